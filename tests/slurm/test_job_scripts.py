"""Decisions of the job scripts, on stand-ins of Slurm's commands and on a real Slurm.

On the real Slurm a stand-in for launch_node.sh records how it was started on each node, and ends as
its first argument says. test_training_jobs.py tests the real one.
"""

import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest
from launching import ROOT, wait_until
from slurm_cluster import Job, SlurmCluster
from stand_ins import copy_scripts

TRAIN, MULTINODE = "slurm/train_job.sh", "slurm/multinode_job.sh"
STOPPED = "stopped at step 7 with a checkpoint"


def test_jobs_that_cannot_run_are_refused_before_anything_starts(stand_ins, tmp_path):
    def refused(code: int, message: str, *words: str, **how) -> None:
        done = stand_ins.run(*words, **how)
        assert (done.returncode, message in done.stdout) == (code, True), done.stdout

    for script in (TRAIN, MULTINODE):
        refused(2, f"no script given: sbatch [OPTIONS] {script} SCRIPT", script)
    refused(2, f"n1: sft_trian.py is no file in {stand_ins.root}", TRAIN, "sft_trian.py")
    nodes = {"SLURM_JOB_NUM_NODES": "3"}
    refused(2, "for one node, not 3: sbatch slurm/multinode", TRAIN, "train.py", env=nodes)
    elsewhere = f"no repository here ({tmp_path}): call sbatch in it, or set STOKER_ROOT"
    for script in (TRAIN, MULTINODE, "slurm/prepare_job.sh"):
        refused(2, elsewhere, script, "train.py", cwd=tmp_path)
        refused(2, elsewhere, script, "train.py", env={"STOKER_ROOT": str(tmp_path)})
    refused(2, "is a job script: sbatch", TRAIN, "train.py", without=["SLURM_JOB_ID"])
    (stand_ins.root / ".stoker").write_text("a file")
    refused(74, f"{stand_ins.root}/.stoker/job-7.0 cannot be made", TRAIN, "train.py")
    for line, message in [
        ("source no/such/activate", "cluster.env: line 2: no/such/activate"),  # bash's own
        ("module() { return 1; }; module load cuda", "n1: slurm/cluster.env failed, see above"),
    ]:
        (stand_ins.root / "slurm/cluster.env").write_text(f"export A=$UNSET\n{line}\n")
        refused(69, message, TRAIN, "train.py")
    assert not stand_ins.was_called("srun")


def test_a_job_finds_its_repository_from_elsewhere(stand_ins, tmp_path):
    for name in ("STOKER_ROOT", "SLURM_SUBMIT_DIR"):
        done = stand_ins.run(TRAIN, "train.py", cwd=tmp_path, env={name: str(stand_ins.root)})
        assert done.returncode == 0, done.stdout
        assert f"{stand_ins.root}/slurm/launch_node.sh" in stand_ins.arguments("srun")
        assert done.stdout.splitlines()[-1].endswith("job 7: done")
        assert list((stand_ins.root / ".stoker").iterdir()) == [], "a good end leaves nothing"
        assert not stand_ins.was_called("scontrol")


def test_the_job_scripts_end_alike():
    """The lines that find the repository are in each script, because sbatch copies one file."""
    bodies = {}
    for name in ("train", "multinode", "sweep", "prepare"):
        _, bodies[name] = (ROOT / f"slurm/{name}_job.sh").read_text().split("set -euo pipefail\n")
    assert bodies["train"].replace("train_job", "multinode_job") == bodies["multinode"]
    finds_repository = bodies["train"].partition("fi\n")[0]
    assert all(body.startswith(finds_repository) for body in bodies.values())


# Before the job


