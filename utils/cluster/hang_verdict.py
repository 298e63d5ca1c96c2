"""Works out from the notes of a run that stands still which rank the others wait for."""

from collections.abc import Sequence

from utils.cluster.notes import Note

SHOWN = 4  # ranks of many that are at fault together


def hang_verdict(notes: Sequence[Note], hosts: Sequence[str]) -> str:
    """Name the rank that a run hangs on, its host and where it stands; `hosts` holds one a rank.

    A rank that ended comes first, then one that left no note (it is stopped, or gone), then the
    one with the fewest beats, in no collective where some are: the others got as far as they could
    without it.
    """
    ended = [note for note in notes if note.kind != "hung"]
    if ended:
        first = ended[0]
        return (
            f"{_named(first.rank, first.host)} ended ({first.kind}: {first.text}); the other ranks "
            "waited for it."
        )
    silent = [rank for rank in range(len(hosts)) if rank not in {note.rank for note in notes}]
    if silent:
        named = ", ".join(_named(rank, hosts[rank]) for rank in silent[:SHOWN])
        named += ", ..." * (len(silent) > SHOWN)
        return (
            f"{named}: no sign of life, while the others hang. It was stopped (SIGSTOP, a frozen "
            "host), stands in a call that never returns to Python, or is gone. "
            f"{_named(notes[0].rank, notes[0].host)} {notes[0].text}"
        )
    fewest = min(note.beats or 0 for note in notes)
    behind = [note for note in notes if (note.beats or 0) == fewest]
    busy = [note for note in behind if not note.waiting]
    at_fault = busy or behind
    others = "; the other ranks waited for it." if len(at_fault) < len(notes) else "."
    lines = [f"{_named(note.rank, note.host)} {note.text}{others}" for note in at_fault[:SHOWN]]
    lines += ["..."] * (len(at_fault) > SHOWN)
    if len(at_fault) == len(notes) > 1:
        lines[:0] = [
            f"All {len(notes)} ranks hang, none behind the others: the network between them, or "
            "storage that all of them read."
        ]
    return "\n".join(lines)


def _named(rank: int, host: str) -> str:
    return f"rank {rank} on {host}"
