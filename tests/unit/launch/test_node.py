"""slurm/launch_node.sh outside of Slurm; tests/slurm/test_node_launcher.py tests it in Slurm."""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from launching import ROOT, quiet_environment, wait_until
from torch.distributed import DistNetworkError
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from utils.config.errors import UnfitClusterError
from utils.launch import node, verdict
from utils.launch.slurm import Allocation
from utils.launch.verdict import leave_note

LAUNCH_NODE = ROOT / "slurm/launch_node.sh"
WORKER = """
import os, signal, sys, time
from pathlib import Path
from utils.launch.script import run_script

def main():
    print("worker", os.environ.get("RANK"), os.environ["ACCELERATE_USE_CPU"], sys.argv[1:])
    if sys.argv[1] == "code":
        return int(sys.argv[2])
    if sys.argv[1] == "stop":
        signal.signal(signal.SIGTERM, lambda *_: None)
        stop = Path(os.environ["STOKER_NODE_DIR"]) / "STOP"
        draft = Path(sys.argv[2] + f".{os.getpid()}")
        draft.write_text(str(os.getpid()))
        draft.rename(sys.argv[2])
        while not stop.exists():
            time.sleep(0.05)
        print("found", stop.read_text())
        return 75

sys.exit(run_script(main))
"""


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


def environment(tmp_path: Path, **changes: str) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    fixed = {"PATH": path, "TMPDIR": str(tmp_path), "ACCELERATE_USE_CPU": "true"}
    return quiet_environment(fixed | changes)


