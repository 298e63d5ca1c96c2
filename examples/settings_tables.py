"""Write every setting into docs/settings.md: ours, inherited ones, what is refused and why.

python examples/settings_tables.py
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "examples"))

from recipe_schemas import CLASSES  # noqa: E402 - the folder is not ROOT

from benchmarks.figures.marks import replace_between  # noqa: E402
from utils.config.declarations import REFUSED, Declaration, declared_settings, other_names, shown  # noqa: E402

DOCUMENT = ROOT / "docs" / "settings.md"
MARKS = "<!-- all settings: make figures -->", "<!-- end of all settings -->"
TYPES = {bool: "true or false", int: "integer", float: "number", dict: "JSON", list: "list"}


def with_tables(document: str) -> str:
    """Return the document with all tables between its marks made anew."""
    training, preparation = (declared_settings(CLASSES[kind]) for kind in ("sft", "data"))
    lines = ["## Training", *settings(training.values())]
    lines += ["", "## Preparing data (`prepare_data.py`)", *settings(preparation.values())]
    lines += ["", "## Settings of the libraries that are refused", ""]
    lines += [*reasons(REFUSED, "refused", "because")]
    lines += ["", "## What other toolkits call it", "", *reasons(other_names(), "theirs", "here")]
    return replace_between(document, *MARKS, "\n".join(lines))


def settings(declared: Iterable[Declaration]) -> Iterator[str]:
    """Yield a table for each class of settings, under the first line of its docstring."""
    for owner, group in groupby(declared, lambda each: each.owner):
        yield f"\n{str(owner.__doc__).splitlines()[0]}\n"
        yield "| setting | values | default | what it does |"
        yield "|---|---|---|---|"
        for each in group:
            empty = each.default is None or each.default in ([], {}, "")
            default = "required" if each.required else "" if empty else f"`{shown(each.default)}`"
            yield f"| `{each.name}` | {values_of(each)} | {default} | {cell(each.help)} |"


def values_of(declaration: Declaration) -> str:
    """Return the words that may be given, or the type."""
    if declaration.choices is not None:
        return ", ".join(f"`{shown(choice)}`" for choice in declaration.choices)
    return next((word for kind, word in TYPES.items() if kind in declaration.origins), "text")


def reasons(table: Mapping[str, str], names: str, answer: str) -> Iterator[str]:
    """Yield a table from each answer to the names that it is given for."""
    grouped = defaultdict(list)
    for name, why in table.items():
        grouped[why].append(f"`{name}`")
    yield f"| {names} | {answer} |"
    yield "|---|---|"
    for why, found in grouped.items():
        yield f"| {', '.join(found)} | {f'`{why}`' if why.isidentifier() else cell(why)} |"


def cell(text: str) -> str:
    """Return a text on one line, without what ends a cell or begins a tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    """Rewrite docs/settings.md in place."""
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
