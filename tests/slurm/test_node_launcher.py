"""slurm/launch_node.sh and the other ways to start ranks, as tasks of a real Slurm."""

import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import ROOT, processes_of, wait_until
from slurm_cluster import SlurmCluster
from training_jobs import job_environment

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("idle")]

NODE = "slurm/launch_node.sh"
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1")
# Writes its facts into a file with its rank's name, then does what its first argument says.
WORKER = """
import json, os, signal, sys, time
from pathlib import Path
from utils.launch.script import configure_environment, run_script

folder, action, *rest = Path(sys.argv[1]), *sys.argv[2:]
NAMES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE",
         "STOKER_NODE_DIR", "OMP_NUM_THREADS", "TRITON_CACHE_DIR",
         "HF_HUB_OFFLINE", "SLURMD_NODENAME")

def main():
    configure_environment()
    rank = int(os.environ.get("RANK", "0"))
    said = {name: os.environ.get(name) for name in NAMES} | {"rest": rest}
    if action in ("reduce", "lose launcher in a collective"):
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        said["sum"] = total.item()
    if action == "reduce":
        dist.destroy_process_group()
    draft = folder / f".{rank}"
    draft.write_text(json.dumps(said))
    draft.rename(folder / f"{rank}.json")
    mine = rest and rest[0] == str(rank)
    if action == "raise" and mine:
        raise KeyError("no such column")
    if action == "kill" and mine:
        os.kill(os.getpid(), signal.SIGKILL)
    if action in ("raise", "kill"):
        while len(list(folder.glob("*.json"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.1)
        time.sleep(1)
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4242")
    if action.startswith("lose launcher"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a rank that trains survives it as well
        while len(list(folder.glob("*.json"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.1)
        if rest == [os.environ["SLURMD_NODENAME"]] and os.environ["LOCAL_RANK"] == "0":
            os.kill(os.getppid(), signal.SIGKILL)
        while True:
            time.sleep(0.1)
            if action != "lose launcher":
                dist.all_reduce(total)
    if action == "stop":
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        while not (Path(os.environ["STOKER_NODE_DIR"]) / "STOP").exists():
            time.sleep(0.05)
        return 75
    return 0

sys.exit(run_script(main))
"""


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


def environment(**changes: str) -> dict[str, str]:
    """Return the variables that a job on CPUs exports, without those of launch_node.sh."""
    chosen = job_environment(changes)
    for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE"):
        del chosen[name]
    return {name: value for name, value in chosen.items() if value != "unset"}


@dataclass(frozen=True)
class End:
    """The end of a step: its exit code and the verdict, as slurm/training_job.sh reads them.

    srun_code: the exit code of srun itself, the largest code of its tasks.
    """

    code: int
    srun_code: int
    verdict: str
    output: str


def srun(slurm: SlurmCluster, folder: Path, *command: object, **changes: str) -> End:
    notes = Path(tempfile.mkdtemp(prefix="notes-", dir=folder))
    words = [str(word) for word in command]
    env = environment(STOKER_NOTES_DIR=str(notes), **changes)
    done = slurm.run("srun", *words, env=env, cwd=ROOT, check=False)
    verdict, code = notes / "verdict.txt", notes / "exit_code"
    return End(
        int(code.read_text()) if code.exists() else done.returncode,
        done.returncode,
        verdict.read_text() if verdict.exists() else "",
        done.stdout,
    )


def ranks(folder: Path) -> dict[int, dict]:
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_two_nodes_of_two_processes_are_four_ranks(slurm, worker, tmp_path):
    done = srun(
        slurm, tmp_path, *TWO_NODES, "--gres=gpu:2", NODE, worker, tmp_path, "reduce", "a\nb", "$$"
    )
    assert done.code == 0, done.output
    found = ranks(tmp_path)
    assert sorted(found) == [0, 1, 2, 3]
    assert {said["sum"] for said in found.values()} == {4.0}
    assert all(said["rest"] == ["a\nb", "$$"] for said in found.values())
    assert sorted(said["SLURMD_NODENAME"] for said in found.values()) == ["n1", "n1", "n2", "n2"]
    assert {said["HF_HUB_OFFLINE"] for said in found.values()} == {"1"}
    assert {said["OMP_NUM_THREADS"] for said in found.values()} == {"1"}
    directories = {said["STOKER_NODE_DIR"] for said in found.values()}
    assert len(directories) == 2
    assert all(said["TRITON_CACHE_DIR"].startswith(tuple(directories)) for said in found.values())
    assert not any(Path(directory).exists() for directory in directories)  # deleted at the end
    launched = "launch: 2 process(es), CPU only, on each of 2 node(s) (n1, n2): accelerate_configs/"
    assert f"{launched}cpu.yaml" in done.output


