"""What a checkpoint says of its model beside the tensors: put beside FSDP's shards, and read again.

Without it a run could only go on where the model that it began with still is.
"""

import copy
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, Trainer


def describe_shards(trainer: Trainer, directory: Path) -> None:
    """Write configuration and tokenizer beside the parts that the ranks write under FSDP.

    Before the commit, so that the manifest holds them.
    """
    if not trainer.is_fsdp_enabled or not trainer.args.should_save:
        return
    plugin: Any = trainer.accelerator.state.fsdp_plugin
    if "FULL_STATE_DICT" in str(plugin.state_dict_type):
        return  # Trainer saves a model
    model: Any = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    described = [model.config, trainer.processing_class]
    if isinstance(model, PreTrainedModel) and model.can_generate():
        described.append(model.generation_config)
    for each in described:
        each.save_pretrained(directory)


def set_generation_settings(trainer: Trainer, generation: GenerationConfig | None) -> None:
    """Let the model be saved with these: Trainer and SFTTrainer write special tokens into them."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if generation is not None:
        base.generation_config = copy.deepcopy(generation)
