"""Layers on tensors without data that keep for their backward pass what compiled ones keep.

torch's compiler takes a layer's forward and backward pass as one graph and cuts it where the fewest
bytes cross; what is cheap is computed again. Here the same cut is made, and nothing is compiled.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten


@contextmanager
def cut_as_compiled(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Within, layers run as the compiler would cut them; each is traced when it first runs.

    Ever after they are to be called with tensors of the same shapes and the same other arguments.
    """
    changed: list[nn.Module] = []
    for layer in layers:
        layer.forward = _CutLayer(layer)
        changed.append(layer)
    try:
        yield
    finally:
        for layer in changed:
            del layer.forward


class _CutLayer:
    """A layer's forward pass, in two graphs from the first call on."""

    def __init__(self, layer: nn.Module):
        self.weights = dict(layer.named_parameters())
        self.module = _Forward(layer)
        self.cut: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def run(weights: dict[str, torch.Tensor], tensors: list[torch.Tensor]) -> Any:
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            args, kwargs = tree_unflatten(filled, form)
            named = {f"layer.{name}": weight for name, weight in weights.items()}
            return torch.func.functional_call(self.module, named, args, kwargs)

        self.cut = self.cut or _cut(run)
        return self.cut(self.weights, [leaves[place] for place in places])


class _Forward(nn.Module):
    """The layer's own forward pass, its weights among this module's."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.forward = layer, layer.forward


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
