"""A watchdog that ends hanging runs and writes hang.txt: stacks and collectives of all ranks."""

import dataclasses
import faulthandler
import itertools
import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState
from typing_extensions import override

from utils.callbacks.progress import Phase, Progress
from utils.config.errors import ExitCode
from utils.host.atomic_files import replace_text
from utils.host.faults import innermost_frame, thread_frames, waits_for_ranks
from utils.host.machine import host_name
from utils.host.redaction import write_error
from utils.host.run_lock import last_lost_lock_message, note_hang
from utils.launch.verdict import Note, hang_verdict, leave_note, leave_verdict, read_notes

SLOW = 3  # how many times longer the first step, evaluations, saves and the export may take
LONGEST_GAP_S = 10.0  # between two calls of look(); in a longer gap the process was suspended
OTHERS_LIMIT_S = 2.0  # to wait for hang/rank-N.json of the other ranks
LAST_WORDS_LIMIT_S = 15.0  # to write the report, because the storage or the log may hang
LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "safetensors")
PAGE, FOLDER = "hang.txt", "hang"  # in the run directory; the folder has rank-N.json files
# Functions of torch's flight recorder. torch's version decides which function has the collectives
# of NCCL and which has the collectives of gloo.
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
MISMATCH = ": MISMATCH, ranks do different things"
# Besides the main thread, hang.txt shows threads that run code in these folders.
_THREAD_CODE = ("utils/checkpoints/", "utils/data/", "torch/utils/data/")


