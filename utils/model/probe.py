"""A small random model with the user's architecture and attention, for checks before training."""

import contextlib
import copy
from typing import Any
from unittest import mock

import torch
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.integrations import hub_kernels

from utils.config.errors import ConfigurationError
from utils.kernels.varlen import AttentionNeeds
from utils.model.architecture import (
    EXPERTS_PER_TOKEN,
    LAYER_TYPES,
    MODEL_ERRORS,
    add_input_hooks,
    causal_lm_class,
    check_memory_room,
    error_text,
    first_set_attribute,
    layer_settings,
    non_text_parameters,
    text_model_of,
    without_weights,
)

CPU = torch.device("cpu")
VOCABULARY = 64
PROBE_WIDTH = 64
WIDEST = 512  # limit of the hidden size; larger ones take seconds on a CPU
WIDEST_GROUP = 1024  # limit of the width of the query heads that share a key/value head
OBSERVER = "packed_observer"
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
LAYER_INDICES = (
    "hybrid_layer_ids", "full_attn_idxs", "attn_layer_indices", "cross_attention_layers",
)  # fmt: skip
# Limits of sizes that do not affect other sizes: widths of MLPs, ranks of low-rank products, groups
# of experts and of state-space heads, and lengths of chunks (sequences are padded to whole chunks;
# kernels on GPUs need a power of two of at least 16).
SIZE_LIMITS = {
    "intermediate_size": PROBE_WIDTH, "intermediate_size_mlp": PROBE_WIDTH,
    "moe_intermediate_size": PROBE_WIDTH, "shared_expert_intermediate_size": PROBE_WIDTH,
    "shared_intermediate_size": PROBE_WIDTH, "n_inner": PROBE_WIDTH,
    "ffn_dim": PROBE_WIDTH, "n_group": 1, "topk_group": 1, "n_groups": 1, "mamba_n_groups": 1,
    "mamba_ngroups": 1, "chunk_size": 32, "mamba_chunk_size": 32,
    "vocab_size_per_layer_input": VOCABULARY, "zero_expert_num": 0,
    "q_lora_rank": PROBE_WIDTH, "kv_lora_rank": PROBE_WIDTH, "o_lora_rank": PROBE_WIDTH,
}  # fmt: skip
# Settings of state-space layers: pairs (number of heads, dimension of a head), and the ratio of the
# inner width to the hidden size.
STATE_HEADS = (
    ("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim"),
    ("num_heads", "head_dim"),
)  # fmt: skip
EXPANSIONS = ("mamba_expand", "expand")
# Settings that must equal the hidden size in some architectures.
SAME_WIDTH = ("embedding_dim", "lru_width", "attention_hidden_size", "d_model")


class ProbeError(ConfigurationError):
    """Error of a check whose small model does not run on this host."""


def torch_operators() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which models use torch's operators, not kernels that need a GPU."""
    return mock.patch.object(hub_kernels, "is_torchdynamo_exporting", return_value=True)


def tolerance(device: torch.device, on_cpu: float) -> float:
    """Return the relative difference that counts as rounding: 0.01 on a GPU, else `on_cpu`."""
    return on_cpu if device.type == "cpu" else 1e-2  # GPUs multiply in TF32, with 10 bits


