"""On a real Slurm: a node that fails twice is left out, and a node that computes wrong is found."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import tiny
from slurm_cluster import Job
from stand_ins import copy_scripts
from training_jobs import TrainingJobs, job_environment

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("idle")]

# A stand-in for launch_node.sh, which hangs on the first node that a job gets.
HANGS = r"""#!/usr/bin/env bash
set -uo pipefail
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
(set -C; echo "$SLURMD_NODENAME" >"bad-$job") 2>/dev/null || true
[[ $SLURMD_NODENAME == "$(<"bad-$job")" && -z ${SLURM_RESTART_COUNT:-} ]] || exit 0
echo "3 0" >"$STOKER_NOTES_DIR/restarts"
echo runs/a >"$STOKER_NOTES_DIR/run_started"
echo '["GPU-1"]' >"$STOKER_NOTES_DIR/gpus.json"
echo "rank 0 on $SLURMD_NODENAME gave no sign of life (frozen)." >"$STOKER_NOTES_DIR/verdict.txt"
echo 76 >"$STOKER_NOTES_DIR/exit_code"
exit 76
"""


class Hangs:
    """A submitter of jobs of one node that hang there twice: at first, and restarted in the job."""

    def __init__(self, jobs: TrainingJobs, root: Path):
        self.slurm, self.root, self.ledger = jobs.slurm, root, root.parent / "nodes.jsonl"
        self.count = 0
        copy_scripts(root)
        (root / "slurm/launch_node.sh").write_text(HANGS)

    def submit(self, *options: str, env: Mapping[str, str] | None = None) -> Job:
        self.count += 1
        log = self.root.parent / f"{self.count}.log"
        own = {"STOKER_LEDGER": str(self.ledger), "STOKER_LEAVE_OUT_AFTER": "2"} | dict(env or {})
        words = "--cpus-per-task=1", "--mem=500", "--gpus-per-node=0", "--time=60", *options
        return self.slurm.submit(
            *words, "slurm/train_job.sh", "train.py",
            cwd=self.root, log=log, env=job_environment(own),
        )  # fmt: skip

    def first_node(self, job: Job) -> str:
        return (self.root / f"bad-{job.id}").read_text().strip()


def test_a_node_that_fails_twice_is_left_out_if_another_fits(jobs, tmp_path):
    told, command = tmp_path / "told", tmp_path / "tell"
    command.write_text(f'#!/bin/sh\nprintf "%s|" "$@" >>{told}\n')
    command.chmod(0o755)
    hangs = Hangs(jobs, tmp_path / "a repository")
    moves = hangs.submit("--array=4", "--exclude=n4", env={"STOKER_ON_EVENT": str(command)})
    stays = hangs.submit("--partition=other", "--exclude=n3")
    off = hangs.submit("--partition=other", "--exclude=n4", env={"STOKER_LEAVE_OUT_AFTER": "0"})
    for job in (moves, stays, off):
        assert jobs.slurm.wait(job) == "COMPLETED", job.output()
        assert jobs.slurm.fields(job)["Restarts"] == "1", job.output()
        assert job.output().count(f"noted in {hangs.ledger}: ") == 2, job.output()
    bad = hangs.first_node(moves)
    fields = jobs.slurm.fields(moves)
    assert {fields["BatchHost"], bad} == {"n1", "n2"}, moves.output()
    assert sorted(fields["ExcNodeList"].split(",")) == [bad, "n4"], "the user's own stays"
    said = f"the next start leaves out {bad} (2 faults in 7 days)"
    assert f"job {moves.id}_4: {said} (python status.py --nodes)" in moves.output()
    assert f"start 2 will resume; {said}|" in told.read_text()
    assert "cannot do without n4 (2 faults in 7 days)" in stays.output()
    for job, node, excluded in ((stays, "n4", "n3"), (off, "n3", "n4")):
        fields = jobs.slurm.fields(job)
        assert (fields["BatchHost"], fields["ExcNodeList"]) == (node, excluded), job.output()
    assert "leaves out" not in stays.output() + off.output()
    faults = [json.loads(line) for line in hangs.ledger.read_text().splitlines() if line]
    assert [(one["node"], one["kind"], one["gpu"]) for one in faults if one["node"] == bad] == [
        (bad, "hang", "GPU-1"), (bad, "hang", "GPU-1"),
    ]  # fmt: skip
    assert {one["job"] for one in faults} == {f"{moves.id}_4", stays.id, off.id}


# A callback that spoils a gradient on n2, as a faulty unit of a GPU would.
WRONG_ON_N2 = """
import os
from transformers import TrainerCallback

class Wrong(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if os.environ.get("SLURMD_NODENAME") == "n2" and state.global_step == 10:
            next(model.parameters()).grad[:, 0] += 1.0
"""


def test_a_node_that_computes_wrong_is_found_at_the_resume(jobs, tmp_path, call):
    run, ledger, wrong = tmp_path / "run", tmp_path / "nodes.jsonl", tmp_path / "wrong.py"
    wrong.write_text(WRONG_ON_N2)
    settings = {
        "callbacks": f"{wrong}:Wrong", "max_steps": 14, "save_steps": 10, "eval_strategy": "no",
        "eval_data": None, "eval_steps": None, "full_determinism": True, "restarts_in_job": 0,
    }  # fmt: skip

    def start(node: str, state: str, partition: str = "main", **env: str) -> Job:
        options = (f"--nodelist={node}", f"--partition={partition}", "--no-requeue")
        options += ("--gpus-per-node=0", "--ntasks-per-node=1")
        own = {"STOKER_LEDGER": str(ledger), "STOKER_PROCESSES_PER_NODE": "1"} | env
        job = jobs.submit(
            run, *options, script="slurm/train_job.sh", env=own, config="cpu", **settings
        )
        assert jobs.slurm.wait(job) == state, job.output()
        return job

    start("n1", "FAILED", STOKER_TEST_KILL_RANK_AT_STEP="0:13")
    assert len(tiny.losses(run)) == 13, "three steps after the checkpoint"
    assert not ledger.exists(), "a killed rank is no fault of a node"
    found = start("n2", "FAILED")
    assert jobs.slurm.fields(found)["ExitCode"] == "69:0", found.output()
    log = found.output()
    assert "resume check: step 11 is as on n1. The run repeats this step anyway" in log
    assert "step 12: loss " in log
    assert ", first on n1, then on n2. One of these nodes computes wrong." in log
    assert "--exclude=n1,n2. If a third node agrees with n1, the run goes on" in log
    faults = [json.loads(line) for line in ledger.read_text().splitlines() if line]
    assert [(one["node"], one["kind"], one["job"]) for one in faults] == [
        ("n1", "mismatch", found.id), ("n2", "mismatch", found.id),
    ]  # fmt: skip
    again = start("n2", "FAILED")
    assert "step 12: loss " in again.output(), "n2 does not agree with itself alone"
    third = start("n3", "COMPLETED", partition="other")
    assert "resume check: step 12 is as on n1. " in third.output()
    own = {"STOKER_LEDGER": str(ledger), "STOKER_LEAVE_OUT_AFTER": "2"}
    shown = call("python", "status.py", "--nodes", **own)
    assert "n2    mismatch 2  no" in shown.stdout, shown.stdout + shown.stderr
