"""The keys of axolotl, LLaMA-Factory and TRL, and the state of a conversion.

Our name for a key comes from the toolkit's table, else from utils/config/other_names.yaml. A key in
neither table has the same name here.
"""

import re
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
from utils.config.declarations import (
    REFUSED,
    Given,
    by_name,
    checked_value,
    declared_settings,
    other_names,
)
from utils.config.own_code import OwnCode

UNKNOWN = "unknown here, left out"
EMPTY = "empty there"
OFF = "off there, and not done here"
BY_DEFAULT = "as it is here without a line"
_OFF_VALUES: tuple[Any, ...] = (None, False, 0, "", "none", [], {})


@dataclass(frozen=True)
class Toolkit:
    """A toolkit whose configs can be converted.

    marks: keys that identify its configs. names: {its key: our name}. defaults: {our name: its
    default}. winners: keys that override other keys of the same meaning. null_counts: whether
    null in a config replaces a default.
    """

    marks: tuple[str, ...]
    names: Mapping[str, str]
    defaults: Mapping[str, Any]
    winners: tuple[str, ...] = ()
    null_counts: bool = True


# {key of a toolkit or of a dataset's entry: why the key has no counterpart here}.
LEFT = by_name({
    "not needed: Stoker does it by itself, or in its own way (docs/coming-from.md)": ""
    "auto_resume_from_checkpoints resume_from_checkpoint save_only_model overwrite_output_dir "
    "overwrite_cache save_safetensors attn_implementation flash_attention flash_attn "
    "sdp_attention flex_attention xformers_attention flex_attn_compile_kwargs special_tokens "
    "eos_token pad_token eot_tokens model_type tokenizer_type is_llama_derived_model "
    "tokenizer_use_fast tokenizer_legacy push_dataset_to_hub skip_prepare_dataset "
    "shuffle_merged_datasets streaming dataset_prepared_path pad_to_sequence_len "
    "eval_sample_packing group_by_length max_packed_sequence_len pretrain_multipack_attn plugins "
    "liger_rms_norm liger_glu_activation liger_layer_norm liger_rope liger_rms_norm_gated "
    "liger_fused_linear_cross_entropy cut_cross_entropy lora_mlp_kernel lora_qkv_kernel "
    "lora_o_kernel use_kernels flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp "
    "experts_implementation use_scattermoe use_sonicmoe fused_attn_kernel lora_target_linear "
    "lora_fan_in_fan_out gradient_checkpointing_kwargs do_train strict debug plot_loss "
    "ddp_timeout quantization_method low_cpu_mem_usage hf_use_auth_token "
    "loss_watchdog_threshold loss_watchdog_patience",
    "the tokenizer's own chat template prints the prompt; another one is a file: chat_template of "
    "the data recipe": "template chat_template chat_template_path format no_input_format "
    "system_prompt system_format default_system conversation tool_format",
    "answers, and what ends them, are trained on; train: false in a message leaves one out": ""
    "train_on_inputs roles_to_train train_on_eos train_on_eot train_on_prompt mask_history "
    "assistant_only_loss completion_only_loss message_field_training "
    "message_field_training_detail",
    "messages have role and content, or from and value, and the usual roles (docs/data.md): rename "
    "others in the data": "role content role_tag content_tag message_field_role "
    "message_field_content roles user_tag assistant_tag observation_tag function_tag system_tag",
    "system messages stay: take them out of the data": "drop_system_message",
    "a thought is reasoning_content of its message or a part of the answer; whether answers think: "
    "chat_template_kwargs of the data recipe": "split_thinking field_thinking "
    "template_thinking_key preserve_thinking",
    "a source is read whole, and the ending of a file tells its type; weight takes a share, "
    "max_tokens limits it": "shards_idx num_samples skip max_samples ds_type preprocess_shards "
    "load_from folder preprocessing_batch_size",
    "only text is trained on, from the columns of the format": "columns images videos audios "
    "ranking chosen rejected kto_tag processor_type freeze_mm_modules freeze_vision_tower "
    "freeze_multi_modal_projector freeze_language_model image_max_pixels video_max_pixels",
    "another method: this run trains without it": "qat relora lisa_n_layers unfrozen_parameters "
    "fp8 use_badam use_galore use_apollo use_adam_mini use_muon use_dft_loss use_eaft_loss "
    "use_asft_loss use_eaft use_llama_pro pissa_init loraplus_lr_ratio mixture_of_depths "
    "curriculum_sampling tensor_parallel_size context_parallel_size expert_parallel_size "
    "dp_replicate_size",
    "the adapter of an earlier run: init_from names the run's directory": "lora_model_dir",
    "Weights & Biases reads WANDB_ENTITY and the like from the environment": ""
    "wandb_entity wandb_run_id wandb_mode wandb_watch wandb_log_model",
})  # fmt: skip

