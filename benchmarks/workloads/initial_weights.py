"""The weights that all contestants of a cell start from, on disk as transformers has them."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

HEADER_LENGTH_BYTES = 8  # safetensors: its JSON header's length comes first, little-endian
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def save_random_weights(
    config: PreTrainedConfig, dtype: torch.dtype, seed: int, directory: Path
) -> None:
    """Save a model as transformers initialises it, drawn on the GPU if there is one."""
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(directory)


def save_zero_weights(config: PreTrainedConfig, dtype: torch.dtype, directory: Path) -> None:
    """Save a model of zeros as a sparse file: any size, at once, and no room on disk.

    Its memory is that of any other; its speed is not, for products of zeros draw little power.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        begin, end = end, end + tensor.numel() * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % HEADER_LENGTH_BYTES)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(HEADER_LENGTH_BYTES, "little") + text)
        file.truncate(file.tell() + end)
    model.config.save_pretrained(directory)
