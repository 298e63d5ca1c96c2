"""Preparing data as a job array: the work of each task, and an array on a real Slurm."""

import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny
from launching import ROOT, wait_until
from stand_ins import StandIns
from training_jobs import job_environment

from utils.data.token_dataset import open_token_dataset

PREPARE = "slurm/prepare_job.sh"
CORES = {"SLURM_CPUS_PER_TASK": "3"}


def array(task: int, first: int, last: int, step: int = 1, count: int | None = None):
    tasks = (last - first) // step + 1 if count is None else count
    return {
        "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(task),
        "SLURM_ARRAY_TASK_MIN": str(first), "SLURM_ARRAY_TASK_MAX": str(last),
        "SLURM_ARRAY_TASK_STEP": str(step), "SLURM_ARRAY_TASK_COUNT": str(tasks),
    }  # fmt: skip


@pytest.fixture
def stand_ins(stand_ins: StandIns) -> StandIns:
    """Record the arguments of each call of run_python.sh."""
    (stand_ins.root / "slurm/run_python.sh").write_text(
        '#!/bin/bash\nprintf "%s\\n" "$@" "tmp=$HF_DATASETS_CACHE" '
        '"offline=$HF_HUB_OFFLINE" >>"$STAND_IN/calls"\n'
        'read -r code <"$STAND_IN/srun.code"\n'
        "[[ $code != 138 ]] || kill -USR1 $PPID\n"
        'exit "$code"\n'
    )
    return stand_ins


def calls(stand_ins: StandIns) -> list[str]:
    path = stand_ins.directory / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_each_task_takes_its_share_with_private_temporary_files(stand_ins, tmp_path):
    (tmp_path / "node disk").mkdir()
    disk = {"TMPDIR": str(tmp_path / "node disk")}
    for environment, share in [
        ({}, None),
        (array(0, 0, 3), "0/4"),
        (array(6, 4, 7), "2/4"),
        (array(5, 1, 9, step=4), "1/3"),
        (array(3, 3, 3), "0/1"),
    ]:
        done = stand_ins.run(PREPARE, "--sources", "x", env=CORES | disk | environment)
        assert done.returncode == 0, done.stdout
        *words, used, offline = calls(stand_ins)
        given = ["prepare_data.py", "--sources", "x", "--num_proc", "3"]
        assert words == [*given, *(["--shard", share] if share else [])]
        assert used.startswith(f"tmp={tmp_path}/node disk/stoker-prepare-")
        assert offline == "offline=1"
        (stand_ins.directory / "calls").unlink()
        assert not list((tmp_path / "node disk").iterdir())
    stand_ins.run(PREPARE, "--sources", "x", "--num_proc", "9", env=CORES)
    assert calls(stand_ins)[:5] == ["prepare_data.py", "--sources", "x", "--num_proc", "9"]


def test_jobs_that_cannot_prepare_are_refused(stand_ins):
    x = ("--sources", "x")
    for words, environment, message in [
        (x, array(7, 3, 7, count=2), "an array with gaps (2 tasks from 3 to 7) leaves shares"),
        ((*x, "--shard=0/2"), {}, "--shard=0/2 is not for jobs: the array is the division"),
        ((*x, "--merge", "2"), {}, "--merge is not for jobs: the array is the division"),
        (x, {"SLURM_JOB_NUM_NODES": "4"}, "use --array=0-3 in place of --nodes=4"),
        ((), {}, "no arguments given: sbatch --array=0-15 slurm/prepare_job.sh"),
    ]:
        done = stand_ins.run(PREPARE, *words, env=environment)
        assert done.returncode == 2
        assert message in done.stdout
    done = stand_ins.run(PREPARE, *x, env={"TMPDIR": "/no/such"})
    assert done.returncode == 74
    assert "no temporary directory can be made in /no/such: set TMPDIR in" in done.stdout
    assert not calls(stand_ins)


def test_a_failed_share_is_not_merged_and_says_how_to_resume(stand_ins):
    stand_ins.answer(2)
    done = stand_ins.run(PREPARE, "--sources", "a b", env=array(0, 0, 1))
    assert done.returncode == 2
    assert calls(stand_ins).count("prepare_data.py") == 1
    assert "finished work is kept: to resume, submit the same" in done.stdout.splitlines()[-1]
    assert not stand_ins.was_called("scontrol")


