"""What an unknown setting was meant to be: another toolkit's name for it, or a typing error."""

from collections.abc import Iterable
from difflib import SequenceMatcher

ALIKE = 0.75  # of two words, of which one is a typing error

# Our name of a setting, and what argparse scripts, TRL, axolotl, LLaMA-Factory, torchtitan,
# nanochat, litgpt and Megatron call it.
SYNONYMS = {
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
}
TOKENIZED = "prepare_data.py --sources tokenizes it once, then train_data names its folder"
# What to do instead, and the names of which there is no setting here.
INSTEAD = {
    TOKENIZED: "dataset dataset_config dataset_dir dataset_mixer dataset_name dataset_path "
    "dataset_train_split datasets max_samples max_train_samples train_file train_files",
    "eval_data: NAME=DIR": "dataset_test_split",
    "prepare_data.py --validation_fraction holds documents out, eval_data names them": "val_size "
    "val_set_size validation_split",
    "prepare_data.py marks what is trained on, by the chat template or the completion": ""
    "train_on_inputs train_on_prompt mask_history",
    "prepare_data.py applies it: prepare_data.py --chat_template FILE": "chat_template template",
    "token datasets are memory-mapped: nothing needs streaming": "streaming",
    "gradient accumulation follows from global_batch_size": "gas grad_accum_steps "
    "grad_accumulation_steps gradient_accumulation",
    "global_batch_size (in sequences)": "total_batch_size",
    "global_batch_size (over all ranks) or per_device_train_batch_size": "train_batch_size",
    "max_steps or num_train_epochs": "duration",
    "lr_scheduler_kwargs: {min_lr: ...} with lr_scheduler_type: cosine_with_min_lr": "min_lr",
    "warmup_steps (below 1 it is a share of all steps)": "warmup_ratio",
    "model_config: a file with it; sequence_length is the tokens of a sequence": ""
    "max_position_embeddings",
    "output_dir (checkpoints are in it), or init_from for weights to start from": "checkpoint_dir",
    "--use_peft true for LoRA": "finetuning_type adapter",
    "lora_target_modules: all-linear": "lora_target_linear",
    "quantized weights are not supported: use --dtype bfloat16 with --use_peft true": ""
    "quantization_bit use_4bit use_qlora",
    "attn_implementation: flash_attention_2": "flash_attn flash_attention use_flash_attention_2 "
    "use_flash_attn",
    "--loss_head fused and the fastest --attn_implementation are the defaults": "liger use_liger "
    "unsloth use_unsloth",
    "--bf16 true is mixed precision, --dtype bfloat16 keeps the weights in 2 bytes": ""
    "mixed_precision precision",
    "dtype: bfloat16, with stochastic_rounding: true": "pure_bf16",
    "save_best: true keeps the best checkpoint; touch STOP ends the run": "early_stopping_patience",
    "eval_strategy: epoch, or eval_steps": "evals_per_epoch",
    "save_strategy: epoch, or save_steps": "saves_per_epoch",
    "every evaluation reads all of its split: give a smaller one": "limit_val_batches "
    "max_eval_batches max_eval_samples eval_iters",
    "--report_to wandb; the project is WANDB_PROJECT in the environment": "use_wandb wandb "
    "wandb_project",
    "metrics.jsonl in output_dir has every logged loss": "plot_loss",
    "name another output_dir: nothing is written over": "overwrite_output_dir",
    "a run resumes by itself from the last checkpoint in its output_dir": "resume "
    "auto_resume_from_checkpoints",
    "accelerate launch --num_processes N, or slurm/launch_node.sh for all GPUs": "num_gpus nproc "
    "nproc_per_node",
    "the strategy belongs to accelerate launch --config_file accelerate_configs/FILE": ""
    "deepspeed_config strategy data_parallel_shard_degree fsdp_version",
    "generation settings come from the model's generation_config.json": "do_sample",
    "pretrain.py and sft_train.py are the stages": "stage",
    "gone: a step that is not finite ends the run and names its documents": "on_nonfinite "
    "nonfinite_limit",
}


def _by_name(table: dict[str, str]) -> dict[str, str]:
    return {name: ours for ours, names in table.items() for name in names.split()}


OTHER_NAMES = _by_name(SYNONYMS)
ADVICE = _by_name(INSTEAD)


def unknown_name(shown: str, name: str, known: Iterable[str]) -> str:
    """Say that a setting is unknown, and what was meant.

    That is our name of what another toolkit calls so, or the setting whose words are the same but
    for typing errors. Likeness of the whole is no reason: `per_device_batch_size` looks most like
    `per_device_eval_batch_size`.
    """
    known = list(known)
    name = name.rpartition(".")[2]  # torchtitan's --training.steps
    dashes = "--" if shown.startswith("--") else ""
    advice = ADVICE.get(name)
    ours = OTHER_NAMES.get(name, "")
    if advice == TOKENIZED and "sources" in known:  # prepare_data.py's own setting
        ours, advice = "sources", None
    if ours in known:
        advice = f"here it is {dashes}{ours}"
    if advice is None:
        nearest = [candidate for candidate in known if _is_typing_error(name, candidate)]
        nearest.sort(key=lambda candidate: -SequenceMatcher(None, name, candidate).ratio())
        advice = f"did you mean {dashes}{nearest[0]}?" if nearest else "--help lists all settings"
    return f"unknown setting {shown}: {advice}"


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