def test_submit_passes_every_word_and_the_options_of_sbatch_keep_their_meaning(stand_ins):
    def submit(*words: str, **env: str) -> str:
        done = stand_ins.run("slurm/submit.sh", *words, env=env)
        assert done.returncode == 0, done.stdout
        return done.stdout

    hostile = ["a b", '"', "$(touch canary)", "", "--nodes=9", "*", "%JOB%"]
    words = ["-J", "a b", TRAIN, "train.py", *hostile]
    assert "Submitted batch job 77\n" in submit(*words)
    calls = stand_ins.calls()
    names = ["sbatch", "scontrol", "sbatch", "scontrol", "sinfo", "sacctmgr", "squeue", "python"]
    assert [name for name, *_ in calls] == [*names, "scontrol"]
    assert stand_ins.arguments("sbatch") == ["--test-only", *words]
    assert stand_ins.arguments("python")[9:] == ["2", *words]
    root = stand_ins.environment("sbatch")["STOKER_ROOT"]
    assert root == str(stand_ins.root), "where the job looks for it"
    assert stand_ins.arguments("sacctmgr")[-1] == "format=Name,Flags"
    config = "AccountingStorageEnforce = associations,limits,qos\nAccountingStorageHost = db\n"
    (stand_ins.directory / "config").write_text(config)
    assert "\n77\n" in f"\n{submit('--parsable', TRAIN)}"
    limits = "format=Name,Flags,MaxWall,MaxTRES,MaxTRESPU,GrpTRES"
    assert stand_ins.arguments("sacctmgr")[-1] == limits
    assert "not submitted" in submit("--check", TRAIN)
    assert stand_ins.calls()[-1] == ["scancel", "77"]
    stand_ins.sbatch_says("77;far\n")
    assert "Submitted batch job 77\n" in submit(TRAIN)
    assert stand_ins.arguments("scontrol") == ["--clusters=far", "release", "77"]
    points = "0\ta=1\n1\ta=2\tfinished\n2\ta=3\n"
    (stand_ins.directory / "python.output").write_text(points)
    submit("slurm/sweep_job.sh", "a b.yaml")  # an array of the unfinished points
    array = ["--array=0,2", "slurm/sweep_job.sh", "a b.yaml"]
    assert stand_ins.arguments("sbatch")[1:] == array
    submit("slurm/sweep_job.sh", "s.yaml", SBATCH_ARRAY_INX="1")
    assert "--array=0,2" not in stand_ins.arguments("sbatch")
    assert "slurm/submit.sh --nodes=4" in submit("--help")
    notes = {name: stand_ins.root / f".stoker/submitted-{name}" for name in "12345"}
    notes["1"].parent.mkdir(exist_ok=True)
    for name, note in notes.items():
        note.write_text(f"/runs/{name}\n{stand_ins.root if name == '5' else ''}/slurm/submit.sh\n")
    os.utime(notes["3"], (0, 0))
    (stand_ins.root / ".stoker/submitted-6").mkdir()  # unreadable, as one that its job deletes
    (stand_ins.directory / "state").write_text("2\n3\n")
    submit("-t", "9:00", TRAIN)
    left = [name for name, note in notes.items() if note.exists()]
    assert left == ["2", "5"], "2 is in the queue, 3 is old, the log of 5 is there"


def test_the_recorded_command_works_when_pasted(stand_ins):
    stand_ins.sbatch_says("", 3)  # its test of the job would follow, without the command

    def recorded(*words: str, **how) -> str:
        stand_ins.run("slurm/submit.sh", *words, **how)
        return stand_ins.environment("sbatch")["STOKER_SUBMITTED"]

    assert recorded("-t", "9:00", TRAIN) == f"slurm/submit.sh -t 9:00 {TRAIN} "
    elsewhere = stand_ins.root / "slurm"
    command = f"cd {elsewhere} && {stand_ins.root}/slurm/submit.sh train_job.sh "
    assert recorded("train_job.sh", cwd=elsewhere) == command
    given = {"ACCELERATE_USE_CPU": "true", "STOKER_X": "a b", "STOKER_ON_EVENT": "token"}
    command = f"ACCELERATE_USE_CPU=true STOKER_X=a\\ b slurm/submit.sh {TRAIN} "
    assert recorded(TRAIN, env=given) == command


