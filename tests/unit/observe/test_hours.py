"""GPU-hours of made-up runs by part, with the right values; sums, energy and the budget's end."""

import datetime
import json
import os
import time

import pytest

from utils.callbacks.progress import Phase
from utils.host import run_lock
from utils.host.phase_times import HUNG, SAVING, PhaseTimes
from utils.observe.history import read_run
from utils.observe.hours import PHASES_BY_PART, amount, end_of_budget, hours_of
from utils.observe.run_state import read_status, sums_of_hours

BEGIN = 1_800_000_000.0
SPENT = {"starting": 100, "in its first step": 20, "training": 800, "evaluating": 50, SAVING: 30}


def iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def owner(run, number, since, spent, *, left=True, saved=None, kwh=None, restart=0, beat=None):
    """Write the lock file of a start of job 9."""
    who = {"since": iso(since), "host": "n1", "pid": 7, "job": "9", "machine": "m"}
    content = {"owner": who | {"restart_in_job": restart}, "beat": 9, "left": left, "kwh": kwh}
    content |= {"spent": spent, "saved": saved or {}, "phase": "training"}
    path = run / ".lock" / f"owner-{number}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    os.utime(path, (since + sum(spent.values()) if beat is None else beat,) * 2)


def entry(began, restart, ranks=4, job_began=None, devices=("H100",)):
    slurm = {"job_id": "9", "restart_count": "0", "restart_in_job": restart}
    slurm["start_time"] = job_began
    launch = {"world_size": ranks, "devices": list(devices)}
    return {"time": iso(began), "resumed_from": None, "slurm": slurm, "launch": launch}


def write(run, *entries):
    run.mkdir(parents=True, exist_ok=True)
    (run / "provenance.json").write_text(json.dumps({"run_id": "r", "starts": entries}))
    return run


