"""Looks whether a model's weights are finite: each rank at the part of them that it holds."""

import math
from typing import Any

import torch
from torch import nn


def spoilt_weights(model: nn.Module) -> list[str]:
    """Return the names of the trained parameters with a NaN or infinity in this rank's part.

    Reads each weight once and waits for the device once. Call it on all ranks: FSDP2 and ZeRO-3
    keep a shard of each parameter on every rank.
    """
    names, largest = [], []
    for name, parameter in model.named_parameters():
        part = _own_part(parameter)
        if parameter.requires_grad and part.numel():
            names.append(name.removeprefix("module."))
            # The largest absolute value: without a temporary of the weight's size, NaN if one is.
            largest.append(torch.linalg.vector_norm(part.detach(), math.inf).float())
    if not largest:
        return []
    finite = torch.stack([value.to(largest[0].device) for value in largest]).isfinite().tolist()
    return [name for name, good in zip(names, finite, strict=True) if not good]


def _own_part(parameter: nn.Parameter) -> torch.Tensor:
    any_kind: Any = parameter
    if hasattr(parameter, "ds_tensor"):  # DeepSpeed ZeRO-3's shard; the parameter itself is empty
        return any_kind.ds_tensor
    return any_kind.to_local() if hasattr(parameter, "to_local") else parameter
