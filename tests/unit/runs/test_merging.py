"""Adapters merged module by module are what PEFT's merge_and_unload makes of them."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from utils.runs.export import (
    Merger,
    bare_name,
    can_merge_by_file,
    merge_by_file,
    merged_state,
    weight_files,
)

LINEAR = ["q_proj", "v_proj", "down_proj"]
SIZES = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
KINDS = {
    "lora": {"target_modules": LINEAR},
    "rslora": {"target_modules": LINEAR, "use_rslora": True, "lora_alpha": 3},
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


def _adapted(**settings):
    """A model with trained adapters: every tensor of theirs is another than at the start."""
    torch.manual_seed(0)
    sizes = SIZES | {"tie_word_embeddings": settings.pop("tied", False)}
    biased = settings.pop("bias_in_base", False)
    if settings.pop("experts", False):
        config = AutoConfig.for_model(
            "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, **sizes
        )
    else:
        config = AutoConfig.for_model("llama", attention_bias=biased, mlp_bias=biased, **sizes)
    base = AutoModelForCausalLM.from_config(config)
    model = get_peft_model(base, LoraConfig(r=2, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    return copy.deepcopy(base), model


def _trained(model):
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_the_merged_tensors_are_pefts(kind, tmp_path):
    _, model = _adapted(**KINDS[kind])
    merger = Merger(model, _trained(model))
    base = {
        bare_name(name): value.detach().clone()
        for name, value in model.state_dict().items()
        if name not in merger.adapters
    }
    merged = merged_state(merger, base)
    expected = copy.deepcopy(model).merge_and_unload()
    assert merged.keys() == merger.shapes.keys() - merger.tied.keys()
    assert merged.keys() | merger.tied.keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(merged[merger.tied.get(name, name)], value, rtol=0, atol=1e-6)

    changed = {name for name, value in merged.items() if not value.equal(base[name])}
    assert changed == merger.adapted  # and nothing else
    if kind == "experts":  # their files hold one expert at a time
        model.unload().save_pretrained(tmp_path)
        assert not can_merge_by_file(merger, weight_files(tmp_path))


@pytest.mark.parametrize("kind", ["lora", "dora", "modules_to_save", "tied_tokens"])
def test_files_are_merged_one_at_a_time(kind, tmp_path):
    settings = dict(KINDS[kind])
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=settings.pop("tied", False))
    base = AutoModelForCausalLM.from_config(config)
    base.save_pretrained(tmp_path / "base", max_shard_size="5kB")
    model = get_peft_model(base, LoraConfig(r=2, **settings))
    with torch.no_grad():
        for value in _trained(model).values():
            value.add_(torch.randn_like(value))
    merger = Merger(model, _trained(model))
    files = weight_files(tmp_path / "base")
    assert len(set(files.values())) > 3
    assert can_merge_by_file(merger, files)
    (tmp_path / "out").mkdir()
    merge_by_file(merger, files, tmp_path / "out", lambda _, value: value)
    config.save_pretrained(tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    expected = model.merge_and_unload().state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "settings", [{"modules_to_save": ["embed_tokens"]}, {"target_modules": ["embed_tokens"]}]
)
def test_an_embedding_trained_alone_is_no_longer_tied(settings):
    """The head went on with the old values while the embedding was trained."""
    _, model = _adapted(tied=True, **({"target_modules": LINEAR} | settings))
    ids = torch.arange(12).reshape(2, 6)
    expected = model.eval()(ids).logits
    merger = Merger(model, _trained(model))
    base = {bare_name(name): value for name, value in model.state_dict().items()}
    state = merged_state(merger, base)
    assert not state["lm_head.weight"].equal(state["model.embed_tokens.weight"])
    made = AutoModelForCausalLM.from_config(merger.clean.config)
    made.load_state_dict(state)
    torch.testing.assert_close(made.eval()(ids).logits, expected, rtol=0, atol=1e-5)
    assert not can_merge_by_file(merger, dict.fromkeys(merger.adapted))


def test_a_merger_holds_no_weights_but_the_adapters():
    _, model = _adapted(**KINDS["lora"])
    merger = Merger(model, _trained(model))
    assert all(value.device.type == "meta" for value in merger.wrapped.parameters())
    next_key = next(iter(merger.modules))
    base = {bare_name(name): value for name, value in model.state_dict().items()}
    merger.merged(next_key, lambda name: base[name])
    assert all(value.device.type == "meta" for value in merger.wrapped.parameters())


def test_a_base_with_other_names_or_shapes_is_not_merged_by_file(tmp_path):
    _, model = _adapted(**KINDS["lora"])
    merger = Merger(model, _trained(model))
    smaller = AutoConfig.for_model("llama", **(SIZES | {"intermediate_size": 8}))
    AutoModelForCausalLM.from_config(smaller).save_pretrained(tmp_path)
    files = weight_files(tmp_path)
    assert not can_merge_by_file(merger, files)
    assert not can_merge_by_file(merger, {f"other.{name}": path for name, path in files.items()})
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == files.keys()
