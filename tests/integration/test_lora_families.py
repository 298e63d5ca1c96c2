"""LoRA with default settings is trained, resumed, merged and loaded, in different families."""

from pathlib import Path

import pytest
import tiny
import torch
from families import tiny_config, tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import sft_train

pytestmark = pytest.mark.slow


@pytest.fixture
def argv(fine_tuning, tmp_path):
    def command(name: str, **changes: object) -> tuple[Path, list[str]]:
        base, run = tmp_path / "base_of_family", tmp_path / "run"
        if not base.exists():
            tiny_model(tiny_config(name)).save_pretrained(base)
            tiny.make_tokenizer(base)
        settings = {"model_name_or_path": base, "use_peft": True, "max_steps": 3, "save_steps": 2}
        return run, fine_tuning(run, **(settings | changes))

    return command


@pytest.mark.parametrize("name", ["gpt2", "phi3", "gpt_oss", "deepseek_v3", "gemma3"])
def test_default_targets_train_resume_and_merge(name, argv, tmp_path, capsys):
    run, command = argv(name)
    assert sft_train.main(command) == 0
    assert "LoRA: rank 16 on " in capsys.readouterr().out
    expected, losses = load_file(run / "final" / "model.safetensors"), tiny.losses(run)
    for path in (run / "checkpoint-3", run / "final", run / "adapter"):
        path.rename(tmp_path / path.name)
    assert sft_train.main(command) == 0
    assert tiny.losses(run) == losses
    actual = load_file(run / "final" / "model.safetensors")
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    merged, info = AutoModelForCausalLM.from_pretrained(run / "final", output_loading_info=True)
    assert not any(info.values())
    before = tiny_model(tiny_config(name)).state_dict()
    moved = {key for key, value in merged.state_dict().items() if not value.equal(before[key])}
    assert moved
    assert not any("vision" in key for key in moved)
    said = merged.generate(torch.arange(2, 12)[None], max_new_tokens=3, min_new_tokens=3)
    assert said.shape == (1, 13)


@pytest.mark.parametrize("name", ["llama", "gemma"], ids=["untied", "tied"])
def test_the_last_layer_trained_whole_beside_lora(name, argv, capsys):
    run, command = argv(name, lora_target_modules="q_proj", lora_modules_to_save="lm_head")
    assert sft_train.main(command) == 0
    assert "for LoRA trains the last layer" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(run / "final").state_dict()
    before = tiny_model(tiny_config(name)).state_dict()
    assert not merged["lm_head.weight"].equal(before["lm_head.weight"])
    assert merged["model.embed_tokens.weight"].equal(before["model.embed_tokens.weight"])
