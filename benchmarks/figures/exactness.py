"""Write the figures of benchmarks/results/exactness/ into docs/internals/proofs.md.

python -m benchmarks.figures.exactness
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures.marks import replace_between

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "exactness"
DOCUMENT = ROOT / "docs" / "internals" / "proofs.md"
BEGIN, END = "<!-- exactness figures: make figures -->", "<!-- end of exactness figures -->"

PROOFS = {
    "resume_equality": "Runs interrupted after each step and resumed, against uninterrupted ones",
    "kill_points": "SIGKILL at each call that changes the run directory; survived: the next start "
    "needs no human, and the run ends with the weights of an uninterrupted run",
    "storage_refusals": "No space (ENOSPC) or a failing disk (EIO) at each call that changes "
    "the run directory",
    "random_kills": "Two ranks, killed at random moments",
    "damage": "Damages to each file of a checkpoint: emptied, cut, lengthened, bits flipped, "
    "deleted, linked, swapped, taken from another step",
    "world_sizes": "One run on 1, 2 and 4 ranks in any order",
    "two_jobs": "Two jobs started at once on one directory, new or with a killed run to resume; "
    "row stale lock: the first job is killed or suspended, and the second job finishes the run",
    "verification_cost": "Cost of checksums for a checkpoint of 1 GB: SHA-256 (ours), torch's "
    "CRC-32, none",
    "full_disks": "Runs on file systems of many sizes, and how they ended; wrong: after room was "
    "made, a checkpoint was lost or damaged, or the final weights differed",
    "soak": "An hour of jobs on a Slurm of two nodes, one interruption a minute (`make soak`); "
    "lost s: seconds from the last step before an interruption to the first step after it",
    "async_save": "How long training stands still for a save",
}
# Columns that come first; the others follow in the order of the result file.
FIRST = (
    *(
        "cases",
        "points",
        "tried",
        "runs",
        "runs_ended_as_the_undisturbed_one",
        "kills",
        "of_rank_0",
    ),
    *("of_rank_1", "of_rank_0_and_rank_1"),
)
WORDS = {
    "verification_at_start_cpu_s": "verification at start, CPU s",
    "checkpoint_gb": "checkpoint, GB",
    "checkpoint_mb": "checkpoint, MB",
    "save_with_digests_s": "save with SHA-256, s",
    "save_with_crc32_of_torch_s": "save with torch's CRC-32, s",
    "save_without_checksums_s": "save without checksums, s",
    "digests_instead_of_crc32_add": "SHA-256 instead of CRC-32 adds, share of a save (median)",
    "digests_alone_add": "SHA-256 instead of no checksum adds, share of a save (median)",
}
CIRCUMSTANCES = ("made_by", "date", "commit", "hardware", "python", "torch", "transformers")


def with_figures(document: str, results: Path = RESULTS) -> str:
    """Return the document with the tables between the two marks made anew."""
    sections = [_section(name, title, results) for name, title in PROOFS.items()]
    return replace_between(document, BEGIN, END, "\n".join(sections))


def _section(name: str, title: str, results: Path) -> str:
    path = results / f"{name}.json"
    if not path.exists():
        return f"### {title}\n\nNot run yet.\n"
    content = json.loads(path.read_text(encoding="utf-8"))
    made = {key: content.pop(key, "unknown") for key in CIRCUMSTANCES}
    made_by = (
        f"{made['date']}, commit {made['commit']}, {made['hardware']}, torch {made['torch']}, "
        f"transformers {made['transformers']}."
    )
    return f"### {title}\n\n{_table(content)}\n\n{made_by}\n"


def _table(content: Mapping[str, Any]) -> str:
    """Write {row: {column: figure}} or {row: figure} as a table; lists are no figures."""
    rows = {key: value for key, value in content.items() if isinstance(value, dict)}
    nested = {key: row for key, row in rows.items() if _scalars(row)}
    flat = {key: value for key, value in content.items() if not isinstance(value, dict | list)}
    lines = []
    if nested:
        found = dict.fromkeys(key for row in nested.values() for key in _scalars(row))
        first = [key for key in FIRST if key in found]
        columns = list(dict.fromkeys([*first, *found]))
        lines += [_row(["", *map(_words, columns)]), _row(["---"] * (len(columns) + 1))]
        for key, row in nested.items():
            lines.append(_row([_words(key), *(_figure(row.get(column, "")) for column in columns)]))
    if flat:
        lines += ["", "| | |", "|---|---|"] if nested else ["| | |", "|---|---|"]
        lines += [_row([_words(key), _figure(value)]) for key, value in flat.items()]
    return "\n".join(lines)


def _scalars(row: Mapping[str, Any]) -> list[str]:
    return [key for key, value in row.items() if not isinstance(value, dict | list)]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _words(key: str) -> str:
    return WORDS.get(key, key.replace("_", " "))


def _figure(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return "0" if value == 0 else f"{value:.3g}"
    return str(value)


def main() -> None:
    """Rewrite docs/internals/proofs.md in place."""
    DOCUMENT.write_text(with_figures(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
