"""What keys of axolotl, LLaMA-Factory, torchtune and TRL mean; import_config.py converts by it.

A key is ours where a table says so, else by OTHER_NAMES, else where it is a setting of that name.
Names that are no settings of ours (`accumulation`, `quantize`) are those of import_config.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from utils.config.unknown_names import by_name


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
    "nothing recomputes by reentrant autograd here": "gradient_checkpointing_kwargs",
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
        "lora_alpha": 8, "lora_dropout": 0.0, "lr_scheduler_type": "cosine",
        "optimizer": "adamw_torch_fused",
    },
    left=_EVERYWHERE | by_name({
        "prepare_data.py tokenizes once, into output_dir of the data recipe": ""
        "dataset_prepared_path push_dataset_to_hub skip_prepare_dataset shuffle_merged_datasets "
        "streaming",
        "packing does its work": "pad_to_sequence_len eval_sample_packing group_by_length "
        "max_packed_sequence_len pretrain_multipack_attn",
        "kernels are chosen by tests at the start; the loss head is fused": ""
        "plugins liger_rms_norm liger_glu_activation liger_layer_norm liger_rope "
        "liger_rms_norm_gated liger_fused_linear_cross_entropy cut_cross_entropy lora_mlp_kernel "
        "lora_qkv_kernel lora_o_kernel use_kernels flash_attn_cross_entropy flash_attn_rms_norm "
        "flash_attn_fuse_mlp experts_implementation use_scattermoe use_sonicmoe fused_attn_kernel",
        "every linear layer is adapted by default": "lora_target_linear lora_fan_in_fan_out",
        "a loss that is not finite ends the run": ""
        "loss_watchdog_threshold loss_watchdog_patience",
        "Weights & Biases reads WANDB_ENTITY and the like from the environment": ""
        "wandb_entity wandb_watch wandb_log_model wandb_run_id wandb_mode",
        "all keys are checked": "strict debug",
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
        "metrics.jsonl has every figure": "plot_loss",
        "max_tokens of a source limits it, weight takes a share": "max_samples",
        "quantized with bitsandbytes": "quantization_method double_quantization",
        "the script trains": "do_train do_eval",
        "DDP's own time-out stays": "ddp_timeout",
        "a class of the model's config.json": "rope_scaling",
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
        "logging_steps": "log_every_n_steps",
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
        "files are found in model_name_or_path": "checkpointer.* tokenizer.* name",
        "always": "shuffle log_level log_peak_memory_stats loss.* device dataset.* dataset_val.* "
        "batch_size_val save_adapter_weights_only metric_logger.* optimizer.fused",
        "LoRA of every linear layer is the default": ""
        "model.apply_lora_to_mlp model.apply_lora_to_output",
        "Trainer's profiler is not offered": "profiler.*",
    }),
)  # fmt: skip

TRL = Toolkit(
    marks=("dataset_name", "dataset_mixture", "dataset_mixer", "dataset_train_split",
           "max_length", "chat_template", "model_revision", "hub_model_id"),
    names=by_name({
        "accumulation": "gradient_accumulation_steps",
        "checkpointing": "gradient_checkpointing",
        "sequence_length": "max_length max_seq_length",
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
    left=_EVERYWHERE | by_name({
        "final/ is complete; hf upload pushes it": "push_to_hub hub_model_id hub_strategy "
        "hub_private_repo hub_model_revision",
    }),
)  # fmt: skip

TOOLKITS = {
    "axolotl": AXOLOTL, "llamafactory": LLAMA_FACTORY, "torchtune": TORCHTUNE, "trl": TRL,
}  # fmt: skip
