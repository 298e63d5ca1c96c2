"""--profile_steps writes a trace and a table of some steps, and changes nothing else."""

import gzip
import json
import re
import shutil

import pytest
import tiny
from launching import run_processes

import pretrain
from utils.config.errors import ExitCode

STEPS = {"max_steps": 6, "logging_steps": 1, "learning_rate": 1e-3, "global_batch_size": 4}


def traced(path):
    """Return the events of a Chrome trace."""
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def mark_of(path, name):
    """Return the beginning and end, in microseconds, of the only event of this name."""
    (mark,) = (event for event in traced(path) if event.get("name") == name)
    return mark["ts"], mark["ts"] + mark["dur"]


@pytest.mark.slow
def test_the_window_is_traced_and_training_is_the_same(pretrained, tmp_path, capsys):
    settings = STEPS | {"per_device_train_batch_size": 2}
    plain = pretrained(tmp_path / "plain", **settings)
    assert not (plain / "profile").exists()
    capsys.readouterr()
    run = pretrained(tmp_path / "run", **settings, profile_steps="3:5", save_steps=1)
    shown = capsys.readouterr().out
    tiny.assert_same_run(run, plain)

    trace = run / "profile/steps3-4-rank0.json.gz"
    assert f"profile: {trace} (ui.perfetto.dev opens it)" in shown
    head, *table = (run / "profile/kernels.txt").read_text().splitlines()
    assert f"profile: {head}" in shown
    assert head == "steps 3 to 4 of rank 0; with a save after step 3", "saves outside do not count"
    assert "Self CPU time total" in table[-1]
    rows = [line for line in table if "%" in line and "Self CPU %" not in line]
    shares = [float(re.search(r"([\d.]+)%", row)[1]) for row in rows]
    assert len(rows) == 10
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 100.5
    names = [event.get("name", "") for event in traced(trace)]
    (_, end), (begin, _) = (mark_of(trace, name) for name in ("step 3", "step 4"))
    assert begin > end + 1000, "the save between them is in neither"
    steps = [name for name in names if name.startswith("Optimizer.step#")]
    assert len(steps) == 2, "of the steps 3 and 4 alone"

    # Steps before the resumed step are not traced: first a part of 3 to 5, then all of 2 and 3.
    tiny.cut(run, step=4)
    shutil.rmtree(run / "profile")
    for written, said in (
        ("3:6", "steps 5 to 5 of rank 0"), ("2:4", "profile: none, this start begins after step 4"),
    ):  # fmt: skip
        copy = tiny.copied(run, tmp_path / written[0])
        pretrained(copy, **settings, profile_steps=written)
        assert said in capsys.readouterr().out
        assert (copy / "profile").exists() is (written == "3:6")
        assert tiny.losses(copy) == tiny.losses(plain)


@pytest.mark.slow
def test_rank_0_alone_writes_after_the_last_collective(pretraining, tmp_path):
    argv = pretraining(tmp_path / "run", **STEPS, profile_steps="1:3")
    run_processes("multi_gpu", "pretrain.py", argv).succeeded()
    files = sorted(path.name for path in (tmp_path / "run/profile").iterdir())
    assert files == ["kernels.txt", "steps1-2-rank0.json.gz"]
    trace = tmp_path / "run/profile/steps1-2-rank0.json.gz"
    begin, end = mark_of(trace, "step 2")
    assert begin > mark_of(trace, "step 1")[1]
    waits = [each["ts"] for each in traced(trace) if "DataLoader" in each.get("name", "")]
    assert any(wait < end for wait in waits), "the wait for data is in the trace"
    # gloo ends its events in memory that the profiler frees, so the profiler must wait for them.
    collectives = [each for each in traced(trace) if each.get("name", "").startswith("gloo:")]
    last = max(collectives, key=lambda each: each["ts"])
    assert last["name"] == "gloo:barrier", "it waits for all others"
    assert all(each["ts"] + each["dur"] <= last["ts"] + last["dur"] for each in collectives)
    assert len({each["tid"] for each in collectives}) <= 2, "no turn of an AsyncMax, with no end"
    text = (tmp_path / "run/profile/kernels.txt").read_text()
    assert "; the first step of a start compiles and allocates, choose later ones" in text


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("12:10", "profile_steps 12:10: expected FIRST:STOP, as 10:13"),
        ("0", "the first step is 1"),
        ("ten", "profile_steps ten: expected"),
        ("5:8", "profile_steps 5:8: the run has no step 7"),
    ],
)
def test_a_window_that_cannot_be_is_refused(written, said, pretraining, tmp_path, capsys):
    argv = pretraining(tmp_path / "run", **STEPS, profile_steps=written, dry_run=True)
    with pytest.raises(ValueError, match=re.escape(said)):
        pretrain.main(argv)


def test_a_profiler_that_does_not_run_is_a_warning(pretraining, tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr("torch.profiler.profile", refuse)
    argv = pretraining(tmp_path / "run", **STEPS, profile_steps="2:4")
    assert pretrain.main(argv) == ExitCode.DONE
    assert "profile: torch's profiler does not run here: CUPTI" in capsys.readouterr().out
    assert not (tmp_path / "run/profile").exists()
