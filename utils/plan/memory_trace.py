"""The memory of a training step, counted by running the user's model on fake tensors.

Fake tensors have shapes and types, but no values. A tensor's bytes count from the operator that
returns the tensor until the last reference to the tensor is gone. If several layers are equal, only
the first layer runs, and its bytes count for each of these layers. Start reading at `trace`.
"""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
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
from utils.kernels.linear_cross_entropy import TILE_SIZES, ChunkedHead
from utils.kernels.ulysses import ContextGroup, cut_inputs
from utils.kernels.varlen import VarlenKernel, packed_varlen
from utils.launch.processes import LaunchFacts
from utils.model.adapters import with_adapters
from utils.model.architecture import MODEL_ERRORS, causal_lm_class
from utils.model.attention import AttentionChoice, shape_inputs
from utils.model.layers import keep_products, marked_layers
from utils.model.loss_head import LossHeadChoice
from utils.model.probe import torch_operators
from utils.model.weights import COMPUTED, Quantized, quantized_layers, weights_dtype

FORWARD, BACKWARD, REST, AUTOCAST_ENDS = "forward", "backward", "rest", "autocast ends"
WITH_SCORES = ("sdpa", "eager")  # they run unchanged, because their masks and scores take memory
COUNTED = "counted_attention"  # transformers treats names with "flash" or "sdpa" specially
ALL_FEATURES = frozenset({"softcap", "sinks", "dropout"})


@dataclass(frozen=True)
class Setup:
    """The settings and choices that determine a run's memory and speed.

    settings: parsed settings, in which LoRA's targets have their full module names. parameters:
    (number of all parameters, number of trained parameters). compiled: whether compilation was
    chosen (see `compiles`). elsewhere: whether the run trains on another machine.
    """

    settings: RunSettings
    config: PreTrainedConfig
    launch: LaunchFacts
    attention: AttentionChoice
    loss_head: LossHeadChoice
    parameters: tuple[int, int]
    compiled: bool = False
    elsewhere: bool = False

    @property
    def micro_batch(self) -> int:
        """The number of sequences per rank and forward pass."""
        return self.settings.training.per_device_train_batch_size

    @property
    def data_ranks(self) -> int:
        """The number of data-parallel ranks: world_size / context_parallel."""
        return self.launch.world_size // self.settings.run.context_parallel

    @property
    def compiles(self) -> bool:
        """Whether layers are compiled. ZeRO-3's hooks prevent this."""
        return self.compiled and self.launch.strategy != "zero3"

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of mixed precision. None means no mixed precision."""
        return COMPUTED.get(self.settings.training.mixed_precision)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights that the optimizer updates."""
        return weights_dtype(self.settings.model, self.config)

    @property
    def computed_dtype(self) -> torch.dtype:
        """The type of weights during a forward or backward pass.

        FSDP and ZeRO gather weights in autocast's type.
        """
        sharded = self.launch.strategy.startswith(("fsdp", "zero"))
        return self.autocast if sharded and self.autocast is not None else self.dtype

    @property
    def quantized(self) -> Quantized | None:
        """The layers with weights in 4 bits. None means that load_in_4bit is false."""
        return quantized_layers(self.settings.model, self.config)


@dataclass
class StepPart:
    """The memory of a part of a training step, such as the forward pass of a layer.

    A tensor is live until its last reference is gone. change: {name of a part: growth, during this
    part, of the live bytes that the named part allocated}. The growth is negative if this part
    frees tensors of the named part. peak: the largest growth of all live bytes since this part
    began. gradients: bytes of the layer's gradients, which are live when its backward pass ends.
    They are 0 if this part is no backward pass.
    """

    name: str
    gradients: int = 0
    change: Counter[str] = field(default_factory=Counter)
    peak: int = 0

    @property
    def live(self) -> int:
        """The growth of all live bytes from the beginning to the end of this part."""
        return self.change.total()