def test_submit_makes_no_job_where_sbatch_makes_none(stand_ins):
    # sbatch's own refusals, of a job and of its options, and --test-only.
    for code, names in ((3, ["sbatch", "sinfo"]), (255, ["sbatch"]), (0, ["sbatch"])):
        stand_ins.sbatch_says("", code)
        done = stand_ins.run("slurm/submit.sh", TRAIN)
        assert (done.returncode, done.stdout) == (code, "")
        assert [name for name, *_ in stand_ins.calls()] == names
    done = stand_ins.run("slurm/submit.sh", "-N2", TRAIN, "--time=9", "train.py", "--timer")
    told = f"note:    --time stands after {TRAIN}, so sbatch does not read it: options of sbatch"
    assert done.stdout == f"{told} stand before the job script\n"
    (stand_ins.commands / "sinfo").write_text("#!/bin/bash\necho 'sinfo: error' >&2\nexit 1\n")
    stand_ins.sbatch_says("", 1)
    told = "Slurm does not answer. Without Slurm: slurm/launch_node.sh SCRIPT ARGUMENTS\n"
    assert stand_ins.run("slurm/submit.sh", TRAIN).stdout == told
    for words in ([], ["--check"], ["-N2"], ["--wrap=hostname"]):
        done = stand_ins.run("slurm/submit.sh", *words)
        assert done.returncode == 2
        assert "slurm/submit.sh" in done.stdout


def test_submit_cancels_the_job_of_its_test_after_ctrl_c(stand_ins):
    refused = "echo Requested node configuration is not available; exit 1"
    answers = f"*--test-only*) {refused} ;;\n*--begin=*) kill -INT $PPID; echo 99 ;;\n*) echo 77 ;;"
    (stand_ins.commands / "sbatch").write_text(f'#!/bin/bash\ncase "$*" in\n{answers}\nesac\n')
    assert "Submitted batch job 77\n" in stand_ins.run("slurm/submit.sh", TRAIN).stdout
    assert ["scancel", "99"] in stand_ins.calls()


@pytest.mark.parametrize(
    ("words", "task", "message"),
    [
        (["a b.yaml"], "", r"a sweep is a job array: slurm/submit.sh slurm/sweep_job.sh a\ b.yaml"),
        (["a", "b"], "0", "usage: sbatch --array=0-N slurm/sweep_job.sh"),
    ],
)
def test_a_sweep_job_refuses_before_anything_starts(stand_ins, words, task, message):
    done = stand_ins.run("slurm/sweep_job.sh", *words, env={"SLURM_ARRAY_TASK_ID": task})
    assert done.returncode == 2
    assert message in done.stdout
    assert not stand_ins.was_called("python")


# The step


def test_the_step_gets_what_the_job_has(stand_ins):
    environment = {
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_JOB_CPUS_PER_NODE": "72(x3),36",
        "SLURM_CPUS_ON_NODE": "72",
    }
    (stand_ins.root / "slurm/cluster.env").write_text('STOKER_SRUN_ARGS=("--container-image=a b")')
    done = stand_ins.run(MULTINODE, "train.py", "--hub_token", "hf_secret", env=environment)
    given = stand_ins.arguments("srun")
    script = [f"{stand_ins.root}/slurm/launch_node.sh", "train.py", "--hub_token", "hf_secret"]
    assert given[-4:] == script
    assert {"--nodes=4", "--ntasks=4", "--ntasks-per-node=1", "--kill-on-bad-exit=1"} <= set(given)
    assert "--cpus-per-task=36" in given  # the cores of the smallest node
    assert "--container-image=a b" in given
    assert "job 7, start 1: 4 node(s) n1" in done.stdout
    assert "hf_secret" not in done.stdout
    stand_ins.run(TRAIN, "train.py", env={"SLURM_CPUS_PER_TASK": "5"})
    assert "--cpus-per-task=5" in stand_ins.arguments("srun")
    same = {"SLURM_GPUS_PER_NODE": "h100:4", "SLURM_GPUS_ON_NODE": "4"}
    stand_ins.run(TRAIN, "train.py", env=same)
    assert stand_ins.environment("srun")["SLURM_GPUS_PER_NODE"] == "h100:4"
    # The GPUs of the command line override those of the script.
    done = stand_ins.run(TRAIN, "train.py", env=same | {"SLURM_GPUS_PER_NODE": "1"})
    assert "SLURM_GPUS_PER_NODE" not in stand_ins.environment("srun")
    assert "4 GPU(s)" in done.stdout
    # With --exclusive, Slurm counts all GPUs of the node, but gives none to the step.
    done = stand_ins.run(TRAIN, "train.py", env=same | {"SLURM_GPUS_PER_NODE": "0"})
    assert stand_ins.environment("srun")["SLURM_GPUS_PER_NODE"] == "0"
    assert "no GPU(s)" in done.stdout


