"""Write which published models train, and how, into docs/models.md.

python -m benchmarks.figures.models
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures.marks import replace_between
from benchmarks.hardware.circumstances import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "published_models.json"
DOCUMENT = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- models: make figures -->", "<!-- end of models -->"


def with_figures(document: str, results: Path = RESULTS) -> str:
    """Return the document with the list between the two marks made anew."""
    found = json.loads(results.read_text(encoding="utf-8"))
    return replace_between(document, BEGIN, END, "\n".join(_table(found)))


def _table(found: Mapping[str, Any]) -> Iterator[str]:
    models = found["models"]
    trained = [model for model in models if model["pretraining"]]
    worst = max(model["loss_difference"] for model in trained)
    packed = sum(model["packed"] for model in models)
    yield (
        f"transformers {found['transformers']}: {len(trained)} of {len(models)} train, {packed} of "
        f"them packed; the largest difference from transformers' own loss is {worst:.0e}."
    )
    yield ""
    kinds: dict[str, list[str]] = {}
    for model in models:
        kinds.setdefault(_kind(model), []).append(model["name"])
    for kind, names in kinds.items():
        yield f"- **{kind}**: {', '.join(names)}"


def _kind(model: Mapping[str, Any]) -> str:
    """Return how a model trains: packed or not and why, or what does not work."""
    broken = [way for way in ("pretraining", "sft", "lora") if not model[way]]
    if broken:
        return f"Without {' and '.join(broken)}, because {model['why']}"
    return "Packed" if model["packed"] else f"Not packed on a CPU, because {model['why']}"


def main() -> None:
    """Write the document's list."""
    DOCUMENT.write_text(with_figures(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