def trace(setup: Setup, choice: str, micro_batch: int) -> tuple[list[StepPart], int, str]:
    """Count the memory of a step on fake tensors. Returns (parts, gathered bytes, warning).

    choice: the mode of activation checkpointing. The gathered bytes are the sharded weights that a
    rank holds at the same time: two layers, and all weights outside the layers. The warning says
    that compiled layers are counted as not compiled, or is "". Raises one of MODEL_ERRORS if the
    model cannot run on fake tensors.
    """
    fault = ""
    # With recomputation, torch.utils.checkpoint decides which tensors are kept, not the compiler.
    if setup.compiles and choice == "none":
        try:
            return *_count_parts(setup, choice, micro_batch, as_compiled=True), ""
        except MODEL_ERRORS as error:
            fault = (
                f"memory: layers of {type(setup.config).__name__} are counted as not compiled, "
                f"which is more: {type(error).__name__}: {error!s:.200}"
            )
    return *_count_parts(setup, choice, micro_batch, as_compiled=False), fault


def _count_parts(
    setup: Setup, choice: str, micro_batch: int, *, as_compiled: bool
) -> tuple[list[StepPart], int]:
    device = "cuda" if setup.launch.device == "cuda" else "cpu"
    model = _build_model(setup, choice)
    marked = marked_layers(model)
    inside = {inner for layer in marked for inner in layer.modules() if inner is not layer}
    layers = [layer for layer in marked if layer not in inside]
    kinds = layer_kinds(layers)
    # Let experts use transformers' fallback for torch's grouped product. The fallback accepts fake
    # tensors of any type, and its results have the same sizes. `_zero` is a function, because a
    # Mock would keep its arguments alive.
    plain_experts = mock.patch.object(moe, "_can_use_grouped_mm", _zero)
    head = mock.patch.object(ChunkedHead, "chunk", _zero)  # count only the buffers of the loss head
    # A CPU build of torch has no fake GPU tensors: use fake CPU tensors with the GPU's tile sizes.
    gpu_sizes = mock.patch.dict(TILE_SIZES, {"cpu": TILE_SIZES["cuda"]} if setup.elsewhere else {})
    with FakeTensorMode(), torch.device(device), head, plain_experts, gpu_sizes, torch_operators():
        _replace_meta_tensors(model)
        if as_compiled:
            for kind in set(kinds):
                cut_as_compiled(layers[kind], **_context_kwargs(setup))
            _run_step(model, layers, setup, micro_batch)  # traces the layers; not counted
        parts = _run_step(model, layers, setup, micro_batch)
    sizes = [sum(weight.nbytes for weight in layer.parameters()) for layer in layers]
    outside = sum(weight.nbytes for weight in model.parameters()) - sum(sizes)
    gathered = outside + 2 * max(sizes, default=0)
    return _repeat_parts(parts, kinds), gathered


def _zero(*_: Any) -> int:
    return 0


def _build_model(setup: Setup, choice: str) -> nn.Module:
    config, settings = copy.deepcopy(setup.config), setup.settings
    config._attn_implementation = setup.attention.name
    if setup.attention.name not in WITH_SCORES:
        kernel = VarlenKernel(COUNTED, COUNTED, ALL_FEATURES, _attend, on_cuda_only=False)
        AttentionInterface.register(COUNTED, partial(packed_varlen, kernel=kernel))
        config._attn_implementation = COUNTED
    with torch.device("meta"):
        # Call the class: AutoModel.from_config would split the weights over the ranks under ZeRO-3.
        model_class: Any = causal_lm_class(config)
        model = model_class(config).to(setup.computed_dtype)
        setup.loss_head.install(model, setup.compiles)
        if choice == "selective":
            keep_products(model)
        if choice != "none":
            options: Any = settings.training.activation_checkpointing_kwargs or {}
            model.activation_checkpointing_enable(every_n_layers=options.get("every_n_layers", 1))
        return with_adapters(model, settings.model).train()