def test_launch_node_becomes_python_or_says_why_not(stand_ins, tmp_path):
    """Signals and the exit code are passed on. test_hostile_values.py tests all arguments."""
    python, notes = stand_ins.commands / "python", tmp_path / "job's notes"

    def started(line: str, **env: str) -> tuple[int, str]:
        (stand_ins.root / "slurm/cluster.env").write_text(line + "\n")
        done = stand_ins.run("slurm/launch_node.sh", "x.py", env={"SLURMD_NODENAME": "n2"} | env)
        return done.returncode, done.stdout

    python.write_text(
        '#!/bin/bash\n[[ $1 != -c ]] || exit 0\nprintf "%s|" "$PWD" "$(ulimit -c)" "${X-}" "$@"\n'
        "kill -USR1 $$\nprintf alive\nexit 7\n"
    )
    given = "-m|utils.launch.node|x.py|alive"  # Python ignores USR1
    said = f"{stand_ins.root}|0|from-cluster-env|{given}"
    assert started("export X=from-cluster-env$UNSET") == (7, said)
    assert started((ROOT / "slurm/cluster.env.example").read_text())[0] == 7
    # In a job, refusals are written to the notes for the job script.
    python.write_text("#!/bin/sh\necho SyntaxError: f-string >&2\nexit 1\n")
    for line, said in {
        "": "n2: python cannot start the launcher (SyntaxError: f-string): act",
        "STOKER_CONTAINER=(no-such)": "n2: there is no no-such on PATH: activate the environment",
        'STOKER_CONTAINER="apptainer exec"': r"n2: there is no apptainer\ exec on PATH",
        "false": "n2: slurm/cluster.env failed, see above",
        "if": "n2: slurm/cluster.env failed, see above",
    }.items():
        notes.mkdir()
        assert started(line, STOKER_NOTES_DIR=str(notes))[0] == 69
        assert (notes / "verdict.txt").read_text().startswith(said)
        assert (notes / "exit_code").read_text() == "69\n"
        shutil.rmtree(notes)


# The end: who is requeued


@pytest.mark.parametrize(
    ("state", "reason", "restarts", "may_requeue", "said"),
    [
        ("RUNNING", "None", 0, 1, "requeued, start 2 will resume"),
        ("COMPLETING", "TimeLimit", 0, 1, "requeued, start 2 will resume"),
        ("TIMEOUT", "TimeLimit", 0, 1, "requeued, start 2 will resume"),
        ("COMPLETING", "None", 0, 1, "cancelled, not requeued: to resume, submit the same command"),
        ("CANCELLED", "None", 0, 1, "cancelled, not requeued"),
        ("COMPLETING", "None", 1, 1, "Slurm has requeued it itself"),
        ("PENDING", "BeginTime", 1, 1, "Slurm has requeued it itself"),
        ("OUT_OF_MEMORY", "OutOfMemory", 0, 1, "ended by Slurm for lack of memory, not requeued"),
        ("RUNNING", "None", 0, 0, "not requeued (--no-requeue, or the cluster forbids it)"),
    ],
)
def test_who_is_requeued(stand_ins, state, reason, restarts, may_requeue, said):
    stand_ins.answer(143)  # srun's code when one task ends before the others
    code = 76 if may_requeue else 75
    stand_ins.leaves(code, STOPPED)
    stand_ins.slurm_says(state, reason, restarts, may_requeue)
    done = stand_ins.run(TRAIN, "train.py")
    assert done.returncode == code
    assert f"{STOPPED}; {said}" in done.stdout.splitlines()[-1]
    assert stand_ins.was_called("scontrol") == said.startswith("requeued")
    if said.startswith("requeued"):
        assert stand_ins.arguments("scontrol") == ["requeue", "7"]


def test_a_requeue_that_fails_says_how_to_resume(stand_ins):
    stand_ins.leaves(75, STOPPED)
    (stand_ins.directory / "denied").write_text("Access/permission denied")
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    done = stand_ins.run(TRAIN, "train.py", env=array)
    assert done.returncode == 75
    assert stand_ins.arguments("scontrol") == ["requeue", "7_3"]  # not the whole array
    assert "requeue failed (Access/permission denied): to resume, submit" in done.stdout
    stand_ins.forget()
    (stand_ins.directory / "state").write_text("")
    done = stand_ins.run(TRAIN, "train.py")
    assert "not requeued, squeue does not answer: to resume, submit" in done.stdout
    assert not stand_ins.was_called("scontrol")


