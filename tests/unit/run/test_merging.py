"""Merging adapters module by module equals PEFT's merge_and_unload."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from utils.run.export import merged_model

LINEAR = ["q_proj", "v_proj", "down_proj"]
SIZES = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
KINDS = {
    "dora": {"target_modules": LINEAR, "use_dora": True},
    "bias": {"target_modules": LINEAR, "lora_bias": True, "bias_in_base": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "modules_to_save": {"target_modules": LINEAR, "modules_to_save": ["lm_head", "norm"]},
    "tokens": {"target_modules": LINEAR, "trainable_token_indices": {"embed_tokens": [3, 47]}},
    "tied_tokens": {
        "target_modules": LINEAR, "trainable_token_indices": {"embed_tokens": [3]}, "tied": True,
    },
    "experts": {
        "target_modules": ["q_proj"], "experts": True,
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}  # fmt: skip


def adapted(**settings):
    """Make a model with adapters whose tensors all differ from their initial values."""
    torch.manual_seed(0)
    sizes = SIZES | {"tie_word_embeddings": settings.pop("tied", False)}
    biased = settings.pop("bias_in_base", False)
    if settings.pop("experts", False):
        config = AutoConfig.for_model(
            "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, **sizes
        )
    else:
        config = AutoConfig.for_model("llama", attention_bias=biased, mlp_bias=biased, **sizes)
    model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=2, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_the_merged_tensors_are_pefts(kind):
    model = adapted(**KINDS[kind])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    clean, merged = merged_model(model, model.state_dict(), torch.float32)
    for name, value in before.items():
        assert value.equal(model.state_dict()[name]), "the trained model is left as it is"
    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    tied = clean.all_tied_weights_keys
    assert merged.keys() | tied.keys() == expected.keys() == clean.state_dict().keys()
    for name, value in expected.items():
        found = merged[name if name in merged else tied[name]]
        torch.testing.assert_close(found, value, rtol=0, atol=1e-6)
    assert all(value.is_meta for value in clean.parameters())


@pytest.mark.parametrize(
    "settings", [{"modules_to_save": ["embed_tokens"]}, {"target_modules": ["embed_tokens"]}]
)
def test_an_embedding_trained_alone_is_no_longer_tied(settings):
    """The head kept its values while the embedding was trained, so the two must not be tied."""
    model = adapted(tied=True, **({"target_modules": LINEAR} | settings))
    ids = torch.arange(12).reshape(2, 6)
    expected = model.eval()(ids).logits
    clean, state = merged_model(model, model.state_dict(), torch.float32)
    assert not state["lm_head.weight"].equal(state["model.embed_tokens.weight"])
    made = AutoModelForCausalLM.from_config(clean.config)
    made.load_state_dict(state)
    torch.testing.assert_close(made.eval()(ids).logits, expected, rtol=0, atol=1e-5)
