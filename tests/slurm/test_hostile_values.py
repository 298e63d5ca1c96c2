"""Forty hostile values through every argument and variable of the scripts in slurm/.

A value arrives unchanged or is refused with a message, and nothing in it is executed: each value
that could be executed would make a file whose name begins with CANARY.
"""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from launching import ROOT
from slurm_cluster import SlurmCluster
from stand_ins import copy_scripts
from training_jobs import job_environment

pytestmark = pytest.mark.slow  # hundreds of shells

VALUES = [
    "$(touch CANARY1)", "`touch CANARY2`", "; touch CANARY3;", "&& touch CANARY4",
    "| touch CANARY5", "\ntouch CANARY6\n", "> CANARY7", "a[$(touch CANARY8)]",
    "x' ; touch CANARY9 ; '", 'x" ; touch CANARY10 ; "', "$'\\n'touch CANARY11",
    "<(touch CANARY12)", "{CANARY13,b}", "& touch CANARY14 &", "${x:=$(touch CANARY15)}",
    "$((a[$(touch CANARY16)]))", "-c touch CANARY17",
    "a b", "  a  ", "'", '"', "\\", "\\'", "line\nline", "tab\ttab", "\r", "-rf", "--", "-",
    "--help", "*", "?", "[a-z]", "~", "${HOME}", "!!", "#comment", "%s%n%d", "\u202eabc\u200f",
    "ü 模型", "", "=", "x" * 5000,
]  # fmt: skip
EXECUTABLE = VALUES[:17]
JOB = "slurm/train_job.sh"
TRAIN = ["train.py", *VALUES]
# Variables that the scripts pass to the node unchanged, with any value.
HANDED_ON = [
    "ACCELERATE_CONFIG", "STOKER_MAIN_ADDRESS", "STOKER_PROCESSES_PER_NODE",
    "STOKER_NODE_DIR", "TMPDIR", "SLURM_TMPDIR", "SLURM_JOB_NAME", "WANDB_NAME",
]  # fmt: skip
TEXT = [
    "SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE",
    "SLURM_CPUS_ON_NODE", "SLURM_JOB_END_TIME", "SLURMD_NODENAME", "STOKER_NOTES_DIR",
]  # fmt: skip
NUMBERS = [
    "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_RESTART_COUNT", "SLURM_CPUS_PER_TASK",
    "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID",
]  # fmt: skip
FILE_NAMES = [value for value in VALUES if 0 < len(value) < 200 and value not in ("~", "-", "--")]


@pytest.fixture
def stand_ins(stand_ins, tmp_path: Path):
    yield stand_ins
    assert_nothing_was_executed(tmp_path)


def assert_nothing_was_executed(directory: Path) -> None:
    made = [path for place in (directory, ROOT) for path in place.rglob("CANARY*")]
    assert not made, f"executed: {made}"


def test_every_argument_arrives(stand_ins):
    assert len(set(VALUES)) == len(VALUES) >= 40
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_MIN": "0"}
    task |= {"SLURM_ARRAY_TASK_MAX": "1", "SLURM_ARRAY_TASK_COUNT": "2"}
    point = "\0".join(["train.py", *VALUES]) + "\0"
    (stand_ins.directory / "python.output").write_text(point)
    (stand_ins.root / "prepare_data.py").touch()

    def given(command: str, script: str, *words: str, **env: str) -> list[str]:
        stand_ins.forget()
        done = stand_ins.run(f"slurm/{script}.sh", *words, env=env)
        assert done.returncode == 0, done.stdout
        return stand_ins.arguments(command)

    for script in ("train_job", "multinode_job"):
        assert given("srun", script, "train.py", *VALUES)[-len(VALUES) - 1 :] == TRAIN
    assert given("python", "launch_node", *TRAIN) == ["-m", "utils.launch.node", *TRAIN]
    assert given("sbatch", "submit", JOB, *VALUES)[-len(VALUES) - 1 :] == [JOB, *VALUES]
    assert stand_ins.arguments("python")[-len(VALUES) :] == VALUES
    assert stand_ins.arguments("scontrol") == ["release", "77"]
    assert given("python", "prepare_job", *VALUES)[:-2] == ["prepare_data.py", *VALUES]
    share = ["prepare_data.py", *VALUES, "--num_proc", "2", "--shard", "0/2"]
    assert given("python", "prepare_job", *VALUES, **task) == share
    for value in EXECUTABLE:
        assert given("srun", "sweep_job", value, **task)[-len(VALUES) - 1 :] == TRAIN
        assert value in stand_ins.arguments("python")


def test_variables_arrive_at_the_node(stand_ins):
    for value in VALUES:
        env = dict.fromkeys(HANDED_ON, value)
        done = stand_ins.run("slurm/launch_node.sh", env=env)
        assert done.returncode == 0, (value, done.stdout)
        arrived = stand_ins.environment("python")
        assert {arrived[name] for name in HANDED_ON} == {value}
        done = stand_ins.run(
            "slurm/multinode_job.sh", "train.py", env=env | dict.fromkeys(TEXT, value)
        )
        assert done.returncode == 0, done.stdout
        arrived = stand_ins.environment("srun")
        assert {arrived.get(name, value) for name in HANDED_ON} == {value}
        # The scripts always set this one, because ranks write there.
        assert arrived["STOKER_NOTES_DIR"] == f"{stand_ins.root}/.stoker/job-7.0"


