"""Counts the memory of a training step on the user's own model, without data.

The model runs forward and backward on fake tensors. Every storage is counted from the operator that
makes it until nothing refers to it. Only the first of equal layers runs. Begin with `trace`.
"""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations import moe
from transformers.modeling_layers import GradientCheckpointingLayer

from utils.config.settings import RunSettings
from utils.kernels.linear_cross_entropy import SIZES, ChunkedHead
from utils.kernels.varlen import VarlenKernel, packed_varlen
from utils.model.adapters import with_adapters
from utils.model.architecture import MISFITS, causal_lm_class
from utils.model.attention import AttentionChoice, shape_inputs
from utils.model.compilation import keep_products, marked_layers
from utils.model.loss_head import LossHeadChoice
from utils.model.probe import torch_operators
from utils.model.quantization import Quantized

FORWARD, BACKWARD, REST, AUTOCAST_ENDS = "forward", "backward", "rest", "autocast ends"
WITH_SCORES = ("sdpa", "eager")  # they run as they are: masks and scores may be in memory
COUNTED = "counted_attention"  # transformers looks for "flash", "sdpa" and the like inside a name
EVERYTHING = frozenset({"softcap", "sinks", "dropout"})


@dataclass(frozen=True)
class Kernels:
    """The attention and the loss head of a step. `elsewhere`: GPUs of another machine train."""

    attention: AttentionChoice
    loss_head: LossHeadChoice
    compiled: bool = False
    elsewhere: bool = False

    def under(self, strategy: str) -> "Kernels":
        """Return the kernels with a strategy: torch cannot compile the hooks of ZeRO-3."""
        return replace(self, compiled=self.compiled and strategy != "zero3")


@dataclass(frozen=True)
class Workload:
    """A micro-batch, the types of its numbers, and what computes it."""

    rows: int
    sequence_length: int
    weights: torch.dtype
    autocast: torch.dtype | None
    device: str
    kernels: Kernels
    quantized: Quantized | None = None


@dataclass
class Stretch:
    """A part of a step, such as the forward pass of a layer.

    change: bytes made minus bytes freed in the stretch, by the stretch that made them.
    peak: the most bytes alive, beyond those alive at the beginning.
    gradients: bytes of the layer's gradients, all alive when its backward pass ends.
    """

    name: str
    gradients: int = 0
    change: Counter[str] = field(default_factory=Counter)
    peak: int = 0

    @property
    def live(self) -> int:
        """Return the growth of the live bytes since the stretch began."""
        return self.change.total()


def most_alive(
    stretches: Sequence[Stretch], shards: int, *, held: int, copied: float = 0.0
) -> tuple[int, int]:
    """Return the most bytes beside weights and optimizer, and how many of them are gradients.

    A layer's gradients are cut into `shards` when its backward pass ends. For the sum over the
    ranks they are copied into a buffer of `copied` times their bytes, which lives until the next
    layer's buffer; at the end, weights outside the layers have such a buffer. `held`: bytes of
    gradients from an earlier micro-batch of the step, to which this one's are added; 0: no earlier
    one.
    """
    alive = most = made = of_most = held
    buffer = 0
    for stretch in stretches:
        if alive + buffer + stretch.peak > most:
            most, of_most = alive + buffer + stretch.peak, made
        kept = 0 if held else stretch.gradients // shards
        alive += stretch.live - stretch.gradients + kept
        made += kept
        if stretch.gradients:
            buffer = int(stretch.gradients * copied)
    at_end = alive + int(max(alive - made, 0) * copied)
    return max((most, of_most), (at_end, made)) if copied else (most, of_most)


class Traced(NamedTuple):
    """The memory of a step.

    gathered_bytes: the weights of two layers and of everything outside the layers, which each rank
    holds whole where a strategy gathers weights. fault: why layers were not counted as compiled.
    """

    stretches: list[Stretch]  # in the order of the step
    gathered_bytes: int
    fault: str = ""


def trace(settings: RunSettings, config: PreTrainedConfig, work: Workload, choice: str) -> Traced:
    """Count a step's memory with this activation checkpointing; nothing is computed.

    Raises what the architecture raises where it cannot run without data (MISFITS).
    """
    fault = ""
    # Where layers are computed again the checkpoint says what is kept, compiled or not.
    if work.kernels.compiled and choice == "none":
        try:
            return _trace(_build(settings, config, work, choice), work, cut=True)
        except MISFITS as error:
            fault = (
                f"memory: layers of {type(config).__name__} are counted as not compiled, which is "
                f"more: {type(error).__name__}: {error!s:.200}"
            )
    traced = _trace(_build(settings, config, work, choice), work, cut=False)
    return traced._replace(fault=fault)


