"""Parsed settings never change: a run derives values from them, and writes none back."""

import copy
from dataclasses import FrozenInstanceError, fields

import pytest

import pretrain
import sft_train
from utils.config import settings as parsing

LORA = {
    "use_peft": True, "lora_r": 2, "lora_dropout": 0.1, "activation_checkpointing": "auto",
    "save_total_limit": 2,
}  # fmt: skip
FULL = {"bf16_full_eval": True, "use_cpu": True, "run_name": "mine"}
EVALUATED = {
    "eval_steps": 2, "eval_on_start": True, "save_best": True, "save_steps": 2,
    "accept_changes": "max_steps",
}  # fmt: skip


def snapshot(settings) -> dict:
    parts = {name: getattr(settings, name) for name in ("run", "data", "model", "training")}
    values = {
        f"{name}.{each.name}": copy.deepcopy(getattr(part, each.name))
        for name, part in parts.items()
        for each in fields(part)
    }
    return values | {"given": dict(settings.values.given), "resolved": dict(settings.resolved)}


@pytest.mark.slow
@pytest.mark.parametrize("script", [pretrain, sft_train], ids=["pretraining", "LoRA"])
def test_a_run_and_its_resume_leave_the_settings_as_parsed(
    script, pretraining, fine_tuning, heldout, chats_heldout, tmp_path, monkeypatch
):
    parsed = []

    def keep(parse):
        def parse_and_keep(*args, **kwargs):
            settings = parse(*args, **kwargs)
            parsed.append((settings, snapshot(settings)))
            return settings

        return parse_and_keep

    for name in ("parse_pretraining", "parse_fine_tuning"):
        monkeypatch.setattr(parsing, name, keep(getattr(parsing, name)))
    command_line, changes = pretraining, FULL | heldout
    if script is sft_train:
        command_line, changes = fine_tuning, LORA | chats_heldout
    changes |= EVALUATED
    for steps in (2, 4):  # a new run, and one that resumes
        argv = command_line(tmp_path / "run", max_steps=steps, **changes)
        assert script.main([*argv, "--dry_run"]) == 0
        assert script.main(argv) == 0
    assert len(parsed) == 4
    for settings, before in parsed:
        assert snapshot(settings) == before
    settings, _ = parsed[0]
    for part, name in ((settings, "run"), (settings.run, "strategy"), (settings.data, "packing")):
        with pytest.raises(FrozenInstanceError):
            setattr(part, name, None)
