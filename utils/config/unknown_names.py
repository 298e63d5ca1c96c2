"""Names that are no settings here: refused ones of the libraries, other toolkits', typing errors.

Each table has a reason or our name, then the names that it answers, one string for many.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


def by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Return the answer of each name, of a table of answers with their names."""
    return {name: answer for answer, names in table.items() for name in names.split()}


# Fields of the libraries that keep their defaults; the reason completes "... cannot be set here:".
REFUSED = by_name({
    "strategy says how processes share the model, as in strategy: fsdp2": ""
    "deepspeed fsdp fsdp_config parallelism_config",
    "final/ is uploaded once, at the end of the run: push_to_hub with hub_model_id": ""
    "hub_always_push hub_revision hub_strategy",
    "settings are printed and saved, tokens must not be: put HF_TOKEN into the environment or .env":
    "hub_token",
    "it makes a dense attention mask on packed sequences: --compile true compiles layer by layer":
    "torch_compile torch_compile_backend torch_compile_mode",
    "the script always trains, evaluates as eval_strategy says, keeps no predictions, and logs "
    "tokens and memory": "batch_eval_metrics do_eval do_predict do_train eval_accumulation_steps "
    "eval_do_concat_batches eval_use_gather_object include_for_metrics "
    "include_num_input_tokens_seen prediction_loss_only skip_memory_metrics",
    "a run saves all that it needs, as save_steps says and when it is stopped, and resumes by "
    "itself": "enable_jit_checkpoint ignore_data_skip save_on_each_node "
    "save_only_model",
    "it follows from global_batch_size, which is per_device_train_batch_size x gradient "
    "accumulation x ranks: give that": "auto_find_batch_size gradient_accumulation_steps",
    "the loader divides full global batches of packed sequences over the ranks, in an order that "
    "follows from seed": "accelerator_config data_seed dataloader_drop_last dataloader_in_order "
    "dataloader_multiprocessing_context eval_packing label_names length_column_name "
    "packing_strategy pad_to_multiple_of padding_free remove_unused_columns shuffle_dataset "
    "train_sampling_strategy",
    "the loss is the negative log-likelihood of the next token, the mean over the global batch": ""
    "average_tokens_across_devices label_smoothing_factor loss_type",
    "Liger's kernels are not tested with packed sequences": "liger_kernel_config use_liger_kernel",
    "the launcher gives the rank through the environment": "local_rank",
    "code that comes with a model is not run": "trust_remote_code",
    "with a cache, packed documents would attend to each other": "use_cache",
    "prepare_data.py tokenizes the data, applies the chat template and marks what is trained on": ""
    "assistant_only_loss chat_template_path completion_only_loss dataset_kwargs dataset_num_proc "
    "dataset_text_field",
    "special tokens come from the tokenizer: --tokenizer_name_or_path": "eos_token pad_token",
    "set --sequence_length, and --on_overlong for longer documents": "max_length truncation_mode",
    "models are set by --model_name_or_path, --dtype and their like": "model_init_kwargs",
    "8 bits are not supported: load_in_4bit: true takes half as much, dtype: bfloat16 twice": ""
    "load_in_8bit",
    "it shards weights in 4 bits, which is not supported: multi_gpu.yaml keeps them on each GPU": ""
    "bnb_4bit_quant_storage",
    "LoRA here is for causal language models": "lora_task_type",
})  # fmt: skip

