"""The contents of `final/` after whole runs: weights, generation settings, tokenizer."""

import json
import os
import shutil

import pytest
import tiny
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import pretrain
import sft_train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Make a bfloat16 base with generation settings that transformers would refuse to save."""
    directory = tmp_path_factory.mktemp("published")
    torch.manual_seed(0)
    config = LlamaConfig(
        **json.loads(tiny.make_model_config(directory / "config.json").read_text())
    )
    config.bos_token_id = None
    model = AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size="10kB")
    tiny.make_tokenizer(directory)
    (directory / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_p": 0.9, "eos_token_id": [7, 8]})
    )
    return directory


def _types(directory):
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return found


def _contents(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_a_published_model_comes_back_as_it_was_published(
    adapted, published, fine_tuning, tmp_path
):
    run = tmp_path / "run"
    lora = {"use_peft": "true", "lora_r": 2, "lora_target_modules": "all-linear"}
    settings = {"model_name_or_path": published, "max_steps": 2, "save_steps": 1}
    settings |= lora | {"lora_dropout": 0} if adapted else {}
    old = os.umask(0o027)
    try:
        sft_train.main(fine_tuning(run, **settings))
    finally:
        os.umask(old)
    final = run / "final"
    saved = json.loads((final / "generation_config.json").read_text())
    saved.pop("transformers_version")
    expected = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [7, 8, 0]}
    assert saved == expected
    assert set(_types(final).values()) == {"BF16"}
    assert _types(final).keys() == _types(published).keys()
    assert json.loads((final / "config.json").read_text())["dtype"] == "bfloat16"
    modes = {file.stat().st_mode & 0o777 for file in final.iterdir()}
    assert modes == {0o640}
    if not adapted:  # only checkpoints of full fine-tuning contain all weights
        assert set(_types(run / "checkpoint-2").values()) == {"F32"}
    assert AutoModelForCausalLM.from_pretrained(final).dtype == torch.bfloat16
    # If final/ is lost, another start of the finished run writes the same files again.
    before = _contents(final)
    shutil.rmtree(final)
    sft_train.main(fine_tuning(run, **settings))
    assert _contents(final) == before


def test_a_model_from_scratch_generates_with_a_cache(pretraining, tmp_path):
    pretrain.main(pretraining(tmp_path / "run", max_steps=1, save_steps=5))
    assert (tmp_path / "run" / "checkpoint-1").is_dir(), "the last step's, whatever the rhythm"
    final = tmp_path / "run" / "final"
    saved = json.loads((final / "generation_config.json").read_text())
    assert saved["use_cache"]
    # Compare with transformers' own file for this architecture.
    AutoModelForCausalLM.from_pretrained(final).config.save_pretrained(tmp_path / "config")
    config = AutoConfig.from_pretrained(tmp_path / "config")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    assert saved == json.loads((tmp_path / "plain" / "generation_config.json").read_text())
    assert set(_types(final).values()) == {"F32"}


def test_the_next_stage_keeps_the_type_of_the_first_base(published, fine_tuning, tmp_path):
    """final/ stays in bfloat16, although a resumed start reads a checkpoint in float32."""
    run = tmp_path / "run"
    settings = {"init_from": published, "max_steps": 2, "save_steps": 1}
    argv = fine_tuning(run, **settings, model_name_or_path=None)
    sft_train.main(argv)
    before = _contents(run / "final")
    tiny.cut(run, step=1)
    sft_train.main(argv)
    assert set(_types(run / "final").values()) == {"BF16"}
    assert _contents(run / "final") == before