def _trace(model: nn.Module, work: Workload, *, cut: bool) -> Traced:
    layers = layers_of(model)
    kinds = _kinds(layers)
    # Experts multiply with the operator that transformers uses where torch has none: it accepts
    # fake tensors of any type, and its results have the same sizes. (A Mock would keep arguments.)
    by_shape = mock.patch.object(moe, "_can_use_grouped_mm", _zero)
    head = mock.patch.object(ChunkedHead, "chunk", _zero)  # its buffers are all it keeps
    # A CPU build of torch has no fake tensors of a GPU: fake tensors of the CPU replace them.
    of_gpu = mock.patch.dict(SIZES, {"cpu": SIZES["cuda"]} if work.kernels.elsewhere else {})
    with FakeTensorMode(), torch.device(work.device), head, by_shape, of_gpu, torch_operators():
        _put_on_device(model)
        if cut:
            for kind in set(kinds):
                cut_as_compiled(layers[kind])
            _go_through(model, work)  # traces the layers: no step's memory
        stretches = _go_through(model, work)
    sizes = [_bytes(layer.parameters()) for layer in layers]
    gathered = _bytes(model.parameters()) - sum(sizes) + 2 * max(sizes, default=0)
    return Traced(_all_layers(stretches, kinds), gathered)


def _zero(*_: Any) -> int:
    return 0


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers that activation checkpointing works on, without those inside another."""
    marked = marked_layers(model)
    inside = {inner for layer in marked for inner in layer.modules() if inner is not layer}
    return [layer for layer in marked if layer not in inside]


def _build(
    settings: RunSettings, config: PreTrainedConfig, work: Workload, choice: str
) -> nn.Module:
    config = copy.deepcopy(config)
    kernels = work.kernels
    if kernels.attention.name not in WITH_SCORES:
        kernel = VarlenKernel(COUNTED, COUNTED, EVERYTHING, _as_flash, on_cuda_only=False)
        AttentionInterface.register(COUNTED, partial(packed_varlen, kernel=kernel))
        config._attn_implementation = COUNTED
    else:
        config._attn_implementation = kernels.attention.name
    with torch.device("meta"):
        # The class itself: from_config would split the weights over the ranks under ZeRO-3.
        model_class: Any = causal_lm_class(config)
        model = model_class(config).to(work.weights)
        kernels.loss_head.install(model, kernels.compiled)
        if choice == "selective":
            keep_products(model)
        if choice != "none":
            options: Any = settings.training.activation_checkpointing_kwargs or {}
            model.activation_checkpointing_enable(every_n_layers=options.get("every_n_layers", 1))
        return with_adapters(model, settings.model).train()


def _put_on_device(model: nn.Module) -> None:
    """Replace the meta device's tensors by fake ones of the current device; tied ones stay one."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, old in [*module._parameters.items(), *module._buffers.items()]:
            if old is None:
                continue
            if old not in made:
                new = torch.empty(old.shape, dtype=old.dtype)
                weight = isinstance(old, nn.Parameter)
                made[old] = nn.Parameter(new, old.requires_grad) if weight else new
            setattr(module, name, made[old])


def _as_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    """Attend as a flash kernel does, which keeps its output and the statistics of its softmax."""
    query, key, value = (states.transpose(0, 1)[None] for states in (query, key, value))
    output = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
    return output[0, ..., : value.shape[-1]].transpose(0, 1)


def cut_as_compiled(layer: nn.Module) -> None:
    """Let a layer keep the tensors for its backward pass that a compiled layer keeps.

    torch's compiler makes one graph of a layer's forward and backward pass and cuts it where the
    fewest bytes cross. The same cut is made here when the layer first runs, without compilation.
    After that the layer must be called with tensors of the same shapes.
    """
    # Imported here because they take seconds, which a run that compiles needs anyway.
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.compilers import nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    inner: Any = nn.Module()
    inner.layer, inner.forward = layer, layer.forward
    weights = {f"layer.{name}": weight for name, weight in layer.named_parameters()}
    run = aot_function(
        partial(torch.func.functional_call, inner),
        fw_compiler=nop,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )
    layer.forward = lambda *args, **kwargs: run(weights, args, kwargs)


def _go_through(model: nn.Module, work: Workload) -> list[Stretch]:
    """Run forward and backward through one layer of each kind; return the stretches."""
    inputs, live = _fake_batch(work), LiveBytes([*model.parameters(), *model.buffers()])
    call = _first_of_each_kind(layers_of(model), live)
    with mock.patch.object(GradientCheckpointingLayer, "__call__", call), live:
        with torch.autocast(work.device, work.autocast, enabled=work.autocast is not None):
            live.begin("inputs")
            loss = model(**inputs).loss
            live.begin(AUTOCAST_ENDS)
        live.begin("loss")
        loss.backward()
        del loss
        live.begin("end")
    model.zero_grad()
    return live.stretches