class HangWatch(TrainerCallback):
    """A watchdog that ends the process with exit code 76 after ``timeout_s`` without progress.

    Each Trainer event counts as progress (a "beat"), and a thread watches the number of beats. The
    first step, evaluations, saves and the export may take three times as long. A rank without
    progress logs its stack, writes hang/rank-N.json and a note for the launcher
    (utils/launch/verdict.py), and ends. After the first such note, the other ranks end after half
    of ``timeout_s`` without progress. The lowest rank that hangs writes hang.txt from all
    rank-N.json files, and logs which rank the other ranks waited for.

    The thread runs from ``on_train_begin`` until ``leave``, and never with timeout_s 0. All ranks
    have the same events, so their beats can be compared. ``hosts``: the host name of each rank.
    """

    def __init__(
        self, timeout_s: float, hosts: Sequence[str], output_dir: Path, progress: Progress, *,
        clock: Callable[[], float] = time.monotonic, end: Callable[[int], object] = os._exit,
    ):  # fmt: skip
        self.timeout_s, self.hosts, self.output_dir = timeout_s, hosts, output_dir
        self.progress, self.clock, self.end = progress, clock, end
        self.rank = self.step = self.beats = self.beats_seen = 0
        self.silent_s, self.looked = 0.0, clock()
        self.left = threading.Event()
        self.ending = threading.Lock()  # locked while a hang is reported, until the process ends

    @override
    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        if not self.timeout_s:
            return
        self.rank, self.began = args.process_index, time.time()
        self._beat(args, state)
        self.thread = threading.get_ident()
        threading.Thread(target=self._watch, name="hang watch", daemon=True).start()

    def _beat(self, *event: Any, **_: Any) -> None:
        """Count a Trainer event as progress. Only the watch thread reads the clock."""
        _args, state, *_control = event
        self.step = state.global_step
        self.beats += 1

    on_epoch_begin = on_epoch_end = on_step_begin = on_substep_end = on_step_end = _beat
    on_pre_optimizer_step = on_optimizer_step = on_log = on_evaluate = on_save = _beat
    on_prediction_step = on_train_end = _beat

    def leave(self) -> None:
        """End the watch thread. If a hang is being reported, wait until the process ends."""
        with self.ending:
            self.left.set()

    def look(self) -> float:
        """Return the time without progress, as a share of the allowed time; 1 or more is a hang.

        Time in which the whole process was suspended (SIGSTOP, a suspended job) does not count.
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
        while not self.left.wait(min(1.0, self.timeout_s / 20)):
            hangs = self.look() >= 1
            others = [] if self.silent_s < self.timeout_s / 2 else _read_notes()
            if hangs or any(note.kind == "hung" for note in others):
                with self.ending:
                    if not self.left.is_set():
                        self._give_up()
                return

    def _give_up(self) -> None:
        """Report where this rank hangs and which rank caused the hang, then end the process."""
        limit = threading.Timer(LAST_WORDS_LIMIT_S, self.end, [ExitCode.LOST_RANK])
        limit.daemon = True
        limit.start()
        # If torch's flight recorder blocks in the driver with the GIL held, the timer cannot run.
        faulthandler.dump_traceback_later(LAST_WORDS_LIMIT_S + 5, exit=True, file=2)
        frames = thread_frames(self.thread)
        text = (
            f"made no progress for {self.silent_s:.0f} s after step {self.step} "
            f"(beat {self.beats}), in {innermost_frame(frames, LIBRARIES)}"
        )
        known = {"beats": self.beats, "waiting": waits_for_ranks(frames)}
        note = leave_note("hung", ExitCode.LOST_RANK, text, self.rank, **known)
        self._log(f"{text}\n{''.join(traceback.format_list(frames))}")
        phase = self.progress.phase
        for action in (
            lambda: leave_record(self.output_dir, note, phase),
            lambda: note_hang(self.silent_s),
            self._report_cause,
        ):
            try:
                action()
            except Exception as error:  # storage, torch's recorder: the run ends all the same
                self._log(f"{PAGE} is not written, or without this rank: {error!r}")
        limit.cancel()
        faulthandler.cancel_dump_traceback_later()
        self.end(ExitCode.LOST_RANK)

    def _report_cause(self) -> None:
        """Find out from all ranks' notes which rank caused the hang, and tell the launcher.

        The lowest rank that hangs logs the result and writes hang.txt.
        """
        end = time.monotonic() + OTHERS_LIMIT_S
        while len(records := read_rank_records(self.output_dir, self.began)) < len(self.hosts):
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        left = [*(Note(**record["note"]) for record in records.values()), *_read_notes()]
        notes = list({note.rank: note for note in left}.values())
        if not notes:
            return  # no note could be written: the stack above is the only report
        verdict = hang_verdict(notes, self.hosts)
        leave_verdict(verdict, ExitCode.LOST_RANK)
        if self.rank == min(note.rank for note in notes):
            self._log(verdict)
            if (
                last_lost_lock_message(self.output_dir) is None
            ):  # otherwise another job owns the directory
                write_hang_page(self.output_dir, verdict, self.step, self.hosts, records)
                self._log(f"where each rank stood: {self.output_dir / PAGE}")
        else:  # let the lowest rank write first: the launcher ends all ranks when one rank ends
            time.sleep(OTHERS_LIMIT_S / 2)

    def _log(self, text: str) -> None:
        origin = f"{host_name()} rank {self.rank}  "
        write_error("".join(f"{origin}{line}\n" for line in text.splitlines()))


def _read_notes() -> list[Note]:
    try:
        return read_notes()
    except OSError:
        return []  # continue without notes, as if the directory did not exist


def leave_record(output_dir: Path, note: Note, phase: str) -> None:
    """Write this rank's note, phase, stacks and collectives to hang/rank-N.json. Raises OSError."""
    stacks = {}
    for thread in threading.enumerate():
        lines = [innermost_frame([frame], LIBRARIES) for frame in thread_frames(thread.ident or 0)]
        if thread.name == "MainThread" or any(line.startswith(_THREAD_CODE) for line in lines):
            # Leave out the frames in which Python starts the thread.
            stacks[thread.name] = list(itertools.dropwhile(lambda line: line[0] in "/<", lines))
    dumps = [getattr(torch._C._distributed_c10d, name, None) for name in _DUMPS]
    traces = [json.loads(dump(True, False)) for dump in dumps if dump]
    entries = [entry for trace in traces for entry in trace.get("entries", [])]
    distinct = {json.dumps(entry): entry for entry in entries if not entry["is_p2p"]}
    entries = sorted(distinct.values(), key=lambda entry: entry["time_created_ns"])
    record = {
        "note": dataclasses.asdict(note), "phase": phase, "stacks": stacks,
        "groups": last_and_pending(entries), "collectives": entries[-200:],
    }  # fmt: skip
    (output_dir / FOLDER).mkdir(exist_ok=True)
    path = output_dir / FOLDER / f"rank-{note.rank}.json"
    replace_text(path, json.dumps(record, indent=1))


def read_rank_records(output_dir: Path, since: float) -> dict[int, dict[str, Any]]:
    """Return {rank: content of its hang/rank-N.json}; files before `since` (unix s) are ignored."""
    paths = sorted((output_dir / FOLDER).glob("rank-*.json"))
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return {each["note"]["rank"]: each for each in records if each["note"]["time"] >= since}


