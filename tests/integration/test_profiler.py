"""--profile_steps: a trace and a table of some steps, and no change of anything else."""

import gzip
import json
import re
from types import SimpleNamespace

import pytest
import tiny
from launching import run_two_processes
from torch.autograd import DeviceType

import pretrain
from utils.callbacks.profiler import covered, summarize, table
from utils.config.errors import ExitCode

STEPS = {"max_steps": 6, "logging_steps": 1, "learning_rate": 1e-3, "global_batch_size": 4}


@pytest.mark.slow
def test_the_window_is_traced_and_training_is_the_same(pretraining, tmp_path, capsys):
    plain, run = tmp_path / "plain", tmp_path / "run"
    settings = STEPS | {"per_device_train_batch_size": 2}
    assert pretrain.main(pretraining(plain, **settings)) == 0
    assert not (plain / "profile").exists()
    capsys.readouterr()
    assert pretrain.main(pretraining(run, **settings, profile_steps="3:5", save_steps=3)) == 0
    shown = capsys.readouterr().out
    assert tiny.losses(run) == tiny.losses(plain)
    assert tiny.weights(run) == tiny.weights(plain)

    trace = run / "profile/steps3-4-rank0.json.gz"
    assert f"profile: {trace} (ui.perfetto.dev opens it)" in shown
    text = (run / "profile/kernels.txt").read_text()
    assert text in shown + "\n"
    assert re.match(r"steps 3 to 4, [\d.]+ s with the profiler's own cost, with a save\n", text)
    rows = re.findall(r"^ +([\d.]+)% +([\d,]+) +[\d.]+ ms  (\S+)", text, re.MULTILINE)
    assert len(rows) == 10
    shares = [float(share) for share, *_ in rows]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) <= 100.5
    assert re.search(r"the CPU outside of torch's operators: \d+\.\d% of the time; waits", text)
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = [event for event in events if event.get("name", "").startswith("Optimizer.step#")]
    assert len(steps) == 2, "of the steps 3 and 4 alone"

    # The window is behind a start that resumes after its first step.
    trace.unlink()
    tiny.cut(run, step=3)
    assert pretrain.main(pretraining(run, **settings, profile_steps="3:5", save_steps=3)) == 0
    assert "profile: none, this start begins after step 3" in capsys.readouterr().out
    assert not trace.exists()


@pytest.mark.slow
def test_rank_0_alone_writes_and_shows_what_collectives_take(pretraining, tmp_path):
    argv = pretraining(tmp_path / "run", **STEPS, profile_steps=1)
    done = run_two_processes("multi_gpu", "pretrain.py", argv)
    assert done.returncode == 0, done.stdout[-4000:]
    files = sorted(path.name for path in (tmp_path / "run/profile").iterdir())
    assert files == ["kernels.txt", "steps1-1-rank0.json.gz"]
    text = (tmp_path / "run/profile/kernels.txt").read_text()
    assert "the first step of a start and what it compiles among them" in text
    share = re.search(r"collectives ([\d.]+)% of all operators' time", text)
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


def test_kernels_of_a_device_are_summed_over_streams():
    """Stand-ins for a GPU's events: two streams overlap for 10 us, and 40 us nothing runs."""

    def kernel(name, start, end, kind=DeviceType.CUDA, annotation=False):
        span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        return SimpleNamespace(
            name=name, time_range=span, device_type=kind, self_cpu_time_total=end - start,
            is_user_annotation=annotation,
        )  # fmt: skip

    events = [
        kernel("gemm", 0, 30), kernel("gemm", 30, 50), kernel("ncclDevKernel_AllReduce", 40, 60),
        kernel("aten::mm", 0, 100, DeviceType.CPU), kernel("step", 0, 100, annotation=True),
    ]  # fmt: skip
    shares, busy_us = summarize(events, on_gpu=True)
    assert [(s.name, s.calls, s.time_us) for s in shares] == [
        ("gemm", 2, 50), ("ncclDevKernel_AllReduce", 1, 20),
    ]  # fmt: skip
    assert busy_us == 60 == covered([(0, 30), (30, 50), (40, 60), (41, 42)])
    text = table(shares, busy_us, 100e-6, 10e-6, on_gpu=True)
    assert "   71.4%         2    0.025 ms  gemm" in text
    assert "the device: idle 40.0% of the time; waits for data 10.0%; collectives 28.6%" in text


def test_a_profiler_that_does_not_run_is_a_warning(pretraining, tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr("torch.profiler.profile", refuse)
    argv = pretraining(tmp_path / "run", **STEPS, profile_steps="2:4")
    assert pretrain.main(argv) == ExitCode.DONE
    assert "profile: torch's profiler does not run here: CUPTI" in capsys.readouterr().out
    assert not (tmp_path / "run/profile").exists()
