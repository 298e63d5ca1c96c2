"""Write the settings of a run into docs/settings.md, with their defaults and texts.

python examples/settings_tables.py
"""

import re
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "examples"))

from recipe_schemas import CLASSES  # noqa: E402 - the folder is not ROOT

from benchmarks.figures.marks import replace_between  # noqa: E402
from utils.config.declarations import Declaration, declared_settings, help_file, shown  # noqa: E402

DOCUMENT = ROOT / "docs" / "settings.md"
MARKS = "<!-- all settings: make figures -->", "<!-- end of all settings -->"
TYPES = {
    **{int: "integer", float: "number", dict: "JSON", list: "list"},
    **{str: "text", bool: "true or false"},
}
MOST_CHOICES = 8  # the page shows that many; `--help NAME` shows all


def with_tables(document: str) -> str:
    """Return the document with all lists between its marks made anew."""
    training = declared_settings(CLASSES["sft"])
    libraries = help_file()["texts"]["libraries"]
    ours = (each for each in training.values() if each.name not in libraries)
    return replace_between(document, *MARKS, "\n".join(settings(ours)).lstrip())


def settings(declared: Iterable[Declaration]) -> Iterator[str]:
    """Yield a list for each class of settings, under the first line of its docstring."""
    for owner, group in groupby(declared, lambda each: each.owner):
        yield f"\n{str(owner.__doc__).splitlines()[0]}\n"
        for each in group:
            text = cell(first_clause(each.help) + values_of(each))
            yield f"- `{each.name}` ({default_of(each)}): {text}"


def first_clause(text: str) -> str:
    """Return what a setting does; `--help NAME` prints the rest of its text."""
    clause = re.split(r"(?<=[a-z0-9`)/])\. |; ", text)[0].rstrip(".")
    head, _, details = clause.partition(": ")
    return head if len(head.split()) > 3 and len(details) > 50 else clause


def default_of(declaration: Declaration) -> str:
    """Return the default, or the type of a setting whose default is empty."""
    if declaration.required:
        return "required"
    if declaration.default not in (None, [], {}, ""):
        return f"`{shown(declaration.default)}`"
    if declaration.choices is not None:
        return "null"
    return next((word for kind, word in TYPES.items() if kind in declaration.origins), "text")


def values_of(declaration: Declaration) -> str:
    """Return the choices that the setting's text does not name."""
    choices = [shown(choice) for choice in declaration.choices or ()]
    if not choices or all(choice in first_clause(declaration.help) for choice in choices):
        return ""
    few = choices if len(choices) <= MOST_CHOICES else [*choices[:MOST_CHOICES], "..."]
    return f" ({', '.join(few)})"


def cell(text: str) -> str:
    """Return a text on one line, without what begins a tag."""
    return " ".join(text.split()).replace("<", "&lt;")


def main() -> None:
    """Rewrite docs/settings.md in place."""
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
