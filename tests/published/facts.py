"""What a published model is, as typed facts, and how its configuration is made small."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PACKS = "packs"
ONE_A_ROW = "one document a sequence"
REFUSED = "refused"

# The sizes of the cut model. Heads keep their grouping and experts their routing; windows, chunks
# and positions are cut as well, so that documents of the tests are longer than they are.
VOCABULARY, WIDTH, HEADS, HEAD_DIM = 128, 64, 4, 16
POSITIONS, WINDOW, CHUNK = 256, 16, 16
AS_LARGE_AS = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "n_positions": POSITIONS,
    "n_ctx": POSITIONS,
    "max_seq_len": POSITIONS,
    "seq_length": POSITIONS,
    "max_sequence_length": POSITIONS,
    "model_max_length": POSITIONS,
    "initial_context_length": POSITIONS // 4,
    "original_max_position_embeddings": POSITIONS // 4,
    "sliding_window": WINDOW,
    "window_size": WINDOW,
    "attention_window_size": WINDOW,
    "attention_chunk_size": CHUNK,
    "chunk_size": CHUNK,
    "mamba_chunk_size": CHUNK,
    "moe_intermediate_size": 32,
    "expert_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "hidden_size_per_layer_input": 8,
    "word_embed_proj_dim": WIDTH,
    "num_local_experts": 8,
    "num_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "qk_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_d_state": 8,
    "mamba_head_dim": 16,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
    "lru_width": WIDTH,
}
WIDTHS = ("hidden_size", "n_embd", "d_model", "n_inner")
MLPS = ("intermediate_size", "ffn_dim", "block_ff_dim", "ffn_hidden_size")
HEAD_COUNTS = ("num_attention_heads", "n_head", "n_heads")
KV_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads")
HEAD_DIMS = ("head_dim", "global_head_dim", "kv_channels", "attention_head_dim")
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
PER_LAYER = ("layer_types", "layers_block_type", "no_rope_layers", "mlp_layer_types",
             "attention_layers", "moe_layers")  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A model as its config.json, tokenizer and generation_config.json have it.

    tokens: special tokens and their published ids. layers: which of its layers the cut model has.
    cut: what the general cut does not fit. packs: what is expected, `why` when it is not PACKS.
    """

    name: str
    year: int
    config: Mapping[str, Any]
    tokens: Mapping[str, int] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    layers: tuple[int, ...] = (0, 1)
    cut: Mapping[str, Any] = field(default_factory=dict)
    packs: str = PACKS
    why: str = ""

    @property
    def ids(self) -> dict[int, int]:
        """The id in the cut vocabulary of each published id."""
        return {old: new for new, old in enumerate(sorted(set(self.tokens.values())))}

    def small_config(self) -> dict[str, Any]:
        """Return config.json with depth, width, vocabulary and positions cut, and its form kept."""
        text = self.config.get("text_config")
        if text is None:
            return self._small(self.config) | self.cut
        outer = {name: value for name, value in self.config.items() if name != "text_config"}
        return self._renumbered(outer) | {"text_config": self._small(text) | self.cut}

    def small_generation(self) -> dict[str, Any]:
        """Return generation_config.json for the cut vocabulary."""
        return self._renumbered(self.generation)

    def _small(self, config: Mapping[str, Any]) -> dict[str, Any]:
        small = self._renumbered(config)
        for name, value in config.items():
            if name in DEPTHS:
                small[name] = len(self.layers)
            elif name in PER_LAYER and isinstance(value, list) and value:
                small[name] = [value[layer] for layer in self.layers]
            elif name in ("rope_scaling", "rope_parameters") and value:
                small[name] = _small_rope(value)
            elif isinstance(value, int) and not isinstance(value, bool):
                small[name] = _small_size(name, value, config) or small[name]
        return small

    def _renumbered(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        def new(value: Any) -> Any:
            if isinstance(value, list):
                return [self.ids[one] for one in value]
            return value if value is None else self.ids.get(value, value)

        return {
            name: new(value) if name.endswith("_token_id") and name[:3] in ("bos", "eos", "pad")
            else value
            for name, value in settings.items()
        }  # fmt: skip


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((config[name] for name in names if config.get(name)), HEADS)


def _small_size(name: str, value: int, config: Mapping[str, Any]) -> int | None:
    """Return a size of the cut model, in proportion; None for what is no size."""
    heads, width = _first(config, HEAD_COUNTS), _first(config, WIDTHS)
    if name in WIDTHS:
        return WIDTH * value // width
    if name in MLPS:
        return max(8, round(WIDTH * value / width / 8) * 8)
    if name in HEAD_COUNTS:
        return HEADS
    if name in KV_HEAD_COUNTS:
        return max(1, HEADS * value // heads)
    if name in HEAD_DIMS:
        return max(8, round(HEAD_DIM * value * heads / width / 8) * 8)
    return min(value, AS_LARGE_AS[name]) if name in AS_LARGE_AS else None


def _small_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    small = dict(rope)
    for name, value in rope.items():
        if isinstance(value, Mapping):
            small[name] = _small_rope(value)
        elif name == "original_max_position_embeddings":
            small[name] = POSITIONS // 4
        elif name in ("short_factor", "long_factor"):
            small[name] = value[: HEAD_DIM // 2]
    return small


LLAMA2 = {"<unk>": 0, "<s>": 1, "</s>": 2}
LLAMA3 = {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|eom_id|>": 128008,
          "<|eot_id|>": 128009}  # fmt: skip
QWEN = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
GEMMA = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<start_of_turn>": 105, "<end_of_turn>": 106}
GPT2 = {"<|endoftext|>": 50256}
