"""Names that are no settings here: refused ones of the libraries, other toolkits', typing errors.

Each table has a reason or our name, then the names that it answers, one string for many.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {name: answer for answer, names in table.items() for name in names.split()}


# The reason completes "... cannot be set here:". These fields of the libraries' classes are no
# flags and keep their defaults; a test fails when a library drops one.
REFUSED_TRAINING_SETTINGS = _by_name({
    "accelerate launch --config_file FILE sets the strategy": ""
    "deepspeed fsdp fsdp_config parallelism_config",
    "nothing is uploaded while training; upload final/ afterwards with `hf upload`": ""
    "push_to_hub hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy",
    "settings are printed and saved, tokens must not be: put HF_TOKEN into the environment or .env":
    "hub_token",
    "compiling the whole model makes a dense attention mask and loses the flash kernel on packed "
    "sequences: --compile true compiles it layer by layer": ""
    "torch_compile torch_compile_backend torch_compile_mode",
    "evaluation computes loss and perplexity of each split and keeps no predictions": ""
    "batch_eval_metrics eval_accumulation_steps eval_do_concat_batches eval_use_gather_object "
    "include_for_metrics prediction_loss_only",
    "packed sequences have one length and an order of Stoker's own": ""
    "length_column_name train_sampling_strategy",
    "packed sequences hold what the model needs and nothing else": "remove_unused_columns",
    "their labels are named labels": "label_names",
    "pretrain.py and sft_train.py always train, and evaluate when eval_strategy says so": ""
    "do_eval do_predict do_train",
    "a run resumes by itself from the last checkpoint in its output_dir": "resume_from_checkpoint",
    "a resumed run continues with exactly the next sample": "ignore_data_skip",
    "it follows from global_batch_size (sequences per optimizer step over all ranks), which is "
    "per_device_train_batch_size x gradient accumulation x ranks: give that": ""
    "gradient_accumulation_steps",
    "it would change the global batch: set per_device_train_batch_size": "auto_find_batch_size",
    "the loader divides global batches over the ranks itself": "accelerator_config",
    "it stays on: otherwise the loss would depend on the number of ranks": ""
    "average_tokens_across_devices",
    "the order of the data follows from seed": "data_seed",
    "every global batch is full: there is no last batch to drop": "dataloader_drop_last",
    "runs repeat exactly, and the order of the data with them": "dataloader_in_order",
    "the loader starts its workers by its own method": "dataloader_multiprocessing_context",
    "its ranks do not agree on the step to save; checkpoints come from save_steps": ""
    "enable_jit_checkpoint",
    "it waits for the device at every step; the tokens seen are logged without it": ""
    "include_num_input_tokens_seen",
    "the loss is the negative log-likelihood of the next token": "label_smoothing_factor",
    "Liger's kernels are not tested with packed sequences": "liger_kernel_config use_liger_kernel",
    "the launcher gives the rank through the environment": "local_rank",
    "all nodes share one output_dir": "save_on_each_node",
    "a checkpoint without the optimizer cannot be resumed": "save_only_model",
    "memory is logged anyway, at no cost": "skip_memory_metrics",
    "code that comes with a model is not run": "trust_remote_code",
    "with a cache, packed documents would attend to each other": "use_cache",
})  # fmt: skip
REFUSED_FINE_TUNING_SETTINGS = REFUSED_TRAINING_SETTINGS | _by_name({
    "prepare_data.py makes the loss mask, a column of the token dataset": ""
    "assistant_only_loss completion_only_loss",
    "prepare_data.py --chat_template applies the chat template": "chat_template_path",
    "prepare_data.py tokenizes the data beforehand": ""
    "dataset_kwargs dataset_num_proc dataset_text_field",
    "special tokens come from the tokenizer: --tokenizer_name_or_path": "eos_token pad_token",
    "the loss is the negative log-likelihood of the next token": "loss_type",
    "set --sequence_length, and --on_overlong for longer documents": "max_length truncation_mode",
    "models are set by --model_name_or_path, --dtype and their like": "model_init_kwargs",
    "documents are packed as --packing says": ""
    "packing packing_strategy eval_packing pad_to_multiple_of padding_free",
    "training always shuffles, by seed": "shuffle_dataset",
})  # fmt: skip
REFUSED_MODEL_SETTINGS = _by_name({
    "quantized weights are not supported: use --dtype bfloat16 with --use_peft": ""
    "bnb_4bit_quant_storage bnb_4bit_quant_type load_in_4bit load_in_8bit use_bnb_nested_quant",
    "it is always CAUSAL_LM": "lora_task_type",
})  # fmt: skip

# What argparse scripts, TRL, axolotl, LLaMA-Factory, torchtitan, nanochat, litgpt and Megatron call
# a setting: our name of it, or what to do instead.
_TOKENIZED = "prepare_data.py --sources tokenizes it once, then train_data names its folder"
OTHER_NAMES = _by_name({
    "per_device_train_batch_size": "batch_size device_batch_size local_batch_size micro_batch_size "
    "per_device_batch_size per_gpu_train_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "num_train_epochs": "epochs max_epochs n_epochs num_epochs",
    "max_steps": "max_iters max_train_steps num_iterations num_steps num_training_steps steps "
    "total_steps train_iters",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps",
    "max_grad_norm": "clip_grad grad_clip gradient_clip gradient_clip_val gradient_clipping "
    "max_norm",
    "learning_rate": "lr matrix_lr",
    "lr_scheduler_type": "lr_scheduler scheduler scheduler_type",
    "optim": "optimizer optimizer_type",
    "warmup_steps": "warmup warmup_iters",
    "weight_decay": "wd",
    "sequence_length": "block_size context_length cutoff_len max_length max_seq_len max_seq_length "
    "model_max_length seq_len seq_length",
    "packing": "pad_to_sequence_len sample_packing",
    "train_data": "data data_dir data_path dataset_prepared_path train_dataset",
    "eval_data": "dev_data eval_dataset eval_file test_data test_datasets val_data "
    "validation_data validation_file",
    "init_from": "adapter_name_or_path init_checkpoint load_from",
    "model_name_or_path": "base_model hf_path model model_name model_path pretrained_model",
    "tokenizer_name_or_path": "tokenizer tokenizer_name tokenizer_path",
    "dtype": "torch_dtype",
    "use_peft": "lora use_lora peft",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_target",
    "bf16": "amp",
    "use_cpu": "cpu",
    "compile": "torch_compile compile_model",
    "save_steps": "checkpoint_interval save_every save_interval",
    "eval_steps": "eval_every eval_interval",
    "eval_strategy": "evaluation_strategy",
    "logging_steps": "log_every log_interval log_steps",
    "output_dir": "out_dir output output_path save_dir save_path",
    "run_name": "run",
    "seed": "random_seed",
    "dataloader_num_workers": "num_workers",
    _TOKENIZED: "dataset dataset_config dataset_dir dataset_mixer dataset_name dataset_path "
    "dataset_train_split datasets max_samples max_train_samples train_file train_files",
    "eval_data: NAME=DIR": "dataset_test_split",
    "prepare_data.py --validation_fraction holds documents out, eval_data names them": ""
    "val_size val_set_size validation_split",
    "prepare_data.py marks what is trained on, by the chat template or the completion": ""
    "train_on_inputs train_on_prompt mask_history",
    "prepare_data.py applies it: prepare_data.py --chat_template FILE": "chat_template template",
    "token datasets are memory-mapped: nothing needs streaming": "streaming",
    "gradient accumulation follows from global_batch_size": ""
    "gas grad_accum_steps grad_accumulation_steps gradient_accumulation",
    "global_batch_size (in sequences)": "total_batch_size",
    "global_batch_size (over all ranks) or per_device_train_batch_size": "train_batch_size",
    "lr_scheduler_kwargs: {min_lr: ...} with lr_scheduler_type: cosine_with_min_lr": "min_lr",
    "warmup_steps (below 1 it is a share of all steps)": "warmup_ratio",
    "output_dir (checkpoints are in it), or init_from for weights to start from": "checkpoint_dir",
    "--use_peft true for LoRA": "finetuning_type adapter",
    "lora_target_modules: all-linear": "lora_target_linear",
    "quantized weights are not supported: use --dtype bfloat16 with --use_peft true": ""
    "quantization_bit use_4bit use_qlora",
    "attn_implementation: flash_attention_2": ""
    "flash_attn flash_attention use_flash_attention_2 use_flash_attn",
    "--loss_head fused and the fastest --attn_implementation are the defaults": ""
    "liger use_liger unsloth use_unsloth",
    "--bf16 true is mixed precision, --dtype bfloat16 keeps the weights in 2 bytes": ""
    "mixed_precision precision",
    "dtype: bfloat16, with stochastic_rounding: true": "pure_bf16",
    "save_best: true keeps the best checkpoint; touch STOP ends the run": "early_stopping_patience",
    "every evaluation reads all of its split: give a smaller one": ""
    "limit_val_batches max_eval_batches max_eval_samples eval_iters",
    "--report_to wandb; the project is WANDB_PROJECT in the environment": ""
    "use_wandb wandb wandb_project",
    "name another output_dir: nothing is overwritten": "overwrite_output_dir",
    "a run resumes by itself from the last checkpoint in its output_dir": ""
    "resume auto_resume_from_checkpoints",
    "accelerate launch --num_processes N, or slurm/launch_node.sh for all GPUs": ""
    "num_gpus nproc nproc_per_node",
    "accelerate launch --config_file accelerate_configs/FILE sets the strategy": ""
    "deepspeed_config strategy data_parallel_shard_degree fsdp_version",
    "gone: a step that is not finite ends the run and names its documents": ""
    "on_nonfinite nonfinite_limit",
})  # fmt: skip


def unknown_name(shown: str, name: str, known: Iterable[str]) -> str:
    """Say that a setting is unknown, and what was meant: another toolkit's name, a typing error."""
    known = list(known)
    name = name.rpartition(".")[2]  # torchtitan's --training.steps
    dashes = "--" if shown.startswith("--") else ""
    advice = OTHER_NAMES.get(name)
    if advice == _TOKENIZED and "sources" in known:  # prepare_data.py's own setting
        advice = "sources"
    if advice in known:
        advice = f"here it is {dashes}{advice}"
    elif advice is None or advice.isidentifier():
        nearest = get_close_matches(name, known, n=1, cutoff=0.8)
        advice = f"did you mean {dashes}{nearest[0]}?" if nearest else "--help lists all settings"
    return f"unknown setting {shown}: {advice}"