# What other toolkits, older transformers and argparse scripts call a setting: our name of it, or
# what to do instead.
OTHER_NAMES = by_name({
    "per_device_train_batch_size": "batch_size bs device_batch_size local_batch_size "
    "micro_batch_size per_device_batch_size per_gpu_train_batch_size train_micro_batch_size",
    "global_batch_size": "total_batch_size",
    "num_train_epochs": "epochs max_epochs n_epochs num_epochs train_epochs",
    "max_steps": "iters iterations max_iters max_steps_per_epoch max_train_steps n_steps num_iters "
    "num_iterations num_steps num_train_steps num_training_steps steps steps_per_epoch "
    "total_steps train_iters train_steps training_steps",
    "max_tokens": "max_train_tokens num_tokens token_budget total_tokens train_tokens "
    "training_tokens",
    "max_grad_norm": "clip_grad clip_grad_norm clip_norm clipnorm grad_clip grad_norm_clip "
    "gradient_clip_val gradient_clipping max_norm",
    "learning_rate": "base_lr init_lr lr max_lr peak_lr",
    "lr_scheduler_type": "lr_decay_style lr_schedule lr_scheduler scheduler scheduler_type",
    "lr_scheduler_type: cosine_with_min_lr, with lr_scheduler_kwargs: {min_lr: 1e-5}": ""
    "cosine_min_lr cosine_min_lr_ratio eta_min final_lr lr_end lr_min min_lr min_lr_ratio",
    "the schedule ends with the run; warmup_stable_decay takes lr_scheduler_kwargs: "
    "{num_decay_steps: N}": "decay_lr decay_steps lr_decay_iters lr_decay_ratio lr_decay_steps "
    "num_decay_steps",
    "optim": "optimizer optimizer_name optimizer_type",
    "optim_args": "optimizer_kwargs optimizer_params",
    "optim: sgd with optim_args: momentum=0.9": "momentum nesterov",
    "warmup_steps": "lr_warmup_fraction lr_warmup_iters lr_warmup_steps num_warmup_steps warmup "
    "warmup_iters",
    "weight_decay": "wd",
    "adam_beta1": "beta1 beta_1",
    "adam_beta2": "beta2 beta_2",
    "adam_beta1 and adam_beta2": "adam_betas betas",
    "adam_epsilon": "adam_eps eps epsilon",
    "sequence_length": "block_size context_length context_size context_window ctx_len cutoff_len "
    "max_seq_len max_seq_length max_source_length model_max_length seq_len seq_length sequence_len",
    "packing": "group_texts multipack neat_packing pack packed pad_to_sequence_len sample_packing",
    "train_data": "data data_dir data_path dataset_dir dataset_path tokenized_path train_dataset "
    "train_files",
    "train_data with weights, as in train_data: [data/a=0.7, data/b=0.3]": ""
    "data_mix data_mixture data_weights dataset_probs interleave_probs mix_strategy mixing_weights",
    "eval_data": "eval_dataset test_data test_datasets val_data val_dataset validation_data "
    "validation_file",
    "init_from": "adapter_name_or_path init_checkpoint init_weights load load_checkpoint load_from",
    "a run resumes by itself: start it again with the same output_dir": ""
    "auto_resume resume_training",
    "init_from takes the weights of another run, resume_from_checkpoint all of its state": ""
    "checkpoint checkpoint_path ckpt resume_ckpt",
    "resume_from_checkpoint": "ckpt_path resume resume_from resume_path",
    "model_name_or_path": "base_model hf_path model model_id model_name model_path "
    "pretrained pretrained_model pretrained_model_name_or_path",
    "model_revision": "revision",
    "model_config": "config_name model_config_path",
    "model_config, a file with the architecture": "attention_dropout bias d_model depth dim "
    "dropout ffn_dim ffn_hidden_size head_dim hidden_dim hidden_dropout hidden_size "
    "intermediate_size max_position_embeddings n_embd n_head n_heads n_kv_heads n_layer n_layers "
    "num_attention_heads num_hidden_layers num_layers rope_scaling rope_theta vocab_size",
    "tokenizer_name_or_path": "tokenizer tokenizer_file tokenizer_id tokenizer_model "
    "tokenizer_name tokenizer_path",
    "prepare_data.py --add_tokens adds them": "add_special_tokens add_tokens new_special_tokens "
    "resize_vocab special_tokens",
    "pad_embeddings_to_multiple_of": "make_vocab_size_divisible_by pad_vocab_size_to_multiple_of "
    "vocab_size_multiple",
    "dtype": "model_dtype param_dtype torch_dtype",
    "bf16": "bfloat16 enable_bf16 use_bf16",
    "fp16": "float16 use_fp16",
    "tf32": "allow_tf32",
    "use_cpu": "cpu no_cuda",
    "use_peft": "lora peft peft_type use_lora",
    "--use_peft true freezes the model and trains adapters, else every weight is trained": ""
    "freeze_embeddings freeze_layers freeze_trainable_layers freeze_vision_tower",
    "lora_r": "lora_rank",
    "load_in_4bit": "bnb_config load_4bit qlora quantization quantization_bit quantization_method "
    "use_4bit",
    "use_bnb_nested_quant": "bnb_4bit_use_double_quant double_quantization",
    "lora_target_modules": "lora_target target_modules",
    "lora_modules_to_save": "additional_target modules_to_save",
    "neftune_noise_alpha": "neftune neftune_alpha",
    "activation_checkpointing": "activation_checkpoint activation_ckpt checkpoint_activations "
    "enable_activation_checkpointing grad_checkpointing recompute recompute_activations "
    "recompute_granularity recompute_method use_gradient_checkpointing",
    "activation_offloading": "enable_activation_offloading",
    "full_determinism": "cudnn_benchmark deterministic use_deterministic_algorithms",
    "profile_steps": "enable_profiling profile profiler use_profiler",
    "per_device_eval_batch_size": "eval_batch_size per_gpu_eval_batch_size val_batch_size",
    "max_eval_sequences": "eval_batches eval_iters limit_val_batches max_eval_samples "
    "max_val_batches",
    "sample_prompts": "eval_prompts generation_prompts sample_prompt validation_prompts",
    "sample_max_new_tokens": "eval_max_new_tokens max_new_tokens max_target_length",
    "sample_prompts are continued without sampling; chat.py samples": ""
    "do_sample generation_config predict_with_generate temperature top_k top_p",
    "save_steps": "checkpoint_every checkpoint_interval checkpointing_steps ckpt_interval "
    "every_n_train_steps save_every save_freq save_interval",
    "save_total_limit": "keep_last_n keep_latest_k max_checkpoints save_top_k save_total",
    "eval_steps": "eval_every eval_freq eval_interval val_check_interval val_interval",
    "eval_strategy": "evaluation_strategy",
    "eval_on_start": "eval_at_start evaluate_before_train",
    "save_strategy: epoch": "save_epochs save_every_n_epochs",
    "logging_steps": "log_every log_every_n_steps log_freq log_interval log_steps",
    "metric_for_best_model": "monitor",
    "early_stopping_patience": "early_stop early_stopping patience",
    "early_stopping_threshold": "early_stopping_delta min_delta",
    "output_dir": "checkpoint_dir default_root_dir dump_folder log_dir logging_dir out_dir output "
    "output_path save save_dir",
    "report_to": "logger metric_logger",
    "run_name": "exp_name experiment name experiment_name wandb_name wandb_run_name",
    "dataloader_num_workers": "data_workers num_workers workers",
    "dataloader_pin_memory": "pin_memory",
    "dataloader_persistent_workers": "persistent_workers",
    "dataloader_prefetch_factor": "prefetch_factor",
    "seed": "manual_seed random_seed seed_everything",
    "compile": "compile_model use_compile",
    "ema_decay": "ema ema_beta ema_rate use_ema",
    "ddp_backend": "backend distributed_backend",
    "hub_model_id": "hf_repo_id hub_id push_to_hub_model_id repo_id",
    "push_to_hub": "hub upload use_hf",
    "strategy, as in strategy: fsdp2 or zero2": "data_parallel_shard_degree deepspeed_config "
    "cpu_offload distributed_strategy offload_optimizer parallelism use_fsdp zero_stage",
    "the launcher starts a process for each GPU: slurm/launch_node.sh SCRIPT ..., in jobs "
    "slurm/submit.sh with --nodes and --gpus-per-node": "accelerator cuda device devices gpu "
    "gpu_ids gpus gpus_per_node master_addr master_port n_gpu n_gpus ngpu nnodes nodes "
    "nproc_per_node num_gpus num_nodes num_processes partition world_size",
    "no tensor, pipeline or context parallelism: docs/parallelism.md has what there is": ""
    "context_parallel_size cp_size ep_size expert_model_parallel_size expert_parallel_size "
    "pipeline_model_parallel_size pipeline_parallel_degree pp_size sequence_parallel_size "
    "tensor_model_parallel_size tensor_parallel_degree tensor_parallel_size tp tp_size",
    "prepare_data.py --sources tokenizes it once, then train_data names its folder": ""
    "dataset dataset_config dataset_name dataset_prepared_path dataset_split dataset_subset "
    "datasets max_samples max_train_samples messages_column num_proc overwrite_cache "
    "preprocessing_batch_size preprocessing_num_workers prompt_column response_column streaming "
    "text_column text_field train_file train_split",
    "prepare_data.py --validation_fraction holds documents out": "val_set_size val_size "
    "validation_split",
    "prepare_data.py marks what is trained on and applies its --chat_template": ""
    "chat_template completion_only enable_thinking instruction_template mask_history "
    "response_template system_prompt template tool_format train_on_inputs train_on_prompt "
    "train_on_responses_only",
    "global_batch_size, from which accumulation follows, or per_device_train_batch_size": ""
    "accum_steps accumulate_grad_batches grad_acc grad_accum grad_accum_steps grad_accumulation "
    "gradient_accumulation train_batch_size",
    "warmup_steps (below 1 it is a share of all steps)": "warmup_fraction warmup_ratio",
    "eval_steps and save_steps (below 1 they are a share of all steps)": ""
    "evals_per_epoch saves_per_epoch",
    "--use_peft true for LoRA": "adapter finetuning_type",
    "attn_implementation: flash_attention_2": "flash_attention flash_attn sdp_attention "
    "use_flash_attention use_flash_attention_2 use_flash_attn",
    "--bf16 true is mixed precision, --dtype bfloat16 keeps the weights in 2 bytes": ""
    "amp autocast compute_dtype fp8 half half_precision_backend mixed_precision precision "
    "pure_bf16 use_amp",
    "--report_to wandb; the project is WANDB_PROJECT in the environment": ""
    "log_to_wandb project_name use_wandb wandb wandb_entity wandb_group wandb_log wandb_mode "
    "wandb_project wandb_run_id wandb_tags wandb_watch",
    "--report_to tensorboard": "tb_log_dir tensorboard tensorboard_dir use_tensorboard",
    "--report_to mlflow; MLFLOW_TRACKING_URI and the like are in the environment": ""
    "mlflow_experiment_name mlflow_tracking_uri use_mlflow",
    "report.py RUN draws the losses of a run": "plot_loss",
    "pretrain.py pretrains and sft_train.py fine-tunes; there is no preference or reward training":
    "dpo dpo_beta ppo pref_beta pref_loss reward_model rl rl_algo stage",
    "the loss is the negative log-likelihood of the next token": "label_smoothing loss_fn "
    "loss_function z_loss z_loss_weight",
    "loss_head: fused saves the memory of the logits": "cut_cross_entropy liger_kernel use_liger",
    "the order of the data follows from seed": "shuffle shuffle_seed",
    "the script always trains; eval_data, eval_strategy and eval_on_start say what is evaluated": ""
    "eval eval_only evaluate no_eval skip_eval test test_only validate",
    "weights are always saved as safetensors": "save_safetensors",
    "the tokenizer comes as published: --tokenizer_name_or_path": ""
    "add_bos_token add_eos_token tokenizer_type tokenizer_use_fast use_fast_tokenizer",
    "tokens must not be in settings: put HF_TOKEN into the environment or .env": ""
    "hf_token token use_auth_token",
    "packing: best_fit puts documents of all lengths together": "group_by_length",
    "HF_HOME in the environment says where downloads are kept": "cache_dir cache_path hf_cache",
    "optim: adafactor": "adafactor",
    "--dry_run checks everything and starts nothing": "dry fast_dev_run smoke_test test_run",
    "name another output_dir: nothing is overwritten": "overwrite_output_dir",
    "a recipe names others with extends": "config",
    "--config FILE reads a recipe": "config_file recipe yaml",
})  # fmt: skip


