"""The kernels of xLSTM: native ones on a CPU, Triton's on a GPU with the package xlstm.

Published configurations name Triton's kernels and a mode without a backward pass. The settings made
here apply only to this process. `final/` keeps the published settings.
"""

import logging
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.models.xlstm import configuration_xlstm
from transformers.utils import is_xlstm_available

from utils.config.errors import ConfigurationError

logger = logging.getLogger(__name__)

NATIVE = {
    "chunkwise_kernel": "chunkwise--native_autograd", "sequence_kernel": "native_sequence__native",
    "step_kernel": "native", "mode": "inference", "return_last_states": True,
}  # fmt: skip
TRITON = NATIVE | {
    "chunkwise_kernel": "chunkwise--triton_xl_chunk", "sequence_kernel": "native_sequence__triton",
    "step_kernel": "triton",
}  # fmt: skip


def accept_kernel_names() -> None:
    """Let transformers accept the names of Triton's kernels if the package xlstm is missing.

    transformers would refuse a configuration with these names. It then uses its own kernels anyway.
    """
    if not is_xlstm_available():
        strict: Any = configuration_xlstm.xLSTMConfig
        for name in ("chunkwise_kernel", "sequence_kernel", "step_kernel"):
            strict.__validators__.pop(name, None)


def choose_kernels(config: PreTrainedConfig, device_type: str, length: int | None = None) -> None:
    """Set and log the kernels of an xLSTM's configuration; leave other configurations alone.

    Raises ConfigurationError if Triton's kernels do not support the sequence length.
    """
    if config.model_type != "xlstm":
        return
    triton = device_type == "cuda" and is_xlstm_available()
    chunk: int = config.chunk_size
    if triton and length is not None and length % chunk:
        raise ConfigurationError(
            f"--sequence_length {length:,}: Triton's kernels of xLSTM train on multiples of its "
            f"chunk_size, {chunk}: set it to {-(-length // chunk) * chunk:,}."
        )
    for name, value in (TRITON if triton else NATIVE).items():
        setattr(config, name, value)
    hint = "; pip install xlstm for Triton's" if device_type == "cuda" and not triton else ""
    kind = "Triton's" if triton else "native"
    logger.info("xLSTM: %s kernels (%s)%s", kind, config.chunkwise_kernel, hint)


def follow_training(model: nn.Module) -> None:
    """Switch Triton's kernels to the mode with a backward pass while the model trains."""
    backends: list[Any] = [m for m in model.modules() if type(m).__name__ == "mLSTMBackend"]

    def set_mode(module: nn.Module, _: Any) -> None:
        for backend in backends:
            backend.config.mode = "train" if module.training else "inference"

    if backends and "triton" in backends[0].config.chunkwise_kernel:
        model.register_forward_pre_hook(set_mode)
