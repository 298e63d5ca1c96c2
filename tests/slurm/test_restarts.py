"""Restarts of the ranks inside the job: the decisions of the job script, on stand-ins of Slurm.

test_interruptions.py kills ranks, data workers and launchers of real jobs.
"""

import re

import pytest
from stand_ins import StandIns

TRAIN = "slurm/train_job.sh"
LOST = "rank 1 on n1 was killed by SIGKILL"
# The ranks of each step begin at the step that the list STEPS names, of at most three restarts.
AT_SRUN = """
STEPS=({steps})
number=$(wc -l <"$STAND_IN/steps")
echo "$STOKER_RESTART_IN_JOB ${{STOKER_LOST_AT-}} $STOKER_NOTES_DIR" >>"$STAND_IN/steps"
echo "3 ${{STEPS[number]}}" >"$STOKER_NOTES_DIR/restarts"
"""


def steps_of(stand_ins: StandIns) -> list[list[str]]:
    """Return number of the restart, time of the crash and notes of each step."""
    lines = (stand_ins.directory / "steps").read_text().splitlines()
    return [line.split(" ") for line in lines]


def job(stand_ins: StandIns, steps: str, code: int = 76, more: str = "", nodes: int = 1):
    """Run a job in which each step ends with `code`."""
    stand_ins.forget()
    (stand_ins.directory / "steps").write_text("")
    (stand_ins.directory / "at_srun").write_text(AT_SRUN.format(steps=steps) + more)
    stand_ins.answer(code)
    stand_ins.leaves(code, LOST)
    script = TRAIN if nodes == 1 else "slurm/multinode_job.sh"
    return stand_ins.run(script, "train.py", env={"SLURM_JOB_NUM_NODES": str(nodes)})


@pytest.mark.parametrize(
    ("steps", "restarts"), [("0 10 20 30 40", 3), ("0 0 0", 1), ("10 20 20 20", 2)]
)
def test_ranks_start_again_once_from_each_checkpoint_and_at_most_three_times(
    stand_ins, steps, restarts
):
    done = job(stand_ins, steps)
    assert done.returncode == 76
    said = [line for line in done.stdout.splitlines() if LOST in line]
    assert len(said) == restarts + 1
    for number, line in enumerate(said[:-1], 1):
        assert line.endswith(f"job 7: {LOST}; restart {number} of at most 3 inside the job")
    assert said[-1].endswith(f"{LOST}; requeued, start 2 will resume")
    first, *others = steps_of(stand_ins)
    notes = stand_ins.root / ".stoker/job-7.0"
    assert first == ["0", "", str(notes)]
    for number, (counted, lost_at, where) in enumerate(others, 1):
        assert (counted, where) == (str(number), f"{notes}.{number}")
        assert re.fullmatch(r"[0-9]+(\.[0-9]+)?", lost_at)
    assert stand_ins.was_called("scontrol")


@pytest.mark.parametrize("code", [0, 1, 2, 69, 74, 75, 77, 78, 79])
def test_other_ends_start_no_ranks(stand_ins, code):
    done = job(stand_ins, "0 10", code)
    assert done.returncode == code
    assert len(steps_of(stand_ins)) == 1


def test_a_signal_scancel_a_lost_node_or_a_step_that_still_runs_wins_over_a_restart(stand_ins):
    down, squeue = stand_ins.directory / "down", stand_ins.directory / "at_squeue"
    mark = stand_ins.directory / "signalled"
    once = f"[[ -f {mark} ]] || {{ touch {mark}; kill -USR1 $PPID; }}\n"
    for text in (once, "[[ $1$2 != *--steps* ]] || { echo 7.0; exit; }\n"):
        squeue.write_text(text)
        done = job(stand_ins, "0 10")
        assert (done.returncode, len(steps_of(stand_ins))) == (76, 1), done.stdout
        assert f"{LOST}; requeued" in done.stdout
    assert mark.exists()
    squeue.unlink()
    for state, restarts in (("COMPLETING", 0), ("RUNNING", 1)):
        stand_ins.slurm_says(state, "None", restarts, 1)
        done = job(stand_ins, "0 10")
        assert (done.returncode, len(steps_of(stand_ins))) == (76, 1), done.stdout
    stand_ins.slurm_says("RUNNING", "None", 0, 1)
    down.write_text("n2\n")
    verdict = "rank 0 on n1 lost another rank, which left no word: x"
    lost = f'echo "{verdict}" >"$STOKER_NOTES_DIR/verdict.txt"\n'
    done = job(stand_ins, "0 10", more=lost)
    assert (done.returncode, len(steps_of(stand_ins))) == (76, 1), done.stdout
    assert "node n2 failed: rank 0 on n1" in done.stdout


@pytest.mark.parametrize(("left", "code"), [("69", 76), ("", 76), ("75", 75), ("77", 77), ("0", 0)])
def test_a_restart_that_a_node_cannot_make_requeues_the_job(stand_ins, left, code):
    """The second step ends before its run begins, with this code or (empty) without a verdict."""
    files = '"$STOKER_NOTES_DIR"/{restarts,run_started,exit_code,verdict.txt}'
    second = f"if ((number)); then rm {files}; "
    second += 'echo "$LEFT" >"$STOKER_NOTES_DIR/exit_code"; ' if left else ""
    second += (
        'echo second >"$STOKER_NOTES_DIR/verdict.txt"; '
        if left
        else "echo 1 >$STAND_IN/srun.code; "
    )
    done = job(stand_ins, "0 10", more=f"LEFT={left}\n{second}fi\n")
    assert done.returncode == code, done.stdout
    assert len(steps_of(stand_ins)) == 2
    assert stand_ins.was_called("scontrol") == (code in (75, 76))
    assert bool(list((stand_ins.root / ".stoker").iterdir())) == (code != 0)


def test_a_node_that_loses_the_repository_before_a_restart_requeues_the_job(stand_ins):
    lost = 'rm "$STOKER_NOTES_DIR"/{restarts,run_started,exit_code,verdict.txt}; '
    lost += 'echo 1 >"$STAND_IN/srun.code"'
    unseen = "[[ $1 != --overlap ]] || exit 200\n"
    done = job(stand_ins, "0 10", more=f"{unseen}if ((number)); then {lost}; fi\n", nodes=2)
    assert done.returncode == 76, done.stdout
    assert "a node does not see the repository" in done.stdout
    assert stand_ins.was_called("scontrol")


def test_a_job_in_a_restarted_job_begins_anew(stand_ins):
    """The variables of a restart are not inherited by a job that is submitted inside of it."""
    inherited = {"STOKER_LOST_AT": "5", "STOKER_RESTART_IN_JOB": "2"}
    stand_ins.run(TRAIN, "train.py", env=inherited)
    given = stand_ins.environment("srun")
    assert given["STOKER_RESTART_IN_JOB"] == "0"
    assert "STOKER_LOST_AT" not in given
