"""The check of a resume on other nodes: which logs are compared, and what may differ."""

import json
import logging
import math
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState

from utils.callbacks.resume_check import ResumeCheck, difference, logs_after
from utils.config.errors import UnfitClusterError

AT = "2026-11-27T10:{:02}:00+00:00"
UNIX = 1795773600.0  # of the hour of AT


def start(minute: int, host: str, step: int = 0, gpu: str = "", **more):
    """Return an element of `starts` in provenance.json."""
    launch = {"world_size": 1, "strategy": "single", "devices": ["H100"], "hosts": [host]}
    launch |= {"gpus": [[host, gpu]]} | more.pop("launch", {})
    resumed = f"/runs/a/checkpoint-{step}" if step else None
    return {"time": AT.format(minute), "resumed_from": resumed, "launch": launch} | more


def begun(minute: int, step: int = 0):
    event = "resumed" if step else "started"
    return {"event": event, "step": step, "time": UNIX + 60 * minute + 5}


def train(step: int, loss: float, norm: float = 1.0):
    return {"event": "train", "step": step, "loss": loss, "grad_norm": norm, "time": UNIX}


# Ten steps on n1, five of them after the checkpoint of step 5; losses change by 0.1.
LOSSES = {step: 5.0 - 0.1 * step for step in range(1, 11)}
ON_N1 = [begun(0), *(train(step, loss, 1 + 0.01 * step) for step, loss in LOSSES.items())]


class Resumed:
    """A start that resumes at step 5 after the starts and lines of a run."""

    def __init__(self, folder, starts, lines, count=2, deterministic=False):
        self.folder = folder
        content = {"format": 1, "run_id": "0" * 32, "starts": starts}
        (folder / "provenance.json").write_text(json.dumps(content))
        self.saves = []
        checkpoints = SimpleNamespace(
            finish=lambda: None, saves=self.saves, directory=lambda step: folder / f"ckpt-{step}"
        )
        journal = SimpleNamespace(
            path=folder / "metrics.jsonl", earlier=lines, checkpoints=checkpoints
        )
        self.check = ResumeCheck(count, deterministic, journal)
        self.state = TrainerState(global_step=5)
        self.check.on_train_begin(None, self.state, TrainerControl())

    def log(self, step: int, **logs: float) -> None:
        self.state.global_step = step
        self.check.on_log(None, self.state, TrainerControl(), logs=logs)