def test_variables_that_count_are_refused(stand_ins):
    for name in NUMBERS:
        for value in ("a[$(touch CANARY)]", "1; touch CANARY", "1\n2", "-1"):
            done = stand_ins.run("slurm/multinode_job.sh", "train.py", env={name: value})
            assert done.returncode == 2, (name, value)
            assert f"{name} is " in done.stdout
            assert "no number: let Slurm set it" in done.stdout
    for name in ("STOKER_SRUN_ARGS", "STOKER_CONTAINER"):
        for script in ("slurm/train_job.sh", "slurm/launch_node.sh"):
            done = stand_ins.run(script, "train.py", env={name: VALUES[0]})
            assert done.returncode == 2
            assert f"{name} is set in the environment, which cannot hold a list" in done.stdout
    assert not stand_ins.was_called("srun")
    assert not stand_ins.was_called("python")


def test_files_folders_and_repositories_of_any_name(stand_ins, tmp_path):
    for value in VALUES:
        stand_ins.forget()
        done = stand_ins.run(JOB, value)
        if value not in FILE_NAMES:
            assert done.returncode == 2
            assert "is no file in" in done.stdout
            assert not stand_ins.was_called("srun")
            continue
        root, disk = tmp_path / "places" / value, tmp_path / "disks" / value
        disk.mkdir(parents=True)
        shutil.copytree(stand_ins.root, root)
        (root / value).touch()
        env = {"TMPDIR": str(disk), "STOKER_ROOT": str(root)}
        for words in (["slurm/prepare_job.sh", "--sources", "x"], [JOB, value]):
            done = stand_ins.run(*words, env=env, cwd=tmp_path)
            assert done.returncode == 0, (value, done.stdout)
        used = stand_ins.environment("python")["HF_DATASETS_CACHE"]
        assert used.startswith(f"{disk}/stoker-prepare-")
        assert stand_ins.arguments("srun")[-2:] == [f"{root}/slurm/launch_node.sh", value]
        assert not list((root / ".stoker").iterdir())
        shutil.rmtree(root)
    for script in ("train_job", "prepare_job", "sweep_job"):
        for name in ("STOKER_ROOT", "SLURM_SUBMIT_DIR"):
            env = {name: EXECUTABLE[0]}
            done = stand_ins.run(f"slurm/{script}.sh", "train.py", cwd=tmp_path, env=env)
            assert done.returncode == 2
            assert "no repository here" in done.stdout


def test_values_of_cluster_env_arrive(stand_ins):
    lines = [f"export VALUE_{number}={shlex.quote(value)}" for number, value in enumerate(VALUES)]
    lines.append(f"STOKER_SRUN_ARGS=({shlex.join(VALUES)})")
    lines.append(f"STOKER_CONTAINER=({shlex.join(['python', *VALUES])})")
    (stand_ins.root / "slurm/cluster.env").write_text("\n".join(lines) + "\n")
    done = stand_ins.run("slurm/train_job.sh", "train.py")
    assert done.returncode == 0, done.stdout
    given = stand_ins.arguments("srun")
    start = given.index(VALUES[0])
    assert given[start : start + len(VALUES)] == VALUES
    arrived = stand_ins.environment("srun")
    assert [arrived[f"VALUE_{number}"] for number in range(len(VALUES))] == VALUES
    for script in ("slurm/launch_node.sh", "slurm/run_python.sh"):
        done = stand_ins.run(script, "train.py", without=["SLURM_JOB_ID"])
        assert done.returncode == 0, done.stdout
        given = stand_ins.arguments("python")
        assert given[: len(VALUES) + 1] == [*VALUES, "python"]
        assert given[-1] == "train.py"


def test_verdicts_are_only_printed(stand_ins):
    stand_ins.answer(1)
    for value in EXECUTABLE:
        stand_ins.leaves(1, value)
        done = stand_ins.run("slurm/train_job.sh", "train.py")
        assert done.returncode == 1
        assert value.rstrip("\n") in done.stdout
        stand_ins.leaves(75, value)
        assert stand_ins.run("slurm/train_job.sh", "train.py").returncode == 75
        (stand_ins.directory / "exit_code").write_text(value)  # not a number
        assert stand_ins.run("slurm/train_job.sh", "train.py").returncode == 1


# On a real Slurm, to the end: through sbatch, srun, accelerate and torchrun into the script

REPORTER = """
import json, os, sys
with open(os.environ["REPORT"] + os.environ.get("RANK", "0"), "w") as report:
    json.dump([sys.argv[1:], os.environ["VALUE"]], report)
"""


@pytest.mark.usefixtures("idle")
def test_values_arrive_at_the_ranks_of_a_real_job(slurm: SlurmCluster, tmp_path):
    name = "a $(touch CANARY1) 'repository' `touch CANARY2`; touch CANARY3"
    root = tmp_path / name
    copy_scripts(root)
    for folder in ("utils", "accelerate_configs"):
        shutil.copytree(ROOT / folder, root / folder)
    (root / "report ; touch CANARY4.py").write_text(REPORTER)
    environment = job_environment(
        {"PYTHONPATH": "", "REPORT": str(tmp_path / "report-"), "VALUE": VALUES[3]}
    )
    job = slurm.submit(
        "--cpus-per-task=2", "--mem=3G", f"--job-name={VALUES[0]}",
        "slurm/train_job.sh", "report ; touch CANARY4.py", *VALUES,
        cwd=root, log=tmp_path / "log", env=environment,
    )  # fmt: skip
    assert slurm.wait(job) == "COMPLETED", job.output()
    for rank in range(2):
        arguments, variable = json.loads((tmp_path / f"report-{rank}").read_text())
        assert arguments == VALUES
        assert variable == VALUES[3]
    assert not [path for path in tmp_path.rglob("CANARY*") if path != root]
    assert_nothing_was_executed(tmp_path)
