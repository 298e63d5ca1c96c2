"""Activation checkpointing, compilation and fp8 matrix products of a model's layers.

Activation checkpointing has three modes. "none" keeps everything that autograd needs. "selective"
keeps the outputs of matrix products and attention, and recomputes the other outputs of a layer.
"full" keeps only the layer's input. The results do not change, because recomputation has the same
inputs and the same random state.

With fp8, torchao's Float8Linear multiplies in 8-bit floating point. A linear layer has three
matrix products in a step: its output, the gradient of its input and the gradient of its weight.
Before each product both matrices are scaled and rounded to fp8. A scale is computed from the
largest value of each row (`rowwise`) or of the whole matrix (`tensorwise`). Weights, gradients and
optimizer states keep their types, so checkpoints and `final/` do not change.

The LM head and routers stay in bf16, because rounding them changes the loss most. Experts stay in
bf16, because they are not linear layers. The first decoder layer stays in bf16, and so do layers
with sizes that fp8 kernels do not support. torchtitan keeps the LM head in bf16. accelerate keeps
the first and the last linear layer in bf16.
"""

import dataclasses
import importlib.util
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from utils.checkpoints.record import RunRecord
from utils.config.errors import ConfigurationError, Report
from utils.config.precision import gpu_capability
from utils.config.settings import RunSettings
from utils.config.strategy import assumed_gpus
from utils.data.loader import PADDED_TO
from utils.host.atomic_files import cache_root
from utils.host.collectives import gathered, on_rank_0
from utils.launch.processes import LaunchFacts
from utils.model.adapters import linear_and_experts
from utils.model.architecture import causal_lm_class, has_experts, routers, without_weights
from utils.model.attention import FLEX
from utils.model.weights import COMPUTED, weights_dtype

CHOICES = ("none", "selective", "full")  # least recomputation first

ROWWISE, TENSORWISE = "rowwise", "tensorwise"  # torchao's names
MULTIPLE = 16  # torch's fp8 kernels need numbers of rows and columns that 16 divides
LOWEST_CAPABILITY = (8, 9)  # the first GPUs with products in fp8: L4, L40S, RTX 4090
FP8_STRATEGIES = ("single", "ddp", "fsdp2")
LISTED_NAMES = 3

_PRODUCTS = ("mm", "addmm", "_scaled_mm")
# transformers uses the fallback on devices that do not support torch's `_grouped_mm`.
_EXPERT_PRODUCTS = ("_grouped_mm", "grouped_mm_fallback")
# Parts of operators' names: torch's attention, FlashAttention (whose namespace differs by build)
# and varlen_attn. Attention without a kernel uses bmm; its scores are too large to keep.
_ATTENTION = ("_scaled_dot_product_", "flash_attn", "varlen_attn")
_DROPOUT_ARGUMENTS = ("dropout_p", "p_dropout")


def keep_products(model: PreTrainedModel) -> None:
    """Patch `model.activation_checkpointing_enable`, which Trainer calls, to use selective mode.

    Call this before PEFT wraps the model. Experts with a bias (gpt-oss) add the bias in place to
    the outputs of their matrix products, so these outputs are recomputed.
    """
    enable = type(model).activation_checkpointing_enable
    biased = any(getattr(module, "has_bias", False) is True for module in model.modules())
    policy = partial(
        checkpoint_policy, products=_PRODUCTS if biased else _PRODUCTS + _EXPERT_PRODUCTS
    )
    contexts = partial(create_selective_checkpoint_contexts, policy)

    def enable_selective(activation_checkpointing_kwargs: Any = None, **options: Any) -> None:
        assert not activation_checkpointing_kwargs, "refused with the settings"
        enable(model, {"use_reentrant": False, "context_fn": contexts}, **options)

    model.activation_checkpointing_enable = enable_selective  # type: ignore[method-assign,assignment]


