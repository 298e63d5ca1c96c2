"""Write the figures of benchmarks/results/exactness/ into docs/internals/proofs.md.

python -m benchmarks.figures.exactness
"""

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures.marks import replace_between

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "exactness"
DOCUMENT = ROOT / "docs" / "internals" / "proofs.md"
BEGIN, END = "<!-- exactness figures: make figures -->", "<!-- end of exactness figures -->"

# By result file: the title of the table, and sentences that explain it.
PROOFS = {
    "resume_equality": (
        "Runs that are interrupted and resumed",
        "Each configuration is interrupted after each step. The resumed run must equal the "
        "uninterrupted run.",
    ),
    "kill_points": (
        "SIGKILL at each call that changes the run directory",
        "A kill is survived if the next start needs no human and the run ends with the weights of "
        "an uninterrupted run. The row `append` kills `prepare_data.py --append`.",
    ),
    "storage_refusals": (
        "Storage errors at each call that changes the run directory",
        "The storage has no space (ENOSPC) or the disk fails (EIO). The start ends with exit code "
        "74 or continues. `survived` means the same as in the table of SIGKILL.",
    ),
    "random_kills": ("Two ranks, killed at random moments", ""),
    "damage": (
        "Damage to each file of a checkpoint",
        "A file is emptied, cut, lengthened, deleted, linked, swapped or taken from another step, "
        "or some of its bits are flipped.",
    ),
    "world_sizes": ("One run on 1, 2 and 4 ranks in any order", ""),
    "two_jobs": (
        "Two jobs in one run directory",
        "Both jobs start at the same time. The directory is new, or contains a killed run. "
        "In the row with a stale lock, the first job is killed or suspended, and the second job "
        "finishes the run.",
    ),
    "verification_cost": (
        "Cost of checksums for a checkpoint of 1 GB",
        "Stoker computes SHA-256. torch's default is CRC-32. The added time is the time of a save "
        "with SHA-256 minus the time of a save with the other kind of checksum.",
    ),
    "full_disks": (
        "Runs on file systems of many sizes",
        "The names of the rows give the limit of checkpoints (`save_total_limit`). Rows with "
        "background saves use `async_save`. In the rows with space for half a checkpoint, a "
        "killed run resumes on a disk with free space for half a checkpoint. A run without enough "
        "space is refused with exit code 74 before its first step, or ends with 74 later. The "
        "test then enlarges the disk and starts the run again. A result is wrong if a checkpoint "
        "is lost or damaged. A result is also wrong if the final weights differ from the weights "
        "of an uninterrupted run.",
    ),
    "soak": (
        "An hour of jobs on a Slurm of two nodes",
        "`make soak` interrupts the jobs once a minute. The lost time is the time from the last "
        "step before an interruption to the first step after it.",
    ),
    "async_save": (
        "How long training waits for a save",
        "The rows with steps 3 to 12 give the total time of these ten steps. The other times are "
        "medians over five saves.",
    ),
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
    "cuts_of_each": "interruptions of each",
    "unequal": "differences",
    "points": "calls",
    "found": "damages found",
    "of_rank_0": "kills of rank 0",
    "of_rank_1": "kills of rank 1",
    "of_rank_0_and_rank_1": "kills of both ranks",
    "with_the_launcher": "kills of the launcher",
    "resumed": "starts that resumed",
    "runs_ended_as_the_undisturbed_one": "runs equal to the undisturbed run",
    "runs_that_ended_as_the_undisturbed_one": "runs equal to the undisturbed run",
    "second_refused": "second job refused",
    "both_wrote": "both jobs wrote",
    "resumed unattended": "resumed without a human",
    "kills": "interruptions",
    "starts_again": "new starts",
    "by_hand": "new starts by a human",
    "lost_s": "lost time, s",
    "most_lost_steps": "most lost steps at once",
    "save_steps": "steps between two saves",
    "starts_that_ended_with_no last line": "starts without an end message in the job's log",
    "starts_that_ended_with_75": "starts that ended with exit code 75",
    "starts_that_ended_with_76": "starts that ended with exit code 76",
    "starts_that_ended_with_0": "starts that ended with exit code 0",
    "starts_that_ended_with_Slurm's own requeue": "starts that Slurm itself requeued",
    "sync_steps_3_to_12_s": "ordinary saves: total time of steps 3 to 12, s",
    "sync_stall_s": "ordinary save: time that training waits, s",
    "sync_write_s": "ordinary save: time of the background write, s",
    "async_steps_3_to_12_s": "background saves: total time of steps 3 to 12, s",
    "async_stall_s": "background save: time that training waits, s",
    "async_write_s": "background save: time of the background write, s",
    "verification_at_start_s": "verification at the start: time, s",
    "verification_at_start_share_of_a_save": "verification at the start: time, share of a save",
    "verification_at_start_cpu_s": "verification at the start: CPU time, s",
    "checkpoint_gb": "checkpoint, GB",
    "checkpoint_mb": "checkpoint, MB",
    "save_with_digests_s": "save with SHA-256, s",
    "save_with_crc32_of_torch_s": "save with torch's CRC-32, s",
    "save_without_checksums_s": "save without checksums, s",
    "digests_instead_of_crc32_add": "median time added to a save, relative to CRC-32 (share)",
    "digests_alone_add": "median time added to a save, relative to no checksum (share)",
}
CIRCUMSTANCES = ("made_by", "date", "commit", "hardware", "python", "torch", "transformers")


def with_figures(document: str, results: Path = RESULTS) -> str:
    """Return the document with the tables between the two marks made anew."""
    sections = [_section(name, *texts, results) for name, texts in PROOFS.items()]
    return replace_between(document, BEGIN, END, "\n".join(sections))


def _section(name: str, title: str, explanation: str, results: Path) -> str:
    path = results / f"{name}.json"
    title += f"\n\n{textwrap.fill(explanation, 120)}" if explanation else ""
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