def unknown_name(written: str, known: Iterable[str]) -> str:
    """Say why a setting is refused, or what was meant: another toolkit's name, a typing error.

    `written` is "--lr" on a command line and "lr" in a recipe.
    """
    known, name = list(known), written.removeprefix("--")
    dashes = written.removesuffix(name)
    if name in REFUSED:
        return f"{written} cannot be set here: {REFUSED[name]}"
    switch = name.removeprefix("no_")
    if dashes and switch != name and switch in known:
        return f"unknown setting {written}: give --{switch} false"
    answers = {each: f"{dashes}{each} cannot be set here: {why}" for each, why in REFUSED.items()}
    for other, ours in OTHER_NAMES.items():
        if ours in known:
            answers[other] = f"here it is {dashes}{ours}"
        elif not ours.isidentifier():
            answers[other] = ours
    plain = name.rpartition(".")[2]  # others have sections, as in training.steps
    exact = answers.get(plain)
    answers |= {each: f"did you mean {dashes}{each}?" for each in known}
    near = get_close_matches(plain, answers, n=1, cutoff=0.9)
    near = near or get_close_matches(plain, known, n=1, cutoff=0.8)
    advice = answers[near[0]] if near else "--help all lists all settings"
    return f"unknown setting {written}: {exact or advice}"