@pytest.fixture
def interrupted(tmp_path):
    """Make a run of four ranks: killed in a hang, restarted in the job, stopped; then of two."""
    run = write(
        tmp_path / "runs" / "interrupted",
        entry(BEGIN + 10, "0", job_began=BEGIN - 60), entry(BEGIN + 1160, "1"),
        entry(BEGIN + 5000, "0", ranks=2, job_began=BEGIN + 4970),
    )  # fmt: skip
    saved = SPENT | {"training": 500}
    owner(run, 1, BEGIN, SPENT | {HUNG: 100}, left=False, saved=saved, kwh=2.0)
    second = {"starting": 40, "loading a checkpoint": 10, "in its first step": 5, "training": 400}
    owner(run, 2, BEGIN + 1160, second | {SAVING: 45, "finishing": 20}, kwh=1.5, restart=1)
    third = {"starting": 50, "training": 600, "evaluating": 40, SAVING: 10}
    owner(run, 3, BEGIN + 5000, third)
    lines = [
        {"event": "started", "step": 0, "time": BEGIN + 100},
        {"event": "resumed", "step": 50, "time": BEGIN + 1210},
        {"event": "stopped", "step": 90, "time": BEGIN + 1660},
        {"event": "resumed", "step": 90, "time": BEGIN + 5050},
        {"event": "stopped", "step": 150, "time": BEGIN + 5700},
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run


def test_starts_of_the_run_that_a_checkpoint_was_taken_from_do_not_count_again(interrupted):
    """The adopted record has all starts, and the new directory has no lock files of the others."""
    before = hours_of(read_run(interrupted))
    for number in (1, 2):
        (interrupted / ".lock" / f"owner-{number}").unlink()
    content = json.loads((interrupted / "provenance.json").read_text())
    for start in content["starts"][:2]:
        start["slurm"]["job_id"] = "8"
    (interrupted / "provenance.json").write_text(json.dumps(content))
    hours = hours_of(read_run(interrupted))
    third = (600 + 40 + 10 + 50 + 30) * 2 / 3600  # as in the next test
    assert hours.total == pytest.approx(third)
    assert hours.kwh == 0
    assert hours.total < before.total


def test_each_part_has_its_hours_and_the_sum_is_that_of_the_allocation(interrupted):
    run = read_run(interrupted)
    hours = hours_of(run)
    ranked = {  # seconds of 4 ranks, of 2 ranks
        "training": (500 + 400, 600), "evaluation": (50, 40), "saves": (30 + 45, 10),
        "starts": (60 + 120 + 55, 30 + 50), "lost": (300, 0), "hangs": (100, 0),
        "between restarts": (60, 0), "other": (20, 0),
    }  # fmt: skip
    right = {name: (4 * four + 2 * two) / 3600 for name, (four, two) in ranked.items()}
    assert hours.parts == pytest.approx(right)
    ended = [start.ended for start in run.starts]
    assert ended == pytest.approx([BEGIN + 1100, BEGIN + 1680, BEGIN + 5700])
    # The first job had its GPUs from 60 s before the first start to the end of the second.
    allocated = 4 * (ended[1] - (BEGIN - 60)) + 2 * (ended[2] - (BEGIN + 4970))
    assert hours.total == pytest.approx(allocated / 3600)
    assert str(hours) == (
        "2.34 GPU-hours, 3.5 kWh: training 1.33, evaluation 0.0778, saves 0.0889, starts 0.306, "
        "lost 0.333, hangs 0.111, between restarts 0.0667, other 0.0222"
    )


def test_the_phases_are_those_of_a_run_and_none_is_left_out():
    known = [phase for phases in PHASES_BY_PART.values() for phase in phases]
    assert sorted(known) == sorted([*map(str, Phase), HUNG])
    assert SAVING == Phase.SAVE


def test_a_run_of_an_older_version_or_outside_of_slurm_has_its_sum(tmp_path):
    run = write(tmp_path / "run", entry(BEGIN, None, 2, devices=("cpu",)))
    owner(run, 1, BEGIN, {}, beat=BEGIN + 400)
    lines = [{"event": "started", "step": 0, "time": BEGIN + 100}]
    lines += [{"event": "stopped", "step": 9, "time": BEGIN + 390}]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    hours = hours_of(read_run(run))
    assert hours.total == pytest.approx(2 * 400 / 3600)
    assert hours.parts["starts"] == pytest.approx(2 * 100 / 3600)
    assert str(hours) == "0.222 process-hours: starts 0.0556, other 0.167"


def test_a_copied_run_has_the_same_hours(interrupted):
    before = hours_of(read_run(interrupted)).parts
    for path in (interrupted / ".lock").iterdir():
        os.utime(path)  # as `cp -r` does
    assert hours_of(read_run(interrupted)).parts == pytest.approx(before)


@pytest.mark.parametrize(
    "spent", [{"training": -1}, {"training": 1e300}, {"training": "NaN"}, ["x"], 7, {"x": None}]
)
def test_damaged_times_count_nothing(tmp_path, spent):
    run = write(tmp_path / "run", entry(BEGIN, "0"))
    owner(run, 1, BEGIN, {}, beat=BEGIN + 50)
    path = run / ".lock" / "owner-1"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"spent": spent, "kwh": -1}))
    os.utime(path, (BEGIN + 50,) * 2)
    hours = hours_of(read_run(run))
    assert 0 <= hours.total < 1
    assert hours.kwh == 0


@pytest.mark.parametrize("ranks", [-3, 0, 10**400, None])
@pytest.mark.parametrize("job_began", ["2026-01-01", None, BEGIN + 1e6])
def test_a_damaged_record_does_not_hide_the_other_hours(tmp_path, ranks, job_began):
    first, second = entry(BEGIN, "0"), entry(BEGIN + 5000, "0", ranks, job_began)
    run = write(tmp_path / "run", first, second)
    owner(run, 1, BEGIN, {"training": 3600})
    owner(run, 2, BEGIN + 5000, {"training": 1800})
    assert read_status(run, {}).hours.total == pytest.approx(4 * 1.5), "as many ranks as before"


