"""Counts the bytes of tensors that are alive while a program runs on tensors without data."""

import copy
import functools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers import AttentionInterface, PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from utils.config.settings import RunSettings
from utils.kernels.linear_cross_entropy import buffers_alone
from utils.kernels.per_document import Documents, ScoreTerms, attend_by_lengths, short_on_cpu
from utils.kernels.varlen import NAME as PACKED
from utils.kernels.varlen import VarlenKernel, packed_varlen
from utils.model.adapters import with_adapters
from utils.model.architecture import MISFITS, causal_lm_class, experts_by_shape
from utils.model.attention import AttentionChoice, shape_inputs
from utils.model.compilation import keep_products
from utils.model.loss_head import LossHeadChoice


@dataclass
class Stretch:
    """A part of a program: what is alive at its end, by the stretch that made it, and the most.

    `change` counts bytes made and given back within it; `peak` is the most that was alive beyond
    what was alive when it began.
    """

    name: str
    change: Counter[str] = field(default_factory=Counter)
    peak: int = 0

    @property
    def live(self) -> int:
        """Return by how much what is alive has grown since the stretch began."""
        return self.change.total()


class LiveBytes(TorchDispatchMode):
    """While it is active, counts every storage that an operator makes until nothing holds it.

    `begin(name)` closes one stretch and opens the next. Enter it inside a FakeTensorMode: only
    tensors without data are counted in no time. What was there before is given as `known`: it is
    not counted, nor are views of it.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.stretches = [Stretch("begin")]
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._makers: dict[int, tuple[str, int]] = {}

    def begin(self, name: str) -> None:
        """Open a stretch."""
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


# Layers on tensors without data that keep for their backward pass what compiled ones keep.


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


# Attention on tensors without data: what a kernel keeps for its backward pass, and its result.

NAME = "counted_attention"  # transformers looks for "flash", "sdpa" and the like inside a name
EVERYTHING = frozenset({"softcap", "sinks", "dropout"})


def register_counted_attention(lengths: Sequence[int] | None) -> str:
    """Register it and return its name; `lengths` of the documents on a CPU, None: a flash kernel.

    Which documents a micro-batch has is data, which is not there.
    """
    run = _flash if lengths is None else partial(_by_lengths, list(lengths))
    kernel = VarlenKernel(NAME, NAME, EVERYTHING, run, on_cuda_only=False)
    AttentionInterface.register(NAME, partial(packed_varlen, kernel=kernel))
    return NAME


def typical_lengths(lengths: Sequence[int], tokens: int) -> list[int]:
    """Return a few documents of `tokens` in all, as many of them in short ones as in `lengths`.

    Short documents are computed in float32 on a CPU, and kept in other ways than long ones.
    """
    limit = short_on_cpu()
    short = [length for length in lengths if length <= limit]
    long = [length for length in lengths if length > limit]
    in_short = round(tokens * sum(short) / max(1, sum(lengths)))
    found = _equal(in_short, short) + _equal(tokens - in_short, long)
    return [length for length in found if length]


def _equal(tokens: int, like: Sequence[int]) -> list[int]:
    """Cut `tokens` into documents as long as those, on the mean."""
    length = max(1, min(tokens, sum(like) // len(like))) if like else max(1, tokens)
    return [length] * (tokens // length) + [tokens % length]


def _by_lengths(
    lengths: list[int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _: Documents,
    terms: ScoreTerms,
) -> torch.Tensor:
    return attend_by_lengths(query, key, value, lengths, terms)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Documents | ScoreTerms,
) -> torch.Tensor:
    return counted_flash_attn(query, key, value)[0]


# Selective checkpointing keeps its results as it does those of the kernels it stands for.
@torch.library.custom_op("stoker::counted_flash_attn", mutates_args=())
def counted_flash_attn(
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
def counted_flash_attn_backward(
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


def _backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor, ...]:
    return counted_flash_attn_backward(gradient, *ctx.saved_tensors)[:3]


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)


for _operator in (counted_flash_attn, counted_flash_attn_backward):
    _operator.register_fake(_operator._init_fn)
counted_flash_attn.register_autograd(_backward, setup_context=_keep)


# What a micro-batch takes in memory beside weights and optimizer, counted on the model itself.

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


# The user's model without data, gone through once for each choice of activation checkpointing.

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
    """Return a micro-batch as the model takes it (utils/data/sequences.py), without data."""
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
