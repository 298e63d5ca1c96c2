"""Write the table of benchmarks/results/shared_calls.json into docs/cluster.md.

python -m benchmarks.figures.staging
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures.marks import replace_between

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "shared_calls.json"
DOCUMENT = ROOT / "docs" / "cluster.md"
BEGIN, END = "<!-- calls: make figures -->", "<!-- end of calls -->"
STARTS = {
    "without": "without copies",
    "data found": "`stage_data: true`",
    "environment found": "with `STOKER_STAGE_ENV` as well",
}


def with_table(document: str) -> str:
    """Return the document with the table between the two marks made anew."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    return replace_between(document, BEGIN, END, "\n".join(table(result)))


def table(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table: a row for each start."""
    names = [*result["starts"]["without"]]
    yield f"| file-system calls at a start of 2 ranks | {' | '.join(names)} |"
    yield "|---" * (len(names) + 1) + "|"
    for start, what in STARTS.items():
        figures = result["starts"][start]
        yield f"| {what} | {' | '.join(f'{figures[name]:,}' for name in names)} |"


def main() -> None:
    """Rewrite docs/cluster.md in place."""
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
