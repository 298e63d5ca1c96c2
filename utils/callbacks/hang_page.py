"""hang.txt: the stacks and collectives of all ranks of a run that hung."""

import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from utils.host.atomic_files import replace_text
from utils.host.faults import place, thread_frames
from utils.launch.verdict import Note

LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "safetensors")
PAGE, FOLDER = "hang.txt", "hang"  # in the run directory; the folder has a record of each rank
# Functions of torch's flight recorder. torch's version decides which function has the collectives
# of NCCL and of gloo.
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
MISMATCH = ": MISMATCH, ranks do different things"
# Files of threads that are shown beside the main thread.
_SHOWN = ("utils/checkpoints/", "utils/data/", "torch/utils/data/")


def leave_record(output_dir: Path, note: Note, phase: str) -> None:
    """Write this rank's note, phase, threads' stacks and last collectives. Raises OSError."""
    stacks = {}
    for thread in threading.enumerate():
        lines = [place([frame], LIBRARIES) for frame in thread_frames(thread.ident or 0)]
        if thread.name == "MainThread" or any(line.startswith(_SHOWN) for line in lines):
            # Leave out the frames in which Python starts the thread.
            stacks[thread.name] = list(itertools.dropwhile(lambda line: line[0] in "/<", lines))
    entries = collectives()
    known = {
        "note": dataclasses.asdict(note),
        "phase": phase,
        "stacks": stacks,
        "groups": last_and_pending(entries),
    }
    (output_dir / FOLDER).mkdir(exist_ok=True)
    path = output_dir / FOLDER / f"rank-{note.rank}.json"
    text = json.dumps({**known, "collectives": entries[-200:]}, indent=1)
    replace_text(path, text)


def read_records(output_dir: Path, since: float) -> dict[int, dict[str, Any]]:
    """Return by rank the records left after `since`, a time in seconds since 1970."""
    paths = sorted((output_dir / FOLDER).glob("rank-*.json"))
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return {each["note"]["rank"]: each for each in records if each["note"]["time"] >= since}


def collectives() -> list[dict[str, Any]]:
    """Return this process's entries in torch's flight recorder, oldest first."""
    dumps = [getattr(torch._C._distributed_c10d, name, None) for name in _DUMPS]
    traces = [json.loads(dump(True, False)) for dump in dumps if dump]
    entries = [entry for trace in traces for entry in trace.get("entries", [])]
    unlike = {json.dumps(entry): entry for entry in entries if not entry["is_p2p"]}
    return sorted(unlike.values(), key=lambda entry: entry["time_created_ns"])


def last_and_pending(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return by process group the last collective that completed and the first that did not."""
    groups: dict[str, dict[str, str]] = {}
    for entry in entries:
        backend, _, operation = entry["profiling_name"].partition(":")
        sizes = ", ".join("x".join(map(str, size)) or "1" for size in entry["input_sizes"])
        types = "/".join(sorted(set(entry["input_dtypes"])))
        text = f"#{entry['collective_seq_id']} {operation} of {types} [{sizes}]"
        group = groups.setdefault(f"{backend} group {' '.join(entry['process_group'])}", {})
        if entry["retired"] or entry["state"] == "completed":  # gloo sets only the first
            group["completed"] = text
        else:
            group.setdefault("pending", text)
    return groups


def compare(records: Mapping[int, Mapping[str, Any]], hosts: Sequence[str]) -> list[str]:
    """Return lines on each process group: the collective of each rank, and any mismatch."""
    lines = []
    for group in sorted({name for record in records.values() for name in record["groups"]}):
        at = {rank: record["groups"].get(group, {}) for rank, record in sorted(records.items())}
        pending = {stands["pending"] for stands in at.values() if "pending" in stands}
        if not pending:
            continue
        # If one sequence number has several operations or sizes, the ranks do different things.
        parted = len({text.split()[0] for text in pending}) < len(pending)
        lines.append(f"  {group}{MISMATCH * parted}")
        places: dict[str, list[int]] = {}
        for rank, stands in at.items():
            done, now = (stands.get(name, "none") for name in ("completed", "pending"))
            places.setdefault(f"in {now}; completed {done}", []).append(rank)
        lines += [f"    {_named(ranks, hosts)}: {text}" for text, ranks in places.items()]
    return lines or ["  none that torch recorded"]


def write_page(
    output_dir: Path, verdict: str, step: int, hosts: Sequence[str], records: Mapping[int, Any]
) -> None:
    """Write hang.txt, with one part for all ranks in the same state. Raises OSError."""
    utc = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    lines, under_way = [f"{utc}: the run hung after step {step}.", verdict], compare(records, hosts)
    if any(MISMATCH in line for line in under_way):
        lines.append("But ranks are in different collectives, see below: that is the cause.")
    lines += ["", "Collectives under way (all: hang/rank-N.json)", *under_way]
    if silent := sorted(set(range(len(hosts))) - set(records)):
        lines += ["", f"{_named(silent, hosts)}: no record (stopped, frozen or gone)"]
    alike: dict[str, list[int]] = {}
    for rank, record in sorted(records.items()):
        waits = "waits for other ranks" if record["note"]["waiting"] else "waits for no other rank"
        part = [f"{record['phase']}, beat {record['note']['beats']}, {waits}"]
        part += ["\n    ".join([f"  {name}", *stack]) for name, stack in record["stacks"].items()]
        alike.setdefault("\n".join(part), []).append(rank)
    lines += [f"\n{_named(ranks, hosts)}: {text}" for text, ranks in alike.items()]
    replace_text(output_dir / PAGE, "\n".join([*lines, ""]))


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Write ranks with their hosts: `ranks 0-2, 4 on n1; rank 7 on n2`."""
    parts = []
    for host, on_host in itertools.groupby(ranks, key=lambda rank: hosts[rank]):
        own = list(on_host)
        runs = itertools.groupby(own, key=lambda rank: rank - own.index(rank))
        spans = [[*run] for _, run in runs]
        texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in spans]
        parts.append(f"rank{'s' * (len(own) > 1)} {', '.join(texts)} on {host}")
    return "; ".join(parts)
