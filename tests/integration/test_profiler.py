"""--profile_steps writes a trace and a table of some steps, and changes nothing else."""

import gzip
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import tiny
from launching import run_two_processes
from torch.autograd import DeviceType

import pretrain
from utils.callbacks.profiler import covered_us, summarize
from utils.config.errors import ExitCode

STEPS = {"max_steps": 6, "logging_steps": 1, "learning_rate": 1e-3, "global_batch_size": 4}


def traced(path):
    """Return the events of a Chrome trace."""
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def mark_of(path, name):
    """Return the beginning and the end, in us, of the only event of this name."""
    (mark,) = (event for event in traced(path) if event.get("name") == name)
    return mark["ts"], mark["ts"] + mark["dur"]


@pytest.mark.slow
def test_the_window_is_traced_and_training_is_the_same(pretraining, tmp_path, capsys):
    plain, run = tmp_path / "plain", tmp_path / "run"
    settings = STEPS | {"per_device_train_batch_size": 2}
    assert pretrain.main(pretraining(plain, **settings)) == 0
    assert not (plain / "profile").exists()
    capsys.readouterr()
    assert pretrain.main(pretraining(run, **settings, profile_steps="3:5", save_steps=1)) == 0
    shown = capsys.readouterr().out
    assert tiny.losses(run) == tiny.losses(plain)
    assert tiny.weights(run) == tiny.weights(plain)

    trace = run / "profile/steps3-4-rank0.json.gz"
    assert f"profile: {trace} (ui.perfetto.dev opens it)" in shown
    head, _, *rows = (run / "profile/kernels.txt").read_text().splitlines()
    assert f"profile: {head}" in shown
    assert f"profile: {rows[0]}" in shown
    assert f"profile: {rows[3]}" not in shown, "ten rows are for the file"
    assert head.startswith("steps 3 to 4 of rank 0, ")
    assert head.endswith("; without a save after step 3"), "not those before and after the window"
    found = re.findall(r"([\d.]+)%", head)
    assert len(found) == 4
    assert sum(map(float, found)) == pytest.approx(100, abs=0.5)
    rows = [re.match(r" *([\d.]+)% +([\d,]+) +[\d.]+ ms  (\S+)", row) for row in rows]
    shares = [float(row[1]) for row in rows]
    assert len(rows) == 10
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 100.5
    names = [event.get("name", "") for event in traced(trace)]
    (_, end), (begin, _) = (mark_of(trace, name) for name in ("step 3", "step 4"))
    assert begin > end + 1000, "the save between them is in neither"
    steps = [name for name in names if name.startswith("Optimizer.step#")]
    assert len(steps) == 2, "of the steps 3 and 4 alone"

    # Steps before the resumed step are left out: a part of 3 to 5, then all of 2 and 3.
    tiny.cut(run, step=4)
    for written, said in (
        ("3:6", "steps 5 to 5 of rank 0"), ("2:4", "profile: none, this start begins after step 4"),
    ):  # fmt: skip
        copy = tmp_path / written[0]
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns(".lock", "profile"))
        assert pretrain.main(pretraining(copy, **settings, profile_steps=written)) == 0
        assert said in capsys.readouterr().out
        assert (copy / "profile").exists() is (written == "3:6")
        assert tiny.losses(copy) == tiny.losses(plain)


@pytest.mark.slow
def test_rank_0_alone_writes_and_shows_what_collectives_take(pretraining, tmp_path):
    argv = pretraining(tmp_path / "run", **STEPS, profile_steps="1:3")
    done = run_two_processes("multi_gpu", "pretrain.py", argv)
    assert done.returncode == 0, done.stdout[-4000:]
    files = sorted(path.name for path in (tmp_path / "run/profile").iterdir())
    assert files == ["kernels.txt", "steps1-2-rank0.json.gz"]
    trace = tmp_path / "run/profile/steps1-2-rank0.json.gz"
    begin, end = mark_of(trace, "step 2")
    assert abs(begin - mark_of(trace, "step 1")[1]) < 1000, "one begins where the other ends"
    waits = [each["ts"] for each in traced(trace) if "DataLoader" in each.get("name", "")]
    assert any(begin < wait < end for wait in waits), "its data is waited for in it"
    # gloo ends its events in memory that the profiler frees, so the profiler must wait for them.
    collectives = [each for each in traced(trace) if each.get("name", "").startswith("gloo:")]
    last = max(collectives, key=lambda each: each["ts"])
    assert last["name"] == "gloo:barrier", "it waits for all others"
    assert all(each["ts"] + each["dur"] <= last["ts"] + last["dur"] for each in collectives)
    assert len({each["tid"] for each in collectives}) <= 2, "no turn of an Agreement, with no end"
    text = (tmp_path / "run/profile/kernels.txt").read_text()
    assert "; the first step of a start compiles and allocates, choose later ones" in text
    share = re.search(r"else collectives ([\d.]+)%", text)
    assert float(share[1]) > 0, text


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


def event(name, start, end, kind=DeviceType.CUDA, annotation=False):
    """Return a stand-in for a profiler event; times are in us."""
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(
        name=name, time_range=span, device_type=kind, self_cpu_time_total=end - start,
        is_user_annotation=annotation,
    )  # fmt: skip


def test_the_time_of_a_gpu_is_shared_out():
    """The times of overlapping streams, waits and kernels of two steps are added correctly."""
    host = DeviceType.CPU
    events = [
        event("step 1", 0, 100, host, True), event("step 2", 200, 300, host, True),
        event("step 1", 5, 95, annotation=True),  # the same mark, on the device
        event("gemm", 0, 30), event("gemm", 30, 50), event("gemm", 210, 250),
        event("ncclDevKernel_AllReduce", 40, 60), event("nccl:all_reduce", 40, 60, annotation=True),
        event("evaluation", 110, 190), event("aten::mm", 0, 100, host),
        event("enumerate(DataLoader)#_Iter", 200, 220, host, True),
    ]  # fmt: skip
    rows, where = summarize(events, on_gpu=True)
    assert rows[1:] == [
        " 45.0%         3  0.030 ms  gemm", " 10.0%         1  0.020 ms  ncclDevKernel_AllReduce",
    ]  # fmt: skip
    shares = "computes 45.0%; else collectives 5.0%, waiting for data 5.0%, for Python and"
    assert f"0.000 s with the profiler's own cost: the GPU {shares} launches 45.0%" in where
    with pytest.raises(RuntimeError, match="no kernel of the GPU"):
        summarize([one for one in events if one.device_type is host], on_gpu=True)


def test_what_overlaps_is_counted_once_and_within_the_steps():
    spans = [event("", *span) for span in [(0, 30), (41, 42), (30, 50), (40, 60), (70, 200)]]
    assert covered_us(spans, [(0, 100)]) == 90
    assert covered_us(spans, [(10, 20), (65, 75), (300, 400)]) == 15
    assert covered_us([], [(0, 100)]) == 0


def test_a_profiler_that_does_not_run_is_a_warning(pretraining, tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr("torch.profiler.profile", refuse)
    argv = pretraining(tmp_path / "run", **STEPS, profile_steps="2:4")
    assert pretrain.main(argv) == ExitCode.DONE
    assert "profile: torch's profiler does not run here: CUPTI" in capsys.readouterr().out
    assert not (tmp_path / "run/profile").exists()