def test_a_log_on_a_full_disk_changes_no_end(stand_ins):
    """Exit code, requeue and the verdict of a refusal stay the same."""
    for code, requeued in ((75, True), (76, True), (74, False), (0, False)):
        stand_ins.forget()
        stand_ins.answer(code)
        with Path("/dev/full").open("w") as log:
            assert stand_ins.run(TRAIN, "train.py", log=log).returncode == code
        assert stand_ins.was_called("scontrol") == requeued
    with Path("/dev/full").open("w") as log:
        assert stand_ins.run(TRAIN, log=log).returncode == 2


def test_other_ends_are_not_requeued_and_the_verdict_comes_last(stand_ins):
    stand_ins.answer(1)
    notes = stand_ins.root / ".stoker/job-7.0"
    for code in (1, 2, 69, 74, 77):
        stand_ins.leaves(code, "rank 3 on n2 failed:\nValueError: $(no) *")
        done = stand_ins.run(TRAIN, "train.py")
        assert done.returncode == code
        assert done.stdout.splitlines()[-2:] == ["rank 3 on n2 failed:", "ValueError: $(no) *"]
        assert stand_ins.arguments("python") == ["report.py", "runs/a"], "the page of the run"
        assert str(notes) in done.stdout
        assert stat.S_IMODE(notes.stat().st_mode) == 0o700
    # The notes of earlier starts of this job are deleted.
    stand_ins.run(TRAIN, "train.py", env={"SLURM_JOB_ID": "70"})
    stand_ins.run(TRAIN, "train.py", env={"SLURM_RESTART_COUNT": "1"})
    left = sorted(path.name for path in (stand_ins.root / ".stoker").iterdir())
    assert left == ["job-7.1", "job-70.0"]
    assert not stand_ins.was_called("scontrol")


def test_starts_that_never_reach_the_run_are_no_progress(stand_ins):
    """The fourth such start in a row ends the job. A start that begins the run resets the count."""
    stand_ins.answer(139)
    for restart in range(7):
        if restart == 2:
            stand_ins.leaves(75, STOPPED)
        elif restart == 3:
            for left in ("run_started", "exit_code", "verdict.txt"):
                (stand_ins.directory / left).unlink()
        stand_ins.slurm_says("RUNNING", "None", restart, 1)
        done = stand_ins.run(TRAIN, "train.py", env={"SLURM_RESTART_COUNT": str(restart)})
        assert done.returncode == {2: 75, 6: 77}.get(restart, 76)
    said = done.stdout.splitlines()[-5:]
    assert said[0].endswith("ended 4 times in a row before its run started:")
    starts = [f"start {n}: srun or a node's launcher was killed by signal 11" for n in range(4, 8)]
    assert [line.partition(",")[0] for line in said[1:]] == starts
    assert "--time" not in done.stdout, "time was not short"
    assert [path.name for path in (stand_ins.root / ".stoker").iterdir()] == ["job-7.6"]


@pytest.mark.parametrize(
    ("srun_code", "code", "said"),
    [
        (255, 255, "srun ended with exit code 255, see its lines above"),
        (137, 76, "srun or a node's launcher was killed by signal 9, see any lines of srun"),
        (233, 76, "srun lost a node, see its lines above"),  # srun could not reach a node
        (253, 79, "a node's memory ran out"),  # Slurm killed the job for lack of memory
    ],
)
def test_an_end_without_a_verdict_is_sruns(stand_ins, srun_code, code, said):
    stand_ins.answer(srun_code)
    done = stand_ins.run(TRAIN, "train.py")
    assert done.returncode == code
    assert said in done.stdout.splitlines()[-1]
    assert stand_ins.was_called("scontrol") == (code == 76)


