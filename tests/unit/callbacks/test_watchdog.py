"""The hang watch: when it raises an alarm, the rank at fault, and no alarm in a slow run."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from launching import wait_until
from transformers import TrainerControl, TrainerState

from utils.callbacks import watchdog
from utils.callbacks.progress import Phase, Progress
from utils.callbacks.watchdog import HangWatch
from utils.launch.verdict import Note, hang_verdict, leave_note

ALONE = SimpleNamespace(process_index=0, world_size=1)


class Training:
    """Events of training in Trainer's order, with a simulated clock."""

    def __init__(self, monkeypatch, output_dir: Path, timeout_s: float = 100.0):
        self.now = 0.0
        monkeypatch.setattr(threading.Thread, "start", lambda _: None)
        self.progress = Progress()
        self.watch = HangWatch(timeout_s, ["n1"], output_dir, self.progress, clock=lambda: self.now)
        self.state = TrainerState(max_steps=50)
        self.control = TrainerControl()
        self.event("train_begin")

    def event(self, name: str) -> None:
        getattr(self.watch, f"on_{name}")(ALONE, self.state, self.control)

    def wait(self, seconds: float) -> float:
        """Return the largest share of the allowed time, looking once per second."""
        shares = [self.watch.look()]
        for _ in range(round(seconds)):
            self.now += 1.0
            shares.append(self.watch.look())
        return max(shares)

    def step(self, seconds: float = 1.0) -> None:
        self.progress.begin(Phase.TRAIN, self.state.global_step + 1)
        self.event("step_begin")
        self.wait(seconds)
        self.state.global_step += 1
        self.event("step_end")


@pytest.fixture
def training(monkeypatch, tmp_path) -> Training:
    return Training(monkeypatch, tmp_path)


def test_every_event_is_a_beat(training):
    training.step()
    for name in (
        "step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end", "log",
        "prediction_step", "evaluate", "save", "epoch_begin", "epoch_end",
    ):  # fmt: skip
        training.wait(90)
        training.event(name)
        assert training.wait(90) < 1, name


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase != Phase.TRAIN])
def test_what_may_take_longer_is_a_hang_at_three_times_the_timeout(training, phase):
    training.step()
    training.progress.begin(phase, 1)
    assert training.wait(299) < 1
    assert training.wait(1) >= 1


def test_a_usual_step_hangs_at_the_timeout(training):
    training.step()
    training.wait(50)
    training.now += 10_000  # the job and its watch were suspended for hours
    assert training.watch.look() == pytest.approx((50 + watchdog.LONGEST_GAP_S) / 100)
    assert training.wait(39) < 1
    assert training.wait(1) >= 1


def train(timeout_s: float, end) -> HangWatch:
    """Begin to train like Trainer.train."""
    watch = HangWatch(timeout_s, ["n1"], Path("absent"), Progress(Phase.TRAIN), end=end)
    watch.on_train_begin(ALONE, TrainerState(max_steps=5), TrainerControl())
    return watch


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "hang watch"]


@pytest.fixture
def notes(tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_NOTES_DIR", str(tmp_path))
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setattr(watchdog, "OTHERS_LIMIT_S", 0.2)
    return tmp_path


def test_a_rank_joins_when_another_one_has_given_up(notes, training, monkeypatch):
    training.step()
    ended = []
    training.watch.end = ended.append
    begin = training.now

    def sleep(seconds):
        training.now += seconds
        if training.now == begin + 20:
            leave_note("hung", 76, "made no progress", rank=1, beats=0)

    monkeypatch.setattr(watchdog.time, "sleep", sleep)
    training.watch._watch()
    assert ended == [76]
    assert training.now == pytest.approx(begin + 50, abs=2), "at half its own timeout"
    assert "rank 1 on n1 made no progress" in (notes / "verdict.txt").read_text()


def test_storage_that_hangs_too_does_not_keep_the_process(notes, monkeypatch):
    monkeypatch.setattr(watchdog, "LAST_WORDS_LIMIT_S", 0.1)
    wake = threading.Event()
    monkeypatch.setattr(watchdog, "leave_note", lambda *_, **__: wake.wait(10))
    ended = []
    train(0.2, ended.append)
    wait_until(lambda: ended, "the watch does not end the process")
    assert ended == [76]
    wake.set()
    wait_until(lambda: not running(), "the watch goes on")


def test_a_run_directory_that_takes_nothing_leaves_the_verdict(notes, capsys):
    ended = []
    train(0.2, ended.append)
    wait_until(lambda: ended, "the watch does not end the process")
    HangWatch.leave()
    assert (notes / "verdict.txt").read_text().startswith("rank 0 on n1 made no progress")
    assert (
        "hang.txt is not written, or without this rank: FileNotFoundError"
        in capsys.readouterr().err
    )


def test_it_is_over_when_the_run_is_or_a_later_one_takes_over():
    ended = []
    train(0, ended.append)
    assert not running(), "a timeout of 0 turns it off"
    train(600, lambda _: ended.append("first"))
    train(600, lambda _: ended.append("second"))
    wait_until(lambda: len(running()) == 1, "the first watch goes on")
    HangWatch.leave()
    wait_until(lambda: not running(), "the second watch goes on")
    assert not ended


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