def _replace_meta_tensors(model: nn.Module) -> None:
    """Replace meta tensors by fake tensors of the current device. Tied weights stay tied."""
    replaced: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, old in [*module._parameters.items(), *module._buffers.items()]:
            if old is None:
                continue
            if old not in replaced:
                new = torch.empty(old.shape, dtype=old.dtype)
                weight = isinstance(old, nn.Parameter)
                replaced[old] = nn.Parameter(new, old.requires_grad) if weight else new
            setattr(module, name, replaced[old])


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    """Attend with torch's flash operator, which stores no scores for the backward pass."""
    query, key, value = (states.transpose(0, 1)[None] for states in (query, key, value))
    output = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
    return output[0, ..., : value.shape[-1]].transpose(0, 1)


def cut_as_compiled(layer: nn.Module, **fixed: Any) -> None:
    """Make a layer keep the same tensors for its backward pass as a compiled layer does.

    torch's compiler traces forward and backward pass as one graph. It cuts the graph where the
    fewest bytes pass from forward to backward. The first call of the changed layer makes the same
    cut, but compiles nothing. Later calls must have tensors of the same shapes. fixed: keyword
    arguments that torch cannot trace, because they are neither tensors nor numbers.
    """
    # These imports take seconds. A run that compiles needs them anyway.
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.compilers import nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    inner: Any = nn.Module()
    inner.layer, inner.forward = layer, partial(layer.forward, **fixed)
    weights = {f"layer.{name}": weight for name, weight in layer.named_parameters()}
    run = aot_function(
        partial(torch.func.functional_call, inner),
        fw_compiler=nop,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )

    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(weights, args, {name: kwargs[name] for name in kwargs if name not in fixed})

    layer.forward = forward


def _run_step(
    model: nn.Module, layers: Sequence[nn.Module], setup: Setup, micro_batch: int
) -> list[StepPart]:
    """Run a training step that skips repeated layers. Return the parts of the step in order."""
    inputs = fake_batch(setup, micro_batch)
    live = LiveBytes([*model.parameters(), *model.buffers()])
    call = _run_first_layers(layers, live)
    device = inputs["input_ids"].device.type
    with mock.patch.object(GradientCheckpointingLayer, "__call__", call), live:
        with torch.autocast(device, setup.autocast, enabled=setup.autocast is not None):
            live.begin("inputs")
            loss = model(**inputs).loss
            live.begin(AUTOCAST_ENDS)
        live.begin("loss")
        loss.backward()
        del loss
        live.begin("end")
    model.zero_grad()
    return live.parts