def test_no_progress_advises_more_time_where_time_was_short(stand_ins):
    """The verdict has several lines; the log shows the first one of each start."""
    (stand_ins.directory / "exit_code").write_text("75\n")
    (stand_ins.directory / "verdict.txt").write_text("SIGUSR1 before the start\nmore\n")
    for restart in range(4):
        stand_ins.slurm_says("COMPLETING", "TimeLimit", restart, 1)
        done = stand_ins.run(TRAIN, "train.py", env={"SLURM_RESTART_COUNT": str(restart)})
        assert done.returncode == (77 if restart == 3 else 75)
    said = done.stdout.splitlines()[-5:]
    assert said[:4] == [f"start {n}: SIGUSR1 before the start" for n in range(1, 5)]
    assert "give the job more time (sbatch --time)" in said[4]


# Messages


def test_the_users_command_is_told_what_became_of_the_job(stand_ins):
    told, command = stand_ins.directory / "told", stand_ins.directory / "tell me"
    command.write_text(
        '#!/bin/bash\nprintf "%s\\0" "$@" "$STOKER_EVENT" "$STOKER_TEXT" >"$STAND_IN/told"\n'
        "exit 3\n"
    )
    command.chmod(0o755)
    (stand_ins.root / "slurm/cluster.env").write_text(f"STOKER_ON_EVENT='{command}'\n")

    def words(code: int, verdict: str, restarts: int = 0) -> list[str]:
        stand_ins.answer(code and 1)
        stand_ins.leaves(code, verdict)
        stand_ins.slurm_says("RUNNING", "None", restarts, 1)
        done = stand_ins.run(TRAIN, "train.py")
        assert done.returncode == code, "whatever the command does"
        assert "STOKER_ON_EVENT: its command ended with 3" in done.stdout
        return told.read_bytes().decode().split("\0")[:-1]

    def expected(event: str, text: str) -> list[str]:
        return [event, "runs/a", "7", text, event, text]

    assert words(0, "done") == expected("finished", "train.py")
    spent = "stopped at step 7 with runs/a/checkpoint-7: max_gpu_hours 2"
    assert words(0, spent) == expected("stopped", spent)
    assert not stand_ins.was_called("scontrol")
    assert words(75, STOPPED) == expected("requeued", f"{STOPPED}; start 2 will resume")
    assert stand_ins.arguments("scontrol") == ["requeue", "7"]
    assert words(75, STOPPED, 1)[:4] == [
        "requeued", "runs/a", "7", f"{STOPPED}; Slurm has requeued it itself"
    ]  # fmt: skip
    text = "exit code 78: step 3: $(touch no) `id` * is NaN."
    assert words(78, text.removeprefix("exit code 78: ") + "\nmore") == expected("failed", text)
    said = words(69, "cluster error on n1:\nn1: port 3 is in use\nmore")
    assert said[3] == "exit code 69: cluster error on n1: n1: port 3 is in use"
    (stand_ins.directory / "down").write_text("n2\n")
    said = words(76, "rank 0 on n1 lost another rank, which left no word: gloo")
    assert said[3].startswith("node n2 failed: rank 0 on n1 lost another rank")
    verdict = stand_ins.root / ".stoker/job-7.0/verdict.txt"
    assert verdict.read_text().startswith("node n2 failed: rank 0"), "report.py reads it"
    (stand_ins.directory / "denied").write_text("Access/permission denied")
    assert words(76, "killed")[0] == "stopped"
    # The run did not begin: slurm/submit.sh has noted its directory.
    note = stand_ins.root / ".stoker/submitted-7"
    note.write_text("/runs/b\n/logs/b.log\n")
    real = stand_ins.leaves
    stand_ins.leaves = lambda *end: [real(*end), (stand_ins.directory / "run_started").unlink()]
    assert words(2, "in use by another job")[1] == "/runs/b"
    assert note.exists(), "status.py shows the failed job"
    stand_ins.leaves = real
    words(2, "refused after its run began")
    assert not note.exists()


def test_a_webhook_is_told_by_python_and_its_url_is_in_no_argument(stand_ins):
    url = "https://hooks.example.org/T0/secret"
    (stand_ins.root / "slurm/cluster.env").write_text(f"STOKER_ON_EVENT={url}\n")
    stand_ins.leaves(0, "done")
    done = stand_ins.run(TRAIN, "train.py")
    module = ["-m", "utils.launch.notify", "finished", "runs/a", "7", "train.py"]
    assert stand_ins.arguments("python") == module
    assert stand_ins.environment("python")["STOKER_ON_EVENT"] == url
    assert "secret" not in done.stdout