TOOLKITS = {
    "axolotl": Toolkit(
        marks=("base_model", "micro_batch_size", "sequence_len", "sample_packing", "adapter"),
        names={
            "datasets": "sources", "pretraining_dataset": "sources", "rl": "stage",
            "test_datasets": "eval_sources", "val_set_size": "validation", "adapter": "adapter",
            "dataset_processes": "num_proc", "dataset_num_proc": "num_proc",
            "excess_length_strategy": "overlong", "tokens": "add_tokens",
            "peft_use_rslora": "use_rslora", "peft_use_dora": "use_dora",
            "warmup_ratio": "warmup_steps", "torch_compile": "compile",
            "revision_of_model": "model_revision", "batch_size": "total_batch_size",
        },
        defaults={
            "sequence_length": 512, "overlong": "drop", "lora_r": 8, "lora_alpha": 8,
            "lora_dropout": 0.0, "lr_scheduler_type": "cosine", "num_train_epochs": 1,
            "save_total_limit": 4, "warmup_steps": 0.03,
        },
        winners=("bf16", "datasets", "warmup_steps", "dataset_num_proc"),
        null_counts=False,
    ),
    "llamafactory": Toolkit(
        marks=("stage", "finetuning_type", "cutoff_len", "template", "dataset_dir", "lora_rank"),
        names={
            "dataset": "sources", "eval_dataset": "eval_sources", "val_size": "validation",
            "preprocessing_num_workers": "num_proc", "finetuning_type": "adapter",
            "warmup_ratio": "warmup_steps",
        },
        defaults={
            "sequence_length": 2048, "overlong": "truncate", "adapter": "lora", "lora_r": 8,
            "lora_dropout": 0.0, "gradient_checkpointing": True, "learning_rate": 5e-5,
            "per_device_train_batch_size": 8,
        },
        winners=("neat_packing", "warmup_steps"),
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
        winners=("datasets", "dataset_mixture", "dataset_mixer", "max_length", "warmup_steps",
                 "dtype", "dataset_num_proc"),
    ),
}  # fmt: skip


class Conversion:
    """A config during its conversion to our recipes.

    given: {our name: value} that is not converted yet. run: {setting: (value, comment)} of the
    training recipe. data: values of the data recipe. notes: {reason: keys without a counterpart}.
    """

    def __init__(self, kind: str, entries: Mapping[str, tuple[Any, int]], path: Path, gpus: int):
        self.kind, self.path, self.gpus = kind, path, gpus
        self.its_default = f"the default of {kind}"
        self.made_of: dict[str, str] = {}  # {setting: the config's key that it comes from}
        self.run: dict[str, tuple[Any, str]] = {}
        self.data: dict[str, Any] = {}
        self.notes: dict[str, list[str]] = {}
        self.template = ""  # text of a chat template inside the config
        self.given: dict[str, Given] = {}
        toolkit = TOOLKITS[kind]
        for key, (value, line) in entries.items():
            name = toolkit.names.get(key) or other_names().get(key, key)
            name = name if name.isidentifier() and key not in LEFT else key
            new, old = Given(value, key, line), self.given.get(name)
            if value in (None, "") and not (toolkit.null_counts and name in toolkit.defaults):
                self.note(key, EMPTY)
                continue
            if old:  # two keys mean the same: keep the one that is on, else the toolkit's choice
                ranks = [(is_off(each.value), each.source not in toolkit.winners)
                         for each in (old, new)]  # fmt: skip
                old, new = (old, new) if ranks[1] < ranks[0] else (new, old)
                self.note(old.source, f"{new.source} decides, which means the same")
            self.given[name] = new
        for name, value in toolkit.defaults.items():
            self.given.setdefault(name, Given(value, self.its_default))
        self.pretraining = self.value("stage") == "pt" or "pretraining_dataset" in entries
        training = PretrainConfig if self.pretraining else FineTuneConfig
        classes = (RunArguments, DataArguments, ModelArguments, OwnCode, training)
        self.declared = declared_settings(classes)

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of a setting in `given`. name: our name."""
        return self.given[name].value if name in self.given else default

    def take(self, name: str, default: Any = None) -> Any:
        """Remove a setting from `given` and return its value."""
        return self.given.pop(name).value if name in self.given else default

    def note(self, key: str, reason: str) -> None:
        """Add a key of the config to `notes` under a reason. Skip the toolkit's own defaults."""
        if key != self.its_default and key not in self.notes.setdefault(reason, []):
            self.notes[reason].append(key)

    def drop(self, name: str, reason: str) -> None:
        """Remove a setting from `given`, and note the reason."""
        if name in self.given:
            self.note(self.given.pop(name).source, reason)

    def leave(self, key: str, value: Any, ours: str = "") -> None:
        """Note why a key has no counterpart. key: may be a path such as datasets.roles."""
        name = key.rpartition(".")[2]
        reason = LEFT.get(name) or REFUSED.get(ours or name) or other_names().get(name)
        if value in (None, ""):
            reason = EMPTY
        elif reason is None:
            reason = OFF if is_off(value) else UNKNOWN
        elif reason.isidentifier():
            reason = f"here it is {reason}, with another value"
        self.note(key, reason)

    def leave_all(self, path: str, values: Mapping[str, Any]) -> None:
        """Note for each key inside a mapping why the key has no counterpart."""
        for key, value in values.items():
            if isinstance(value, Mapping) and value:
                self.leave_all(f"{path}.{key}", value)
            else:
                self.leave(f"{path}.{key}", value)

    def put(self, name: str, value: Any, comment: str = "", key: str = "") -> None:
        """Add a setting to the training recipe, or note that `value` is refused or our default."""
        key = key or name
        declaration = self.declared.get(name)
        if declaration is not None:
            try:
                value = checked_value(declaration, value)
            except ValueError as error:
                self.note(key, str(error))
                return
            if value == declaration.default and (not value or comment == self.its_default):
                self.note(key, BY_DEFAULT)
                return
        self.run[name] = (value, comment)
        self.made_of[name] = key

    def move(self, name: str) -> None:
        """Move a setting from `given` to the training recipe unchanged."""
        if name in self.given:
            entry = self.given.pop(name)
            self.put(name, entry.value, "" if entry.source == name else entry.source, entry.source)


def is_off(value: Any) -> bool:
    """Return whether a value turns its setting off."""
    return any(value is off or (value == off and type(value) is type(off)) for off in _OFF_VALUES)


def listed(value: Any) -> list[Any]:
    """Return the value as a list, because toolkits also accept "a, b" or a single entry."""
    if isinstance(value, str):
        return re.split(r"\s*,\s*", value)
    return value if isinstance(value, list) else [value]