def test_the_time_limit_requeues_the_task_but_not_for_ever(stand_ins):
    stand_ins.answer(138)
    done = stand_ins.run(PREPARE, "--sources", "x", env=array(3, 0, 3))
    assert done.returncode == 75, done.stdout
    assert "stopped by USR1, finished work is kept; requeued" in done.stdout
    assert stand_ins.arguments("scontrol") == ["requeue", "7_3"]
    stand_ins.forget()
    done = stand_ins.run(PREPARE, "--sources", "x", env={"SLURM_RESTART_COUNT": "20"})
    assert done.returncode == 75, done.stdout
    assert "after 20 restarts, not requeued: give it more --time" in done.stdout
    assert not stand_ins.was_called("scontrol")


def test_a_python_that_knows_no_signals_is_ended_by_the_stop_signal(stand_ins):
    (stand_ins.root / "slurm/run_python.sh").write_text(
        '#!/bin/bash\necho $PPID >"$STAND_IN/pid"\ntouch "$STAND_IN/up"\nexec /bin/sleep 60\n'
    )
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(stand_ins.run, PREPARE, "--sources", "x")
        wait_until((stand_ins.directory / "up").exists, "the step does not start")
        os.kill(int((stand_ins.directory / "pid").read_text()), signal.SIGUSR1)
        done = ended.result()
    assert done.returncode == 75, done.stdout
    assert stand_ins.arguments("scontrol") == ["requeue", "7"]


# On a real Slurm


@pytest.mark.slow
@pytest.mark.usefixtures("idle")
def test_an_interrupted_array_resumes_merges_checks_and_does_nothing_twice(slurm, tmp_path):
    """One share of three is done outside of Slurm; the array of two does the rest."""
    output, source = tmp_path / "a prepared $(touch canary)", tmp_path / "texts.jsonl"
    # A unit of work has at least 1 MiB. With four units no share of two tasks is empty.
    text = '{"text": "' + " ".join(f"t{number % 126}" for number in range(2000)) + '"}\n'
    source.write_text(text * (4 * 2**20 // len(text) + 1))
    tokenizer = tiny.make_tokenizer(tmp_path / "tokenizer")
    words = tiny.flags(sources=source, output_dir=output, tokenizer_name_or_path=tokenizer)

    def logs_of(array: str) -> str:
        """Submit this array and wait until no task of it is left."""
        job = slurm.submit(
            "--cpus-per-task=1", "--mem=1G", f"--array={array}", PREPARE, *words,
            cwd=ROOT, log=tmp_path / "%a.log", env=job_environment(),
        )  # fmt: skip

        def ended() -> bool:
            shown = slurm.run("squeue", "--noheader", "--jobs", job.id, check=False).stdout
            return not shown.strip() or "Invalid job id" in shown

        wait_until(ended, "the array does not end")
        logs = [tmp_path / f"{task}.log" for task in array.split("-")]
        return "\n".join(log.read_text() for log in logs)

    done = slurm.run(sys.executable, "prepare_data.py", *words, "--shard", "0/3", cwd=ROOT)
    assert "shard 0/3 is complete" in done.stdout
    logs = logs_of("5-6")
    assert "1 of 2 work units are finished already" in logs, logs
    assert logs.count("all 2 shards are complete: merging") == 1, logs
    assert logs.count("tokens a document: ") == 1, logs
    data = open_token_dataset(output / "train")
    said = re.search(r"train: ([\d,]+) documents, ([\d,]+) tokens", logs)
    assert said, logs
    assert int(said[1].replace(",", "")) == len(data) > 100
    assert int(said[2].replace(",", "")) == data.lengths.sum() == 2001 * len(data)
    assert not (output / ".shards").exists()

    logs = logs_of("0")
    assert logs.count("already prepared with these settings") == 1, logs
    assert "merging" not in logs
    assert not [*tmp_path.rglob("canary"), *ROOT.glob("canary")]
