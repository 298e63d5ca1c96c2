"""A model with the adapters of the settings."""

from typing import Any

from torch import nn

from utils.config.arguments import ModelArguments


def with_adapters(built: nn.Module, model: ModelArguments) -> nn.Module:
    """Return the model with LoRA's adapters, itself where the settings have none."""
    if not model.use_peft:
        return built
    from peft import get_peft_model
    from trl import get_peft_config  # brings datasets and pandas along

    adapters: Any = get_peft_config(model)
    return get_peft_model(built, adapters)
