"""Generation settings and tensor type of `final/` are known before weights load."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from utils.config.errors import ConfigurationError
from utils.model.finished_model import (
    finished_generation,
    generation_settings,
    saved_dtype,
    set_generation_settings,
)

# Published generation_config.json files that transformers would refuse to save after a change.
PUBLISHED = {
    # Vicuna 7B v1.5: sampling flags, no do_sample
    "vicuna": {
        "bos_token_id": 1, "eos_token_id": 2, "max_length": 4096, "pad_token_id": 0,
        "temperature": 0.9, "top_p": 0.6,
    },
    # Gemma 3 1B
    "gemma3": {
        "bos_token_id": 2, "cache_implementation": "hybrid", "do_sample": True,
        "eos_token_id": [1, 106], "pad_token_id": 0, "top_k": 64, "top_p": 0.95,
    },
    # Conversions of Llama 7B, in which -1 meant no padding token
    "llama1": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": -1},
}  # fmt: skip


def _settings(**model):
    names = ("model_name_or_path", "model_config", "init_from", "model_revision")
    given = dict.fromkeys(names) | {"save_dtype": "auto"} | model
    return SimpleNamespace(
        model=SimpleNamespace(**given), training=SimpleNamespace(output_dir="/nowhere")
    )


def _published(tmp_path, values):
    LlamaConfig(torch_dtype="bfloat16").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    return _settings(model_name_or_path=str(tmp_path)), AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_are_saved_as_they_were_with_the_new_stops(name, tmp_path):
    values = PUBLISHED[name]
    settings, config = _published(tmp_path, values)
    made = generation_settings(settings, config)
    known = values["eos_token_id"]
    known = known if isinstance(known, list) else [known]
    model = SimpleNamespace(can_generate=lambda: True, generation_config=made)
    turns = [{"end_of_turn_token_id": known[-1]}, {"end_of_turn_token_id": 7}]
    datasets = [SimpleNamespace(description=SimpleNamespace(preparation=turn)) for turn in turns]
    tokenizer, data = SimpleNamespace(eos_token_id=None), SimpleNamespace(datasets=datasets)
    set_generation_settings(model, finished_generation(model, tokenizer, data))
    model.generation_config.save_pretrained(tmp_path / "final")  # raises for invalid settings
    saved = json.loads((tmp_path / "final" / "generation_config.json").read_text())
    saved.pop("transformers_version")
    assert saved == values | {"eos_token_id": [*known, 7]}


def test_what_is_never_valid_is_refused_with_the_file(tmp_path):
    settings, config = _published(tmp_path, {"max_new_tokens": 0})
    with pytest.raises(ConfigurationError, match=r"generation_config\.json"):
        generation_settings(settings, config)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"generation_config\.json: it cannot be used"):
        generation_settings(settings, config)


def test_weights_are_saved_as_asked_or_in_the_type_of_the_base():
    half, full = LlamaConfig(dtype=torch.bfloat16), LlamaConfig()
    published, scratch = _settings(model_name_or_path="x"), _settings(model_config="x")
    assert saved_dtype(published, full, torch.float32) == torch.float32
    assert saved_dtype(scratch, half, torch.float32) == torch.float32
    assert saved_dtype(scratch, half, torch.bfloat16) == torch.bfloat16
    asked = _settings(model_config="x", save_dtype="float16")
    assert saved_dtype(asked, half, torch.float32) == torch.float16
