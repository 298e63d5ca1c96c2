"""What a micro-batch takes in memory beside weights and optimizer, counted on the model itself.

The user's own model goes forward and back on tensors without data; every storage is counted from
the operator that makes it until nothing holds it. Layers alike are gone through once.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from utils.planning.compiled_layers import cut_as_compiled
from utils.planning.live_bytes import LiveBytes, Stretch

FORWARD, BACKWARD = "forward ", "backward "
REST, AUTOCAST_ENDS = "rest", "autocast ends"


@dataclass(frozen=True)
class Phases:
    """Bytes beside weights and optimizer: the most at any time, and of what it consists then.

    `working` comes and goes within an operation or a layer; the rest is `activations`.
    """

    peak: int
    activations: int
    gradients: int
    working: int


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers that activation checkpointing works on, in their order."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


def trace_step(
    model: nn.Module,
    inputs: dict[str, Any],
    autocast: torch.dtype | None,
    compiled: bool = False,
) -> list[Stretch]:
    """Go forward and back on one layer of each kind; return the stretches of all layers in order.

    Call it in a FakeTensorMode, on a model that was made in it and is in training mode. What the
    other layers would do is what the first of their kind did. `compiled`: as layers do that are.
    """
    if not compiled:
        return _go_through(model, inputs, autocast)
    layers = layers_of(model)
    with cut_as_compiled(layers[kind] for kind in set(_kinds(model, layers))):
        # The first time layers are traced, which is not a step's memory.
        _go_through(model, inputs, autocast, counts=False)
        return _go_through(model, inputs, autocast)


def _go_through(
    model: nn.Module,
    inputs: dict[str, Any],
    autocast: torch.dtype | None,
    *,
    counts: bool = True,
) -> list[Stretch]:
    layers = layers_of(model)
    kinds = _kinds(model, layers)
    device = next(model.parameters()).device.type
    live = LiveBytes([*model.parameters(), *model.buffers()])
    with _first_of_each_kind(layers, kinds, live), live if counts else nullcontext():
        with torch.autocast(device, autocast, enabled=autocast is not None):
            live.begin("inputs")
            loss = model(**inputs).loss
            live.begin(AUTOCAST_ENDS)
        live.begin("loss")
        loss.backward()
        del loss
        live.begin("end")
    model.zero_grad()
    return _all_layers(live.stretches, kinds)


def most_alive(
    stretches: Sequence[Stretch], layer_gradients: dict[str, int], shards: int, *, held: int
) -> Phases:
    """Return the most that is alive at any time, beside weights and optimizer.

    `layer_gradients` has the bytes by name of a backward stretch; they are cut into `shards` at
    its end. `held` are the bytes of gradients that an earlier micro-batch of the step left, to
    which those of this one are added; 0 where there was none.
    """
    alive, made = held, held
    peak = Phases(alive, 0, alive, 0)
    for stretch in stretches:
        if alive + stretch.peak > peak.peak:
            peak = Phases(alive + stretch.peak, alive - made, made, stretch.peak)
        own = layer_gradients.get(stretch.name, 0)
        kept = 0 if held else own // shards
        alive += stretch.live - own + kept
        made += kept
    return peak


def _kinds(model: nn.Module, layers: Sequence[nn.Module]) -> list[int]:
    """Return for each layer the number of the first one like it."""
    config: Any = getattr(model, "config", None)
    types = getattr(config.get_text_config(), "layer_types", None) if config else None
    if types is None or len(types) != len(layers):
        types = [None] * len(layers)
    first: dict[Any, int] = {}
    kinds = []
    for number, (layer, layer_type) in enumerate(zip(layers, types, strict=True)):
        shapes = tuple(
            (name, tuple(weight.shape), weight.requires_grad)
            for name, weight in layer.named_parameters()
        )
        recomputed = getattr(layer, "gradient_checkpointing", False)
        kinds.append(first.setdefault((type(layer), layer_type, recomputed, shapes), number))
    return kinds


@contextmanager
def _first_of_each_kind(
    layers: Sequence[nn.Module], kinds: Sequence[int], live: LiveBytes
) -> Iterator[None]:
    """Let the others pass on what they get, and note when a first one begins and ends."""
    outputs: dict[int, Any] = {}
    shared: list[Any] = []
    handles: list[Any] = []
    patched: list[nn.Module] = []
    for number, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        if number == kind:
            handles += _watch(layer, number, live, outputs, shared)
        else:
            layer.forward = functools.partial(_pass_on, outputs, kind)
            patched.append(layer)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer in patched:
            del layer.forward


def _pass_on(outputs: dict[int, Any], kind: int, *args: Any, **kwargs: Any) -> Any:
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *outputs[kind]) if kind in outputs else hidden


def _watch(
    layer: nn.Module, number: int, live: LiveBytes, outputs: dict[int, Any], shared: list[Any]
) -> list[torch.utils.hooks.RemovableHandle]:
    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        # A view, for its hook has to come before that of the layer below, whose output this is.
        own = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
        hidden = own.view_as(own)
        hidden.register_hook(lambda _: live.begin(REST))
        live.begin(f"{FORWARD}{number}")
        # What all layers share goes with the last of them, whichever that is.
        shared.append((args[1:], kwargs))
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}

    def after(_: nn.Module, __: Any, output: Any) -> None:
        hidden = output
        if isinstance(output, tuple):
            hidden, *others = output
            outputs[number] = others
        hidden.register_hook(lambda _: live.begin(f"{BACKWARD}{number}"))
        live.begin(REST)

    return [
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(after),
    ]


def _all_layers(stretches: Sequence[Stretch], kinds: Sequence[int]) -> list[Stretch]:
    """Put a copy of the first one's stretch where each layer goes forward and back.

    Where autocast ends its copies of all layers' weights go.
    """
    by_name = {stretch.name: stretch for stretch in stretches}
    passes = {FORWARD: list(kinds), BACKWARD: list(reversed(kinds))}
    result: list[Stretch] = []
    for stretch in stretches:
        direction = next(
            (name for name in (FORWARD, BACKWARD) if stretch.name.startswith(name)), ""
        )
        if not direction:
            result.append(stretch)
        for kind in passes.pop(direction, ()):
            if (name := f"{direction}{kind}") in by_name:
                result.append(by_name[name])
        if stretch.name == AUTOCAST_ENDS:
            for kind in set(kinds):
                stretch.change[f"{FORWARD}{kind}"] *= kinds.count(kind)
    return result


def layer_gradients(model: nn.Module) -> dict[str, int]:
    """Return the bytes of each layer's gradients by the name of its backward stretch."""
    return {
        f"{BACKWARD}{number}": sum(
            weight.numel() * weight.itemsize
            for weight in layer.parameters()
            if weight.requires_grad
        )
        for number, layer in enumerate(layers_of(model))
    }
