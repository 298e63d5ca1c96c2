"""The contents of `final/` after whole runs: weights, generation settings, tokenizer."""

import json
import os
import shutil

import pytest
import tiny
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

pytestmark = pytest.mark.slow

LORA = {
    "use_peft": "true", "lora_r": 2, "lora_target_modules": "all-linear", "lora_dropout": 0,
}  # fmt: skip


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


def types(directory) -> dict[str, str]:
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return found


def contents(directory) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("adapters", [{}, LORA], ids=["full", "lora"])
def test_a_published_model_comes_back_as_it_was_published(
    adapters, published, fine_tuned, tmp_path
):
    settings = {"model_name_or_path": published, "max_steps": 2, "save_steps": 1, **adapters}
    old = os.umask(0o027)
    try:
        run = fine_tuned(tmp_path / "run", **settings)
    finally:
        os.umask(old)
    final = run / "final"
    saved = json.loads((final / "generation_config.json").read_text())
    saved.pop("transformers_version")
    assert saved == {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [7, 8, 0]}
    assert set(types(final).values()) == {"BF16"}
    assert types(final).keys() == types(published).keys()
    assert json.loads((final / "config.json").read_text())["dtype"] == "bfloat16"
    assert {file.stat().st_mode & 0o777 for file in final.iterdir()} == {0o640}
    if not adapters:  # only checkpoints of full fine-tuning contain all weights
        assert set(types(run / "checkpoint-2").values()) == {"F32"}
    assert AutoModelForCausalLM.from_pretrained(final).dtype == torch.bfloat16
    # If final/ is lost, another start of the finished run writes the same files again.
    before = contents(final)
    shutil.rmtree(final)
    fine_tuned(run, **settings)
    assert contents(final) == before


def test_a_model_from_scratch_generates_with_a_cache(pretrained, tmp_path):
    run = pretrained(tmp_path / "run", max_steps=1, save_steps=5)
    assert (run / "checkpoint-1").is_dir(), "the last step's, whatever the rhythm"
    saved = json.loads((run / "final" / "generation_config.json").read_text())
    assert saved["use_cache"]
    # Compare with transformers' own file for this architecture.
    AutoModelForCausalLM.from_pretrained(run / "final").config.save_pretrained(tmp_path / "config")
    config = AutoConfig.from_pretrained(tmp_path / "config")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    assert saved == json.loads((tmp_path / "plain" / "generation_config.json").read_text())
    assert set(types(run / "final").values()) == {"F32"}


def test_the_next_stage_keeps_the_type_of_the_first_base(published, fine_tuned, tmp_path):
    """final/ stays in bfloat16, although a resumed start reads a checkpoint in float32."""
    settings = {"init_from": published, "model_name_or_path": None, "max_steps": 2, "save_steps": 1}
    run = fine_tuned(tmp_path / "run", **settings)
    before = contents(run / "final")
    fine_tuned(tiny.cut(run, step=1), **settings)
    assert set(types(run / "final").values()) == {"BF16"}
    assert contents(run / "final") == before
