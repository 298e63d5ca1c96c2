"""Contradictions in what is to become of steps that are not finite."""

from collections.abc import Iterator

from utils.config.errors import ConfigurationError
from utils.config.reading.settings import SettingValues


def check_nonfinite(values: SettingValues) -> Iterator[str]:
    """Refuse a limit without skipping, and skipping where a loss scaler skips by itself."""
    if values["on_nonfinite"] != "skip":
        if values.changed("nonfinite_limit"):
            yield f"{values.shown('nonfinite_limit')} has no effect without on_nonfinite: skip"
    elif values["fp16"]:
        yield (
            "on_nonfinite skip does not go with fp16, whose loss scaler skips steps on its own "
            "account: use bf16, or leave on_nonfinite at stop"
        )


def check_skipping(deepspeed: bool, mixed_precision: str) -> None:
    """Raise ConfigurationError where the optimizer cannot be kept from a spoilt gradient."""
    if deepspeed:
        raise ConfigurationError(
            "on_nonfinite skip does not go with DeepSpeed, whose optimizer steps at the end of the "
            "backward pass, before the ranks can agree: use multi_gpu.yaml or fsdp2.yaml, or leave "
            "on_nonfinite at stop."
        )
    if mixed_precision == "fp16":
        raise ConfigurationError(
            "on_nonfinite skip does not go with mixed_precision fp16 of the accelerate config, "
            "whose loss scaler skips steps on its own account: use bf16, or leave on_nonfinite at "
            "stop."
        )