def fork_random(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context that restores the random states of the CPU and of this device at its end."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def probe_config(model_config: PretrainedConfig, device: torch.device = CPU) -> PretrainedConfig:
    """Return the configuration of a small model with the same head dimension and windows.

    The small model has the first layer of each type, or two layers if all have the same type. It
    has one or two key/value heads, or all heads if it does not run with fewer. This function runs
    the small model once on `device`, the training device. Raises ProbeError if no small model runs.
    """
    misfit: Exception | None = None
    for cut_heads in (True, False):
        try:
            config = _cut_config(model_config, cut_heads)
            _run_once(build_probe_model(config, "eager", device), device)
            return config
        except ConfigurationError:  # even the small model is too large
            raise
        except MODEL_ERRORS as error:
            misfit = error
    raise ProbeError(
        f"model type {model_config.model_type!r}: no small model could be built on {device.type} "
        f"to check that packed documents stay apart ({type(misfit).__name__}: {misfit})."
    ) from misfit


def build_probe_model(
    config: PretrainedConfig,
    attn_implementation: str,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Return a model in eval mode, with the same random weights every time.

    config: the result of `probe_config`. Weights of other modalities, such as vision layers, are
    zeros and take no memory. The CPU's random state is restored.
    """
    planned = without_weights(config)
    unused = {id(value) for value in non_text_parameters(planned).values()}
    built = (*planned.parameters(), *planned.buffers())
    needed = sum(value.nbytes for value in built if id(value) not in unused)
    check_memory_room(needed, f"{config.name_or_path or config.model_type}: two of its layers take")
    config = copy.deepcopy(config)
    config._attn_implementation = attn_implementation
    model_class: Any = causal_lm_class(config)
    with no_init_weights():
        model = model_class(config)
    idle: dict[Any, torch.Size] = {
        value: value.shape for value in non_text_parameters(model).values()
    }
    for value, shape in idle.items():
        value.requires_grad_(False).data = torch.zeros(()).expand(shape)
        value._is_hf_initialized = True
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model.init_weights()
    add_input_hooks(model)
    for value in idle:
        value.data = torch.zeros(())
    model.to(device=device, dtype=dtype)
    for value, shape in idle.items():
        value.data = value.data.expand(shape)
    return model.eval()


def observe_attention(config: PretrainedConfig, device: torch.device = CPU) -> AttentionNeeds | str:
    """Return the features, such as soft caps, that a model's attention function must support.

    config: the result of `probe_config`. This small model runs once in training mode, without
    attention masks. Returns a text with the reason if the model needs masks, or if transformers
    cannot replace the model's attention.
    """
    unused = f"{causal_lm_class(config).__name__} calls no attention of the AttentionInterface"
    whole = build_probe_model(config, "eager", device)
    if not any(part._supports_attention_backend for part in (whole, text_model_of(whole))):
        return unused
    calls: list[AttentionNeeds] = []

    def attention(*arguments: Any, **terms: Any) -> tuple[torch.Tensor, None]:
        _, query, _, value = arguments[:4]
        softcap, sinks = terms.get("softcap") is not None, terms.get("s_aux") is not None
        dropout, window = terms.get("dropout", 0.0), terms.get("sliding_window") is not None
        calls.append(AttentionNeeds(query.shape[-1], softcap, sinks, dropout, window))
        rows, heads, length, _ = query.shape
        return query.new_zeros(rows, length, heads, value.shape[-1]), None

    AttentionInterface.register(OBSERVER, attention)
    try:
        with fork_random(device):
            _run_once(build_probe_model(config, OBSERVER, device).train(), device)
    except MODEL_ERRORS as error:
        # Indexers of sparse attention read the mask, which packed attention does not have.
        reason = f"{type(error).__name__}: {error_text(error)}"
        return f"{type(whole).__name__} needs masks ({reason})"
    if not calls:
        return unused
    return AttentionNeeds(*(max(values) for values in zip(*calls, strict=True)))


@torch.no_grad()
def _run_once(model: torch.nn.Module, device: torch.device) -> None:
    model(input_ids=torch.arange(1, 5, device=device).view(1, -1), use_cache=False)


def _cut_config(model_config: PretrainedConfig, cut_heads: bool) -> PretrainedConfig:
    """Return the configuration with a small text model. cut_heads: whether to use fewer heads."""
    whole = copy.deepcopy(model_config)
    config = whole.get_text_config(decoder=True)
    if config is not whole:
        whole.pad_token_id = 0
    config.vocab_size = VOCABULARY
    # Inputs of the checks never contain the id 0. Some configs do not accept None.
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
    settings = layer_settings(config)
    config.per_layer_config = None
    kept = _cut_layers(config)
    for name, limit in SIZE_LIMITS.items():
        _limit_size(config, name, limit)
    # Keep as many experts as a token uses. With more, a changed token would change how many tokens
    # an expert gets, and thus the rounding of other documents' logits.
    per_token = first_set_attribute(config, EXPERTS_PER_TOKEN)
    for name in EXPERTS:
        if per_token and isinstance(getattr(config, name, None), int):
            setattr(config, name, per_token)
    if cut_heads:
        _cut_heads(config)
        _cut_recurrent_sizes(config)
    if settings:
        config.per_layer_config = {
            layer: _cut_layer_settings(settings.get(old_layer, {}), per_token)
            for layer, old_layer in enumerate(kept)
        }
    return whole


def _cut_layer_settings(settings: dict[str, Any], experts: int | None) -> dict[str, Any]:
    """Return a layer's settings (see `layer_settings`) for the small model.

    Numbers of heads are left out. experts: the new number of experts, or None to keep the old one.
    """
    small = dict(settings)
    for name, value in settings.items():
        if name in ("num_attention_heads", "num_key_value_heads"):
            del small[name]
        elif name in SIZE_LIMITS and isinstance(value, int):
            small[name] = min(value, SIZE_LIMITS[name])
        elif name in EXPERTS and experts and value:
            small[name] = experts
    return small


def _cut_layers(config: PretrainedConfig) -> list[int]:
    """Keep only the first layer of each type; return the old indices of the kept layers.

    If all layers have the same type, the first two layers are kept.
    """
    layers = config.num_hidden_layers
    types = first_set_attribute(config, LAYER_TYPES) or ["attention"] * layers
    first_of_type = {types.index(kind) for kind in types}
    kept = sorted(first_of_type if len(first_of_type) > 1 else range(min(layers, 2)))
    per_layer = {
        name: [value[layer] for layer in kept]
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == layers
    }
    for name in LAYER_INDICES:
        if isinstance(getattr(config, name, None), list):
            per_layer[name] = [kept.index(i) for i in getattr(config, name) if i in kept]
    config.num_hidden_layers = len(kept)
    if hasattr(config, "num_kv_shared_layers"):
        config.num_kv_shared_layers = 0
    for name, value in per_layer.items():
        setattr(config, name, value)
    return kept


def _cut_heads(config: PretrainedConfig) -> None:
    """Reduce a model to one or two key/value heads, and fit its query heads and hidden size."""
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    group = min(heads // kv_heads, max(2, WIDEST_GROUP // head_dim))
    kept = min(kv_heads, 2 if 2 * group * head_dim <= WIDEST else 1)
    config.num_attention_heads = group * kept
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = kept
    config.hidden_size = config.num_attention_heads * head_dim


def _cut_recurrent_sizes(config: PretrainedConfig) -> None:
    """Fit the sizes of recurrent layers to the hidden size.

    A model without attention first gets a smaller hidden size.
    """
    attends = getattr(config, "num_attention_heads", None)
    if not attends:
        config.hidden_size = min(config.hidden_size, 2 * PROBE_WIDTH)
    for name in SAME_WIDTH:
        _limit_size(config, name, config.hidden_size)
    inner = int((first_set_attribute(config, EXPANSIONS) or 1) * config.hidden_size)
    for heads, dim in STATE_HEADS[: -1 if attends else None]:
        if hasattr(config, heads) and hasattr(config, dim):
            head_dim = min(getattr(config, dim) or inner, inner)
            setattr(config, heads, max(1, inner // head_dim))
            setattr(config, dim, inner // getattr(config, heads))
            _limit_size(config, "mamba_d_ssm", inner)
    if key_heads := getattr(config, "linear_num_key_heads", None):
        config.linear_num_value_heads = config.linear_num_value_heads // key_heads
        config.linear_num_key_heads = 1


def _limit_size(config: PretrainedConfig, name: str, limit: int) -> None:
    size = getattr(config, name, None)
    if isinstance(size, int):
        setattr(config, name, min(size, limit))
    elif isinstance(size, list):
        setattr(config, name, [min(each, limit) for each in size])
