"""The hang watch: its alarm, the verdict, and the page with torch's traces of many ranks."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launching import wait_until
from transformers import TrainerControl, TrainerState

from utils.callbacks import watchdog
from utils.callbacks.progress import Phase, Progress
from utils.callbacks.watchdog import HangWatch
from utils.launch.verdict import Note, hang_verdict, leave_note

ALONE = SimpleNamespace(process_index=0, world_size=1)
HOSTS = [f"n{rank // 8}" for rank in range(64)]


class Training:
    """Events of training in Trainer's order, with a simulated clock."""

    def __init__(self, monkeypatch, output_dir: Path):
        self.now = 0.0
        monkeypatch.setattr(threading.Thread, "start", lambda _: None)
        self.progress = Progress(Phase.TRAIN)
        self.watch = HangWatch(100.0, ["n1"], output_dir, self.progress, clock=lambda: self.now)
        self.state = TrainerState(max_steps=50)
        self.event("train_begin")

    def event(self, name: str) -> None:
        getattr(self.watch, f"on_{name}")(ALONE, self.state, TrainerControl())

    def wait(self, seconds: float) -> float:
        """Return the largest share of the allowed time, looking once per second."""
        shares = [self.watch.look()]
        for _ in range(round(seconds)):
            self.now += 1.0
            shares.append(self.watch.look())
        return max(shares)


@pytest.fixture
def training(monkeypatch, tmp_path) -> Training:
    return Training(monkeypatch, tmp_path)


def test_every_event_is_a_beat(training):
    for name in (
        "step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end", "log",
        "prediction_step", "evaluate", "save", "epoch_begin", "epoch_end",
    ):  # fmt: skip
        training.wait(90)
        training.event(name)
        assert training.wait(90) < 1, name


@pytest.mark.parametrize("phase", Phase)
def test_all_but_a_usual_step_may_take_three_times_as_long(training, phase):
    training.progress.begin(phase, 1)
    limit_s = 100 if phase == Phase.TRAIN else 300
    training.wait(50)
    training.now += 10_000  # the job and its watch were suspended for hours
    assert training.watch.look() == pytest.approx((50 + watchdog.LONGEST_GAP_S) / limit_s)
    assert training.wait(limit_s - 61) < 1
    assert training.wait(1) >= 1