UNSET = dict.fromkeys(["ACCELERATE_USE_CPU", "STOKER_PROCESSES_PER_NODE"], "unset")


def test_devices_that_torch_does_not_see_are_refused_for_both_nodes(slurm, worker, tmp_path):
    command = (*TWO_NODES, "--gpus-per-node=2", NODE, worker, tmp_path, "reduce")
    done = srun(slurm, tmp_path, *command, CUDA_VISIBLE_DEVICES="unset", **UNSET)
    assert done.code == 69, done.output
    assert done.srun_code == 69, (
        done.output
    )  # both codes are 69: neither task was ended because of the other
    for node in ("n1", "n2"):
        message = rf"{node}: the job has 2 GPUs on this node, one process each, but torch sees 0"
        assert re.search(message, done.verdict), done.verdict
    assert not ranks(tmp_path)


def test_a_wrong_number_of_tasks_is_refused(slurm, worker, tmp_path):
    done = srun(slurm, tmp_path, "--nodes=1", "--ntasks=2", NODE, worker, tmp_path, "reduce")
    assert done.code == 2, done.output
    assert "there are 2 tasks on 1 node(s)" in done.verdict
    assert not ranks(tmp_path)


def test_a_node_that_never_comes_is_named(slurm, worker, tmp_path):
    late = f'[ "$SLURM_NODEID" = 1 ] && exec sleep 3600; exec {NODE} "$@"'
    done = srun(
        slurm, tmp_path, *TWO_NODES, "bash", "-c", late, "bash", worker, tmp_path, "reduce",
        STOKER_MEET_TIMEOUT_S="3",
    )  # fmt: skip
    assert done.code == 69, done.output
    assert re.search(r"n2 did not come to 127\.0\.0\.1:\d+ within 3 s, where n1", done.verdict)
    done = srun(
        slurm, tmp_path, *TWO_NODES, NODE, worker, tmp_path, "x",
        STOKER_MAIN_ADDRESS="no.such.host", STOKER_MEET_TIMEOUT_S="3",
    )  # fmt: skip
    assert done.code == 69, done.output
    assert re.search(r"no\.such\.host:\d+.* within 3 s.*Set STOKER_MAIN_ADDRESS", done.verdict)


@pytest.mark.parametrize(
    ("action", "code", "cause"),
    [
        ("raise", 1, r"rank 3 on n[12] failed: KeyError: 'no such column'"),
        ("kill", 76, r"rank 3 on n[12] was killed by SIGKILL"),
    ],
)
def test_the_cause_is_told_from_its_consequences(slurm, worker, tmp_path, action, code, cause):
    done = srun(slurm, tmp_path, *TWO_NODES, NODE, worker, tmp_path, action, "3")
    assert done.code == code, done.output
    assert re.match(cause, done.verdict), done.verdict


@pytest.mark.parametrize(
    ("node", "action", "cause"),
    [
        ("n1", "lose launcher", "n2 lost the launcher of another node: |$"),
        ("n1", "lose launcher in a collective", r"rank \d on n2 lost another rank"),
        ("n2", "lose launcher in a collective", r"rank \d on n1 lost another rank"),
    ],
)
def test_a_launcher_that_dies_is_a_lost_rank(slurm, worker, tmp_path, node, action, cause):
    """The launcher's ranks die as well. The first node's launcher holds the store of torchrun.

    Slurm may kill the other launcher before it writes a verdict. The job script then exits with 76.
    """
    done = srun(slurm, tmp_path, *TWO_NODES, NODE, worker, tmp_path, action, node)
    assert done.code in (76, 137), done.output
    assert re.match(cause, done.verdict), done.verdict
    wait_until(lambda: not processes_of(tmp_path), "ranks are left")


def test_a_stop_signal_reaches_the_workers_of_all_nodes(slurm, worker, tmp_path):
    step = subprocess.Popen(
        ["srun", *TWO_NODES, NODE, str(worker), str(tmp_path), "stop"],
        env=slurm.environment(environment()), cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_until(lambda: len(ranks(tmp_path)) == 4, "the ranks do not start")
    step.send_signal(10)  # USR1, as slurm/training_job.sh does
    output, _ = step.communicate()
    assert step.returncode == 75, output
    for node in ("n1", "n2"):
        assert f"launch_node on {node}: SIGUSR1, asking the processes to stop" in output
