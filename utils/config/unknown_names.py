"""What an unknown setting was meant to be: another toolkit's name for it, or a typing error."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher

ALIKE = 0.75  # of two words, of which one is a typing error

_EVALUATIONS = "every evaluation reads all of its split: give a smaller one"
_MASK = "prepare_data.py marks what is trained on, by the chat template or the completion"
_KERNELS = "the loss is fused and attention chosen by itself: --loss_head, --attn_implementation"
_QUANTIZED = "quantized weights are not supported: use --dtype bfloat16 with --use_peft true"
_TEMPLATE = "prepare_data.py applies it: prepare_data.py --chat_template FILE"
_STRATEGY = "the strategy belongs to accelerate launch --config_file accelerate_configs/FILE"
_DATA = "prepare_data.py --sources tokenizes it once, then train_data names its folder"
_ACCUMULATION = "gradient accumulation follows from global_batch_size"
_NONFINITE = "gone: a step that is not finite ends the run and names its documents; leave it out"
_PRECISION = "--bf16 true is mixed precision, --dtype bfloat16 keeps the weights in 2 bytes"
_REPORTS = "--report_to wandb; the project is WANDB_PROJECT in the environment"

# Names of argparse scripts, TRL, axolotl, LLaMA-Factory, torchtitan, nanochat, litgpt and Megatron;
# each with our name, or with a sentence where there is none.
OTHER_NAMES = {
    # batch
    "batch_size": "per_device_train_batch_size",
    "device_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "gas": _ACCUMULATION,
    "grad_accum_steps": _ACCUMULATION,
    "grad_accumulation_steps": _ACCUMULATION,
    "gradient_accumulation": _ACCUMULATION,
    "local_batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "per_device_batch_size": "per_device_train_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "total_batch_size": "global_batch_size (in sequences)",
    "train_batch_size": "global_batch_size (over all ranks) or per_device_train_batch_size",
    # length of the run
    "duration": "max_steps or num_train_epochs",
    "epochs": "num_train_epochs",
    "max_epochs": "num_train_epochs",
    "max_iters": "max_steps",
    "max_train_steps": "max_steps",
    "n_epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "num_iterations": "max_steps",
    "num_steps": "max_steps",
    "num_training_steps": "max_steps",
    "steps": "max_steps",
    "total_steps": "max_steps",
    "train_iters": "max_steps",
    # learning rate and optimizer
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "clip_grad": "max_grad_norm",
    "eps": "adam_epsilon",
    "grad_clip": "max_grad_norm",
    "gradient_clip": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "matrix_lr": "learning_rate",
    "max_norm": "max_grad_norm",
    "min_lr": "lr_scheduler_kwargs: {min_lr: ...} with lr_scheduler_type: cosine_with_min_lr",
    "optimizer": "optim",
    "optimizer_type": "optim",
    "scheduler": "lr_scheduler_type",
    "scheduler_type": "lr_scheduler_type",
    "warmup": "warmup_steps",
    "warmup_iters": "warmup_steps",
    "warmup_ratio": "warmup_steps (below 1 it is a share of all steps)",
    "wd": "weight_decay",
    # sequences
    "block_size": "sequence_length",
    "context_length": "sequence_length",
    "cutoff_len": "sequence_length",
    "max_length": "sequence_length",
    "max_position_embeddings": "model_config: a file with it; tokens of a sequence are "
    "sequence_length",
    "max_seq_len": "sequence_length",
    "max_seq_length": "sequence_length",
    "model_max_length": "sequence_length",
    "pad_to_sequence_len": "packing",
    "sample_packing": "packing",
    "seq_len": "sequence_length",
    "seq_length": "sequence_length",
    # data
    "data": "train_data",
    "data_dir": "train_data",
    "data_path": "train_data",
    "dataset": _DATA,
    "dataset_config": _DATA,
    "dataset_dir": _DATA,
    "dataset_mixer": _DATA,
    "dataset_name": _DATA,
    "dataset_path": _DATA,
    "dataset_prepared_path": "train_data",
    "dataset_test_split": "eval_data: NAME=DIR",
    "dataset_train_split": _DATA,
    "datasets": _DATA,
    "dev_data": "eval_data",
    "eval_dataset": "eval_data",
    "eval_file": "eval_data",
    "max_samples": _DATA,
    "max_train_samples": _DATA,
    "streaming": "token datasets are read from the memory map, nothing needs streaming",
    "test_data": "eval_data",
    "test_datasets": "eval_data",
    "train_dataset": "train_data",
    "train_file": _DATA,
    "train_files": _DATA,
    "train_on_inputs": _MASK,
    "train_on_prompt": _MASK,
    "mask_history": _MASK,
    "val_data": "eval_data",
    "val_set_size": "prepare_data.py --validation_fraction holds documents out, eval_data names "
    "them",
    "val_size": "prepare_data.py --validation_fraction holds documents out, eval_data names them",
    "validation_data": "eval_data",
    "validation_file": "eval_data",
    "validation_split": "prepare_data.py --validation_fraction",
    # model
    "adapter_name_or_path": "init_from",
    "base_model": "model_name_or_path",
    "checkpoint_dir": "output_dir (checkpoints are in it), or init_from for weights to start from",
    "chat_template": _TEMPLATE,
    "template": _TEMPLATE,
    "finetuning_type": "--use_peft true for LoRA",
    "flash_attn": "attn_implementation: flash_attention_2",
    "flash_attention": "attn_implementation: flash_attention_2",
    "hf_path": "model_name_or_path",
    "init_checkpoint": "init_from",
    "model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "model_path": "model_name_or_path",
    "pretrained_model": "model_name_or_path",
    "tokenizer": "tokenizer_name_or_path",
    "tokenizer_name": "tokenizer_name_or_path",
    "tokenizer_path": "tokenizer_name_or_path",
    "torch_dtype": "dtype",
    "use_flash_attention_2": "attn_implementation: flash_attention_2",
    "use_flash_attn": "attn_implementation: flash_attention_2",
    "liger": _KERNELS,
    "use_liger": _KERNELS,
    "unsloth": _KERNELS,
    "use_unsloth": _KERNELS,
    # LoRA and quantization
    "adapter": "--use_peft true for LoRA",
    "lora": "use_peft",
    "lora_rank": "lora_r",
    "lora_target": "lora_target_modules",
    "lora_target_linear": "lora_target_modules: all-linear",
    "use_lora": "use_peft",
    "peft": "use_peft",
    "quantization_bit": _QUANTIZED,
    "use_4bit": _QUANTIZED,
    "use_qlora": _QUANTIZED,
    # precision, memory, compilation
    "amp": "bf16",
    "cpu": "use_cpu",
    "mixed_precision": _PRECISION,
    "pure_bf16": "dtype: bfloat16, with stochastic_rounding: true",
    "precision": _PRECISION,
    "torch_compile": "compile",
    "compile_model": "compile",
    # evaluation, logging, saving
    "checkpoint_interval": "save_steps",
    "early_stopping_patience": "save_best: true keeps the best checkpoint; touch STOP ends the run",
    "eval_every": "eval_steps",
    "eval_interval": "eval_steps",
    "evals_per_epoch": "eval_strategy: epoch, or eval_steps",
    "evaluation_strategy": "eval_strategy",
    "limit_val_batches": _EVALUATIONS,
    "log_every": "logging_steps",
    "log_interval": "logging_steps",
    "log_steps": "logging_steps",
    "max_eval_batches": _EVALUATIONS,
    "max_eval_samples": _EVALUATIONS,
    "eval_iters": _EVALUATIONS,
    "out_dir": "output_dir",
    "output": "output_dir",
    "output_path": "output_dir",
    "run": "run_name",
    "save_dir": "output_dir",
    "save_every": "save_steps",
    "save_interval": "save_steps",
    "save_path": "output_dir",
    "saves_per_epoch": "save_strategy: epoch, or save_steps",
    "use_wandb": _REPORTS,
    "wandb": _REPORTS,
    "wandb_project": _REPORTS,
    "plot_loss": "metrics.jsonl in output_dir has every logged loss",
    # settings of earlier versions
    "on_nonfinite": _NONFINITE,
    "nonfinite_limit": _NONFINITE,
    # start and launch
    "load_from": "init_from",
    "overwrite_output_dir": "name another output_dir: nothing is written over",
    "resume": "a run resumes by itself from the last checkpoint in its output_dir",
    "auto_resume_from_checkpoints": "a run resumes by itself from the last checkpoint in its "
    "output_dir",
    "random_seed": "seed",
    "num_gpus": "accelerate launch --num_processes N, or slurm/launch_node.sh for all GPUs",
    "nproc": "accelerate launch --num_processes N, or slurm/launch_node.sh for all GPUs",
    "nproc_per_node": "accelerate launch --num_processes N, or slurm/launch_node.sh for all GPUs",
    "deepspeed_config": _STRATEGY,
    "strategy": _STRATEGY,
    "data_parallel_shard_degree": _STRATEGY,
    "fsdp_version": _STRATEGY,
    "do_sample": "generation settings come from the model's generation_config.json",
    "stage": "pretrain.py and sft_train.py are the stages",
    "num_workers": "dataloader_num_workers",
}


@dataclass(frozen=True)
class UnknownName:
    """What to say of an unknown setting, and our settings that it may have meant."""

    message: str
    meant: frozenset[str]


def unknown_name(shown: str, name: str, known: Mapping[str, object] | Iterable[str]) -> UnknownName:
    """Say that a setting is unknown, and what was meant.

    That is our name of what another toolkit calls so, or the setting whose words are the same but
    for typing errors. Likeness of the whole is no reason: `per_device_batch_size` looks most like
    `per_device_eval_batch_size`.
    """
    known = list(known)
    name = name.rpartition(".")[2]  # torchtitan's --training.steps
    other = OTHER_NAMES.get(name, "")
    if other is _DATA and "sources" in known:  # prepare_data.py's own settings
        other = "sources"
    if other in known:
        message = f"here it is {_prefix(shown)}{other}"
        return UnknownName(f"unknown setting {shown}: {message}", frozenset({other}))
    if name.removeprefix("no_") in known:
        positive = f"{_prefix(shown)}{name.removeprefix('no_')}"
        return UnknownName(f"unknown setting {shown}: use {positive} false", frozenset())
    if " " in other:  # a sentence
        ours = {word.strip(",:()") for word in other.split()} & set(known)
        return UnknownName(f"unknown setting {shown}: {other}", frozenset(ours))
    nearest = [candidate for candidate in known if _is_typing_error(name, candidate)]
    if not nearest:
        return UnknownName(f"unknown setting {shown}: --help lists all settings", frozenset())
    nearest.sort(key=lambda candidate: -SequenceMatcher(None, name, candidate).ratio())
    hint = f"did you mean {_prefix(shown)}{nearest[0]}?"
    return UnknownName(f"unknown setting {shown}: {hint}", frozenset(nearest[:1]))


def _prefix(shown: str) -> str:
    return "--" if shown.startswith("--") else ""


def _is_typing_error(name: str, candidate: str) -> bool:
    """Whether two names have the same words, but for letters of one or two of them."""
    if name.replace("_", "") == candidate.replace("_", ""):
        return True
    words, others = name.split("_"), candidate.split("_")
    if len(words) != len(others):
        return False
    pairs = [(word, other) for word, other in zip(words, others, strict=True) if word != other]
    wrong = [SequenceMatcher(None, *pair).ratio() for pair in pairs]
    return len(wrong) <= 2 and all(ratio >= ALIKE for ratio in wrong)
