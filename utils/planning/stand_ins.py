"""What runs in place of the compiler and of attention kernels on tensors without data.

The compiler's cut through a layer is made without compiling; attention is an operator that keeps
and returns tensors of the shapes that a flash kernel does.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import AttentionInterface

from utils.kernels.varlen import VarlenKernel, packed_varlen

COUNTED = "counted_attention"  # transformers looks for "flash", "sdpa" and the like inside a name
EVERYTHING = frozenset({"softcap", "sinks", "dropout"})


def register_counted_attention() -> str:
    """Register attention that keeps what a kernel without scores keeps; return its name."""
    kernel = VarlenKernel(COUNTED, COUNTED, EVERYTHING, _counted, on_cuda_only=False)
    AttentionInterface.register(COUNTED, partial(packed_varlen, kernel=kernel))
    return COUNTED


def _counted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return _counted_flash(query, key, value)[0]


# "flash_attn" in its name lets selective checkpointing keep its results as it does a kernel's.
@torch.library.custom_op("stoker::counted_flash_attn", mutates_args=())
def _counted_flash(
    query: torch.Tensor,
    key: torch.Tensor,  # noqa: ARG001 - kept for the backward pass
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the shapes of a flash kernel's output and of its softmax statistics, float32."""
    tokens, heads, _ = query.shape
    statistics = query.new_empty((heads, tokens), dtype=torch.float32)
    return query.new_empty((tokens, heads, value.shape[-1])), statistics


# An operator too, which needs the output's gradient: else the compiler's cut would compute all that
# comes of it with the forward pass.
@torch.library.custom_op("stoker::counted_flash_attn_backward", mutates_args=())
def _counted_flash_backward(
    gradient: torch.Tensor,  # noqa: ARG001 - needed, not read
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,  # noqa: ARG001 - kept for it, as a kernel's is
    statistics: torch.Tensor,  # noqa: ARG001 - kept for it
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the shapes of the gradients, and of the float32 in which queries' is added up."""
    wide = torch.empty_like(query, dtype=torch.float32)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), wide


for _operator in (_counted_flash, _counted_flash_backward):
    _operator.register_fake(_operator._init_fn)
_counted_flash.register_autograd(
    lambda ctx, gradient, _: _counted_flash_backward(gradient, *ctx.saved_tensors)[:3],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)


@contextmanager
def cut_as_compiled(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Within, layers keep for their backward pass what compiled ones keep.

    torch's compiler takes a layer's forward and backward pass as one graph and cuts it where the
    fewest bytes cross. The same cut is made here when a layer first runs, and nothing is compiled.
    Ever after they are to be called with tensors of the same shapes and the same other arguments.
    """
    changed = list(layers)
    for layer in changed:
        layer.forward = _CutLayer(layer)
    try:
        yield
    finally:
        for layer in changed:
            del layer.forward


class _CutLayer:
    """A layer's forward pass, in two graphs from the first call on."""

    def __init__(self, layer: nn.Module):
        self.weights = dict(layer.named_parameters())
        self.module = nn.Module()
        self.module.layer, self.module.forward = layer, layer.forward
        self.cut: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        tensors = {n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}

        def run(weights: dict[str, torch.Tensor], tensors: dict[int, torch.Tensor]) -> Any:
            filled = [tensors.get(number, leaf) for number, leaf in enumerate(leaves)]
            args, kwargs = tree_unflatten(filled, form)
            named = {f"layer.{name}": weight for name, weight in weights.items()}
            return torch.func.functional_call(self.module, named, args, kwargs)

        self.cut = self.cut or _cut(run)
        return self.cut(self.weights, tensors)


def _cut(run: Callable[..., Any]) -> Callable[..., Any]:
    # Not before: they are seconds of imports, which a run that compiles needs in any case.
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.compilers import nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    return aot_function(
        run,
        fw_compiler=nop,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )
