"""Counts what a training step takes in memory, on the user's own model without data.

The model goes forward and back on fake tensors; every storage is counted from the operator that
makes it until nothing holds it. Layers alike are gone through once. `trace` is where to begin.
"""

import copy
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig

from utils.config.settings import RunSettings
from utils.kernels.linear_cross_entropy import buffers_alone
from utils.kernels.varlen import NAME as PACKED
from utils.model.adapters import with_adapters
from utils.model.architecture import MISFITS, causal_lm_class, experts_by_shape
from utils.model.attention import AttentionChoice, shape_inputs
from utils.model.compilation import keep_products, marked_layers
from utils.model.loss_head import LossHeadChoice
from utils.planning.stand_ins import cut_as_compiled, register_counted_attention

logger = logging.getLogger(__name__)

FORWARD, BACKWARD = "forward ", "backward "
REST, AUTOCAST_ENDS = "rest", "autocast ends"
WITH_SCORES = ("sdpa", "eager")  # they run as they are: masks and scores may be in memory


@dataclass(frozen=True)
class Workload:
    """A micro-batch, the types of its numbers, and what computes it."""

    rows: int
    sequence_length: int
    weights: torch.dtype
    autocast: torch.dtype | None
    device: str
    attention: AttentionChoice | None  # None: the compute node chooses, a flash kernel if any
    loss_head: LossHeadChoice
    compiled: bool = False


@dataclass
class Stretch:
    """A part of a program: bytes made less bytes given back in it, by the stretch that made them.

    `peak` is the most that was alive beyond what was alive when it began.
    """

    name: str
    change: Counter[str] = field(default_factory=Counter)
    peak: int = 0

    @property
    def live(self) -> int:
        """Return by how much what is alive has grown since the stretch began."""
        return self.change.total()


@dataclass(frozen=True)
class StepTrace:
    """The stretches of a step, and the bytes of each layer's gradients by backward stretch.

    `gathered_weights` are those of two layers and of what is in none: whole on each rank, where a
    strategy gathers weights.
    """

    stretches: list[Stretch]
    layer_gradients: dict[str, int]
    gathered_weights: int


@dataclass(frozen=True)
class Phases:
    """Bytes beside weights and optimizer: the most at any time, and of what it consists then.

    `working` comes and goes within an operation or a layer; the rest is `activations`.
    """

    peak: int
    activations: int
    gradients: int
    working: int


def trace(
    settings: RunSettings, config: PreTrainedConfig, work: Workload, choice: str
) -> StepTrace:
    """Count a step's memory; no weight is made and nothing is computed.

    Raises what the architecture raises where it cannot run without data (MISFITS).
    """
    config = copy.deepcopy(config)
    implementation = PACKED if work.attention is None else work.attention.name
    if implementation not in WITH_SCORES:
        implementation = register_counted_attention()
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
        stretches = _trace_step(model.train(), work, choice)
    layers = layers_of(model)
    gradients = {
        f"{BACKWARD}{number}": _bytes(
            weight for weight in layer.parameters() if weight.requires_grad
        )
        for number, layer in enumerate(layers)
    }
    sizes = [_bytes(layer.parameters()) for layer in layers]
    gathered = _bytes(model.parameters()) - sum(sizes) + 2 * max(sizes, default=0)
    return StepTrace(stretches, gradients, gathered)


def most_alive(step: StepTrace, shards: int, *, held: int) -> Phases:
    """Return the most that is alive at any time, beside weights and optimizer.

    A layer's gradients are cut into `shards` at the end of its backward stretch. `held` are the
    bytes of gradients that an earlier micro-batch of the step left, to which those of this one are
    added; 0 where there was none.
    """
    alive, made = held, held
    peak = Phases(alive, 0, alive, 0)
    for stretch in step.stretches:
        if alive + stretch.peak > peak.peak:
            peak = Phases(alive + stretch.peak, alive - made, made, stretch.peak)
        own = step.layer_gradients.get(stretch.name, 0)
        kept = 0 if held else own // shards
        alive += stretch.live - own + kept
        made += kept
    return peak


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers that activation checkpointing works on, without those inside another."""
    inside: set[nn.Module] = set()
    for layer in marked_layers(model):
        inside.update(module for module in layer.modules() if module is not layer)
    return [layer for layer in marked_layers(model) if layer not in inside]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _put_on_device(model: nn.Module) -> None:
    """Replace the meta device's tensors by fake ones of the current device; tied ones stay one."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                if old not in made:
                    new = torch.empty(old.shape, dtype=old.dtype)
                    weight = isinstance(old, nn.Parameter)
                    made[old] = nn.Parameter(new, old.requires_grad) if weight else new
                tensors[name] = made[old]  # type: ignore[assignment] # of its own kind


def _fake_batch(work: Workload) -> dict[str, Any]:
    """Return a micro-batch as the model takes it (utils/data/loader.py), without data."""
    shape, tokens = (work.rows, work.sequence_length), work.rows * work.sequence_length
    whole = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "labels")}
    bounds = torch.zeros(work.rows + 1, dtype=torch.int32)
    inputs: dict[str, Any] = whole | {
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
        inputs["sequence_tokens"] = torch.zeros(work.rows, dtype=torch.int64)
    if work.attention is not None:
        inputs = shape_inputs(inputs, work.attention.batches)
    return inputs | {"use_cache": False}


def _trace_step(model: nn.Module, work: Workload, choice: str) -> list[Stretch]:
    """Go forward and back on one layer of each kind; return the stretches of all layers in order.

    The model was made in the current FakeTensorMode. Where layers are computed again, the
    checkpoint says what is kept, compiled or not.
    """
    inputs, layers = _fake_batch(work), layers_of(model)
    if work.compiled and choice == "none":
        try:
            with cut_as_compiled(layers[kind] for kind in set(_kinds(model, layers))):
                _go_through(model, inputs, work.autocast)  # traces the layers: no step's memory
                return _go_through(model, inputs, work.autocast)
        except MISFITS as error:
            logger.warning(
                "memory: layers of %s are counted as not compiled, which is more: %s: %.200s",
                type(model).__name__, type(error).__name__, error,
            )  # fmt: skip
            model.zero_grad()
    return _go_through(model, inputs, work.autocast)


def _go_through(
    model: nn.Module, inputs: dict[str, Any], autocast: torch.dtype | None
) -> list[Stretch]:
    layers = layers_of(model)
    kinds = _kinds(model, layers)
    device = next(model.parameters()).device.type
    live = LiveBytes([*model.parameters(), *model.buffers()])
    with _first_of_each_kind(layers, kinds, live), live:
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


class LiveBytes(TorchDispatchMode):
    """While it is active, counts every storage that an operator makes until nothing holds it.

    Enter it inside a FakeTensorMode. What was there before is given as `known`: it is not counted,
    nor are views of it.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.stretches = [Stretch("begin")]
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._makers: dict[int, tuple[str, int]] = {}

    def begin(self, name: str) -> None:
        """Close a stretch and open the next."""
        self.stretches.append(Stretch(name))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator and count what it made."""
        outcome = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outcome):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return outcome

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._makers or key in self._known:
            return
        stretch, size = self.stretches[-1], storage.nbytes()
        self._makers[key] = (stretch.name, size)
        stretch.change[stretch.name] += size
        stretch.peak = max(stretch.peak, stretch.live)
        weakref.finalize(storage, self._give_back, key)

    def _give_back(self, key: int) -> None:
        maker, size = self._makers.pop(key)
        self.stretches[-1].change[maker] -= size


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
    outputs: dict[int, Any] = {}  # what layers return beside the hidden states
    shared: list[Any] = []
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def pass_on(kind: int, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, *outputs[kind]) if kind in outputs else hidden

    def before(number: int, _: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        # A view, for its hook has to come before that of the layer below, whose output this is.
        own = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
        hidden = own.view_as(own)
        hidden.register_hook(lambda _: live.begin(REST))
        live.begin(f"{FORWARD}{number}")
        # What all layers share goes with the last of them, whichever that is.
        shared.append((args[1:], kwargs))
        return (
            ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
        )

    def after(number: int, _: nn.Module, __: Any, output: Any) -> None:
        hidden = output
        if isinstance(output, tuple):
            hidden, *outputs[number] = output
        hidden.register_hook(lambda _: live.begin(f"{BACKWARD}{number}"))
        live.begin(REST)

    others = [layer for number, layer in enumerate(layers) if number != kinds[number]]
    for number, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        if number == kind:
            handles.append(
                layer.register_forward_pre_hook(partial(before, number), with_kwargs=True)
            )
            handles.append(layer.register_forward_hook(partial(after, number)))
        else:
            layer.forward = partial(pass_on, kind)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer in others:
            del layer.forward


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
