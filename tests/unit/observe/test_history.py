"""Reading a run directory: what is read and what is left out if files are missing or damaged."""

import json
import os
import random
import shutil

import pytest

from utils.config.errors import ConfigurationError
from utils.host.journal_file import read_journal
from utils.observe import history
from utils.observe.endings import End, end_of_run, start_in_words
from utils.observe.history import read_run
from utils.observe.page import write_pages


def test_each_start_has_its_lines_and_what_was_done_again_is_marked(made_up_run):
    run = read_run(made_up_run)
    steps = [(start.done, start.last_step) for start in run.starts]
    assert steps == [(-1, 60), (40, 100), (100, 160)]
    assert [start.lost_steps for start in run.starts] == [20, 0, 0]
    assert [start.owner.left for start in run.starts] == [False, True, True]
    assert [line["step"] for line in run.trained] == list(range(1, 161))
    first, second, _ = run.starts
    assert first.ended == first.lines[-1]["time"] + 4, "its lock beat after its last line"
    assert first.trained == first.began + 10
    # The second start logs 15 s after its begin: 10 s to start up, 5 s for the first step. The
    # pause before it is not counted.
    assert second.lines[0]["hours"] * 3600 == first.ended - first.began + 15
    assert run.missing == run.damaged == ()
    assert run.max_steps == 160
    assert run.has_final


def test_starts_within_one_second_keep_their_lines(made_up_run):
    path = made_up_run / "provenance.json"
    content = json.loads(path.read_text())
    for entry in content["starts"]:
        entry["time"] = content["starts"][0]["time"]
    path.write_text(json.dumps(content))
    shutil.rmtree(made_up_run / ".lock")
    starts = read_run(made_up_run).starts
    assert sorted((start.done, start.last_step) for start in starts) == [
        (-1, 60), (40, 100), (100, 160),
    ]  # fmt: skip
    assert starts[-1].last_event == "summary"


def test_a_tail_without_the_line_of_a_start_belongs_to_the_last_one(made_up_run, monkeypatch):
    monkeypatch.setattr(history, "TAIL_BYTES", 4096)
    run = read_run(made_up_run, whole=False)
    assert run.starts[-1].last_event == "summary"
    assert run.starts[-1].last_step == 160
    assert end_of_run(run) is End.FINISHED


def without_marks(lines):
    return [
        {key: line[key] for key in line if key not in ("lost", "hours", "at")} for line in lines
    ]


@pytest.mark.parametrize("seed", range(10))
def test_the_lines_that_count_are_those_of_read_journal(tmp_path, seed):
    """The journal has starts at random steps, torn lines and repeated evaluations."""
    chance = random.Random(seed)
    lines, step, time = [], 0, 100.0
    for start in range(chance.randint(1, 5)):
        step = chance.randint(0, step)
        anew = start == 0 or chance.random() < 0.2
        step = 0 if anew else step
        lines.append({"event": "started" if anew else "resumed", "step": step, "time": time})
        for _ in range(chance.randint(0, 9)):
            step, time = step + 1, time + 1
            lines.append({"event": "train", "step": step, "loss": chance.random(), "time": time})
            if chance.random() < 0.4:
                evaluation = {"event": "eval", "split": "web", "step": step, "time": time}
                lines += [evaluation, {**evaluation, "eval_web_loss": chance.random()}]
        if chance.random() < 0.5:
            lines.append('{"event": "train", "st')
        time += 60
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(texts) + "\n")
    expected = read_journal(path)

    def order(line):
        return line["event"], line["step"]

    found = without_marks(read_run(tmp_path).lines)
    assert sorted(found, key=order) == sorted(expected, key=order)


def test_a_directory_without_a_run_is_refused(tmp_path):
    (tmp_path / "provenance.json").write_text("{")
    with pytest.raises(ConfigurationError, match="holds no run"):
        write_pages([tmp_path], None, None)


def test_causes_come_from_the_lock_and_from_the_jobs_log(made_up_run):
    log = made_up_run.parent / "train-77.log"
    log.write_text(
        "12:00:00  step 60/160  loss 3\n"
        "12:00:01  job 77: rank 1 on n1 was killed by SIGKILL; requeued, start 2 will resume\n"
        "12:00:02  job 78: another job; requeued, start 3 will resume\n"
    )
    lock = made_up_run / ".lock" / "owner-3"
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "error": "no space left"}))
    errors = [start.error for start in read_run(made_up_run).starts]
    assert errors == ["rank 1 on n1 was killed by SIGKILL", None, "no space left"]


