"""The user's model without data, gone through once for each choice of activation checkpointing."""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig

from utils.config.run_settings import RunSettings
from utils.kernels.activation_checkpointing import keep_products
from utils.kernels.attention import AttentionChoice, shape_inputs
from utils.kernels.linear_cross_entropy import buffers_alone
from utils.kernels.loss_head import LossHeadChoice
from utils.kernels.packed_varlen import NAME as PACKED
from utils.kernels.probe_model import MISFITS, causal_lm_class, experts_by_shape
from utils.planning.activations import layer_gradients, layers_of, trace_step
from utils.planning.adapters import with_adapters
from utils.planning.counted_attention import register_counted_attention
from utils.planning.live_bytes import Stretch

logger = logging.getLogger(__name__)

WITH_SCORES = ("sdpa", "eager")  # they run as they are: masks and scores may be in memory


@dataclass(frozen=True)
class Workload:
    """A micro-batch and the types of its numbers; `lengths` of its documents on a CPU.

    `compiled`: whether layers are.
    """

    rows: int
    sequence_length: int
    weights: torch.dtype
    autocast: torch.dtype | None
    device: str
    attention: AttentionChoice | None
    loss_head: LossHeadChoice
    lengths: Sequence[int]
    compiled: bool = False


@dataclass(frozen=True)
class StepTrace:
    """The stretches of a step, and the bytes of each layer's gradients by backward stretch.

    `gathered_weights` are those of two layers and of what is in none: whole on each rank, where a
    strategy gathers weights.
    """

    stretches: list[Stretch]
    layer_gradients: dict[str, int]
    gathered_weights: int


def trace(
    settings: RunSettings, config: PreTrainedConfig, work: Workload, choice: str
) -> StepTrace:
    """Count a step's memory on the model itself; no weight is made and nothing is computed.

    Raises what the architecture raises where it cannot run without data: experts gone through one
    by one, say, ask where numbers are not zero.
    """
    config = copy.deepcopy(config)
    # Where the compute node's kernel is not known yet it is a flash kernel, if it is any.
    implementation = PACKED if work.attention is None else work.attention.name
    if implementation not in WITH_SCORES:
        on_cpu = work.device == "cpu" and work.attention is not None
        implementation = register_counted_attention(work.lengths if on_cpu else None)
    config._attn_implementation = implementation
    with torch.device("meta"):
        # The class itself: from_config would split the weights over the ranks under ZeRO-3.
        model_class: Any = causal_lm_class(config)
        model = model_class(config).to(work.weights)
        work.loss_head.install(model, work.compiled)
        if choice == "selective":
            keep_products(model)
        if choice != "none":
            options = settings.training.activation_checkpointing_kwargs or {}
            every = options.get("every_n_layers", 1) if isinstance(options, dict) else 1
            model.activation_checkpointing_enable(every_n_layers=every)
        model = with_adapters(model, settings.model)
    with FakeTensorMode(), torch.device(work.device), buffers_alone(), experts_by_shape():
        _put_on_device(model)
        # Where layers are computed again, the checkpoint says what is kept, compiled or not.
        cut = work.compiled and choice == "none"
        stretches = _stretches(model.train(), work, cut)
    return StepTrace(stretches, layer_gradients(model), _gathered(model))


def _stretches(model: nn.Module, work: Workload, cut: bool) -> list[Stretch]:
    if cut:
        try:
            return trace_step(model, _inputs(work), work.autocast, compiled=True)
        except MISFITS as error:
            logger.warning(
                "memory: layers of %s are counted as not compiled, which is more: %s: %.200s",
                type(model).__name__, type(error).__name__, error,
            )  # fmt: skip
            model.zero_grad()
    return trace_step(model, _inputs(work), work.autocast)


def _gathered(model: nn.Module) -> int:
    sizes = [_bytes(layer) for layer in layers_of(model)]
    return _bytes(model) - sum(sizes) + 2 * max(sizes, default=0)


def _bytes(module: nn.Module) -> int:
    return sum(weight.numel() * weight.itemsize for weight in module.parameters())


def _put_on_device(model: nn.Module) -> None:
    """Put tensors of a device for those of the meta device; both are without data."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                if old not in made:  # tied weights stay one
                    new = torch.empty(old.shape, dtype=old.dtype)
                    weight = isinstance(old, nn.Parameter)
                    made[old] = nn.Parameter(new, old.requires_grad) if weight else new
                tensors[name] = made[old]  # type: ignore[assignment] # of its own kind


def _inputs(work: Workload) -> dict[str, Any]:
    """Return a micro-batch as the model takes it (utils/data/batches.py), without data."""
    shape = work.rows, work.sequence_length
    tokens = work.rows * work.sequence_length
    bounds = torch.zeros(len(work.lengths) + 1, dtype=torch.int32)
    inputs: dict[str, Any] = {
        "input_ids": torch.zeros(shape, dtype=torch.int64),
        "labels": torch.zeros(shape, dtype=torch.int64),
        "position_ids": torch.zeros(shape, dtype=torch.int64),
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": work.sequence_length,
        "max_length_k": work.sequence_length,
        "num_items_in_batch": torch.zeros((), dtype=torch.int64),
    }
    if work.loss_head.name == "fused":
        inputs["loss_positions"] = torch.zeros(tokens, dtype=torch.int64)
    if work.loss_head.router is not None:
        inputs["row_tokens"] = torch.zeros(work.rows, dtype=torch.int64)
    if work.attention is not None:
        inputs = shape_inputs(inputs, work.attention.batches)
    return inputs | {"use_cache": False}
