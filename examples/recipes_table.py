"""Write the gallery of recipes into docs/recipes.md, from the recipes themselves.

python examples/recipes_table.py
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.figures.marks import replace_between  # noqa: E402 - the folder is not ROOT
from utils.config.recipes import read_recipes  # noqa: E402

DOCUMENT = ROOT / "docs" / "recipes.md"
KINDS = ("sft", "pretrain", "data")
MARKS = "<!-- {} recipes: make figures -->", "<!-- end of {} recipes -->"


def with_tables(document: str) -> str:
    """Return the document with a list of each kind of recipe between its marks."""
    for kind in KINDS:
        lines = data_rows() if kind == "data" else training_rows(kind)
        begin, end = (mark.format(kind) for mark in MARKS)
        document = replace_between(document, begin, end, "\n".join(lines))
    return document


def training_rows(kind: str) -> Iterator[str]:
    """Yield the list of the training recipes in a folder: hardware and predicted memory."""
    for path in sorted((ROOT / "recipes" / kind).glob("*.yaml"), key=size_and_name):
        hardware = re.findall(r"^# Hardware: (.*?)\.?$", path.read_text(), flags=re.MULTILINE)
        predicted = re.findall(r"^# Predicted on [^:]*: (.*?)\.$", path.read_text(), re.MULTILINE)
        name = f"[{path.stem}](../{path.relative_to(ROOT)})"
        shown = re.sub(r"(, \d+ nodes)? \(.*\)", "", (hardware or ["2 CPU cores"])[0])
        shown = shown.replace(" x ", "x")
        forecast = (predicted or ["[measured](demo.md)"])[0].partition(" GiB a GPU")
        yield f"- {name}: {shown}, {forecast[0]}{forecast[1] and ' GiB'}"


def data_rows() -> Iterator[str]:
    """Yield the list of the data recipes: the first sentence of each and its tokenizer."""
    for path in sorted((ROOT / "recipes" / "data").glob("*.yaml")):
        entries, _ = read_recipes([str(path)])
        _, _, text = path.read_text().partition("\n")
        comment = " ".join(re.findall(r"^# ?(.*)", text, flags=re.MULTILINE))
        tokenizer = entries.get("tokenizer_name_or_path")
        given = f" (`{tokenizer.value}`)" if tokenizer else ""
        what = re.split(r"\.\s", comment)[0].split("  ")[0].rstrip(".:")
        is_one_of_many = tokenizer and what.startswith(("smoltalk as ", "FineWeb-Edu in "))
        what = "" if is_one_of_many else f": {what}"
        yield f"- [{path.stem}](../{path.relative_to(ROOT)}){what}{given}"


def size_and_name(path: Path) -> tuple[str, float, str]:
    """Sort by family, then by the number of parameters in the name."""
    size = re.search(r"_(\d+(?:_\d)?)(b|m)(?=_|$)", path.stem)
    if size is None:
        return path.stem, 0.0, path.stem
    number = float(size[1].replace("_", ".")) * (1000 if size[2] == "b" else 1)
    return path.stem[: size.start()], number, path.stem


def main() -> None:
    """Rewrite docs/recipes.md in place."""
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
