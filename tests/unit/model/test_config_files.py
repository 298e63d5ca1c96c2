"""Published configuration files are read, built, and checked for unused keys."""

import json
import logging

import pytest
import tiny
from transformers import AutoTokenizer

from utils.config.errors import ConfigurationError
from utils.model.config import config_from_file, read_config_file

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "num_attention_heads": 4, "num_hidden_layers": 2, "rope_theta": 500000.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
}  # fmt: skip


@pytest.fixture
def built(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny.make_tokenizer(tmp_path / "tokenizer"))

    def build(values, overrides=None):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(values))
        return config_from_file(path, tokenizer, overrides)

    return build


def test_renamed_settings_are_taken_without_a_word(built, caplog, tmp_path):
    with caplog.at_level(logging.INFO):
        config = built(LLAMA)
    assert config.rope_parameters["rope_theta"] == 500000.0
    assert config.rope_parameters["rope_type"] == "linear"
    assert config.vocab_size == tiny.VOCABULARY
    assert not caplog.text
    config.save_pretrained(tmp_path / "final")
    saved = json.loads((tmp_path / "final/config.json").read_text())
    assert built(saved).to_dict() == config.to_dict(), "it is the same, saved again"


def test_published_keys_are_no_reason_to_refuse(built, caplog):
    caplog.set_level(logging.INFO)
    for values in (
        {"model_type": "gpt2", "n_ctx": 1024, "task_specific_params": {"text-generation": {}}},
        {"model_type": "mamba2", "time_step_limit": [0.0, float("inf")], "rms_norm": True},
        {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}},
        {"model_type": "qwen3_moe", "head_dim": 128, "max_window_layers": 48},
    ):  # tests/published has more cases
        config = built(values | {"architectures": ["Any"]})
        assert not hasattr(config, "quantization_config")
    assert config.head_dim == 128
    assert caplog.messages[-1].endswith("qwen3_moe uses no max_window_layers")


def test_keys_that_nothing_uses_and_those_given_twice_are_refused(built, caplog, tmp_path):
    caplog.set_level(logging.INFO)
    typo = {"model_type": "llama", "num_hiden_layers": 2}
    with pytest.raises(ConfigurationError, match="llama has no setting num_hiden_layers"):
        built(typo)
    built(typo | {"architectures": ["LlamaForCausalLM"]})  # like a published file
    assert "llama uses no num_hiden_layers" in caplog.text
    assert built({"model_type": "gpt2", "num_hidden_layers": 3}).n_layer == 3, "an alias is used"
    (tmp_path / "twice.json").write_text('{"model_type": "a", "hidden_size": 1, "hidden_size": 2}')
    with pytest.raises(ConfigurationError, match="hidden_size is given twice"):
        read_config_file(tmp_path / "twice.json")


def test_the_text_model_of_a_multimodal_file_follows_the_tokenizer(built):
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 2}
    config = built({"model_type": "gemma3", "text_config": text})
    assert config.text_config.vocab_size == tiny.VOCABULARY
    with pytest.raises(ConfigurationError, match=r"no setting text_config.num_hiden_layers"):
        built({"model_type": "gemma3", "text_config": {"num_hiden_layers": 2}})


def test_an_override_has_an_effect_or_is_refused(built):
    gemma = {"model_type": "gemma3", "architectures": ["A"], "text_config": {"hidden_size": 64}}
    assert built(LLAMA, {"num_hidden_layers": 3}).num_hidden_layers == 3
    config = built(gemma, {"text_config": {"num_hidden_layers": 3}})
    assert (config.text_config.num_hidden_layers, config.text_config.hidden_size) == (3, 64)
    for values, overrides, said in (
        (LLAMA, {"num_hiden_layers": 3}, "no setting num_hiden_layers"),
        (gemma, {"text_config": {"num_hiden_layers": 3}}, "text_config.num_hiden_layers"),
        (gemma, {"num_hidden_layers": 3}, "--model_config.text_config.num_hidden_layers"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            built(values, overrides)
