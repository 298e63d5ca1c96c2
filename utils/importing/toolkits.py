"""What keys of axolotl, LLaMA-Factory and TRL mean, and a config on its way to our recipes.

A key is ours where a table says so, else by OTHER_NAMES, else where it is a setting of that name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.config.arguments import (
    DataArguments,
    FineTuneConfig,
    ModelArguments,
    PretrainConfig,
    RunArguments,
)
from utils.config.declarations import Given, checked_value, declared_settings
from utils.config.unknown_names import OTHER_NAMES, by_name


@dataclass(frozen=True)
class Toolkit:
    """Keys a toolkit is known by, ours by its names, and what it does unless told, by our names."""

    marks: tuple[str, ...]
    names: Mapping[str, str]
    defaults: Mapping[str, Any]


# Why a key has no counterpart, for all toolkits.
LEFT = by_name({
    "checkpoints verify themselves, and the same command resumes": ""
    "auto_resume_from_checkpoints resume_from_checkpoint save_only_model overwrite_output_dir "
    "overwrite_cache save_safetensors",
    "attention takes the fastest kernel that keeps packed documents apart": ""
    "attn_implementation flash_attention flash_attn sdp_attention flex_attention "
    "xformers_attention flex_attn_compile_kwargs",
    "no padding token is needed; the token that ends a turn comes from the template": ""
    "special_tokens eos_token pad_token eot_tokens",
    "the tokenizer's own chat template is taken; another one is a file: chat_template of the data "
    "recipe": "template chat_template chat_template_path",
    "answers, and what ends them, are trained on; weight: 0 in a message leaves one out": ""
    "train_on_inputs roles_to_train train_on_eos train_on_prompt mask_history assistant_only_loss "
    "completion_only_loss",
    "the class comes from the model's config.json": ""
    "model_type tokenizer_type is_llama_derived_model tokenizer_use_fast tokenizer_legacy",
    "only text is trained on": "processor_type freeze_mm_modules freeze_vision_tower "
    "freeze_multi_modal_projector freeze_language_model image_max_pixels video_max_pixels",
    "another method: this run trains without it": "qat relora lisa_n_layers unfrozen_parameters "
    "fp8 use_badam use_galore use_apollo use_adam_mini use_muon use_dft_loss use_eaft_loss "
    "use_asft_loss use_eaft use_llama_pro pissa_init loraplus_lr_ratio mixture_of_depths "
    "curriculum_sampling",
    "prepare_data.py tokenizes once, into output_dir of the data recipe": ""
    "push_dataset_to_hub skip_prepare_dataset shuffle_merged_datasets streaming",
    "max_tokens of a source limits it, weight takes a share": "max_samples",
    "packing does its work": "pad_to_sequence_len eval_sample_packing group_by_length "
    "max_packed_sequence_len pretrain_multipack_attn",
    "kernels are chosen by tests at the start; the loss head is fused": ""
    "plugins liger_rms_norm liger_glu_activation liger_layer_norm liger_rope "
    "liger_rms_norm_gated liger_fused_linear_cross_entropy cut_cross_entropy lora_mlp_kernel "
    "lora_qkv_kernel lora_o_kernel use_kernels flash_attn_cross_entropy flash_attn_rms_norm "
    "flash_attn_fuse_mlp experts_implementation use_scattermoe use_sonicmoe fused_attn_kernel",
    "every linear layer is adapted by default": "lora_target_linear lora_fan_in_fan_out",
    "quantized with bitsandbytes": "quantization_method",
    "Weights & Biases reads WANDB_ENTITY and the like from the environment": ""
    "wandb_entity wandb_run_id wandb_mode",
    "no tensor, context or expert parallelism: docs/parallelism.md": ""
    "tensor_parallel_size context_parallel_size expert_parallel_size dp_replicate_size",
    # Nothing is lost: it is so here, or of the toolkit's own making.
    "": "gradient_checkpointing_kwargs do_train strict debug plot_loss ddp_timeout "
    "low_cpu_mem_usage wandb_watch wandb_log_model dataset_prepared_path hf_use_auth_token "
    "loss_watchdog_threshold loss_watchdog_patience",
})  # fmt: skip

TOOLKITS = {
    "axolotl": Toolkit(
        marks=("base_model", "micro_batch_size", "sequence_len", "sample_packing", "adapter"),
        names={
            "datasets": "sources", "pretraining_dataset": "sources", "rl": "stage",
            "test_datasets": "eval_sources", "val_set_size": "validation", "adapter": "adapter",
            "dataset_processes": "num_proc", "dataset_num_proc": "num_proc",
            "excess_length_strategy": "overlong", "tokens": "add_tokens", "wandb_name": "run_name",
            "peft_use_rslora": "use_rslora", "peft_use_dora": "use_dora", "bfloat16": "bf16",
            "adam_eps": "adam_epsilon", "lr_scheduler": "lr_scheduler_type", "float16": "fp16",
            "warmup_ratio": "warmup_steps", "evaluation_strategy": "eval_strategy",
            "torch_compile": "compile", "revision_of_model": "model_revision",
        },
        defaults={
            "sequence_length": 512, "overlong": "drop", "lora_r": 8, "lora_alpha": 8,
            "lora_dropout": 0.0, "lr_scheduler_type": "cosine", "num_train_epochs": 1,
        },
    ),
    "llamafactory": Toolkit(
        marks=("stage", "finetuning_type", "cutoff_len", "template", "dataset_dir", "lora_rank"),
        names={
            "dataset": "sources", "eval_dataset": "eval_sources", "val_size": "validation",
            "preprocessing_num_workers": "num_proc", "neat_packing": "packing",
            "finetuning_type": "adapter", "lora_rank": "lora_r", "warmup_ratio": "warmup_steps",
            "additional_target": "lora_modules_to_save",
        },
        defaults={
            "sequence_length": 2048, "overlong": "truncate", "adapter": "lora", "lora_r": 8,
            "lora_dropout": 0.0, "gradient_checkpointing": True, "learning_rate": 5e-5,
            "per_device_train_batch_size": 8,
        },
    ),
    "trl": Toolkit(
        marks=("dataset_name", "dataset_mixture", "dataset_mixer", "dataset_train_split",
               "max_length", "chat_template", "model_revision", "hub_model_id"),
        names={
            "dataset_name": "sources", "dataset_mixture": "sources", "dataset_mixer": "sources",
            "datasets": "sources", "dataset_num_proc": "num_proc",
            "preprocessing_num_workers": "num_proc", "max_length": "sequence_length",
            "warmup_ratio": "warmup_steps",
        },
        defaults={
            "sequence_length": 1024, "overlong": "truncate", "bf16": True,
            "gradient_checkpointing": True, "per_device_train_batch_size": 8, "learning_rate": 2e-5,
        },
    ),
}  # fmt: skip


class Conversion:
    """A config on its way: `given` is what is left of it by our name, `run` and `data` the recipes.

    A recipe has (value, comment) by setting. notes: the keys without a counterpart by reason.
    """

    def __init__(self, kind: str, entries: Mapping[str, tuple[Any, int]], path: Path, gpus: int):
        self.kind, self.path, self.gpus = kind, path, gpus
        self.its_default = f"the default of {kind}"
        toolkit = TOOLKITS[kind]
        self.run: dict[str, tuple[Any, str]] = {}
        self.data: dict[str, tuple[Any, str]] = {}
        self.notes: dict[str, list[str]] = {}
        self.template = ""  # a chat template that stands in the config itself
        self.given: dict[str, Given] = {}
        for key, (value, line) in entries.items():
            if value in (None, ""):
                continue
            name = toolkit.names.get(key) or OTHER_NAMES.get(key, key)
            name = name if name.isidentifier() and key not in LEFT else key
            if not self.value(name):
                self.given[name] = Given(value, key, line)
        for name, value in toolkit.defaults.items():
            self.given.setdefault(name, Given(value, self.its_default))
        self.pretraining = self.value("stage") == "pt" or "pretraining_dataset" in entries
        training = PretrainConfig if self.pretraining else FineTuneConfig
        self.declared = declared_settings((RunArguments, DataArguments, ModelArguments, training))

    def value(self, name: str, default: Any = None) -> Any:
        """Return what is given under our name."""
        return self.given[name].value if name in self.given else default

    def take(self, name: str, default: Any = None) -> Any:
        """Return what is given under our name, once."""
        return self.given.pop(name).value if name in self.given else default

    def note(self, key: str, reason: str) -> None:
        """Say what becomes of a key; without a reason nothing is lost."""
        if reason and key not in self.notes.setdefault(reason, []):
            self.notes[reason].append(key)

    def put(self, name: str, value: Any, comment: str = "") -> None:
        """Set a line of the training recipe; a value of another type is noted instead."""
        declaration = self.declared.get(name)
        if declaration is not None:
            try:
                value = checked_value(declaration, value)
            except ValueError as error:
                self.note(name, str(error))
                return
            if value == declaration.default and (not value or comment == self.its_default):
                return
        self.run[name] = (value, comment)

    def move(self, name: str) -> None:
        """Set a setting as it is given."""
        if name in self.given:
            entry = self.given.pop(name)
            self.put(name, entry.value, "" if entry.source == name else entry.source)