@pytest.fixture
def notes(tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_NOTES_DIR", str(tmp_path))
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setattr(watchdog, "OTHERS_LIMIT_S", 0.2)
    return tmp_path


def test_a_rank_joins_when_another_one_has_given_up(notes, training, monkeypatch):
    ended = []
    training.watch.end = ended.append

    def wait(seconds):
        training.now += seconds
        if training.now == 20:
            leave_note("hung", 76, "made no progress", rank=1, beats=0)

    monkeypatch.setattr(training.watch.left, "wait", wait)
    training.watch._watch()
    assert ended == [76]
    assert training.now == pytest.approx(50, abs=2), "at half its own timeout"
    assert "rank 1 on n1 made no progress" in (notes / "verdict.txt").read_text()


def train(timeout_s: float, end) -> HangWatch:
    """Begin to train like Trainer.train."""
    watch = HangWatch(timeout_s, ["n1"], Path("absent"), Progress(Phase.TRAIN), end=end)
    watch.on_train_begin(ALONE, TrainerState(max_steps=5), TrainerControl())
    return watch


def is_over() -> bool:
    return not any(thread.name == "hang watch" for thread in threading.enumerate())


def test_storage_that_hangs_too_does_not_keep_the_process(notes, monkeypatch):
    monkeypatch.setattr(watchdog, "LAST_WORDS_LIMIT_S", 0.1)
    wake = threading.Event()
    monkeypatch.setattr(watchdog, "leave_note", lambda *_, **__: wake.wait(100))
    ended = []
    train(0.2, ended.append)
    wait_until(lambda: ended, "the process does not end")
    assert ended == [76]
    wake.set()
    wait_until(is_over, "the watch does not end")


def test_a_run_directory_that_takes_nothing_leaves_the_verdict(notes, capsys):
    ended = []
    train(0.2, ended.append)
    wait_until(lambda: ended, "the process does not end")
    wait_until(is_over, "the watch does not end")
    assert (notes / "verdict.txt").read_text().startswith("rank 0 on n1 made no progress")
    said = "hang.txt is not written, or without this rank: FileNotFoundError"
    assert said in capsys.readouterr().err


def test_it_is_over_when_the_run_is():
    train(0, pytest.fail)
    assert is_over(), "a timeout of 0 turns it off"
    train(1000, pytest.fail).leave()
    wait_until(is_over, "the watch does not end")


def hung(rank: int, beats: int, text: str = "stands in f", waiting: bool = True) -> Note:
    return Note("hung", 76, text, rank, f"n{rank}", float(rank), beats, waiting)


def test_the_verdict_names_the_rank_that_the_others_wait_for():
    ended = Note("failed", 1, "KeyError", 2, "n2", 0.0)
    asleep = hung(1, 7, "sleeps", waiting=False)
    waited = "the other ranks waited for it."
    for notes, verdict in [
        ([ended, hung(0, 5)], f"rank 2 on n2 failed: KeyError; {waited}"),
        ([hung(0, 7), asleep, hung(2, 8, waiting=False)], f"rank 1 on n1 sleeps; {waited}"),
        (
            [hung(0, 7), hung(2, 7)],
            "rank 1 on n1 gave no sign of life (stopped, on a frozen host, gone, or in a call that "
            f"never returns to Python); {waited}",
        ),
        (
            [hung(rank, 7) for rank in range(3)],
            "All 3 ranks hang, none behind the others: the network between them, or storage that "
            "all of them read.\n" + "\n".join(f"rank {n} on n{n} stands in f" for n in range(3)),
        ),
    ]:
        assert hang_verdict(notes, ["n0", "n1", "n2"]) == verdict


def entry(number, operation, size, state, **others):
    """Return a trace entry of version 2.10, as ProcessGroupNCCL writes it."""
    return {
        "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number, "record_id": number,
        "pg_id": 0, "process_group": ["0", "default_pg"], "profiling_name": f"nccl:{operation}",
        "input_sizes": [[size]], "input_dtypes": ["BFloat16"], "output_sizes": [[size]],
        "output_dtypes": ["BFloat16"], "state": state, "retired": state == "completed",
        "is_p2p": False, "time_created_ns": 10**18 + number, "timeout_ms": 600000,
    } | others  # fmt: skip


def test_64_ranks_are_one_page_without_secrets(monkeypatch, tmp_path):
    def leave(rank, entries, beats=7, waiting=True, time=100.0):
        trace = json.dumps({"version": "2.10", "entries": entries}).encode()
        for name in watchdog._DUMPS:  # in some versions of torch both return NCCL's entries
            module = torch._C._distributed_c10d
            monkeypatch.setattr(module, name, lambda *_: trace, raising=False)
        note = Note("hung", 76, "stands in f", rank, HOSTS[rank], time, beats, waiting)
        watchdog.leave_record(tmp_path, note, "training")

    monkeypatch.setenv("MY_TOKEN", "unmentionable")
    done = entry(41, "all_reduce", 4096, "completed")
    scheduled = [entry(n, "_allgather_base", 512, "scheduled") for n in (43, 44)]
    started = entry(42, "_allgather_base", 512, "started")
    sent = entry(9, "send", 3, "started", is_p2p=True)
    for rank in range(64):
        if rank == 3:
            leave(rank, [done], beats=6, waiting=False)
        elif rank != 12:
            leave(rank, [sent, done, started, *scheduled])
    leave(12, [started], time=50.0)  # from an earlier hang
    records = watchdog.read_rank_records(tmp_path, since=60.0)
    assert len(records) == 63
    watchdog.write_hang_page(tmp_path, "rank 12 is unmentionable", 812, HOSTS, records)
    page = (tmp_path / "hang.txt").read_text()
    head, under_way, silent, waiting, third = page.split("\n\n")
    assert head.endswith("UTC: the run hung after step 812.\nrank 12 is ***")
    alike = "ranks 0-2, 4-7 on n0; ranks 8-11, 13-15 on n1; ranks 16-23 on n2; "
    _, group, *lines = under_way.splitlines()
    assert group == "  nccl group 0 default_pg"
    assert lines[0].startswith(f"    {alike}")
    assert lines[0].endswith(
        ": in #42 _allgather_base of BFloat16 [512]; completed #41 all_reduce of BFloat16 [4096]"
    )
    assert lines[1].startswith("    rank 3 on n0: in none; completed #41 all_reduce")
    assert silent == "rank 12 on n1: no record (stopped, frozen or gone)"
    assert waiting.startswith(alike)
    assert "training, beat 7, waits for other ranks\n  MainThread\n    " in waiting
    assert third.startswith("rank 3 on n0: training, beat 6, waits for no other rank\n")
    record = json.loads((tmp_path / "hang" / "rank-0.json").read_text())
    assert [each["collective_seq_id"] for each in record["collectives"]] == [41, 42, 43, 44]


@pytest.mark.parametrize(
    ("second", "parted"),
    [
        (entry(42, "all_reduce", 512, "started"), True),
        (entry(42, "_allgather_base", 511, "started"), True),
        (entry(41, "all_reduce", 512, "started"), False),  # this rank is behind
    ],
)
def test_other_operations_or_sizes_under_one_number_are_a_mismatch(second, parted):
    traces = {0: [entry(42, "_allgather_base", 512, "started")], 1: [second]}
    records = {r: {"groups": watchdog.last_and_pending(trace)} for r, trace in traces.items()}
    lines = watchdog.collective_lines(records, ["n0", "n1"])
    mismatch = ": MISMATCH, ranks do different things" if parted else ""
    assert (lines[0], len(lines)) == (f"  nccl group 0 default_pg{mismatch}", 3)
    nothing = {0: {"groups": watchdog.last_and_pending([])}}
    assert watchdog.collective_lines(nothing, ["n0"]) == ["  none that torch recorded"]