def last_and_pending(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the last completed and the first pending collective of each process group.

    The result is {group: {"completed": text, "pending": text}}. A text is a string such as "#7
    all_reduce of Float [1024]". entries: the records of collectives in torch's flight recorder,
    oldest first.
    """
    groups: dict[str, dict[str, str]] = {}
    for entry in entries:
        backend, _, operation = entry["profiling_name"].partition(":")
        sizes = ", ".join("x".join(map(str, size)) or "1" for size in entry["input_sizes"])
        types = "/".join(sorted(set(entry["input_dtypes"])))
        text = f"#{entry['collective_seq_id']} {operation} of {types} [{sizes}]"
        group = groups.setdefault(f"{backend} group {' '.join(entry['process_group'])}", {})
        if entry["retired"] or entry["state"] == "completed":  # gloo sets only "retired"
            group["completed"] = text
        else:
            group.setdefault("pending", text)
    return groups


def collective_lines(records: Mapping[int, Mapping[str, Any]], hosts: Sequence[str]) -> list[str]:
    """Return lines of text with the collectives of all ranks, by process group.

    A group whose ranks are in different collectives is marked MISMATCH. records: {rank: content of
    hang/rank-N.json}. hosts: the host name of each rank.
    """
    lines = []
    for group in sorted({name for record in records.values() for name in record["groups"]}):
        ranks = {rank: record["groups"].get(group, {}) for rank, record in sorted(records.items())}
        pending = {state["pending"] for state in ranks.values() if "pending" in state}
        if not pending:
            continue
        # If one sequence number has several operations or sizes, the ranks do different things.
        mismatch = len({text.split()[0] for text in pending}) < len(pending)
        lines.append(f"  {group}{MISMATCH if mismatch else ''}")
        texts = {
            rank: f"in {state.get('pending', 'none')}; completed {state.get('completed', 'none')}"
            for rank, state in ranks.items()
        }
        lines += [f"    {line}" for line in _group_ranks(texts, hosts)]
    return lines or ["  none that torch recorded"]


def write_hang_page(
    output_dir: Path, verdict: str, step: int, hosts: Sequence[str], records: Mapping[int, Any]
) -> None:
    """Write hang.txt. Ranks with equal stacks share one paragraph. Raises OSError.

    verdict: a text about the rank that caused the hang. step: the last finished step. records,
    hosts: see `collective_lines`.
    """
    utc = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    lines, pending = (
        [f"{utc}: the run hung after step {step}.", verdict],
        collective_lines(records, hosts),
    )
    if any(MISMATCH in line for line in pending):
        lines.append("But ranks are in different collectives, see below: that is the cause.")
    lines += ["", "Collectives under way (all: hang/rank-N.json)", *pending]
    missing = dict.fromkeys(sorted(set(range(len(hosts))) - set(records)), "no record")
    lines += [f"\n{line} (stopped, frozen or gone)" for line in _group_ranks(missing, hosts)]
    states = {}
    for rank, record in sorted(records.items()):
        waits = "waits for other ranks" if record["note"]["waiting"] else "waits for no other rank"
        part = [f"{record['phase']}, beat {record['note']['beats']}, {waits}"]
        part += ["\n    ".join([f"  {name}", *stack]) for name, stack in record["stacks"].items()]
        states[rank] = "\n".join(part)
    lines += [f"\n{text}" for text in _group_ranks(states, hosts)]
    replace_text(output_dir / PAGE, "\n".join([*lines, ""]))


def _group_ranks(texts: Mapping[int, str], hosts: Sequence[str]) -> list[str]:
    """Return one line per distinct text, such as `ranks 0-2 on n1; rank 7 on n2: TEXT`.

    texts: {rank: text}. hosts: the host name of each rank.
    """
    lines = []
    for text in dict.fromkeys(texts.values()):
        parts = []
        alike = [rank for rank in texts if texts[rank] == text]
        for host, on_host in itertools.groupby(alike, key=lambda rank: hosts[rank]):
            spans: list[list[int]] = []
            for rank in on_host:
                if spans and spans[-1][-1] == rank - 1:
                    spans[-1].append(rank)
                else:
                    spans.append([rank])
            named = [f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans]
            several = len(spans) > 1 or len(spans[0]) > 1
            parts.append(f"rank{'s' if several else ''} {', '.join(named)} on {host}")
        lines.append(f"{'; '.join(parts)}: {text}")
    return lines
