"""Runs in this process with a provocation at a chosen event, and checks of their results."""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tiny
from transformers import TrainerCallback

import pretrain
from utils.config.errors import ExitCode
from utils.training.callbacks import Callbacks

# Logs, evaluations and saves at different steps; two micro-batches per step; dropout, so that
# random numbers matter.
STEPS = 8
RUN = {
    "max_steps": STEPS, "logging_steps": 3, "eval_strategy": "steps", "eval_steps": 2,
    "save_steps": 4, "per_device_eval_batch_size": 4, "metric_for_best_model": "eval_first_loss",
    "load_best_model_at_end": "true", "save_best": "false", "lr_scheduler_type": "cosine",
}  # fmt: skip


class Provoke(TrainerCallback):
    """A callback that acts once: at the n-th event of a given kind within a given step."""

    def __init__(self, event: str, step: int, action: Callable[["Provoke"], None], nth: int = 1):
        self.step, self.action, self.nth = step, action, nth
        self.callbacks: Callbacks | None = None  # set when the run has made its callbacks
        setattr(self, event, self._count)

    def _count(self, args, state, _control, **_kwargs):
        if state.global_step == self.step:
            self.nth -= 1
            if self.nth == 0:
                self.output_dir = Path(args.output_dir)
                self.action(self)


def touch(name: str) -> Callable[[Provoke], None]:
    return lambda provoke: (provoke.output_dir / name).touch()


def send(*signals: int) -> Callable[[Provoke], None]:
    def action(_provoke: Provoke) -> None:
        for number in signals:
            os.kill(os.getpid(), number)

    return action


def let_the_time_run_out(provoke: Provoke) -> None:
    provoke.callbacks.stop.deadline.ends_at = time.monotonic() + 3


@pytest.fixture
def start(pretraining, workspace, monkeypatch):
    """Return a function that starts a run in this process, with or without a provocation."""
    import utils.run.finish as reporting

    real = reporting.run_callbacks

    monkeypatch.setattr("utils.callbacks.stop.LOOK_INTERVAL_S", 0)

    def start(run: Path, provoke: Provoke | None = None, **changes: object) -> int:
        def run_callbacks(*args):
            callbacks = real(*args)
            if provoke is not None:
                provoke.callbacks, order = callbacks, [provoke, *callbacks.in_order()]
                callbacks.in_order = lambda: order
            return callbacks

        monkeypatch.setattr(reporting, "run_callbacks", run_callbacks)
        held_out = workspace / "heldout"
        splits = {"eval_data": [f"first={held_out}", f"second={held_out}"]}
        model = tiny.make_model_config(workspace / "dropout.json", attention_dropout=0.1)
        return pretrain.main(pretraining(run, **RUN | splits | {"model_config": model} | changes))

    return start


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("uninterrupted")


@pytest.fixture
def uninterrupted(kept, start):
    """Return a function for the directory of the uninterrupted run with given settings.

    Each such run is made once.
    """

    def made(**changes: object) -> Path:
        run = kept / ("-".join(f"{name}={value}" for name, value in changes.items()) or "plain")
        if not run.exists():
            assert start(run, **changes) == ExitCode.DONE
        return run

    return made


def assert_the_same(
    run: Path, whole: Path, folders: Sequence[str] = ("final", f"checkpoint-{STEPS}")
) -> None:
    assert tiny.losses(run) == tiny.losses(whole)
    for split in ("first", "second"):
        assert tiny.evaluations(run, split) == tiny.evaluations(whole, split)
    for name in folders:
        weights = f"{name}/model.safetensors"
        assert (run / weights).read_bytes() == (whole / weights).read_bytes()


def assert_the_same_end(run: Path, whole: Path) -> None:
    """Compare two runs, including the history in their last checkpoints."""
    assert_the_same(run, whole)
    ends = [trainer_state(folder, STEPS) for folder in (run, whole)]
    assert ends[0]["best_metric"] == ends[1]["best_metric"]
    best = [Path(end["best_model_checkpoint"] or "none").name for end in ends]
    assert best[0] == best[1]
    figures = [
        [
            {key: entry[key] for key in entry if key in ("step", "loss") or key.endswith("_loss")}
            for entry in end["log_history"]
        ]
        for end in ends
    ]
    assert figures[0] == figures[1]
    # The mean loss over all steps is in the last line of a finished run.
    totals = [tiny.figures(each, "train_loss", "total_flos")[-2:].tolist() for each in (run, whole)]
    assert totals[0] == totals[1] != []


def trainer_state(run: Path, step: int) -> dict:
    return json.loads((run / f"checkpoint-{step}" / "trainer_state.json").read_text())
