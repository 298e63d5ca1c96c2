"""A small random model that attends as the user's model does, to try an attention on it."""

import contextlib
import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from utils.config.errors import ConfigurationError
from utils.kernels.varlen import AttentionNeeds

VOCABULARY = 64
WIDTH = 64
WIDEST = 512  # of the hidden states; wider ones take seconds on a CPU
OBSERVER = "packed_observer"

# What each is called differs by architecture; the attribute that a config has is the one meant.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k", "top_k_experts",
)  # fmt: skip
LAYER_TYPES = ("layer_types", "layers_block_type")
LAYER_INDICES = (
    "hybrid_layer_ids", "full_attn_idxs", "attn_layer_indices", "cross_attention_layers",
)  # fmt: skip
# Sizes that others do not depend on: widths of MLPs, groups of experts and of state-space heads,
# and chunks, to which sequences are padded (GPUs' kernels take powers of two from 16 on).
AT_MOST = {
    "intermediate_size": WIDTH, "intermediate_size_mlp": WIDTH, "moe_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": WIDTH, "shared_intermediate_size": WIDTH, "n_inner": WIDTH,
    "ffn_dim": WIDTH, "n_group": 1, "topk_group": 1, "n_groups": 1, "mamba_n_groups": 1,
    "mamba_ngroups": 1, "chunk_size": 32, "mamba_chunk_size": 32,
    "vocab_size_per_layer_input": VOCABULARY,
}  # fmt: skip
# Of state-space layers: heads and their dimension, the ratio of inner to outer width.
STATE_HEADS = (
    ("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim"),
    ("num_heads", "head_dim"),
)  # fmt: skip
EXPANSIONS = ("mamba_expand", "expand")
# As wide as the hidden states, in one architecture or the other.
SAME_WIDTH = ("embedding_dim", "lru_width", "attention_hidden_size", "d_model")
# What an architecture raises that does not fit a cut: sizes that must divide, missing layers.
MISFITS = (
    RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError,
    AssertionError,
)  # fmt: skip


def first_line(error: BaseException) -> str:
    """Return the first line of what a library says is wrong."""
    return (str(error).strip().splitlines() or [repr(error)])[0]


def first_set(config: PretrainedConfig, names: Sequence[str]) -> Any:
    """Return the first of these settings that a configuration has; None: it has none of them."""
    return next((getattr(config, name) for name in names if getattr(config, name, None)), None)


def has_experts(config: PretrainedConfig) -> bool:
    """Whether a model routes tokens to experts."""
    return first_set(config.get_text_config(decoder=True), EXPERTS) is not None