def test_the_log_tells_a_preemption_from_scancel(made_up_run):
    def second():
        run = read_run(made_up_run)
        return start_in_words(run, run.starts[1]).partition("with a checkpoint: ")[2]

    assert second() == "a signal, a limit or STOP"
    journal = made_up_run / "metrics.jsonl"
    stop = '"event": "stopped"'
    journal.write_text(journal.read_text().replace(stop, f'{stop}, "reason": "SIGTERM to the job"'))
    assert "from Slurm (before its time limit, or a preemption) or scancel" in second()
    ended = "slurmstepd-n1: error: *** JOB 77 ON n1 CANCELLED AT 2026-11-27T09:00:00"
    (made_up_run.parent / "train-77.log").write_text(
        "12:00:00  job 77, start 1: 1 node(s) n1, in /r\n"
        "12:10:00  job 77: stopped with a checkpoint; requeued, start 2 will resume\n"
        f"{ended} DUE TO JOB REQUEUE ***\n"
        f"12:20:00  job 77, start 2: 1 node(s) n1, in /r\n{ended} DUE TO PREEMPTION ***\n"
        f"12:30:00  job 77, start 3: 1 node(s) n1, in /r\n{ended} ***\n"
        "slurmstepd-n1: error: *** STEP 77.0 ON n1 CANCELLED AT 2026-11-27T09:00:00 ***\n"
    )
    told = ["", "ended by Slurm: preemption", "ended by scancel"]
    assert [start.by_slurm for start in read_run(made_up_run).starts] == told
    assert second() == "ended by Slurm: preemption"
    log = made_up_run.parent / "train-77.log"
    log.write_text(log.read_text().replace(f"{ended} ***\n", ""))
    # Slurm ends the step after each rank that fails.
    assert read_run(made_up_run).starts[2].by_slurm == ""
    record = made_up_run / "provenance.json"
    content = json.loads(record.read_text())
    content["starts"][1]["slurm"] = None
    record.write_text(json.dumps(content))
    assert second() == "SIGTERM to the job", "by hand"


def test_a_restart_on_a_node_with_another_clock_has_its_own_lock(made_up_run):
    record = made_up_run / "provenance.json"
    content = json.loads(record.read_text())
    content["starts"][2]["time"] = content["starts"][0]["time"]  # the third node's clock is behind
    record.write_text(json.dumps(content))
    locks = [made_up_run / ".lock" / f"owner-{number}" for number in (1, 2, 3)]
    owners = [json.loads(lock.read_text()) for lock in locks]
    owners[2]["owner"]["since"] = owners[0]["owner"]["since"]
    for count, (lock, owner) in enumerate(zip(locks, owners, strict=True)):
        owner["owner"] |= {"job": "77", "restart_count": count}
        lock.write_text(json.dumps(owner))
    starts = read_run(made_up_run).starts
    assert {start.owner.restart_count for start in starts} == {0, 1, 2}
    for start in starts:
        assert start.owner.restart_count == int(start.job["restart_count"])


def test_a_job_that_loads_weights_does_not_get_the_lock_of_a_shell(made_up_run):
    """The last start holds the lock. It has no entry in the record yet, so its job is unknown."""
    record = made_up_run / "provenance.json"
    content = json.loads(record.read_text())
    del content["starts"][1:]
    content["starts"][0]["slurm"] = {}
    record.write_text(json.dumps(content))
    locks = [made_up_run / ".lock" / f"owner-{number}" for number in (1, 2, 3)]
    owners = [json.loads(lock.read_text()) for lock in locks]
    locks[2].unlink()
    for lock, owner, job in ((locks[0], owners[0], None), (locks[1], owners[2], "77")):
        owner["owner"]["job"] = job
        lock.write_text(json.dumps(owner))
    starts = read_run(made_up_run).starts
    assert (starts[0].owner.job, starts[-1].owner.job) == (None, "77")


def test_a_strangers_run_shows_no_file_of_another_folder(made_up_run, tmp_path):
    (tmp_path / "secret.txt").write_text("of somebody else")
    (made_up_run / "hang.txt").unlink(missing_ok=True)
    (made_up_run / "hang.txt").symlink_to(tmp_path / "secret.txt")
    os.mkfifo(made_up_run / "out-of-memory-rank7.txt")
    path = made_up_run / "provenance.json"
    content = json.loads(path.read_text())
    job = content["starts"][0]["slurm"]
    job |= {"job_name": "../../secret", "job_id": "9", "restart_count": 0}
    (tmp_path.parent / "secret-9.log").write_text(
        "  job 9: of somebody else; requeued, start 2 will resume\n"
    )
    path.write_text(json.dumps(content))
    run = read_run(made_up_run)
    shown = {page.name for page in run.pages}
    assert not shown & {"hang.txt", "out-of-memory-rank7.txt"}
    assert "of somebody else" not in str([start.error for start in run.starts])