def fake_batch(setup: Setup, micro_batch: int) -> dict[str, Any]:
    """Return a micro-batch of zeros with the inputs that the trainer gives the model."""
    length, size = setup.settings.data.sequence_length, setup.settings.run.context_parallel
    per_token = ("input_ids", "labels", "position_ids")
    bounds = torch.zeros(micro_batch + 1, dtype=torch.int32)
    inputs: dict[str, Any] = {
        **{name: torch.zeros(micro_batch, length, dtype=torch.int64) for name in per_token},
        **{"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds},
        **{"max_length_q": length, "max_length_k": length},
        "num_items_in_batch": torch.zeros((), dtype=torch.int64),
    }
    if setup.loss_head.name == "fused":
        inputs["loss_positions"] = torch.zeros(micro_batch * length // size, dtype=torch.int64)
    if setup.loss_head.router is not None:
        inputs["sequence_tokens"] = torch.zeros(micro_batch, dtype=torch.int64)
    if context := _context_kwargs(setup):
        inputs = cut_inputs(inputs, context["context"])
    return shape_inputs(inputs, setup.attention.batches) | {"use_cache": False}


def _context_kwargs(setup: Setup) -> dict[str, ContextGroup]:
    """Return {"context": a group without communication}, or {} if ranks share no sequences."""
    size = setup.settings.run.context_parallel
    return {"context": ContextGroup(size, rank=0)} if size > 1 else {}


class LiveBytes(TorchDispatchMode):
    """A torch mode that counts the bytes of each tensor until its last reference is gone.

    Tensors in `known` and their views are not counted.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.parts = [StepPart("begin")]
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._allocations: dict[int, tuple[str, int]] = {}

    def begin(self, name: str, gradients: int = 0) -> None:
        """Start a new part of the step. See StepPart for `gradients`."""
        self.parts.append(StepPart(name, gradients))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        outcome, part = func(*args, **(kwargs or {})), self.parts[-1]
        for tensor in tree_leaves(outcome):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._allocations and key not in self._known:
                self._allocations[key] = (part.name, size)
                part.change[part.name] += size
                part.peak = max(part.peak, part.live)
                weakref.finalize(storage, self._count_freed, key)
        return outcome

    def _count_freed(self, key: int) -> None:
        part_name, size = self._allocations.pop(key)
        self.parts[-1].change[part_name] -= size


def layer_kinds(layers: Sequence[nn.Module]) -> list[int]:
    """Return each layer's kind: the index of the first layer with the same class and shapes."""
    first: dict[Any, int] = {}
    kinds = []
    for number, layer in enumerate(layers):
        weights = tuple(
            (name, weight.shape, weight.requires_grad) for name, weight in layer.named_parameters()
        )
        recomputed = getattr(layer, "gradient_checkpointing", False)
        kinds.append(first.setdefault((type(layer), recomputed, weights), number))
    return kinds


def _run_first_layers(layers: Sequence[nn.Module], live: LiveBytes) -> Callable[..., Any]:
    """Return a replacement for the layers' __call__ that runs only the first layer of each kind.

    `layer_kinds` defines a kind. For other layers, the function returns the hidden states it got.
    """
    numbers, kinds = {layer: number for number, layer in enumerate(layers)}, layer_kinds(layers)
    outputs: dict[int, Any] = {}  # what layers return besides the hidden states
    shared: list[Any] = []

    def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        number = numbers.get(layer)
        if number is None:  # a layer inside another
            return nn.Module.__call__(layer, *args, **kwargs)
        hidden, *others = args or (kwargs.pop("hidden_states"),)
        kind = kinds[number]
        if number != kind:
            return (hidden, *outputs[kind]) if kind in outputs else hidden
        # Tensors that all layers share, such as masks, must live until the last layer ran.
        shared.append((others, kwargs))
        # Hook a view: this hook must run before the hook on the output of the layer below.
        own = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
        hidden = own.view_as(own)
        hidden.register_hook(lambda _: live.begin(REST))
        live.begin(f"{FORWARD} {number}")
        output = result = nn.Module.__call__(layer, hidden, *others, **kwargs)
        if isinstance(output, tuple):
            result, *outputs[number] = output
        gradients = sum(each.nbytes for each in layer.parameters() if each.requires_grad)
        result.register_hook(lambda _: live.begin(f"{BACKWARD} {number}", gradients))
        live.begin(REST)
        return output

    return call


def _repeat_parts(parts: Sequence[StepPart], kinds: Sequence[int]) -> list[StepPart]:
    """Return the parts of a step in which all layers run.

    parts: the parts of a step in which one layer of each kind ran. Each layer gets the parts of
    the first layer of its kind. At AUTOCAST_ENDS, the copies of all layers' weights are freed.
    """
    by_name = {part.name: part for part in parts}
    passes = {FORWARD: kinds, BACKWARD: kinds[::-1]}
    result: list[StepPart] = []
    for part in parts:
        direction = part.name.split()[0]
        if direction not in (FORWARD, BACKWARD):
            result.append(part)
        names = [f"{direction} {kind}" for kind in passes.pop(direction, ())]
        result += [by_name[name] for name in names if name in by_name]
        if part.name == AUTOCAST_ENDS:
            for kind in set(kinds):
                part.change[f"{FORWARD} {kind}"] *= kinds.count(kind)
    return result