def test_the_budget_ends_when_the_hours_of_all_starts_are_used_up(interrupted):
    used = hours_of(read_run(interrupted)).total
    assert end_of_budget(interrupted, None) is None
    # The last start has two ranks, so an hour of the budget is half an hour.
    end = end_of_budget(interrupted, used + 1)
    assert end == pytest.approx(time.time() + 1800, abs=600), "not by the clock of a start"


@pytest.mark.parametrize("wrong_s", [-365 * 86400, 365 * 86400])
def test_a_clock_that_was_wrong_for_a_moment_makes_no_hours(tmp_path, wrong_s):
    run = write(tmp_path / "run", entry(BEGIN + 10, "0", ranks=1))
    owner(run, 1, BEGIN + min(wrong_s, 0), SPENT)
    lines = [{"event": "started", "step": 0, "time": BEGIN + 100}]
    lines += [{"event": "train", "step": 1, "loss": 1.0, "time": BEGIN + 900 + max(wrong_s, 0)}]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert hours_of(read_run(run)).total <= (sum(SPENT.values()) + 60) / 3600


def test_hours_are_summed_by_user_and_folder(interrupted, monkeypatch):
    other = write(interrupted.parent / "sweep" / "a", entry(BEGIN, "0", 1, devices=("cpu",)))
    owner(other, 1, BEGIN, {"starting": 1800, "training": 1800})
    runs = [read_status(path, {}) for path in (interrupted, other)]
    assert {run.owner for run in runs} == {interrupted.owner()}
    names = dict(zip((run.run for run in runs), ("interrupted", "sweep/a"), strict=True))
    both = "2.34 GPU-hours, 1 process-hours, 3.5 kWh"
    assert sums_of_hours(runs, names) == [
        ("all runs", both), (f"user {interrupted.owner()}", both),
        ("folder sweep", "1 process-hours"),
    ]  # fmt: skip
    monkeypatch.setenv("STOKER_CO2_G_PER_KWH", "400")
    assert sums_of_hours(runs, names)[0][1] == f"{both}, 1.4 kg CO2"
    monkeypatch.setenv("STOKER_CO2_G_PER_KWH", "a lot")
    assert sums_of_hours(runs, names)[0][1].endswith("STOKER_CO2_G_PER_KWH='a lot' is no number")


def test_times_of_phases_are_of_a_process_that_hangs_after_a_save(monkeypatch, tmp_path):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    phases = PhaseTimes("starting")
    for seconds, phase in ((9, "training"), (1, "training"), (2, SAVING), (3, "training")):
        now[0] += seconds
        phases.begin(phase)
    now[0] += 50
    assert phases.saved == {"starting": 9, "training": 3, SAVING: 3}
    assert phases.seconds() == {"starting": 9, "training": 53, SAVING: 3}
    phases.take_hang(48)
    now[0] += 1
    assert phases.seconds() == {"starting": 9, "training": 6, SAVING: 3, HUNG: 48}


def test_the_lock_of_a_process_has_its_phases_energy_and_hang(tmp_path):
    run_lock.take_run_lock(tmp_path)
    try:
        run_lock.note_phase("training")
        run_lock.note_energy(0.25)
        run_lock.note_hang(1e6)
        found = next(run_lock.run_owners(tmp_path))
        assert set(found.spent) == {"starting", "training", HUNG}
        assert found.kwh == 0.25
        longest = "\U0001f600" * 1000  # twelve bytes each in JSON
        run_lock.note_error(longest)
        for phase in (*Phase, "training"):
            run_lock.note_phase(phase)
    finally:
        run_lock.leave_run_lock(tmp_path)
    path = tmp_path / run_lock.LOCK_FOLDER / "owner-1"
    assert path.stat().st_size == run_lock.SIZE, "a shorter text would leave a rest of a longer one"
    assert next(run_lock.run_owners(tmp_path)).spent.keys() == {*Phase, HUNG}


def test_amounts_have_three_digits():
    assert [amount(each) for each in (0.0, 1.0, 12.345, 999.4, 1234.5)] == [
        "0", "1", "12.3", "999", "1,234",
    ]  # fmt: skip