# On a real Slurm

STAND_IN = r"""#!/usr/bin/env bash
set -uo pipefail
node=$SLURMD_NODENAME
start=started/$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$node
printf '%s\0' "$@" >"$start.arguments"
env -0 >"$start.environment"
stat --format=%a "$STOKER_NOTES_DIR" >"$start.mode"
leave() { # CODE TEXT
  if (set -C; printf '%s\n' "$2" >"$STOKER_NOTES_DIR/verdict.txt") 2>/dev/null; then
    printf '%s\n' "$1" >"$STOKER_NOTES_DIR/exit_code"
  fi
  exit "$1"
}
[[ -z ${SLURM_RESTART_COUNT:-} ]] || exit 0
case ${2:-} in
stop) # as launch_node.sh does; Slurm signals sleep, too
  stop=
  trap 'stop=1' USR1 TERM
  touch "$start.ready"
  while [[ -z $stop ]]; do sleep 0.1; done
  trap '' USR1 TERM
  leave 75 "stopped at step 7"
  ;;
fail) leave 3 "rank 1 on $node failed: ValueError: 7" ;;
killed) kill -KILL $$ ;;
esac
"""


class Jobs:
    """A submitter of jobs from a repository with a stand-in for launch_node.sh."""

    def __init__(self, slurm: SlurmCluster, root: Path):
        self.slurm = slurm
        self.root = root
        self.count = 0
        copy_scripts(root)
        (root / "slurm/launch_node.sh").write_text(STAND_IN)
        (root / "started").mkdir()

    def submit(
        self, *options: str, how: str = "", script=TRAIN, env: Mapping[str, str] | None = None
    ) -> Job:
        self.count += 1
        return self.slurm.submit(
            "--cpus-per-task=1", "--mem=500", *options,
            script, "train.py", how, "it's $(touch canary)",
            cwd=self.root, log=self.root.parent / f"{self.count}.log", env=env,
        )  # fmt: skip

    def started(self, job: Job, what: str = "environment") -> dict[str, str]:
        """Return the records of all nodes of a job's first start."""
        paths = (self.root / "started").glob(f"{job.id}.0.*.{what}")
        return {path.suffixes[-2][1:]: path.read_text() for path in paths}


@pytest.fixture
def jobs(slurm: SlurmCluster, tmp_path: Path) -> Jobs:
    return Jobs(slurm, tmp_path / "a $(touch canary) repository")


@pytest.mark.slow
@pytest.mark.usefixtures("idle")
def test_the_launcher_is_started_once_a_node_with_what_the_job_has(jobs):
    """Try each way to request GPUs. The command line overrides the #SBATCH lines of the scripts."""
    asked = {
        "gpus-per-node": ["--gpus-per-node=2"],
        "gres": ["--gres=gpu:2"],
        "gpus-per-task": ["--gpus-per-node=0", "--gpus-per-task=2"],
    }
    submitted = {
        name: jobs.submit("--nodes=2", *options, script=MULTINODE)
        for name, options in asked.items()
    }
    for name, job in submitted.items():
        assert jobs.slurm.wait(job) == "COMPLETED", f"{name}:\n{job.output()}"
        nodes = {
            node: dict(pair.split("=", 1) for pair in text.split("\0")[:-1])
            for node, text in jobs.started(job).items()
        }
        assert sorted(nodes) == ["n1", "n2"], name
        for environment in nodes.values():
            assert environment["SLURM_GPUS_ON_NODE"] == "2", name
            assert environment["SLURM_CPUS_PER_TASK"] == "1", name
            assert environment["SLURM_STEP_NUM_TASKS"] == "2", name
        assert len({environment["STOKER_NOTES_DIR"] for environment in nodes.values()}) == 1, name
        assert set(jobs.started(job, "mode").values()) == {"700\n"}
        arguments = {"train.py\0\0it's $(touch canary)\0"}
        assert set(jobs.started(job, "arguments").values()) == arguments
        assert job.output().splitlines()[-1].endswith(f"job {job.id}: done")
    assert not list(jobs.root.parent.rglob("canary"))


