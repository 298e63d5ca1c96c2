"""torchtitan's models in the sizes of a transformers configuration."""

from typing import Any

from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

LOADED = {"weight": skip_param_init}  # weights are not drawn: all come from the workload


def model_spec(config: dict[str, Any], length: int) -> ModelSpec:
    """Describe a Llama or Qwen3 of transformers' `config.json`, for rows of `length` tokens.

    All is as in torchtitan's own descriptions but for the sizes and the attention: SDPA, cuDNN's
    kernel first, where those have FlexAttention. A row is one document: causal masks are enough.
    """
    qwen3 = config["model_type"] == "qwen3"
    assert qwen3 or config["model_type"] == "llama"
    model: Any = Qwen3Model if qwen3 else Llama3Model
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    embedding = Embedding.Config(num_embeddings=vocabulary, embedding_dim=width, param_init=LOADED)
    return ModelSpec(
        name=config["model_type"],
        flavor="benchmark",
        model=model.Config(
            dim=width,
            vocab_size=vocabulary,
            enable_weight_tying=config["tie_word_embeddings"],
            tok_embeddings=embedding,
            norm=_norm(config, width),
            lm_head=Linear.Config(in_features=width, out_features=vocabulary, param_init=LOADED),
            layers=[_layer(config, length) for _ in range(config["num_hidden_layers"])],
        ),
        parallelize_fn=parallelize_qwen3 if qwen3 else parallelize_llama,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=Qwen3StateDictAdapter if qwen3 else Llama3StateDictAdapter,
    )


def _layer(config: dict[str, Any], length: int) -> Any:
    qwen3 = config["model_type"] == "qwen3"
    block: Any = Qwen3TransformerBlock if qwen3 else Llama3TransformerBlock
    rope: Any = CosSinRoPE if qwen3 else ComplexRoPE
    width, head_dim = config["hidden_size"], config["head_dim"]
    return block.Config(
        attention_norm=_norm(config, width),
        ffn_norm=_norm(config, width),
        attention=make_gqa_config(
            dim=width,
            n_heads=config["num_attention_heads"],
            n_kv_heads=config["num_key_value_heads"],
            head_dim=head_dim,
            wqkv_param_init=LOADED,
            wo_param_init=LOADED,
            inner_attention=ScaledDotProductAttention.Config(),
            fuse_qkv=True,
            qk_norm=_norm(config, head_dim) if qwen3 else None,
            rope=rope.Config(
                dim=head_dim, max_seq_len=length, theta=config["rope_parameters"]["rope_theta"]
            ),
        ),
        feed_forward=make_ffn_config(
            dim=width,
            hidden_dim=config["intermediate_size"],
            w1_param_init=LOADED,
            w2w3_param_init=LOADED,
        ),
    )


def _norm(config: dict[str, Any], width: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=width, eps=config["rms_norm_eps"], param_init=LOADED)
