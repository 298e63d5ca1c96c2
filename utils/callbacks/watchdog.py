"""Ends a run that makes no progress, and reports where each rank hangs."""

import faulthandler
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from transformers import TrainerCallback, TrainerControl, TrainerState
from typing_extensions import override

from utils.callbacks.hang_page import LIBRARIES, PAGE, leave_record, read_records, write_page
from utils.callbacks.progress import Phase, Progress
from utils.config.errors import ExitCode
from utils.host.faults import place, thread_frames, waits_for_ranks
from utils.host.machine import host_name
from utils.host.redaction import write_error
from utils.host.run_lock import known_loss
from utils.launch.verdict import (
    Note,
    hang_verdict,
    leave_note,
    leave_verdict,
    read_notes,
)

SLOW = 3  # how many times longer the first step, evaluations, saves and the export may take
LONGEST_GAP_S = 10.0  # after a longer gap between two looks, the process itself was suspended
OTHERS_LIMIT_S = 2.0  # to wait for the records of the other ranks
LAST_WORDS_LIMIT_S = 15.0  # for the report, because storage or log may be what hangs


class HangWatch(TrainerCallback):
    """Ends the process with exit code 76 after ``timeout_s`` without progress (0: never).

    Every event of training is a beat, and a thread watches for beats. All phases except a usual
    step may take three times as long. A rank without beats gives up: it logs its stack and writes a
    note (verdict.py) and a record (hang_page.py). A rank that is silent for half the time
    gives up as well when another rank has given up. The verdict names the rank that the others wait
    for. The lowest rank writes hang.txt from all records.

    The watch runs from ``on_train_begin`` until ``leave`` or the watch of a later run. All ranks
    have the same events, so their counts of beats can be compared. ``hosts`` has the host name of
    each rank.
    """

    current: ClassVar["HangWatch | None"] = None  # the watch of this process
    ending = threading.Lock()  # held from giving up to the end of the process

    def __init__(
        self,
        timeout_s: float,
        hosts: Sequence[str],
        output_dir: Path,
        progress: Progress,
        *,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = os._exit,
    ):
        self.timeout_s, self.hosts, self.output_dir = timeout_s, hosts, output_dir
        self.progress, self.clock, self.end = progress, clock, end
        self.rank = self.step = self.beats = self.beats_seen = 0
        self.silent_s, self.looked = 0.0, clock()

    @override
    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start to watch."""
        if not self.timeout_s:
            return
        self.rank, self.began = args.process_index, time.time()
        self._beat(args, state)
        self.thread = threading.get_ident()
        HangWatch.current = self
        threading.Thread(target=self._watch, name="hang watch", daemon=True).start()

    def _beat(self, *event: Any, **_: Any) -> None:
        """Count an event. This takes no time, because only the thread reads the clock."""
        _args, state, *_control = event
        self.step = state.global_step
        self.beats += 1

    on_epoch_begin = on_epoch_end = on_step_begin = on_substep_end = on_step_end = _beat
    on_pre_optimizer_step = on_optimizer_step = on_log = on_evaluate = on_save = _beat
    on_prediction_step = on_train_end = _beat

    @classmethod
    def leave(cls) -> None:
        """Stop watching.

        If this rank is giving up, block until the process ends, so that the hang is reported.
        """
        with cls.ending:
            cls.current = None

    def look(self) -> float:
        """Return the time without a beat as a share of the allowed time; 1 and more is a hang.

        The thread calls this repeatedly. Time in which the whole process was suspended (SIGSTOP, a
        suspended job) does not count.
        """
        now = self.clock()
        if self.beats != self.beats_seen:
            self.silent_s = 0.0
        else:
            self.silent_s += min(now - self.looked, LONGEST_GAP_S)
        self.looked, self.beats_seen = now, self.beats
        usual = self.progress.phase == Phase.TRAIN
        return self.silent_s / (self.timeout_s * (1 if usual else SLOW))

    def _watch(self) -> None:
        while HangWatch.current is self:
            hangs = self.look() >= 1
            others = [] if self.silent_s < self.timeout_s / 2 else _notes()
            if hangs or any(note.kind == "hung" for note in others):
                with self.ending:
                    self._give_up()
                return
            time.sleep(min(1.0, self.timeout_s / 20))

    def _give_up(self) -> None:
        """Report where this rank hangs and which rank is at fault, then end the process."""
        limit = threading.Timer(LAST_WORDS_LIMIT_S, self.end, [ExitCode.LOST_RANK])
        limit.daemon = True
        limit.start()
        # If torch's recorder is stuck in the driver, no Python thread runs, nor does the timer.
        faulthandler.dump_traceback_later(LAST_WORDS_LIMIT_S + 5, exit=True, file=2)
        frames = thread_frames(self.thread)
        text = (
            f"made no progress for {self.silent_s:.0f} s after step {self.step} "
            f"(beat {self.beats}), in {place(frames, LIBRARIES)}"
        )
        known = {"beats": self.beats, "waiting": waits_for_ranks(frames)}
        note = leave_note("hung", ExitCode.LOST_RANK, text, self.rank, **known)
        self._say(f"{text}\n{''.join(traceback.format_list(frames))}")
        # No error of the storage or of torch's recorder may keep this process from ending.
        self._try(lambda: leave_record(self.output_dir, note, self.progress.phase))
        self._try(self._judge)
        limit.cancel()
        faulthandler.cancel_dump_traceback_later()
        self.end(ExitCode.LOST_RANK)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # storage, torch's recorder: the run ends all the same
            self._say(f"{PAGE} is not written, or without this rank: {error!r}")

    def _judge(self) -> None:
        """Write the verdict on all ranks' records and notes. The lowest rank writes hang.txt."""
        end = time.monotonic() + OTHERS_LIMIT_S
        while len(records := read_records(self.output_dir, self.began)) < len(self.hosts):
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        left = [*(Note(**record["note"]) for record in records.values()), *_notes()]
        notes = list({note.rank: note for note in left}.values())
        if not notes:
            return  # no storage accepts notes: only the lines above are logged
        verdict = hang_verdict(notes, self.hosts)
        leave_verdict(verdict, ExitCode.LOST_RANK)
        if self.rank == min(note.rank for note in notes):
            self._say(verdict)
            if known_loss(self.output_dir) is None:  # else another job owns the directory
                write_page(self.output_dir, verdict, self.step, self.hosts, records)
                self._say(f"where each rank stood: {self.output_dir / PAGE}")
        else:  # let that rank write first: a launcher ends all ranks when one ends
            time.sleep(OTHERS_LIMIT_S / 2)

    def _say(self, text: str) -> None:
        origin = f"{host_name()} rank {self.rank}  "
        write_error("".join(f"{origin}{line}\n" for line in text.splitlines()))


def _notes() -> list[Note]:
    try:
        return read_notes()
    except OSError:
        return []  # judge without notes, as if there were no directory
