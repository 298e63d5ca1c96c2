"""Names that are no settings here: refused ones of the libraries, other toolkits', typing errors.

Each table has a reason or our name, then the names that it answers, one string for many.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {name: answer for answer, names in table.items() for name in names.split()}


# The reason completes "... cannot be set here:"; these fields of the libraries keep their defaults.
REFUSED_TRAINING_SETTINGS = _by_name({
    "accelerate launch --config_file FILE sets the strategy": ""
    "deepspeed fsdp fsdp_config parallelism_config",
    "nothing is uploaded while training; upload final/ afterwards with `hf upload`": ""
    "push_to_hub hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy",
    "settings are printed and saved, tokens must not be: put HF_TOKEN into the environment or .env":
    "hub_token",
    "it makes a dense attention mask on packed sequences: --compile true compiles layer by layer":
    "torch_compile torch_compile_backend torch_compile_mode",
    "evaluation computes loss and perplexity of each split and keeps no predictions": ""
    "batch_eval_metrics eval_accumulation_steps eval_do_concat_batches eval_use_gather_object "
    "include_for_metrics prediction_loss_only",
    "packed sequences hold labels and what the model needs, and have one length": ""
    "label_names length_column_name remove_unused_columns train_sampling_strategy",
    "the script always trains, and evaluates as eval_strategy says": "do_eval do_predict do_train",
    "a run resumes by itself from its last checkpoint": "ignore_data_skip resume_from_checkpoint",
    "it follows from global_batch_size, which is per_device_train_batch_size x gradient "
    "accumulation x ranks: give that": "auto_find_batch_size gradient_accumulation_steps",
    "the loader divides full global batches over the ranks, in an order that follows from seed": ""
    "accelerator_config data_seed dataloader_drop_last dataloader_in_order "
    "dataloader_multiprocessing_context",
    "the loss would depend on the number of ranks": "average_tokens_across_devices",
    "checkpoints come from save_steps and from the stop signal": "enable_jit_checkpoint",
    "tokens and memory are logged anyway": "include_num_input_tokens_seen skip_memory_metrics",
    "the loss is the negative log-likelihood of the next token": "label_smoothing_factor",
    "Liger's kernels are not tested with packed sequences": "liger_kernel_config use_liger_kernel",
    "the launcher gives the rank through the environment": "local_rank",
    "all nodes share one output_dir": "save_on_each_node",
    "a checkpoint without the optimizer cannot be resumed": "save_only_model",
    "code that comes with a model is not run": "trust_remote_code",
    "with a cache, packed documents would attend to each other": "use_cache",
})  # fmt: skip
REFUSED_FINE_TUNING_SETTINGS = REFUSED_TRAINING_SETTINGS | _by_name({
    "prepare_data.py tokenizes the data, applies the chat template and marks what is trained on": ""
    "assistant_only_loss chat_template_path completion_only_loss dataset_kwargs dataset_num_proc "
    "dataset_text_field",
    "special tokens come from the tokenizer: --tokenizer_name_or_path": "eos_token pad_token",
    "the loss is the negative log-likelihood of the next token": "loss_type",
    "set --sequence_length, and --on_overlong for longer documents": "max_length truncation_mode",
    "models are set by --model_name_or_path, --dtype and their like": "model_init_kwargs",
    "documents are packed as --packing says, in an order that follows from seed": ""
    "packing packing_strategy eval_packing pad_to_multiple_of padding_free shuffle_dataset",
})  # fmt: skip
REFUSED_MODEL_SETTINGS = _by_name({
    "quantized weights are not supported: use --dtype bfloat16 with --use_peft": ""
    "bnb_4bit_quant_storage bnb_4bit_quant_type load_in_4bit load_in_8bit use_bnb_nested_quant",
    "it is always CAUSAL_LM": "lora_task_type",
})  # fmt: skip

# What TRL, axolotl, LLaMA-Factory, torchtune and argparse scripts call a setting: our name of it,
# or what to do instead.
_TOKENIZED = "prepare_data.py --sources tokenizes it once, then train_data names its folder"
OTHER_NAMES = _by_name({
    "per_device_train_batch_size": "batch_size micro_batch_size per_device_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "num_train_epochs": "epochs num_epochs",
    "max_steps": "max_iters max_steps_per_epoch max_train_steps num_steps steps train_iters",
    "max_grad_norm": "clip_grad grad_clip gradient_clipping",
    "learning_rate": "lr",
    "lr_scheduler_type": "scheduler",
    "optim": "optimizer",
    "warmup_steps": "warmup num_warmup_steps",
    "sequence_length": "block_size context_length cutoff_len max_length max_seq_len max_seq_length "
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
    "save_steps": "save_every save_interval",
    "eval_steps": "eval_every eval_interval",
    "logging_steps": "log_interval log_every_n_steps",
    "output_dir": "out_dir output_path save_dir",
    _TOKENIZED: "dataset dataset_config dataset_name datasets max_samples train_file",
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
})  # fmt: skip


def unknown_name(written: str, known: Iterable[str]) -> str:
    """Say that a setting is unknown, and what was meant: another toolkit's name, a typing error.

    `written` is "--lr" on a command line and "lr" in a recipe.
    """
    known, name = list(known), written.removeprefix("--")
    dashes = written.removesuffix(name)
    advice = OTHER_NAMES.get(name)
    switch = name.removeprefix("no_")
    if dashes and switch != name and switch in known:
        return f"unknown setting {written}: give --{switch} false"
    if advice == _TOKENIZED and "sources" in known:  # prepare_data.py's own setting
        advice = "sources"
    if advice in known:
        advice = f"here it is {dashes}{advice}"
    elif advice is None or advice.isidentifier():
        nearest = get_close_matches(name, known, n=1, cutoff=0.8)
        advice = f"did you mean {dashes}{nearest[0]}?" if nearest else "--help lists all settings"
    return f"unknown setting {written}: {advice}"
