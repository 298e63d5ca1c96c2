"""`stage_data`: ranks read copies of the datasets, with the bits and records of the originals."""

from pathlib import Path

import pytest
import tiny
import yaml
from launching import run_processes


def settings_of(run: Path) -> dict[str, object]:
    found = yaml.safe_load((run / "config.yaml").read_text())
    return {
        name: value for name, value in found.items() if name not in ("output_dir", "stage_data")
    }


@pytest.mark.slow
@pytest.mark.parametrize("script", ["pretrain.py", "sft_train.py"])
def test_a_staged_run_has_the_bits_and_records_of_another_and_resumes_without_copies(
    script, pretraining, fine_tuning, workspace, tmp_path, monkeypatch
):
    argv = pretraining if script == "pretrain.py" else fine_tuning
    disk = tmp_path / "disk"
    disk.mkdir()
    more = {"eval_data": f"heldout={workspace / 'chats_heldout'}", "eval_steps": 3}
    more["dataloader_num_workers"] = 1
    plain, staged = tmp_path / "plain", tmp_path / "staged"
    run_processes("multi_gpu", script, argv(plain, **more)).succeeded()
    shown = run_processes("multi_gpu", script, argv(staged, **more, stage_data=disk)).succeeded()
    assert shown.count("is read from") == 2
    assert len([*disk.glob("stoker-data-*/*/state.json")]) == 2
    tiny.assert_same_run(staged, plain)
    assert tiny.evaluations(staged, "heldout") == tiny.evaluations(plain, "heldout")
    (before,), (start,) = tiny.starts(plain), tiny.starts(staged)
    for name in ("data", "tokenizer_sha256", "base_weights"):
        assert start[name] == before[name]
    assert settings_of(staged) == settings_of(plain)
    finals = [(run / "final" / "tokenizer_config.json").read_text() for run in (plain, staged)]
    assert finals[0] == finals[1]

    cut = tiny.copied(staged, tmp_path / "cut", step=3)
    shown = run_processes("multi_gpu", script, argv(cut, **more)).succeeded()
    assert f"stage_data: {disk} -> false" in shown
    tiny.assert_same_run(cut, plain)
