"""Interrupted jobs are requeued and end with the numbers of an uninterrupted run.

`make test` interrupts a few jobs. `make interruptions`, a part of `make test-exhaustive`, runs each
row of the table in interruptions.py as a job and writes the outcomes to
benchmarks/results/interruptions.json, from which the table in docs/slurm.md is made.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny
from interruptions import TABLE, Interruption, Scene, Then
from training_jobs import TrainingJobs, cycles, raw_journal

from benchmarks.figures.interruptions import KINDS
from benchmarks.hardware.circumstances import circumstances

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("idle")]

ROWS = {row.name: row for row in TABLE}
SCRIPTS = dict(zip(KINDS, ("pretrain.py", "sft_train.py"), strict=True))
CASES = [
    pytest.param(row, kind, id=f"{row.name}, {kind}")
    for kind in KINDS
    for row in TABLE
    if kind == "pretraining" or row.fine_tuning
]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of an interrupted job, as in the result file.

    `seconds` is the time between the last new step before the interruption and the first after it.
    """

    exit_code: int | None
    then: str
    lost_steps: int | None
    seconds: float | None
    says: str
    equal: bool | None


@pytest.fixture
def scene(jobs: TrainingJobs, tmp_path: Path) -> Iterator[Scene]:
    made = Scene(jobs, tmp_path)
    yield made
    jobs.slurm.cancel_all()
    made.umount()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("row", "kind"), CASES)
def test_an_interruption_costs_what_the_table_says(
    row: Interruption, kind: str, jobs: TrainingJobs, scene: Scene
):
    scene.script = SCRIPTS[kind]
    refused = row.then == Then.REFUSED
    whole = None if refused else jobs.finished(per_node=1, training=scene.script)
    outcome = interrupted(scene, row, whole)
    print(outcome)
    expected = (row.code, row.then.value, None if refused else True)
    assert (outcome.exit_code, outcome.then, outcome.equal) == expected, scene.log()
    if row.then in (Then.RESTARTED, Then.REQUEUED, Then.RESUBMITTED):
        assert outcome.lost_steps is not None, "the run was not interrupted"
        assert outcome.lost_steps <= row.lost, scene.log()
    record(row, kind, outcome)


def interrupted(scene: Scene, row: Interruption, whole: Path | None) -> Outcome:
    """Interrupt a job, let it end, and return its outcome from the journal and the log."""
    row.before(scene)
    if row.provoke is not None:
        (scene.hold / str(row.at_step)).touch()
    scene.submit(row)
    if row.provoke is not None:
        scene.reach(row.at_step)
        row.provoke(scene)
        scene.release()
    scene.slurm.wait(scene.job)
    then, code = scene.became(), scene.exit_code()
    row.mend(scene)
    if then == Then.RESUBMITTED:
        scene.submit(row)
        assert scene.slurm.wait(scene.job) == "COMPLETED", scene.log()
    equal = None if whole is None else same(scene.run, whole)
    cost = next(iter(cycles(scene.run)), None)
    said = re.search(f"^.*(?:{row.says}).*", scene.log(), flags=re.MULTILINE)
    assert said, f"the log lacks {row.says!r}:\n{scene.log()}"
    return Outcome(
        code, then.value,
        cost.lost_steps if cost else None,
        cost.seconds if cost else None,
        scene.readable(said[0]) if row.says else "",
        equal,
    )  # fmt: skip


def same(run: Path, uninterrupted: Path) -> bool:
    """Return whether losses, evaluations and weights are exactly equal."""
    tiny.assert_same_run(run, uninterrupted)
    assert tiny.evaluations(run, "heldout") == tiny.evaluations(uninterrupted, "heldout")
    return True


