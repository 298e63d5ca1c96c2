"""Small configurations of many architectures, with the published types of layers."""

import itertools
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from utils.model.architecture import causal_lm_class

VOCABULARY = 128
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "pad_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 128,
}  # fmt: skip
EIGHT_OF_TWO = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
WITH_IMAGES = {"vision_config": {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "image_size": 28, "patch_size": 14,
}}  # fmt: skip

# Settings that differ from SIZES. A nested text_config gets SIZES as well.
DENSE: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {}, "ministral": {}, "qwen2": {}, "qwen3": {}, "gemma": {},
    "gemma2": {},
    "gemma3_text": {"sliding_window": 16}, "phi": {}, "phi3": {}, "olmo": {}, "olmo2": {},
    "olmo3": {}, "cohere": {}, "cohere2": {}, "glm": {}, "glm4": {}, "granite": {}, "smollm3": {},
    "starcoder2": {}, "stablelm": {}, "gpt2": {}, "gpt_neox": {}, "gpt_neo": {
        "num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8}, "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt_bigcode": {}, "nemotron": {}, "seed_oss": {}, "exaone4": {}, "helium": {}, "ernie4_5": {},
    "arcee": {}, "apertus": {}, "hunyuan_v1_dense": {},
}  # fmt: skip
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": LOCAL, "qwen2_moe": EIGHT_OF_TWO | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": EIGHT_OF_TWO, "olmoe": EIGHT_OF_TWO, "flex_olmo": EIGHT_OF_TWO,
    "gpt_oss": LOCAL | {"sliding_window": 16}, "granitemoe": LOCAL, "granitemoeshared": LOCAL,
    "phimoe": LOCAL | {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "minimax_m2": LOCAL, "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16},
    "deepseek_v2": LATENT | ROUTED | {"topk_method": "greedy"}, "deepseek_v3": LATENT | ROUTED,
    "glm4_moe": ROUTED, "dots1": ROUTED, "llama4_text": LOCAL | {
        "intermediate_size_mlp": 64, "num_experts_per_tok": 1, "moe_layers": [1],
        "no_rope_layers": [1, 0]},
    "hunyuan_v1_moe": EIGHT_OF_TWO | {"moe_topk": 2}, "jetmoe": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "kv_channels": 8},
}  # fmt: skip
THREE_ROWS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
SOUND = {"hidden_size": 32, "intermediate_size": 64, "num_blocks": 1, "num_attention_heads": 4}
INSIDE: dict[str, dict[str, Any]] = {
    "gemma3": WITH_IMAGES | {"text_config": {"sliding_window": 16}, "mm_tokens_per_image": 4},
    "gemma4": {"text_config": {
        "global_head_dim": 8, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        "vision_config": WITH_IMAGES["vision_config"] | {"head_dim": 8}, "audio_config": None},
    "got_ocr2": {"text_config": {"model_type": "qwen2"}, "vision_config": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "output_channels": 16,
        "mlp_dim": 32}},
    "phi4_multimodal": WITH_IMAGES | {"audio_config": SOUND},
    "qwen3_vl": {"text_config": {"rope_parameters": THREE_ROWS}, "vision_config": {
        "hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 4,
        "out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}},
    "mistral3": WITH_IMAGES | {"text_config": {"model_type": "mistral"}},
    "paligemma": WITH_IMAGES | {"text_config": {"model_type": "gemma"}, "projection_dim": 32},
    "mllama": {"text_config": {"cross_attention_layers": [1]}, "vision_config": {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_global_layers": 1, "attention_heads": 4, "image_size": 28, "vision_output_dim": 64,
        "intermediate_layers_indices": [0]}},
    "kimi_k25": {"text_config": {"model_type": "deepseek_v3"} | LATENT | ROUTED, "vision_config": {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 4, "pos_emb_height": 4, "pos_emb_width": 4}},
    "qwen3_5": {"text_config": {"layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "rope_parameters": THREE_ROWS | {"partial_rotary_factor": 1.0}},
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 4,
        "out_hidden_size": 32, "num_position_embeddings": 16}},
}  # fmt: skip


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Return a small configuration of this model type."""
    values = {**DENSE, **EXPERTS, **INSIDE}[model_type] | changes
    if "text_config" in values:
        own = SIZES | values["text_config"]
        if "qk_rope_head_dim" in own:
            del own["head_dim"]
        values["text_config"] = own
        return AutoConfig.for_model(model_type, **values)
    return AutoConfig.for_model(model_type, **(SIZES | values))


def tiny_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model with the same random weights every time."""
    torch.manual_seed(0)
    built: Any = causal_lm_class(config)(config)
    return built


def names(*groups: dict[str, Any]) -> list[str]:
    """Return the model types of some groups."""
    return list(itertools.chain.from_iterable(groups))
