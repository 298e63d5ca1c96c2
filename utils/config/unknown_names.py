"""Names that are no settings here: refused ones of the libraries, other toolkits', typing errors.

Each table has a reason or our name, then the names that it answers, one string for many.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {name: answer for answer, names in table.items() for name in names.split()}


# Fields of the libraries that keep their defaults; the reason completes "... cannot be set here:".
REFUSED = _by_name({
    "strategy says how processes share the model, as in strategy: fsdp2": ""
    "deepspeed fsdp fsdp_config parallelism_config",
    "nothing is uploaded while training; upload final/ afterwards with `hf upload`": ""
    "push_to_hub hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy",
    "settings are printed and saved, tokens must not be: put HF_TOKEN into the environment or .env":
    "hub_token",
    "it makes a dense attention mask on packed sequences: --compile true compiles layer by layer":
    "torch_compile torch_compile_backend torch_compile_mode",
    "the script always trains, evaluates as eval_strategy says, keeps no predictions, and logs "
    "tokens and memory": "batch_eval_metrics do_eval do_predict do_train eval_accumulation_steps "
    "eval_do_concat_batches eval_use_gather_object include_for_metrics "
    "include_num_input_tokens_seen prediction_loss_only skip_memory_metrics",
    "a run saves all that it needs, as save_steps says and when it is stopped, and resumes by "
    "itself": "enable_jit_checkpoint ignore_data_skip resume_from_checkpoint save_on_each_node "
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
    "quantized weights are not supported: use --dtype bfloat16 with --use_peft": ""
    "bnb_4bit_quant_storage bnb_4bit_quant_type load_in_4bit load_in_8bit use_bnb_nested_quant",
    "LoRA here is for causal language models": "lora_task_type",
})  # fmt: skip

# What TRL, axolotl, LLaMA-Factory, torchtune and argparse scripts call a setting: our name of it,
# or what to do instead.
OTHER_NAMES = _by_name({
    "per_device_train_batch_size": "batch_size micro_batch_size per_device_batch_size",
    "num_train_epochs": "epochs num_epochs",
    "max_steps": "max_iters max_steps_per_epoch max_train_steps num_steps steps train_iters",
    "max_grad_norm": "clip_grad grad_clip gradient_clipping",
    "learning_rate": "lr",
    "lr_scheduler_type": "scheduler",
    "optim": "optimizer",
    "warmup_steps": "warmup num_warmup_steps",
    "sequence_length": "block_size context_length cutoff_len max_seq_len max_seq_length "
    "seq_len sequence_len",
    "packing": "sample_packing",
    "train_data": "data data_dir data_path train_dataset",
    "eval_data": "eval_dataset test_data test_datasets val_data validation_file",
    "init_from": "adapter_name_or_path",
    "model_name_or_path": "base_model model model_name model_path",
    "tokenizer_name_or_path": "tokenizer tokenizer_name tokenizer_path",
    "dtype": "torch_dtype",
    "use_peft": "lora peft use_lora",
    "lora_target_modules": "lora_target",
    "per_device_eval_batch_size": "eval_batch_size",
    "save_steps": "save_every save_interval",
    "eval_steps": "eval_every eval_interval",
    "logging_steps": "log_interval log_every_n_steps",
    "output_dir": "out_dir output_path save_dir",
    "prepare_data.py --sources tokenizes it once, then train_data names its folder": ""
    "dataset dataset_config dataset_name datasets max_samples train_file",
    "prepare_data.py --validation_fraction holds documents out": "val_set_size val_size",
    "prepare_data.py marks what is trained on and applies its --chat_template": ""
    "chat_template template train_on_inputs",
    "global_batch_size, from which accumulation follows, or per_device_train_batch_size": ""
    "gradient_accumulation train_batch_size",
    "warmup_steps (below 1 it is a share of all steps)": "warmup_ratio",
    "--use_peft true for LoRA": "adapter finetuning_type",
    "attn_implementation: flash_attention_2": "flash_attention flash_attn",
    "--bf16 true is mixed precision, --dtype bfloat16 keeps the weights in 2 bytes": ""
    "mixed_precision precision",
    "--report_to wandb; the project is WANDB_PROJECT in the environment": ""
    "use_wandb wandb_project",
    "name another output_dir: nothing is overwritten": "overwrite_output_dir",
    "a recipe names others with extends": "config",
})  # fmt: skip


def unknown_name(written: str, known: Iterable[str]) -> str:
    """Say why a setting is refused, or what was meant: another toolkit's name, a typing error.

    `written` is "--lr" on a command line and "lr" in a recipe.
    """
    known, name = list(known), written.removeprefix("--")
    dashes = written.removesuffix(name)
    if name in REFUSED:
        return f"{written} cannot be set here: {REFUSED[name]}"
    advice = OTHER_NAMES.get(name)
    switch = name.removeprefix("no_")
    if dashes and switch != name and switch in known:
        return f"unknown setting {written}: give --{switch} false"
    if advice in known:
        advice = f"here it is {dashes}{advice}"
    elif advice is None or advice.isidentifier():
        nearest = get_close_matches(name, known, n=1, cutoff=0.8)
        advice = f"did you mean {dashes}{nearest[0]}?" if nearest else "--help lists all settings"
    return f"unknown setting {written}: {advice}"