def record(row: Interruption, kind: str, outcome: Outcome) -> None:
    """Add the outcome to the other rows in the result file of `make interruptions`."""
    if not (target := os.environ.get("STOKER_INTERRUPTIONS_FILE")):
        return
    path = Path(target)
    known = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    rows = known["rows"]
    rows.setdefault(row.name, {})[kind] = dataclasses.asdict(outcome)
    ordered = {name: rows[name] for name in ROWS if name in rows}
    facts = circumstances("make interruptions") | {"rows": ordered}
    path.write_text(json.dumps(facts, indent=2) + "\n")


# One job meets these rows in turn. Its ranks wait after these steps.
IN_TURN = {
    4: "`scancel --signal=TERM`",
    12: "`touch RUN/STOP`",
    23: "`kill -9` of a rank",
    33: "a node lost and back",
}


def test_whatever_ends_a_job_it_resumes_with_the_same_numbers(jobs, scene, tmp_path):
    """Two jobs run side by side: one meets its time limit, the other all other causes in turn."""
    (tmp_path / "limited").mkdir()
    limited = Scene(jobs, tmp_path / "limited")
    limit = ROWS["time limit, with Slurm's signal"]
    limit = dataclasses.replace(limit, options=("--partition=other", "--signal=B:USR1@300"))
    whole = jobs.finished(per_node=1)
    (limited.hold / str(limit.at_step)).touch()
    limited.submit(limit)
    with ThreadPoolExecutor() as pool:
        at_the_limit = pool.submit(meet_the_limit, limited, limit)
        survive_causes_in_turn(scene)
        at_the_limit.result()
    for survivor in (scene, limited):
        same(survivor.run, whole)
    # There may be more starts than cycles: the limit may come before the first step of a start.
    found = cycles(limited.run)
    assert found, "the run was not interrupted"
    assert all(cycle.lost_steps == 0 for cycle in found)


def meet_the_limit(scene: Scene, limit: Interruption) -> None:
    """Bring the limit near while the job waits at a step, and far away after its requeue."""
    scene.reach(limit.at_step)
    hours, minutes, _ = scene.slurm.fields(scene.job)["RunTime"].split(":")
    set_limit(scene, 60 * int(hours) + int(minutes) + 5)
    limit.provoke(scene)
    scene.release()
    scene.wait_for_requeue()
    set_limit(scene, 60)
    assert scene.slurm.wait(scene.job) == "COMPLETED", scene.log()
    restarts = int(scene.slurm.fields(scene.job)["Restarts"])
    assert restarts == scene.log().count("; requeued, start")


def set_limit(scene: Scene, minutes: int) -> None:
    scene.slurm.run("scontrol", "update", f"jobid={scene.job.id}", f"timelimit={minutes}")


def survive_causes_in_turn(scene: Scene) -> None:
    """Interrupt one job by each row of IN_TURN."""
    for step in IN_TURN:
        (scene.hold / str(step)).touch()
    scene.submit()
    for step, name in IN_TURN.items():
        scene.reach(step)
        ROWS[name].provoke(scene)
        (scene.hold / str(step)).unlink()
    assert scene.slurm.wait(scene.job) == "COMPLETED", scene.log()
    found = cycles(scene.run)
    print(found)
    # Slurm may end the job once more, because its signal for the lost node's old start comes late.
    for name, cycle in zip(IN_TURN.values(), found[:4], strict=True):
        assert cycle.lost_steps <= ROWS[name].lost
        assert re.search(ROWS[name].says, scene.log())
    codes = [ROWS[name].code for name in IN_TURN.values()]
    assert scene.codes()[:2] == [code for code in codes[:3] if code]
    starts = tiny.starts(scene.run)[3:5]
    assert [start["resumed_from"].rsplit("-", 1)[1] for start in starts] == ["20", "30"]
    assert [start["slurm"]["restart_in_job"] for start in starts] == ["1", "0"]
    assert any(line.get("recovery_s", 0.0) > 0 for line in raw_journal(scene.run))
    assert f"{scene.run}/STOP" in scene.log()
    assert not (scene.run / "STOP").exists()