def causal_lm_class(model_config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class to train: with towers for images or sound it is the whole model's.

    Raises ConfigurationError where transformers has none that learns from text alone.
    """
    # The mappings have no public name; `_model_mapping` has had this one since transformers 4.
    multimodal = AutoModelForMultimodalLM._model_mapping
    mapping = (
        multimodal if type(model_config) in multimodal else AutoModelForCausalLM._model_mapping
    )
    kind = f"model type {model_config.model_type!r} ({type(model_config).__name__})"
    if type(model_config) not in mapping:
        raise ConfigurationError(
            f"{kind}: transformers has no causal language model for it. Code that comes with a "
            "model is not run: use an architecture that transformers has."
        )
    found: Any = mapping[type(model_config)]
    model_class: Any = found[0] if isinstance(found, tuple) else found
    if problem := _not_for_text(model_class, model_config):
        raise ConfigurationError(f"{kind}: {model_class.__name__} {problem}")
    return model_class


def is_multimodal(model_config: PretrainedConfig) -> bool:
    """Whether AutoModelForCausalLM does not load the whole model."""
    causal = AutoModelForCausalLM._model_mapping.get(type(model_config), None)
    return causal is not causal_lm_class(model_config)


def text_model_config(model_config: PretrainedConfig) -> PretrainedConfig | None:
    """Return the text part's configuration if AutoModelForCausalLM loads that part alone."""
    found: Any = AutoModelForCausalLM._model_mapping.get(type(model_config), None)
    if found is None or found.config_class is not model_config.sub_configs.get("text_config"):
        return None
    text = model_config.get_text_config(decoder=True)
    return text if type(text) in AutoModelForCausalLM._model_mapping else None


def _not_for_text(model_class: Any, model_config: PretrainedConfig) -> str | None:
    """Return why a model cannot learn from text alone; None: it can."""
    arguments = inspect.signature(model_class.forward).parameters
    needed = [
        name
        for name, one in arguments.items()
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    needed = [name for name in needed if name not in ("self", "input_ids")]
    text = model_config.get_text_config(decoder=True)
    if model_config.is_encoder_decoder or getattr(text, "is_encoder_decoder", False):
        return "is an encoder with a decoder, and Stoker trains decoders alone: use one of those."
    if "labels" not in arguments:
        thinker = getattr(model_config, "thinker_config", None)
        part = "use another model" if thinker is None else _saved_alone(thinker)
        return f"computes no loss of the next token: {part}."
    if needed:
        return f"needs {' and '.join(needed)} beside text: use a model that runs on text alone."
    return None


def _saved_alone(part: PretrainedConfig) -> str:
    found: Any = AutoModelForMultimodalLM._model_mapping[type(part)]
    name = found.__name__
    return f"train its text part, saved by {name}.from_pretrained(MODEL).save_pretrained(DIRECTORY)"


def body_of(model: PreTrainedModel) -> Any:
    """Return the model without its head."""
    body: Any = model.base_model
    # Llama 4's names a part that it does not have, which makes its base model itself.
    return model.model if body is model else body


def text_model_of(model: PreTrainedModel) -> Any:
    """Return the decoder that text goes through; beside it there may be towers for images."""
    decoder: Any = model.get_decoder()
    return body_of(model) if decoder is model else decoder


def probe_config(model_config: PretrainedConfig) -> PretrainedConfig:
    """Return a small config with the same head dimension, head grouping, windows and positions.

    One layer of each type remains (two at least). Where heads cannot be cut they stay. Raises
    ConfigurationError where nothing small runs.
    """
    misfit: Exception | None = None
    for cut_heads in (True, False):
        try:
            config = _cut(model_config, cut_heads)
            _run(build_probe_model(config, "eager"))
            return config
        except MISFITS as error:
            misfit = error
    raise ConfigurationError(
        f"model type {model_config.model_type!r}: no small model could be built to check that "
        f"packed documents stay apart ({type(misfit).__name__}: {misfit})"
    )


def build_probe_model(
    config: PretrainedConfig,
    attn_implementation: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Build the model of a probe config in eval mode; the same weights every time.

    Weights that text leaves out are zeros, which take no memory and no time however large towers
    for images are. from_config would shard the model under ZeRO-3. The CPU's random generator is
    put back.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = attn_implementation
    model_class: Any = causal_lm_class(config)
    with no_init_weights():
        model = model_class(config)
    idle = {value: value.shape for value in outside_text(model).values()}
    for value, shape in idle.items():
        value.requires_grad_(False).data = torch.zeros(()).expand(shape)
        setattr(value, "_is_hf_initialized", True)  # noqa: B010 - a name of transformers
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model.init_weights()
    give_token_types(model)
    for value in idle:
        value.data = torch.zeros(())
    model.to(device=device, dtype=dtype)
    for value, shape in idle.items():
        value.data = value.data.expand(shape)
    return model.eval()


def give_token_types(model: PreTrainedModel) -> None:
    """Let batches of text be known as text: Molmo 2 asks for token types while it trains."""
    if model.config.model_type != "molmo2":
        return

    def add_types(_: Any, args: Any, given: dict[str, Any]) -> Any:
        if given.get("mm_token_type_ids") is None and given.get("input_ids") is not None:
            given["mm_token_type_ids"] = torch.zeros_like(given["input_ids"])
        return args, given

    body_of(model).register_forward_pre_hook(add_types, with_kwargs=True)


def apart_inside(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the parts of names that modules of the text model have which text does not enter.

    Chameleon and Phi-4 have towers there, Llama 3.2 Vision layers that attend to images.
    """
    config: Any = model.config
    text_config, text = config.get_text_config(decoder=True), text_model_of(model)
    kinds = {type(getattr(config, name, None)) for name in config.sub_configs} - {type(text_config)}
    towers = [
        name
        for name, module in text.named_modules()
        if isinstance(module, PreTrainedModel) and type(module.config) in kinds
    ]
    layers = getattr(text_config, "cross_attention_layers", None) or ()
    inside = [*towers, "embed_tokens_extend", *(f"layers.{layer}" for layer in layers)]
    return tuple(f".{name}." for name in inside)


def outside_text(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that text does not go through: those of towers and projectors."""
    used = {
        id(one)
        for part in (text_model_of(model), model.get_output_embeddings())
        for one in part.parameters()
    }
    apart = apart_inside(model)
    return {
        name: value
        for name, value in model.named_parameters()
        if id(value) not in used or any(part in name for part in apart)
    }


def observe_attention(config: PretrainedConfig) -> AttentionNeeds | None:
    """Run a probe config once in training mode and note what its layers ask of the attention.

    Returns None when the model does not attend through transformers' AttentionInterface.
    """
    whole = build_probe_model(config, "eager")
    if not any(part._supports_attention_backend for part in (whole, text_model_of(whole))):
        return None
    calls: list[AttentionNeeds] = []

    def attention(*arguments: Any, **terms: Any) -> tuple[torch.Tensor, None]:
        _, query, _, value = arguments[:4]
        softcap, sinks = terms.get("softcap") is not None, terms.get("s_aux") is not None
        dropout, window = terms.get("dropout", 0.0), terms.get("sliding_window") is not None
        calls.append(AttentionNeeds(query.shape[-1], softcap, sinks, dropout, window))
        rows, heads, length, _ = query.shape
        return query.new_zeros(rows, length, heads, value.shape[-1]), None

    AttentionInterface.register(OBSERVER, attention)
    with torch.random.fork_rng(devices=[]), contextlib.suppress(LookupError):
        # Some look their attention up in a table of their own.
        _run(build_probe_model(config, OBSERVER).train())
    if not calls:
        return None
    return AttentionNeeds(*(max(asked) for asked in zip(*calls, strict=True)))


@torch.no_grad()
def _run(model: torch.nn.Module) -> None:
    model(input_ids=torch.arange(1, 5).view(1, -1), use_cache=False)


def _cut(model_config: PretrainedConfig, cut_heads: bool) -> PretrainedConfig:
    """Return a copy whose text part is small."""
    whole = copy.deepcopy(model_config)
    config = whole.get_text_config(decoder=True)
    if config is not whole:
        whole.pad_token_id = 0
    config.vocab_size = VOCABULARY
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
    _cut_layers(config)
    for name, most in AT_MOST.items():
        _at_most(config, name, most)
    # As many experts as a token uses: with more, perturbed tokens would change how many tokens an
    # expert gets and so, by rounding alone, what the other documents see.
    per_token = first_set(config, EXPERTS_PER_TOKEN)
    for name in EXPERTS:
        if per_token and isinstance(getattr(config, name, None), int):
            setattr(config, name, per_token)
    if cut_heads:
        _cut_heads(config)
        _cut_states(config)
    return whole


def _cut_layers(config: PretrainedConfig) -> None:
    """Keep the first layer of each type, and every list of one entry per layer in step."""
    layers = config.num_hidden_layers
    types = first_set(config, LAYER_TYPES) or ["attention"] * layers
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


def _cut_heads(config: PretrainedConfig) -> None:
    """Keep two key/value heads with their groups of query heads, one where groups are wide."""
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    group = heads // kv_heads
    kept = min(kv_heads, 2 if 2 * group * head_dim <= WIDEST else 1)
    config.num_attention_heads = group * kept
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = kept
    config.hidden_size = config.num_attention_heads * head_dim


def _cut_states(config: PretrainedConfig) -> None:
    """Fit recurrent layers to the width that attention heads leave, or to a small one."""
    attends = getattr(config, "num_attention_heads", None)
    if not attends:
        config.hidden_size = min(config.hidden_size, 2 * WIDTH)
    for name in SAME_WIDTH:
        _at_most(config, name, config.hidden_size)
    inner = int((first_set(config, EXPANSIONS) or 1) * config.hidden_size)
    for heads, dim in STATE_HEADS[: -1 if attends else None]:
        if hasattr(config, heads) and hasattr(config, dim):
            head_dim = min(getattr(config, dim) or inner, inner)
            setattr(config, heads, max(1, inner // head_dim))
            setattr(config, dim, inner // getattr(config, heads))
            _at_most(config, "mamba_d_ssm", inner)
    if key_heads := getattr(config, "linear_num_key_heads", None):
        config.linear_num_value_heads = config.linear_num_value_heads // key_heads
        config.linear_num_key_heads = 1


def _at_most(config: PretrainedConfig, name: str, most: int) -> None:
    """Cut a size, or those of each layer, if the configuration has it."""
    size = getattr(config, name, None)
    if isinstance(size, int):
        setattr(config, name, min(size, most))
    elif isinstance(size, list):
        setattr(config, name, [min(each, most) for each in size])