def checkpoint_policy(
    _: Any, operator: Any, *args: Any, products: tuple[str, ...] = _PRODUCTS, **kwargs: Any
) -> CheckpointPolicy:
    """Return whether selective activation checkpointing keeps an operator's output.

    products: names of the matrix products to keep. Operators with dropout are always recomputed.
    The recomputation restores the layer's random state. If it skipped an operator with dropout, the
    following operators would draw other random numbers than in the forward pass.
    """
    schema = operator._schema
    known = schema.name.rpartition("::")[2] in products
    known = known or any(kernel in str(operator) for kernel in _ATTENTION)
    if not known or schema.is_mutable:
        return CheckpointPolicy.PREFER_RECOMPUTE
    names = [argument.name for argument in schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    has_dropout = any(arguments.get(name) for name in _DROPOUT_ARGUMENTS)
    return CheckpointPolicy.PREFER_RECOMPUTE if has_dropout else CheckpointPolicy.MUST_SAVE


# Set this variable before importing torch, because the import sets it to a directory in /tmp.
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# torch's names for the arguments of a layer that change from step to step.
DYNAMIC_ARGUMENTS = ("L['kwargs']['max_length_q']", "L['kwargs']['max_length_k']")
LEAST_GRAPHS = 8  # torch's default limit


def compile_cache() -> Path:
    """Return torch's directory of compiled code.

    In a job, utils/launch/caches.py sets the environment variable that names this directory.
    """
    return Path(os.environ.get(CACHE_VARIABLE) or cache_root() / "compiled")


def check_compilation(strategy: str, compiles_here: bool = True) -> None:
    """Raise ConfigurationError for ZeRO-3, and if this host needs but lacks a C++ compiler.

    compiles_here: whether this host compiles the layers, so that it needs the C++ compiler
    """
    if strategy == "zero3":
        raise ConfigurationError(
            "--compile true: ZeRO-3 gathers weights in hooks around every module, which torch "
            "compiles each time; take strategy: fsdp2, which shards as much, or set --compile false"
        )
    compiler = os.environ.get("CXX") or os.environ.get("CC") or "g++"
    if compiles_here and not shutil.which(compiler.split()[0]):  # for "ccache g++" find ccache
        raise ConfigurationError(
            f"--compile true needs a C++ compiler, and there is no {compiler} here (CXX names "
            "another): load or install one, or set --compile false"
        )


def marked_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers for which transformers supports activation checkpointing, in order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def compile_layers(model: nn.Module) -> None:
    """Let torch compile each layer when it first runs.

    Each new micro-batch size or sequence length causes another compilation. torch raises an error
    after too many compilations. Raises ConfigurationError if `marked_layers` finds no layers.
    """
    layers = marked_layers(model)
    if not layers:
        name = type(model).__name__
        raise ConfigurationError(f"--compile true: {name} is not built of layers; set it to false")
    # At worst no layers are alike, and each layer is compiled for training and for evaluation.
    torch._dynamo.config.recompile_limit = max(LEAST_GRAPHS, 2 * len(layers))
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch.compiler.config.dynamic_sources = ",".join(DYNAMIC_ARGUMENTS)
    for layer in layers:
        layer.compile(dynamic=False)


def choose_compilation(
    settings: RunSettings, config: PreTrainedConfig, launch: LaunchFacts, elsewhere: bool
) -> tuple[bool, str]:
    """Return whether to compile layers, and the reason to log. "" means that nothing is logged.

    A resumed run keeps the choice that it recorded, because compiled layers round differently.
    elsewhere: whether the run trains on another machine. All ranks must call this. Raises
    ConfigurationError if compilation is requested but not possible.
    """
    compiled, why = settings.model.compile, "as requested"
    if compiled is None:
        starts = on_rank_0(lambda: RunRecord(Path(str(settings.training.output_dir))).starts)
        if starts:
            compiled, why = bool(starts[-1].get("compiled")), "as in the last start of this run"
        elif launch.device == "cuda" or (elsewhere and settings.run.assume):
            problems = gathered(_compile_problem(config, launch, elsewhere))
            problem = next(filter(None, problems), None)
            compiled, why = not problem, f"as {problem}" if problem else "auto"
    if compiled:
        check_compilation(launch.strategy, compiles_here=not elsewhere)
        return True, f"{why}, layer by layer, static shapes, kept in {compile_cache()}"
    return False, "" if why == "as requested" else f"off, {why}"


def pads_to_longest(
    settings: RunSettings, config: PreTrainedConfig, attention: str, compiled: bool, report: Report
) -> bool:
    """Return whether a micro-batch is padded to its longest document, not to sequence_length.

    A resumed run that padded to sequence_length continues to do so, because other padding changes
    the last bits of results. A line on the choice is added to `report`.
    """
    if settings.data.packing != "none":
        return False
    starts = on_rank_0(lambda: RunRecord(Path(str(settings.training.output_dir))).starts)
    why = ""
    if compiled or attention == FLEX:
        why = f"{'compiled layers need' if compiled else f'{FLEX} needs'} one length"
    elif config.model_type == "xlstm" and PADDED_TO % config.chunk_size:
        why = f"a multiple of chunk_size {config.chunk_size}"  # for Triton's kernels
    elif PADDED_TO % settings.run.context_parallel:
        why = f"a multiple of context_parallel {settings.run.context_parallel}"
    elif settings.model.fp8 and PADDED_TO % (MULTIPLE * settings.run.context_parallel):
        why = f"as fp8 needs a multiple of {MULTIPLE} tokens on each rank"
    elif starts and not starts[-1].get("to_longest"):
        why = "as in the last start of this run"
    to = f"sequence_length, {why}" if why else f"its longest document, in steps of {PADDED_TO}"
    report.say(f"padding: each micro-batch to {to}")
    return not why


def _compile_problem(config: PreTrainedConfig, launch: LaunchFacts, elsewhere: bool) -> str | None:
    """Return a reason not to compile layers by default, or None if there is no such reason.

    elsewhere: whether another machine trains and compiles
    """
    if not elsewhere and torch.cuda.get_device_capability()[0] < 8:  # Triton needs 8.0 for bfloat16
        return "the GPU's compute capability is below 8.0"
    if not elsewhere and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if has_experts(without_weights(config)):
        return "each expert of this model gets as many tokens as are routed to it"
    model_class = causal_lm_class(config)
    if not model_class.supports_gradient_checkpointing:  # `marked_layers` needs it
        return f"transformers marks no layers in {model_class.__name__}"
    try:
        check_compilation(launch.strategy, compiles_here=not elsewhere)
    except ConfigurationError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Float8Plan:
    """The layers that multiply in fp8, and their scaling.

    recipe: torchao's name of the scaling. layers: full names. emulated: whether matrices are
    rounded to fp8 but multiplied in another type, because the device has no fp8 products.
    """

    recipe: str
    layers: tuple[str, ...]
    emulated: bool

    def convert(self, model: nn.Module) -> None:
        """Replace these layers by fp8 layers with equal weights. Call before PEFT wraps `model`."""
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(self.recipe)
        config = dataclasses.replace(config, emulate=self.emulated)
        chosen = frozenset(self.layers)
        convert_to_float8_training(
            model, config=config, module_filter_fn=lambda _, name: name in chosen
        )


def plan_float8(
    settings: RunSettings,
    config: PreTrainedConfig,
    launch: LaunchFacts,
    elsewhere: bool,
    compiled: bool,
    report: Report,
) -> Float8Plan | None:
    """Return the plan of the layers that multiply in fp8, or None without `--fp8`.

    Lines for the log are added to `report`. All ranks must call this. elsewhere: whether the run
    trains on another machine. compiled: whether layers are compiled. Raises ConfigurationError if
    the GPU, the strategy, the sizes or the model do not allow fp8.
    """
    if not settings.model.fp8:
        return None
    shown = settings.values.shown("fp8")
    recipe = TENSORWISE if settings.model.fp8 == TENSORWISE else ROWWISE
    if launch.strategy not in FP8_STRATEGIES:
        raise ConfigurationError(
            f"{shown} was tried with DDP and FSDP2, not with {launch.strategy}: use strategy: "
            "multi_gpu or fsdp2, or leave it out"
        )
    own = weights_dtype(settings.model, config)
    if COMPUTED.get(settings.training.mixed_precision, own) != torch.bfloat16:
        raise ConfigurationError(f"{shown} needs --bf16 true, as the other layers compute in bf16")
    emulated = _emulates_fp8(settings, launch, elsewhere)
    length, rows = settings.data.sequence_length, settings.training.per_device_train_batch_size
    multiple = MULTIPLE * settings.run.context_parallel
    if length * rows % multiple:
        raise ConfigurationError(
            f"{shown} needs a multiple of {MULTIPLE} tokens on each rank: sequence_length {length} "
            f"x per_device_train_batch_size {rows} must be one of {multiple}: set "
            f"sequence_length: {-(-length // multiple) * multiple}"
        )
    layers, left_out = float8_layers(config)
    if not layers:
        raise ConfigurationError(
            f"{shown}: leave it out, no layer of {config.model_type} fits ({'; '.join(left_out)})"
        )
    report.say(f"fp8: {recipe}, {len(layers)} linear layers; in bf16: {'; '.join(left_out)}")
    if launch.strategy == "fsdp2":
        report.say("fp8: weights are gathered in bf16, then each GPU rounds them to fp8")
    if emulated:
        report.warn("fp8: emulated on this CPU, to try the settings; bf16 alone is faster")
    elif not compiled:
        report.warn("fp8: without compiled layers rounding to fp8 may take more time than it saves")
    return Float8Plan(recipe, layers, emulated)


def _emulates_fp8(settings: RunSettings, launch: LaunchFacts, elsewhere: bool) -> bool:
    """Return whether training runs on this CPU, which emulates fp8. All ranks must call this.

    Raises ConfigurationError if a GPU of the run has no fp8 products.
    """
    found = ""
    if settings.run.assume:
        gpus = assumed_gpus(settings.run.assume)
        found = "" if gpus.fp8 else gpus.name
    elif not elsewhere and launch.device != "cpu":
        lowest = min(gathered(gpu_capability() or (0, 0)))
        found = "" if lowest >= LOWEST_CAPABILITY else f"capability {lowest[0]}.{lowest[1]}"
    if found:
        raise ConfigurationError(
            f"{settings.values.shown('fp8')} needs a GPU of compute capability 8.9 or newer (L4, "
            f"L40S, RTX 4090, H100), not {found}: leave it out"
        )
    return not elsewhere and launch.device == "cpu"


def float8_layers(config: PreTrainedConfig) -> tuple[tuple[str, ...], list[str]]:
    """Return the full names of the layers for fp8, and descriptions of layers that stay in bf16."""
    built = without_weights(config)
    linear, experts = linear_and_experts(built)
    routing = {id(module) for router in routers(built) for module in router.modules()}
    groups: dict[str, list[str]] = {}
    for name in linear:
        layer: Any = built.get_submodule(name)
        decoder_layer = next(filter(str.isdigit, name.split(".")), "0")
        if id(layer) in routing:
            group = "of routers"
        elif type(layer) is not nn.Linear:
            group = "of another class than nn.Linear"
        elif layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
            group = f"with sizes that {MULTIPLE} does not divide"
        else:
            group = "of the first decoder layer" if decoder_layer == "0" else "chosen"
        groups.setdefault(group, []).append(name)
    chosen = tuple(groups.pop("chosen", ()))
    left_out = [f"{len(names)} {group} ({_short_list(names)})" for group, names in groups.items()]
    if experts:
        left_out.append(f"the experts' grouped matrices ({_short_list(experts)})")
    return chosen, ["the last layer", *left_out]


def _short_list(names: Sequence[str]) -> str:
    last_names = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    return ", ".join(last_names[:LISTED_NAMES]) + (
        ", ..." if len(last_names) > LISTED_NAMES else ""
    )