@pytest.fixture(autouse=True)
def ledger(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("STOKER_LEDGER", str(tmp_path / "nodes.jsonl"))
    caplog.set_level(logging.INFO, logger="utils.callbacks.resume_check")
    return tmp_path / "nodes.jsonl"


def test_the_first_two_logs_are_compared_and_equal_ones_are_said(tmp_path, caplog, ledger):
    run = Resumed(tmp_path, [start(0, "n1"), start(20, "n2", 5)], ON_N1)
    assert run.check.due == [6, 7]
    run.log(6, eval_loss=99.0)
    run.log(6, loss=LOSSES[6], grad_norm=1.06)
    run.log(7, loss=1.09 * LOSSES[7], grad_norm=1.6)
    run.log(8, loss=99.0, grad_norm=99.0)
    said = [record.message for record in caplog.records]
    assert said == [
        f"resume check: step {step} is as on n1. The run repeats this step anyway"
        for step in (6, 7)
    ]
    assert not ledger.exists()


@pytest.mark.parametrize(
    "logs", [{"loss": 1.12 * LOSSES[6]}, {"loss": LOSSES[6], "grad_norm": 3.3}]
)
def test_a_difference_ends_the_run_names_both_nodes_and_sets_its_saves_aside(
    tmp_path, logs, ledger, caplog
):
    earlier, now = start(0, "n1", gpu="GPU-1"), start(20, "n2", 5, gpu="GPU-2")
    run = Resumed(tmp_path, [earlier, now], ON_N1)
    run.saves.append(SimpleNamespace(step=6))
    (tmp_path / "ckpt-6").mkdir()
    with pytest.raises(UnfitClusterError) as refused:
        run.log(6, **logs)
    assert refused.value.exit_code == 69
    said = refused.value.problems[0]
    for words in (
        "step 6: ",
        "first on n1, then on n2. One",
        "--exclude=n1,n2. If",
        "checkpoint-5. --verify",
    ):
        assert words in said, said
    faults = [json.loads(line) for line in ledger.read_text().splitlines() if line]
    assert [(one["node"], one["gpu"], one["kind"]) for one in faults] == [
        ("n1", "GPU-1", "mismatch"), ("n2", "GPU-2", "mismatch"),
    ]  # fmt: skip
    assert not (tmp_path / "ckpt-6").exists()
    assert "ckpt-6 may be wrong: set aside as damaged.ckpt-6" in caplog.text


def test_a_third_node_that_agrees_with_the_second_one_tells_that_the_first_was_wrong(
    tmp_path, ledger
):
    starts = [start(0, "n1"), start(20, "n2", 5), start(40, "n3", 5)]
    lines = [*ON_N1, begun(20, 5), train(6, 9.0)]
    with pytest.raises(UnfitClusterError) as refused:
        Resumed(tmp_path, starts, lines).log(6, loss=9.01)
    said = refused.value.problems[0]
    assert "first on n1, then on n3. n2 computed it as n3 does, so n1 was wrong, and" in said
    assert "checkpoint-5 may be: resume from an earlier checkpoint" in said
    (fault,) = [json.loads(line) for line in ledger.read_text().splitlines() if line]
    assert fault["node"] == "n1"
    with pytest.raises(UnfitClusterError, match="--exclude=n1,n3"):
        Resumed(tmp_path, starts, lines).log(6, loss=2.0)  # all three differ


def test_full_determinism_compares_bits_unless_the_processors_differ(tmp_path, caplog):
    near = LOSSES[6] + 1e-15
    same = [start(0, "n1"), start(20, "n2", 5)]
    with pytest.raises(UnfitClusterError, match="step 6"):
        Resumed(tmp_path, same, ON_N1, deterministic=True).log(6, loss=near)
    others = [
        {"launch": {"devices": ["A100"]}}, {"launch": {"cpu": "another"}},
        {"launch": {"world_size": 2}}, {"altered": ["versions"]},
    ]  # fmt: skip
    for other in others:
        starts = [start(0, "n1"), start(20, "n2", 5, **other)]
        Resumed(tmp_path, starts, ON_N1, deterministic=True).log(6, loss=near)
    assert caplog.text.count("step 6 is as on n1") == len(others)


@pytest.mark.parametrize(
    ("starts", "lines", "said"),
    [
        ([start(0, "n1"), start(20, "n1", 5)], ON_N1, ""),  # the same node
        ([start(0, "n1"), start(20, "n2", 5)], ON_N1[:6], ""),  # it stopped with a checkpoint
        ([start(0, "n1"), start(20, "n2", 5, altered=["max_grad_norm", "versions"])], ON_N1,
         "left out, changed: max_grad_norm"),
        ([start(0, "n1"), start(9, "n3", 5, altered=["seed"]), start(20, "n2", 5)], ON_N1,
         "left out, changed: seed"),  # accepted by a start that logged nothing
        ([start(0, "n1"), {"time": None, "launch": {}}], ON_N1, "provenance.json lacks"),
        # A checkpoint of another directory: the second start is in its journal alone.
        ([start(0, "n1"), start(20, "n2", 5)],
         [*ON_N1[:6], begun(9, 5), train(6, 4.0)], ""),
        ([start(0, "n1"), start(20, "n2", 5)], ON_N1[1:], ""),  # the journal lost its begin
        # A later start went back to an earlier checkpoint.
        ([start(0, "n1"), start(9, "n3", 3), start(20, "n2", 5)],
         [*ON_N1, begun(9, 3), train(4, 1.0), train(5, 1.0)], ""),
        ([start(0, "n1"), start(9, "n3"), start(20, "n2", 5)], [*ON_N1, begun(9)], ""),
    ],
)  # fmt: skip
def test_nothing_is_compared_without_logs_of_the_same_training(
    tmp_path, starts, lines, said, caplog
):
    run = Resumed(tmp_path, starts, lines)
    assert run.check.due == []
    assert (said in caplog.text) if said else not caplog.records
    run.log(6, loss=99.0, grad_norm=99.0)


def test_the_nodes_of_the_checkpoint_are_the_reference(tmp_path, caplog):
    """n2 logged another loss at step 6 and ended: it is refused again; n3 is compared with n1."""
    lines = [*ON_N1, begun(9, 5), train(6, 9.0)]
    starts = [start(0, "n1"), start(9, "n2", 5)]
    Resumed(tmp_path, [*starts, start(20, "n3", 5)], lines).log(6, loss=LOSSES[6])
    assert "step 6 is as on n1." in caplog.messages[-1]
    for host in ("n2", "n3"):
        with pytest.raises(UnfitClusterError, match=f"first on n1, then on {host}"):
            Resumed(tmp_path, [*starts, start(20, host, 5)], lines).log(6, loss=9.0)


def test_another_gpu_of_the_node_is_another_place_and_zero_steps_turn_the_check_off(tmp_path):
    starts = [start(0, "n1", gpu="GPU-1"), start(20, "n1", 5, gpu="GPU-2")]
    assert Resumed(tmp_path, starts, ON_N1).check.due == [6, 7]
    assert Resumed(tmp_path, starts, ON_N1, count=9).check.due == [6, 7, 8, 9, 10]
    assert Resumed(tmp_path, starts, ON_N1, count=0).check.due == []


def test_how_far_figures_may_differ():
    old = {"loss": 2.0, "grad_norm": 1.0}
    assert difference(old, {"loss": 2.2, "grad_norm": 0.34}, exact=False) == ""
    assert difference(old, {"grad_norm": 2.99}, exact=False) == ""
    assert difference(old, {"loss": 1.79}, exact=False) == "loss 2.0 and 1.79"
    assert difference(old, {"grad_norm": 3.01}, exact=False) == "grad_norm 1.0 and 3.01"
    assert difference({"loss": 0.01}, {"loss": 0.029}, exact=False) == "", "rounding of small ones"
    assert difference({"loss": 0.01}, {"loss": 0.031}, exact=False) == "loss 0.01 and 0.031"
    assert difference(old, {"loss": 2.0000000000000004}, exact=True).startswith("loss")
    assert difference(old, {"loss": math.nan}, exact=False) == "loss 2.0 and nan"
    assert difference({"loss": math.nan}, {"loss": math.nan}, exact=True) == ""
    for norms in ((1.0, math.inf), (math.inf, 1.0), (math.inf, math.inf)):
        then, now = ({"loss": 2.0, "grad_norm": norm} for norm in norms)
        assert difference(then, now, exact=False) == "", "a scaler of fp16 skips the step"
    assert difference(old, old, exact=True) == difference(old, {}, exact=True) == ""


def test_the_first_start_that_logged_steps_after_the_checkpoint_is_taken():
    starts = [start(0, "n1"), start(9, "n2", 5)]
    first, logs = logs_after(5, [*ON_N1, begun(9, 5), train(6, 4.0), train(11, 4.0)], starts)
    assert (first, {step: line["loss"] for step, line in logs.items()}) == (
        0, {step: LOSSES[step] for step in range(6, 11)},
    )  # fmt: skip
    # A start that only the journal knows trained otherwise, in the same minute for the record.
    first, logs = logs_after(5, [*ON_N1[:7], begun(9, 5), train(6, 4.0), train(7, 4.0)], starts[:1])
    assert (first, {step: line["loss"] for step, line in logs.items()}) == (0, {6: LOSSES[6]})
    first, logs = logs_after(5, [*ON_N1[:6], begun(9, 5), train(6, 4.0)], starts)
    assert (first, [*logs]) == (1, [6])