@pytest.mark.slow
@pytest.mark.usefixtures("idle")
def test_slurm_requeues_what_was_stopped_and_nothing_else(jobs):
    """Several jobs of one node run at the same time, and each ends in another way."""
    stop = {name: jobs.submit(how="stop") for name in ("signalled", "cancelled")}
    wait_until(lambda: all(jobs.started(job, "ready") for job in stop.values()), "not up")
    jobs.slurm.run("scancel", "--batch", "--signal=USR1", stop["signalled"].id)
    jobs.slurm.run("scancel", stop["cancelled"].id)
    assert jobs.slurm.wait(stop["cancelled"]) == "CANCELLED"
    log = stop["cancelled"].output()
    assert "stopped at step 7; cancelled, not requeued: to resume" in log, log

    kept = jobs.submit("--no-requeue", how="stop")
    requeued = jobs.submit(how="stop")
    array = jobs.submit("--array=4", how="stop")
    wait_until(lambda: all(jobs.started(job, "ready") for job in (kept, requeued)), "not up")
    jobs.slurm.run("scancel", "--batch", "--signal=USR1", kept.id)
    jobs.slurm.run("scontrol", "requeue", requeued.id)
    assert jobs.slurm.wait(kept) == "FAILED"
    assert jobs.slurm.fields(kept)["ExitCode"] == "75:0"
    assert "not requeued (--no-requeue" in kept.output()
    wait_until(lambda: jobs.started(array, "ready"), "the array does not start")
    jobs.slurm.run("scancel", "--batch", "--signal=USR1", array.id)

    lost, failed = jobs.submit(how="killed"), jobs.submit(how="fail")
    assert jobs.slurm.wait(failed) == "FAILED"
    assert jobs.slurm.fields(failed)["ExitCode"] == "3:0"
    last_line = failed.output().splitlines()[-1]
    assert re.fullmatch(r"rank 1 on n[12] failed: ValueError: 7", last_line)
    for job, said in (
        (stop["signalled"], "stopped at step 7; requeued"),
        (requeued, "stopped at step 7; Slurm has requeued it itself"),
        (array, "stopped at step 7; requeued"),
        (lost, "srun or a node's launcher was killed by signal 9"),
    ):
        assert jobs.slurm.wait(job) == "COMPLETED", job.output()
        assert jobs.slurm.fields(job)["Restarts"] == "1"
        log = job.output()
        assert said in log, log
        assert log.splitlines()[-1].endswith(": done"), log


@pytest.mark.slow
@pytest.mark.usefixtures("idle")
def test_a_node_that_cannot_start_ends_the_job_at_once(jobs):
    """srun ends the other node's task by a signal, which must not count as the cause."""
    tools, cluster_env = jobs.root / "tools", jobs.root / "slurm/cluster.env"
    shutil.copy(ROOT / "slurm/launch_node.sh", jobs.root / "slurm")
    tools.mkdir()
    (tools / "python").write_text(
        "#!/bin/bash\n[[ $1 == -c || $2 == utils.launch.ledger ]] ||\n"
        "  exec env --default-signal=TERM sleep 600\n"
    )
    (tools / "python").chmod(0o755)
    there = f"PATH='{tools}':$PATH\n"
    causes = {
        "[[ $SLURMD_NODENAME != n2 ]] || PATH=/nowhere": "n2: there is no python on PATH",
        "[[ $SLURMD_NODENAME != n2 ]] || source gone/activate": "n2: slurm/cluster.env failed",
        "": "a node does not see the repository in ",
    }
    for line, said in causes.items():
        cluster_env.write_text(there + line + "\n")
        if not line:
            jobs.slurm.stop_node("n2")
            jobs.slurm.start_node("n2", hidden=jobs.root)
        job = jobs.submit("--nodes=2", "--gpus-per-node=0", script=MULTINODE)
        try:
            assert jobs.slurm.wait(job) == "FAILED", job.output()
        finally:
            if not line:
                jobs.slurm.stop_node("n2")
                jobs.slurm.start_node("n2")
        assert jobs.slurm.fields(job)["ExitCode"] == "69:0", job.output()
        assert jobs.slurm.fields(job)["Restarts"] == "0", job.output()
        assert job.output().splitlines()[-1].startswith(said), job.output()
