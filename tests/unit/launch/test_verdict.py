import dataclasses
import json
import threading

import pytest

from utils.launch import verdict
from utils.launch.verdict import (
    Note,
    causes_in_log,
    leave_verdict,
    likeliest_cause,
    note_worker_ends,
    read_notes,
    read_verdict,
    wait_for_verdict,
)

PEER = "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer [10.0.0.1]:4242"
NCCL = "DistBackendError: NCCL error: remote process exited or there was a network error"


def note(kind: str, text: str, rank: int, code: int = 1, at: float = 0.0) -> Note:
    return Note(kind, code, text, rank, f"n{rank // 2 + 1}", at)


@pytest.fixture
def notes_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_NOTES_DIR", str(tmp_path))
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    return tmp_path


def write(directory, *notes: Note) -> None:
    for one in notes:  # renamed into place, as by ranks: a reader may look at any time
        partial = directory / "partial"
        partial.write_text(json.dumps(dataclasses.asdict(one)))
        partial.replace(directory / f"rank-{one.rank}.json")


@pytest.mark.parametrize(
    ("consequence", "cause", "text", "code"),
    [
        (note("failed", NCCL, 0), note("failed", "KeyError", 2, at=2), "rank 2 on n2 failed: K", 1),
        (note("killed", "SIGABRT", 0, 76), note("failed", "a", 3, at=2), "rank 3 on n2 failed", 1),
        (note("failed", "exit code 143", 0, 143), note("hung", "", 1, 76, 5), "rank 1 on n1 h", 76),
        (
            note("killed", "SIGKILL", 0, 76, 5),
            note("failed", "GPU, in nccl.py", 2, 79, 1),
            "rank 2 on n2 failed: GPU, in nccl.py",
            79,
        ),
        (
            None,
            note("refused", "storage error: a", 0, 74),
            "rank 0 on n1 ended: storage error: a",
            74,
        ),
        (None, note("refused", "cluster error: gloo took too long", 1, 69), "rank 1 on n1 end", 69),
        (None, note("stopped", "stopped at step 3", 0, 75), "stopped at step 3", 75),
        (None, note("failed", PEER, 1), "rank 1 on n1 lost another rank, which left no word", 76),
        (None, None, "a process of the job ended without a word", 76),
    ],
)
def test_the_cause_is_chosen_over_what_followed_from_it(consequence, cause, text, code):
    notes = [one for one in (consequence, cause) if one]
    found = likeliest_cause(notes)
    assert found.text.startswith(text)
    assert found.exit_code == code
    assert likeliest_cause(notes[::-1]) == found


def test_each_end_of_a_process_is_noted_but_not_over_its_own_words(notes_dir):
    """SIGKILL means lack of memory only if the kernel's counter of such kills has grown."""
    write(notes_dir, note("failed", "KeyError: 'x'", 0))
    ends = {0: 1, 1: -9, 2: 3, 3: 75, 4: -10, 5: -120}
    note_worker_ends(ends, asked_to_stop=False, memory_ran_out=False)
    note_worker_ends({6: -10, 7: -15, 8: -11, 9: -9}, asked_to_stop=True, memory_ran_out=True)
    found = {one.rank: (one.kind, one.exit_code, one.text) for one in read_notes(notes_dir)}
    lacked = found.pop(9)
    assert lacked[:2] == ("killed", 79)
    assert "SIGKILL: the kernel killed a process of this job because the host's memo" in lacked[2]
    assert [found[rank] for rank in range(9)] == [
        ("failed", 1, "KeyError: 'x'"),
        ("killed", 76, "SIGKILL"),
        ("failed", 3, "exit code 3; what it printed is above"),
        ("stopped", 75, "stopped"),
        ("killed", 76, "SIGUSR1"),
        ("killed", 76, "signal 120"),
        ("stopped", 75, "stopped by SIGUSR1 before it could save"),
        ("stopped", 75, "stopped by SIGTERM before it could save"),
        ("killed", 76, "SIGSEGV"),
    ]


def test_only_a_consequence_waits_for_the_other_nodes_word(notes_dir, monkeypatch):
    monkeypatch.setattr(verdict, "WAIT_FOR_CAUSES_S", 1e9)
    write(notes_dir, note("failed", "KeyError: 'x'", 0))
    assert "KeyError" in wait_for_verdict(several_nodes=True).text
    write(notes_dir, note("failed", PEER, 0))
    assert "lost another rank" in wait_for_verdict(several_nodes=False).text
    killed = note("killed", "SIGKILL", 3, 76)
    timer = threading.Timer(0.2, write, (notes_dir, killed))
    timer.start()
    found = wait_for_verdict(several_nodes=True)
    timer.join()
    assert found.text == "rank 3 on n2 was killed by SIGKILL"


def test_a_verdict_that_is_there_is_the_jobs(notes_dir):
    write(notes_dir, note("failed", "KeyError: 'x'", 0))
    assert read_verdict() is None
    assert leave_verdict("rank 1 on n2 hung", 76)
    assert not leave_verdict("another", 1)
    found = wait_for_verdict(several_nodes=True)
    assert (found.text, found.exit_code) == ("rank 1 on n2 hung", 76)


def test_the_log_tells_why_the_ranks_of_each_restart_ended():
    log = (
        "10:00:00  job 7, start 1: 2 node(s) n[1-2], in /r\n"
        "10:05:00  job 7: rank 1 was killed by SIGKILL; restart 1 of at most 3 inside the job\n"
        "10:15:00  job 7: rank 0 on n1 hung; requeued, start 2 will resume\n"
        "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-27T09:00:00 DUE TO X ***\n"
        "10:20:00  job 7, start 2: 2 node(s) n[1-2], in /r\n"
        "10:25:00  job 7: a; restart 1 of at most 3 inside the job\n"
        "10:26:00  job 7: b; restart 2 of at most 3 inside the job\n"
        "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-27T10:27:00 ***\n"
    )
    told = {
        (0, 0): ("rank 1 was killed by SIGKILL", ""),
        (0, 1): ("rank 0 on n1 hung", ""),
        (1, 0): ("a", ""),
        (1, 1): ("b", ""),
        (1, 2): ("", "ended by scancel"),
        (1, 3): ("", ""),
    }
    for (count, again), cause in told.items():
        slurm = {"job_id": "7", "restart_count": str(count), "restart_in_job": str(again)}
        assert causes_in_log(log, slurm) == cause, slurm
