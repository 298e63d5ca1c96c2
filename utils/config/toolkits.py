"""What keys of axolotl, LLaMA-Factory, torchtune and TRL mean; import_config.py converts by it.

A key is ours where a table says so, else by OTHER_NAMES, else where it is a setting of that name.
Names that are no settings of ours (`accumulation`, `quantize`) are those of import_config.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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
    """One toolkit: the keys that it is known by, its names for ours, and its defaults.

    defaults: by our name, what it does where the file says nothing and we do otherwise. left:
    reasons why a key has no counterpart.
    """

    marks: tuple[str, ...]
    names: Mapping[str, str]
    defaults: Mapping[str, Any]
    left: Mapping[str, str]


_EVERYWHERE = by_name({
    "checkpoints verify themselves, and the same command resumes": ""
    "auto_resume_from_checkpoints resume_from_checkpoint save_only_model overwrite_output_dir "
    "overwrite_cache save_safetensors",
    "attention takes the fastest kernel that keeps packed documents apart": ""
    "attn_implementation flash_attention flash_attn sdp_attention xformers_attention "
    "flex_attention s2_attention flex_attn_compile_kwargs",
    "no padding token is needed; the token that ends a turn comes from the template": ""
    "special_tokens eos_token pad_token eot_tokens",
    "the tokenizer's own chat template is taken; another one is a file: chat_template of the data "
    "recipe": "template chat_template chat_template_path",
    "answers, and what ends them, are trained on; weight: 0 in a message leaves one out": ""
    "train_on_inputs roles_to_train train_on_eos train_on_prompt mask_history assistant_only_loss "
    "completion_only_loss train_on_input",
    "the class comes from the model's config.json": ""
    "model_type tokenizer_type is_llama_derived_model tokenizer_use_fast tokenizer_legacy",
    "only text is trained on": "processor_type processor freeze_mm_modules freeze_vision_tower "
    "freeze_multi_modal_projector freeze_language_model image_max_pixels video_max_pixels",
    # Nothing is lost: it is so here, or of the toolkit's own making.
    "": "gradient_checkpointing_kwargs do_train strict debug plot_loss ddp_timeout "
    "low_cpu_mem_usage wandb_watch wandb_log_model dataset_prepared_path hf_use_auth_token "
    "loss_watchdog_threshold loss_watchdog_patience",
    "another method: this run trains without it": "qat relora lisa_n_layers unfrozen_parameters "
    "fp8 use_badam use_galore use_apollo use_adam_mini use_muon use_dft_loss use_eaft_loss "
    "use_asft_loss use_eaft use_llama_pro pissa_init loraplus_lr_ratio mixture_of_depths "
    "optimizer_in_bwd quantizer._component_ curriculum_sampling",
})  # fmt: skip

AXOLOTL = Toolkit(
    marks=("base_model", "micro_batch_size", "sequence_len", "sample_packing", "adapter"),
    names=by_name({
        "accumulation": "gradient_accumulation_steps",
        "checkpointing": "gradient_checkpointing",
        "validation": "val_set_size",
        "sources": "datasets pretraining_dataset",
        "eval_sources": "test_datasets",
        "overlong": "excess_length_strategy",
        "optimizer": "optimizer",
        "lr_scheduler_type": "lr_scheduler",
        "adapter": "adapter",
        "warmup_steps": "warmup_ratio",
        "adam_epsilon": "adam_eps",
        "use_rslora": "peft_use_rslora",
        "use_dora": "peft_use_dora",
        "model_revision": "revision_of_model",
        "add_tokens": "tokens",
        "min_lr": "cosine_min_lr_ratio",
        "num_proc": "dataset_processes dataset_num_proc",
        "run_name": "wandb_name",
        "bf16": "bfloat16",
        "fp16": "float16",
        "eval_strategy": "evaluation_strategy",
        "stage": "rl",
        "shards": "dp_shard_size",
        "compile": "torch_compile",
    }),
    defaults={
        "sequence_length": 512, "overlong": "drop", "packing": False, "lora_r": 8,
        "lora_alpha": 8, "lora_dropout": 0.0, "lr_scheduler_type": "cosine", "num_train_epochs": 1,
        "optimizer": "adamw_torch_fused",
    },
    left=_EVERYWHERE | by_name({
        "prepare_data.py tokenizes once, into output_dir of the data recipe": ""
        "push_dataset_to_hub skip_prepare_dataset shuffle_merged_datasets "
        "streaming",
        "packing does its work": "pad_to_sequence_len eval_sample_packing group_by_length "
        "max_packed_sequence_len pretrain_multipack_attn",
        "kernels are chosen by tests at the start; the loss head is fused": ""
        "plugins liger_rms_norm liger_glu_activation liger_layer_norm liger_rope "
        "liger_rms_norm_gated liger_fused_linear_cross_entropy cut_cross_entropy lora_mlp_kernel "
        "lora_qkv_kernel lora_o_kernel use_kernels flash_attn_cross_entropy flash_attn_rms_norm "
        "flash_attn_fuse_mlp experts_implementation use_scattermoe use_sonicmoe fused_attn_kernel",
        "every linear layer is adapted by default": "lora_target_linear lora_fan_in_fan_out",
        "Weights & Biases reads WANDB_ENTITY and the like from the environment": ""
        "wandb_entity wandb_run_id wandb_mode",
        "no tensor, context or expert parallelism: docs/parallelism.md": ""
        "tensor_parallel_size context_parallel_size expert_parallel_size dp_replicate_size",
    }),
)  # fmt: skip

LLAMA_FACTORY = Toolkit(
    marks=("stage", "finetuning_type", "cutoff_len", "template", "dataset_dir", "lora_rank"),
    names=by_name({
        "accumulation": "gradient_accumulation_steps",
        "checkpointing": "gradient_checkpointing",
        "no_checkpointing": "disable_gradient_checkpointing",
        "validation": "val_size",
        "sources": "dataset",
        "eval_sources": "eval_dataset",
        "adapter": "finetuning_type",
        "warmup_steps": "warmup_ratio",
        "lora_r": "lora_rank",
        "lora_modules_to_save": "additional_target",
        "quantize": "quantization_bit",
        "num_proc": "preprocessing_num_workers",
        "packing": "neat_packing",
        "pure": "pure_bf16",
    }),
    defaults={
        "sequence_length": 2048, "overlong": "truncate", "packing": False, "adapter": "lora",
        "lora_r": 8, "lora_dropout": 0.0, "checkpointing": True,
        "per_device_train_batch_size": 8, "learning_rate": 5e-5,
    },
    left=_EVERYWHERE | by_name({
        "max_tokens of a source limits it, weight takes a share": "max_samples",
        "quantized with bitsandbytes": "quantization_method",
        "of the model's config.json": "rope_scaling",
    }),
)  # fmt: skip

TORCHTUNE = Toolkit(
    marks=("model._component_", "tokenizer._component_", "checkpointer._component_"),
    names=by_name({
        "accumulation": "gradient_accumulation_steps",
        "checkpointing": "enable_activation_checkpointing",
        "activation_offloading": "enable_activation_offloading",
        "max_grad_norm": "clip_grad_norm",
        "optimizer": "optimizer._component_",
        "learning_rate": "optimizer.lr",
        "weight_decay": "optimizer.weight_decay",
        "lr_scheduler_type": "lr_scheduler._component_",
        "warmup_steps": "lr_scheduler.num_warmup_steps",
        "eval_steps": "run_val_every_n_steps",
        "sequence_length": "tokenizer.max_seq_len",
        "sources": "dataset",
        "eval_sources": "dataset_val",
        "packing": "dataset.packed",
        "weights_type": "dtype",
        "component": "model._component_",
        "lora_r": "model.lora_rank",
        "lora_alpha": "model.lora_alpha",
        "lora_dropout": "model.lora_dropout",
        "use_dora": "model.use_dora",
        "lora_target": "model.lora_attn_modules",
        "directory": "checkpointer.checkpoint_dir",
        "tracker": "metric_logger._component_",
    }),
    defaults={
        "sequence_length": 4096, "packing": False, "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0, "weight_decay": 0.01, "logging_steps": 1,
    },
    left=_EVERYWHERE | by_name({
        "": "checkpointer.* tokenizer.* loss.* dataset.* dataset_val.* profiler.* metric_logger.* "
        "name shuffle log_level log_peak_memory_stats device batch_size_val "
        "save_adapter_weights_only optimizer.fused",
        "LoRA of every linear layer is the default": ""
        "model.apply_lora_to_mlp model.apply_lora_to_output",
    }),
)  # fmt: skip

TRL = Toolkit(
    marks=("dataset_name", "dataset_mixture", "dataset_mixer", "dataset_train_split",
           "max_length", "chat_template", "model_revision", "hub_model_id"),
    names=by_name({
        "accumulation": "gradient_accumulation_steps",
        "checkpointing": "gradient_checkpointing",
        "sequence_length": "max_length",
        "sources": "dataset_name dataset_mixture dataset_mixer datasets",
        "subset": "dataset_config",
        "split": "dataset_train_split",
        "test_split": "dataset_test_split",
        "warmup_steps": "warmup_ratio",
        "quantize": "load_in_4bit",
        "num_proc": "dataset_num_proc preprocessing_num_workers",
    }),
    defaults={
        "sequence_length": 1024, "overlong": "truncate", "packing": False, "bf16": True,
        "checkpointing": True, "per_device_train_batch_size": 8, "learning_rate": 2e-5,
    },
    left=_EVERYWHERE,
)  # fmt: skip

TOOLKITS = {
    "axolotl": AXOLOTL, "llamafactory": LLAMA_FACTORY, "torchtune": TORCHTUNE, "trl": TRL,
}  # fmt: skip


class Conversion:
    """A config on its way: `given` is what is left of it by our name, `run` and `data` the recipes.

    A recipe has (value, comment) by setting. notes: the keys without a counterpart by reason.
    """

    def __init__(self, kind: str, entries: Mapping[str, tuple[Any, int]], text: str, gpus: int):
        self.kind, self.text, self.gpus = kind, text, gpus
        self.its_default = f"the default of {kind}"
        self.toolkit: Toolkit = TOOLKITS[kind]
        self.run: dict[str, tuple[Any, str]] = {}
        self.data: dict[str, tuple[Any, str]] = {}
        self.notes: dict[str, list[str]] = {}
        self.template = ""  # a chat template that stands in the config itself
        self.given: dict[str, Given] = {}
        for key, (value, line) in entries.items():
            if value in (None, ""):
                continue
            name = self.toolkit.names.get(key) or OTHER_NAMES.get(key, key)
            name = name if name.isidentifier() and key not in self.toolkit.left else key
            if name not in self.given or not self.given[name].value:
                self.given[name] = Given(value, key, line)
        for name, value in self.toolkit.defaults.items():
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
