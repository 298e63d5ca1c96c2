"""Published models as typed facts, and the small configurations made from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PACKS = "packs"
ONE_A_ROW = "one document a sequence"
REFUSED = "refused"

# The sizes of the small model. Heads keep their grouping and experts their routing. Windows, chunks
# and positions are smaller than the tests' documents.
VOCABULARY, WIDTH, HEADS, HEAD_DIM = 128, 64, 4, 16
POSITIONS, WINDOW, CHUNK = 256, 16, 16
AS_LARGE_AS = {
    name: size
    for size, names in (
        (VOCABULARY, "vocab_size vocab_size_per_layer_input"),
        (POSITIONS, "max_position_embeddings n_positions n_ctx max_seq_len seq_length"),
        (POSITIONS, "max_sequence_length model_max_length"),
        (POSITIONS // 4, "initial_context_length original_max_position_embeddings"),
        (WINDOW, "sliding_window window_size attention_window_size"),
        (CHUNK, "attention_chunk_size chunk_size mamba_chunk_size"),
        (WIDTH, "word_embed_proj_dim lru_width"),
        (96, "intermediate_size_mlp"),
        (32, "moe_intermediate_size expert_intermediate_size shared_expert_intermediate_size"),
        (32, "shared_intermediate_size moe_shared_expert_intermediate_size"),
        (8, "num_local_experts num_experts n_routed_experts moe_num_experts"),
        (2, "num_experts_per_tok experts_per_token moe_k top_k_experts linear_num_key_heads"),
        (2, "n_group"),
        (1, "topk_group first_k_dense_replace moe_layer_start_index mamba_n_groups n_groups"),
        (24, "q_lora_rank qk_head_dim"),
        (16, "kv_lora_rank qk_nope_head_dim v_head_dim"),
        (16, "linear_key_head_dim linear_value_head_dim mamba_head_dim mamba_d_head"),
        (8, "qk_rope_head_dim hidden_size_per_layer_input state_size ssm_state_size mamba_d_state"),
        (4, "linear_num_value_heads time_step_rank mamba_dt_rank"),
    )
    for name in names.split()
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
    """A model: its config.json, tokenizer and generation_config.json.

    config: without the version, and without values that transformers' configuration class of the
    model has by default. tokens: special tokens with their published ids. layers: the layers that
    the small model keeps. cut: small sizes that `small_config` cannot derive. packs: whether
    documents can be packed. why: the reason if they cannot.
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
        """Return the ids in the small vocabulary that replace the published ids."""
        return {old: new for new, old in enumerate(sorted(set(self.tokens.values())))}

    def small_config(self) -> dict[str, Any]:
        """Return config.json with smaller depth, width, vocabulary and positions."""
        text = self.config.get("text_config")
        if text is None:
            return self._small(self.config) | self.cut
        outer = {name: value for name, value in self.config.items() if name != "text_config"}
        return self._renumbered(outer) | {"text_config": self._small(text) | self.cut}

    def small_generation(self) -> dict[str, Any]:
        """Return generation_config.json for the small vocabulary."""
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
    """Return a setting's size in the small model, or None if the setting is not a size."""
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