def launch(tmp_path: Path, *command: object, script: Path = LAUNCH_NODE, **changes: str):
    return subprocess.run(
        [str(script), *[str(word) for word in command]],
        env=environment(tmp_path, **changes), cwd=tmp_path, timeout=600, check=False,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.slow
def test_the_exit_code_of_a_single_process_passes(worker, tmp_path):
    done = launch(tmp_path, worker, "code", "5", "$$", "${local_rank}")
    assert done.returncode == 5, done.stdout
    assert "worker None True ['code', '5', '$$', '${local_rank}']" in done.stdout


def start(
    tmp_path: Path, worker: Path, command: list[str] | None = None, **changes: str
) -> subprocess.Popen:
    """Launch the worker by launch_node.sh, or by `command`; wait until the worker runs."""
    process = subprocess.Popen(
        command or [str(LAUNCH_NODE), str(worker), "stop", str(tmp_path / "up")],
        env=environment(tmp_path, **changes), cwd=tmp_path,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_until((tmp_path / "up").exists, "the worker does not start")
    return process


@pytest.mark.slow
def test_sigterm_ends_all_at_once_when_another_node_ended_the_job(worker, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    process = start(tmp_path, worker, STOKER_NOTES_DIR=str(notes))
    remains = Path("/proc") / (tmp_path / "up").read_text()
    assert remains.exists()
    (notes / "verdict.txt").write_text("rank 3 on n2 was killed by SIGKILL\n")
    (notes / "exit_code").write_text("76\n")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert process.returncode == 76, output
    assert "found" not in output  # the worker was not asked to save
    # The killed worker disappears once the process that adopts orphans has reaped it.
    wait_until(lambda: not remains.exists(), "the worker is left")
    assert not list(tmp_path.glob("stoker-*"))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["launch_node.sh", "accelerate", "torchrun"])
def test_no_rank_outlives_its_launcher(worker, tmp_path, launcher):
    """SIGKILL leaves the launcher no time to end its ranks."""
    up = ("stop", str(tmp_path / "up"))
    modules = {
        "accelerate": [
            "accelerate.commands.accelerate_cli",
            "launch",
            "--cpu",
            "--num_processes=1",
        ],
        "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    }
    command = [sys.executable, "-m", *modules.get(launcher, []), str(worker), *up]
    command = command if launcher in modules else None
    process = start(tmp_path, worker, command, STOKER_NODE_DIR=str(tmp_path))
    rank = psutil.Process(int((tmp_path / "up").read_text()))
    process.kill()
    process.communicate(timeout=600)  # on a busy machine a rank may end only after its start
    wait_until(lambda: not rank.is_running() or rank.status() == "zombie", "a rank is left")


@pytest.mark.slow
def test_a_stop_before_the_start_starts_nothing(worker, tmp_path):
    """The signal comes as soon as the node's directory exists. The directory is removed."""
    made = f"""
import os, signal, sys, tempfile
from utils.launch import node
make = tempfile.mkdtemp
def make_and_signal(**where):
    directory = make(**where)
    os.kill(os.getpid(), signal.SIGUSR1)
    return directory
tempfile.mkdtemp = make_and_signal
sys.exit(node.main({[str(worker), "stop", str(tmp_path / "up")]}))
"""
    done = launch(tmp_path, "-c", made, script=Path(sys.executable), PYTHONPATH=str(ROOT))
    assert done.returncode == 75, done.stdout
    assert "before the processes were started" in done.stdout
    assert not [*tmp_path.glob("up"), *tmp_path.glob("stoker-*")]


@pytest.mark.slow
def test_ctrl_c_while_the_report_of_a_failed_run_is_written_skips_it(tmp_path):
    (tmp_path / node.RUN_STARTED).write_text(str(tmp_path))
    (tmp_path / "STAGE").write_text("TRAINING")
    made = f"""
import os, signal, sys
from pathlib import Path
from utils.launch import node
def run(_command, signals):
    signals.directory, signals.started = Path({str(tmp_path)!r}), True
    return node.Verdict("rank 0 failed", 1)
node.run, node.write_report = run, lambda _run: os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
sys.exit(node.main([]))
"""
    done = launch(tmp_path, "-c", made, script=Path(sys.executable), PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout) == (1, "rank 0 failed\n")


def test_what_is_no_file_is_not_launched(tmp_path):
    done = launch(tmp_path)
    assert done.returncode == 2, done.stdout
    assert "nothing is no file in" in done.stdout
    assert "Traceback" not in done.stdout
    assert not list(tmp_path.glob("stoker-*"))


@pytest.mark.slow
def test_strategy_cpu_means_the_cpu_and_a_refusal_is_the_last_word(tmp_path):
    """Two processes refuse the same settings with one message, without output of torchrun."""
    done = launch(
        tmp_path, "pretrain.py", "--epochs", "3", "--strategy", "cpu",
        ACCELERATE_USE_CPU="", ACCELERATE_CONFIG="",
        STOKER_PROCESSES_PER_NODE="2", CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    assert done.returncode == 2, done.stdout
    assert "launch: 2 process(es), CPU only, on each of 1 node(s) (" in done.stdout
    assert "accelerate_configs/cpu.yaml, by strategy cpu (--strategy)" in done.stdout
    assert done.stdout.count("configuration error:\n") == 1
    assert "unknown setting --epochs: here it is --num_train_epochs" in done.stdout.splitlines()[-1]
    assert "Traceback" not in done.stdout
    assert "torch.distributed" not in done.stdout


def test_cores_are_shared_equally(monkeypatch):
    names = ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "OMP_NUM_THREADS")
    cases = {("16", "64", ""): "4", ("", "64", ""): "16", ("2", "", ""): "1", ("2", "", "7"): None}
    for given, threads in cases.items():
        for name, value in zip(names, given, strict=True):
            monkeypatch.setenv(name, value)
        added = node.process_environment(Allocation(("n1", "n2"), 0, 4, None, "n1", 20000))
        assert added.get("OMP_NUM_THREADS") == threads
        assert added["ACCELERATE_USE_CPU"] == "true"


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


LOST_STORE = caused(RendezvousConnectionError("see inner"), DistNetworkError("Broken pipe"))
TAKEN_PORT = caused(RendezvousConnectionError("see inner"), DistNetworkError("name: EADDRINUSE"))


@pytest.mark.parametrize(
    ("error", "nodes", "code", "text"),
    [
        (LOST_STORE, 2, 76, "n2 lost the launcher of another node: "),
        (DistNetworkError("Broken pipe"), 2, 76, "n2 lost the launcher of another node: "),
        (ConnectionResetError("reset"), 2, 76, "n2 lost the launcher of another node: "),
        (LOST_STORE, 1, 69, "n2: accelerate launch: Broken pipe"),
        (TAKEN_PORT, 2, 76, "n2: accelerate launch: name: EADDRINUSE"),
        (ImportError("no such library"), 2, 69, "n2: accelerate launch: no such library"),
        (ValueError("no such option"), 2, 69, "n2: accelerate launch: no such option"),
    ],
)
def test_a_lost_launcher_is_no_unfit_cluster(monkeypatch, tmp_path, error, nodes, code, text):
    """The nodes met before the start. Only a fault of this node's launch counts as unfit."""

    def fail(_arguments: object) -> None:
        raise error

    monkeypatch.setattr("accelerate.commands.launch.launch_command", fail)
    monkeypatch.setattr(verdict, "WAIT_FOR_CAUSES_S", 0.1)
    monkeypatch.setenv("STOKER_NOTES_DIR", str(tmp_path))
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    arguments, signals = argparse.Namespace(num_machines=nodes), SimpleNamespace(asked=False)
    try:
        found = node.run_processes(arguments, signals)
    except UnfitClusterError as refusal:
        found = verdict.Verdict(refusal.problems[0], refusal.exit_code)
    assert (found.exit_code, found.text.startswith(text)) == (code, True), found
    leave_note("killed", 76, "SIGSEGV", rank=3)
    if "lost" in text:
        assert node.run_processes(arguments, signals).text == "rank 3 on n2 was killed by SIGSEGV"


CRASHING = """
import os, signal, sys
from pathlib import Path
from utils.launch.restart import note_restarts, recovery_s
from utils.launch.script import run_script
from utils.launch.verdict import mark_run_started

def main():
    number, steps = int(os.environ.get("STOKER_RESTART_IN_JOB", "0")), sys.argv[1].split(",")
    first = os.environ["RANK"] == "0"
    if first:
        note_restarts(2, int(steps[number]))
        mark_run_started(Path("run"))
    if first and number < len(steps) - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if first and recovery_s() is not None:
        print("recovered after restart", number)
    return 0

sys.exit(run_script(main))
"""


@pytest.mark.slow
def test_ranks_that_are_lost_start_again_once_from_each_checkpoint(tmp_path):
    script = tmp_path / "crashing.py"
    script.write_text(CRASHING)
    ranks = {"STOKER_PROCESSES_PER_NODE": "2"}
    done = launch(tmp_path, script, "0,10,20", **ranks)
    assert done.returncode == 0, done.stdout
    for number in (1, 2):
        assert f"killed by SIGKILL; restart {number} of at most 2 inside the job" in done.stdout
    assert "recovered after restart 2" in done.stdout
    done = launch(tmp_path, script, "10,10,10", **ranks)
    assert done.returncode == 76, done.stdout
    assert done.stdout.count("inside the job") == 1
    assert done.stdout.splitlines()[-1].endswith("was killed by SIGKILL")
