"""Unknown settings: another toolkit's name, a typing error, or a refused setting."""

import dataclasses

import pytest
from transformers import TrainingArguments
from trl import ModelConfig, SFTConfig

from utils.config.arguments import (
    DataArguments,
    FineTuneConfig,
    ModelArguments,
    PretrainConfig,
    RunArguments,
)
from utils.config.command_line import read_settings
from utils.config.declarations import declared_settings
from utils.config.errors import ConfigurationError
from utils.config.preparation import PreparationArguments
from utils.config.unknown_names import REFUSED, by_name, other_names, unknown_name

CLASSES = (RunArguments, DataArguments, ModelArguments, FineTuneConfig)
KNOWN = declared_settings(CLASSES)


def test_what_was_meant_is_named():
    for flag, said in {
        "dataset_name": "prepare_data.py --sources tokenizes it once, then train_data names",
        "per_device_batch_size": "here it is --per_device_train_batch_size",
        "warmup_ratio": "warmup_steps (below 1 it is a share of all steps)",
        "learning_rte": "did you mean --learning_rate?",
        "no_bf16": "give --bf16 false",
        "device_eval_size": "--help all lists all settings",  # a similar name is not enough
        "max_epoch": "here it is --num_train_epochs",  # a typing error in another toolkit's name
        "max_lenght": "--max_length cannot be set here: set --sequence_length",
        "training.steps": "here it is --max_steps",
        "max_new_tokens": "here it is --sample_max_new_tokens",  # not max_tokens
        "mix_strategy": "train_data with weights",  # not strategy
        "add_tokens": "prepare_data.py --add_tokens",
    }.items():
        assert f"unknown setting --{flag}: {said}" in unknown_name(f"--{flag}", KNOWN)
    preparation = ["sources", "seed", "tokenizer_name_or_path"]
    assert "--help all lists all" in unknown_name("--lr", preparation)


# Our name -> names in axolotl, LLaMA-Factory, nanoGPT, torchtune, torchtitan, Megatron-LM,
# Lightning, Keras and older transformers.
ELSEWHERE = {
    "max_steps": "num_train_steps num_training_steps max_iters train_iters max_train_steps steps "
    "total_steps steps_per_epoch max_steps_per_epoch",
    "num_train_epochs": "epochs max_epochs num_epochs",
    "per_device_train_batch_size": "micro_batch_size batch_size local_batch_size "
    "per_gpu_train_batch_size",
    "learning_rate": "lr max_lr", "weight_decay": "wd", "adam_beta1": "beta1",
    "seed": "random_seed",
    "warmup_steps": "warmup_iters lr_warmup_iters num_warmup_steps lr_warmup_fraction",
    "max_grad_norm": "grad_clip clip_grad gradient_clip_val clip_grad_norm clipnorm max_norm",
    "lr_scheduler_type": "lr_scheduler lr_decay_style scheduler",
    "sequence_length": "block_size seq_len seq_length cutoff_len sequence_len max_seq_len",
    "eval_steps": "eval_interval val_check_interval", "eval_strategy": "evaluation_strategy",
    "save_steps": "save_interval checkpointing_steps every_n_train_steps ckpt_interval",
    "logging_steps": "log_interval log_every_n_steps", "max_eval_sequences": "eval_iters",
    "output_dir": "out_dir save dump_folder default_root_dir", "packing": "neat_packing packed",
    "lora_r": "lora_rank", "lora_target_modules": "lora_target", "use_cpu": "no_cuda",
    "activation_checkpointing": "recompute_granularity enable_activation_checkpointing",
    "early_stopping_patience": "patience", "dataloader_num_workers": "num_workers",
    "resume_from_checkpoint": "ckpt_path resume", "save_total_limit": "save_top_k",
    "sample_max_new_tokens": "eval_max_new_tokens", "eval_on_start": "evaluate_before_train",
    "run_name": "wandb_name", "dtype": "torch_dtype", "optim": "optimizer",
}  # fmt: skip


def test_a_name_of_another_toolkit_is_answered_with_ours():
    named = by_name(ELSEWHERE)
    assert len(named) > 60
    for name, ours in named.items():
        assert unknown_name(f"--{name}", KNOWN) == f"unknown setting --{name}: here it is --{ours}"
    for name, said in {
        "min_lr": "cosine_with_min_lr", "n_layer": "model_config", "devices": "launch_node.sh",
        "accumulate_grad_batches": "global_batch_size", "tensor_model_parallel_size": "parallelism",
        "zero_stage": "strategy: fsdp2", "validation_split": "--validation_fraction",
        "adafactor": "optim: adafactor", "wandb_entity": "--report_to wandb",
        "plot_loss": "report.py", "stage": "sft_train.py", "eval_only": "always trains",
        "use_fast_tokenizer": "--tokenizer_name_or_path", "streaming": "prepare_data.py --sources",
        "save_safetensors": "always saved", "rope_scaling": "model_config", "top_p": "chat.py",
        "hf_token": "HF_TOKEN", "tp_size": "parallelism", "use_liger": "loss_head: fused",
    }.items():  # fmt: skip
        assert said in unknown_name(f"--{name}", KNOWN), name


def names(argument_class):
    return {field.name for field in dataclasses.fields(argument_class)}


def test_refused_and_other_names_and_changed_defaults_are_those_of_the_libraries():
    assert REFUSED.keys() <= names(SFTConfig) | names(ModelConfig)
    own = {
        *("compile", "init_from", "init_optimizer", "loss_head", "model_config", "save_dtype"),
        "pad_embeddings_to_multiple_of",
    }
    assert names(PretrainConfig) == names(TrainingArguments)
    assert names(FineTuneConfig) == names(SFTConfig)
    assert names(ModelArguments) == names(ModelConfig) | own
    added = names(SFTConfig) - names(TrainingArguments) - REFUSED.keys() - {"packing"}  # our own
    assert added == {"activation_offloading", "router_aux_loss_coef"}, "refuse it, or see it act"
    assert KNOWN["packing"].owner is DataArguments
    tokens = [name for name in KNOWN if "token" in name and "tokenizer" not in name]
    assert tokens == ["max_tokens", "sample_max_new_tokens"], "no Hub token is a setting"
    assert not REFUSED.keys() & (names(PreparationArguments) | names(DataArguments))
    ours = {answer for answer in other_names().values() if answer.isidentifier()}
    assert ours <= KNOWN.keys()
    assert not other_names().keys() & (KNOWN.keys() | REFUSED.keys())


def test_giving_a_refused_setting_is_answered_with_its_reason(tmp_path):
    path = tmp_path / "all.yaml"
    path.write_text("".join(f"{name}: 1\n" for name in REFUSED))
    with pytest.raises(ConfigurationError) as caught:
        read_settings(CLASSES, ["--config", str(path)])
    for line, (name, reason) in enumerate(REFUSED.items(), 1):
        assert f"{path}:{line}: {name} cannot be set here: {reason}" in caught.value.problems
