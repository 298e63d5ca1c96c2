"""Ctrl-C on a terminal: the first saves and ends, the second ends at once, and the run resumes."""

import os
import re
import sys
import time
from pathlib import Path

import pytest
import tiny
from launching import (
    ROOT,
    free_port,
    launch_options,
    on_terminal,
    press_ctrl_c,
    quiet_environment,
    run_processes,
)

from utils.host.run_lock import BY_USER
from utils.launch.signals import SAME_PRESS_S, SAVING, Stage
from utils.observe.run_state import read_status

pytestmark = pytest.mark.slow

ACCELERATE = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [*ACCELERATE, *launch_options("cpu", 2, free_port())],
    "launch_node.sh": [str(ROOT / "slurm/launch_node.sh")],
}


@pytest.fixture
def held(tmp_path, pretraining):
    """Return a function that starts a run on a terminal, held after a step, and presses Ctrl-C."""
    hold, run = tmp_path / "hold", tmp_path / "run"
    hold.mkdir()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = quiet_environment({
        "STOKER_TEST_HOLD": str(hold), "ACCELERATE_USE_CPU": "true", "TERM": "dumb", "PATH": path,
        "STOKER_PROCESSES_PER_NODE": "2",
        "STOKER_TEST_STEP_DELAY_S": "0.6",  # a rank looks for requests once a second
    })  # fmt: skip

    def start(launcher: str, step: int, *events: tuple[str, object]) -> tuple[int, str]:
        (hold / str(step)).touch()

        def press_again(terminal: int) -> None:
            time.sleep(2 * SAME_PRESS_S)
            press_ctrl_c(terminal)

        do = {
            "press": press_ctrl_c,
            "press again": press_again,
            "release": lambda _terminal: (hold / str(step)).unlink(),
        }
        command = [*LAUNCHERS[launcher], str(ROOT / "pretrain.py"), *pretraining(run)]
        return on_terminal(command, environment, *((text, do[what]) for text, what in events))

    return start, run


PRESS, AGAIN, RELEASE = ("step 2/6", "press"), (SAVING, "press again"), (SAVING, "release")


def test_ctrl_c_before_the_first_step_ends_at_once(held):
    start, _ = held
    code, shown = start("python", 0, ("batch: ", "press"))
    assert (code, shown.count("Traceback")) == (130, 0), shown
    assert f"{BY_USER}, {Stage.STARTING.value}" in shown


@pytest.mark.parametrize("launcher", ["python", "launch_node.sh"])
def test_a_second_ctrl_c_ends_at_once(held, launcher):
    """The launcher of a node has two ranks, which are held."""
    start, run = held
    code, shown = start(launcher, 2, PRESS, AGAIN)
    assert (code, shown.count("Traceback")) == (130, 0), shown
    assert shown.rstrip().endswith(f"{BY_USER}, {Stage.TRAINING.value}")
    status = read_status(run, {})
    assert (status.state, status.error) == ("stopped", None)
    assert status.because == f"{BY_USER} at step 2 before a save"
    assert not list(run.glob("checkpoint-*"))


# torchrun's agent ends with a traceback, after it has sent SIGINT to the ranks and waited for them.
@pytest.mark.parametrize(("launcher", "exit_code"), [("torchrun", 1), ("launch_node.sh", 75)])
def test_ctrl_c_saves_and_the_run_resumes(held, pretraining, tmp_path, launcher, exit_code):
    start, run = held
    code, shown = start(launcher, 2, PRESS, RELEASE)
    ours = shown.partition("Traceback")[0]
    assert code == exit_code, shown
    assert ours == shown or launcher == "torchrun"
    last = shown.rstrip().splitlines()[-1]
    assert launcher != "torchrun" or last == "stopped with a checkpoint; the same command resumes"
    step = re.search(rf"stopped at step (\d) of 6 with {run}/checkpoint-\1", ours)
    assert step, shown
    status = read_status(run, {})
    assert status.state == "stopped"
    assert status.because.startswith(f"at step {step[1]} with a checkpoint: Ctrl-C")
    whole = tmp_path / "whole"
    for each in (run, whole):
        run_processes("cpu", "pretrain.py", pretraining(each)).succeeded()
    assert tiny.starts(run)[-1]["resumed_from"] == f"{run}/checkpoint-{step[1]}"
    tiny.assert_same_run(run, whole)
