"""A checkpoint that was copied to another place resumes in a new directory, bit for bit."""

import json
import os
import shutil

import numpy as np
import pytest
import tiny

import pretrain
import sft_train
from utils.config.errors import ConfigurationError
from utils.host.journal_file import read_journal

pytestmark = pytest.mark.slow


def copied(checkpoint, target):
    """Copy a checkpoint as to another cluster: with other modes and times, and a cache file."""
    shutil.copytree(checkpoint, target)
    for path in target.rglob("*"):
        if path.is_file():
            path.chmod(0o440)
            os.utime(path, (1e9, 1e9))
    (target / ".cache").mkdir()
    (target / ".cache" / "of_hf_download").touch()
    return target


def test_a_copied_checkpoint_resumes_bit_for_bit(
    pretraining, pretrained, heldout, tmp_path, capsys
):
    moved, new = tmp_path / "elsewhere" / "mine", tmp_path / "new"
    settings = {**heldout, "async_save": "true"}
    whole = pretrained(tmp_path / "whole", **settings)
    copied(whole / "checkpoint-3", moved)
    argv = pretraining(new, **settings, resume_from_checkpoint=moved)
    assert pretrain.main([*argv, "--dry_run", "true"]) == 0
    assert f"a start would resume from {moved}" in capsys.readouterr().out
    assert not new.exists()
    # A dry run and a start both refuse changes of settings that would make it another run.
    for extra in (["--dry_run", "true"], []):
        with pytest.raises(ConfigurationError, match="its seed is 42, now it is 7"):
            pretrain.main([*argv, "--seed", "7", *extra])
    capsys.readouterr()
    assert pretrain.main(argv) == 0
    shown = capsys.readouterr().out
    assert "has checkpoints of its own" in shown, "the refused start has taken it"
    assert f"resuming from {new}/checkpoint-3" in shown
    assert tiny.weights(new) == tiny.weights(whole)
    assert tiny.losses(new) == tiny.losses(whole)[3:], "of its own steps: no journal came along"
    first, second = tiny.starts(new)
    assert first == tiny.starts(whole)[0]
    assert (second["resumed_from"], second["changed"]["resume_from_checkpoint"]) == (
        f"{new}/checkpoint-3", str(moved),
    )  # fmt: skip
    # The same command again finds the finished run, with only one copy of each checkpoint.
    assert pretrain.main(argv) == 0
    assert "nothing is left to do" in capsys.readouterr().out
    assert {path.name for path in new.glob("*checkpoint*")} == {"checkpoint-3", "checkpoint-6"}


def test_a_run_is_named_and_its_best_checkpoint_and_its_journal_come_along(
    fine_tuning, fine_tuned, tmp_path, capsys
):
    # The held-out split is noise, so its loss grows while the model learns the chats.
    noise = np.random.default_rng(0).integers(2, tiny.VOCABULARY, (40, 20)).tolist()
    noise = tiny.save(tmp_path / "noise", tiny.masked(noise))
    settings = {
        "eval_data": f"noise={noise}", "eval_steps": 2, "save_steps": 2,
        "load_best_model_at_end": "true", "metric_for_best_model": "eval_noise_loss",
        "lr_scheduler_type": "constant", "learning_rate": 5e-3,
    }  # fmt: skip
    whole = fine_tuned(tmp_path / "whole", **settings)
    old = tiny.copied(whole, tmp_path / "old", step=4)
    state = json.loads((old / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"].endswith("checkpoint-2")
    alone = shutil.copytree(old / "checkpoint-4", tmp_path / "alone" / "checkpoint-4")
    argv = fine_tuning(tmp_path / "a", **settings, resume_from_checkpoint=alone)
    with pytest.raises(ConfigurationError, match="needs checkpoint-2 too, the best one so far"):
        sft_train.main(argv)
    capsys.readouterr()
    new = fine_tuned(tmp_path / "new", **settings, resume_from_checkpoint=old)
    assert f"resuming from {new}/checkpoint-4" in capsys.readouterr().out
    tiny.assert_same_run(new, whole)
    events = [line["event"] for line in read_journal(new / "metrics.jsonl")]
    assert events.count("eval") == 3
    assert (old / "checkpoint-4" / "manifest.json").is_file()


def test_what_is_no_whole_checkpoint_of_this_run_is_refused(pretraining, pretrained, tmp_path):
    new = tmp_path / "new"
    checkpoint = pretrained(tmp_path / "whole", max_steps=3) / "checkpoint-3"

    def refused(named, said, output_dir=new, **changes):
        with pytest.raises(ConfigurationError, match=said):
            pretrain.main(pretraining(output_dir, resume_from_checkpoint=named, **changes))
        assert not list(output_dir.glob("checkpoint-*"))

    refused(tmp_path / "nowhere", "no such directory; one on the Hub comes with `hf download")
    refused(tmp_path, "it is no committed checkpoint, nor a run that has one")
    changed = shutil.copytree(checkpoint, tmp_path / "changed")
    weights = changed / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused(changed, r"not as it was committed \(model.safetensors has other contents\)")
    weights.unlink()
    refused(changed, r"not as it was committed \(.*No such file")
    # A checkpoint of an older version has no copies of the run's record.
    before = shutil.copytree(checkpoint, tmp_path / "older" / "checkpoint-3")
    shutil.rmtree(before / "run")
    refused(before, "copy config.yaml and provenance.json from there to")
    other = tiny.cut(pretrained(tmp_path / "other", max_steps=1), step=0)
    refused(checkpoint, "holds another run, which has no checkpoint yet", output_dir=other)
    # Refusals leave nothing behind. `true` changes nothing: every start resumes from its own run.
    pretrained(new, max_steps=1, resume_from_checkpoint="true")