def _fake_batch(work: Workload) -> dict[str, Any]:
    """Return a micro-batch as the model takes it (utils/data/loader.py), without data."""
    shape, tokens = (work.rows, work.sequence_length), work.rows * work.sequence_length
    bounds = torch.zeros(work.rows + 1, dtype=torch.int32)
    per_token = ("input_ids", "labels", "position_ids")
    inputs: dict[str, Any] = {
        **{name: torch.zeros(shape, dtype=torch.int64) for name in per_token},
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": work.sequence_length,
        "max_length_k": work.sequence_length,
        "num_items_in_batch": torch.zeros((), dtype=torch.int64),
    }
    kernels = work.kernels
    if kernels.loss_head.name == "fused":
        inputs["loss_positions"] = torch.zeros(tokens, dtype=torch.int64)
    if kernels.loss_head.router is not None:
        inputs["sequence_tokens"] = torch.zeros(work.rows, dtype=torch.int64)
    batches = kernels.attention.batches
    # The longest document fills its sequence.
    inputs = shape_inputs(inputs, "plain" if batches == "alone" else batches)
    return inputs | {"use_cache": False}


class LiveBytes(TorchDispatchMode):
    """A mode that counts every storage from its operator until nothing refers to it.

    Enter it inside a FakeTensorMode. Tensors in `known` existed before: neither they nor their
    views are counted.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.stretches = [Stretch("begin")]
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._makers: dict[int, tuple[str, int]] = {}

    def begin(self, name: str, gradients: int = 0) -> None:
        """Close a stretch and open the next."""
        self.stretches.append(Stretch(name, gradients))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator and count its results."""
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


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _kinds(layers: Sequence[nn.Module]) -> list[int]:
    """Return for each layer the number of the first one like it."""
    first: dict[Any, int] = {}
    kinds = []
    for number, layer in enumerate(layers):
        weights = tuple(
            (name, weight.shape, weight.requires_grad) for name, weight in layer.named_parameters()
        )
        recomputed = getattr(layer, "gradient_checkpointing", False)
        kinds.append(first.setdefault((type(layer), recomputed, weights), number))
    return kinds


def _first_of_each_kind(layers: Sequence[nn.Module], live: LiveBytes) -> Callable[..., Any]:
    """Return the call of a layer: the first of a kind runs and is counted, others do not run.

    The others return their input.
    """
    numbers, kinds = {layer: number for number, layer in enumerate(layers)}, _kinds(layers)
    outputs: dict[int, Any] = {}  # what layers return beside the hidden states
    shared: list[Any] = []

    def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        number = numbers.get(layer)
        if number is None:  # inside another
            return nn.Module.__call__(layer, *args, **kwargs)
        hidden, *others = args or (kwargs.pop("hidden_states"),)
        kind = kinds[number]
        if number != kind:
            return (hidden, *outputs[kind]) if kind in outputs else hidden
        # Tensors that all layers share must live until the last layer, whichever it is.
        shared.append((others, kwargs))
        # A view: its hook must run before the hook of the layer below, whose output this is.
        own = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
        hidden = own.view_as(own)
        hidden.register_hook(lambda _: live.begin(REST))
        live.begin(f"{FORWARD} {number}")
        output = result = nn.Module.__call__(layer, hidden, *others, **kwargs)
        if isinstance(output, tuple):
            result, *outputs[number] = output
        gradients = _bytes(weight for weight in layer.parameters() if weight.requires_grad)
        result.register_hook(lambda _: live.begin(f"{BACKWARD} {number}", gradients))
        live.begin(REST)
        return output

    return call


def _all_layers(stretches: Sequence[Stretch], kinds: Sequence[int]) -> list[Stretch]:
    """Repeat the stretches of the first layer of a kind for each layer of that kind.

    At the end of autocast its copies of all layers' weights are freed.
    """
    of_first = {stretch.name: stretch for stretch in stretches}
    passes = {FORWARD: kinds, BACKWARD: kinds[::-1]}
    result: list[Stretch] = []
    for stretch in stretches:
        direction = stretch.name.split()[0]
        if direction not in (FORWARD, BACKWARD):
            result.append(stretch)
        names = [f"{direction} {kind}" for kind in passes.pop(direction, ())]
        result += [of_first[name] for name in names if name in of_first]
        if stretch.name == AUTOCAST_ENDS:
            for kind in set(kinds):
                stretch.change[f"{FORWARD} {kind}"] *= kinds.count(kind)
    return result
