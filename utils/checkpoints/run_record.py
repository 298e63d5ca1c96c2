"""The files of a run directory beside its checkpoints, and what its record says of it."""

import json
from pathlib import Path
from typing import Any

from utils.config.errors import ConfigurationError

CONFIG = "config.yaml"  # the settings of the first start
PROVENANCE = "provenance.json"  # how each of its starts came about
FINAL = "final"  # the finished model


def earlier_starts(path: Path) -> list[dict[str, Any]]:
    """Return the starts in a file that `write_provenance` wrote; none where there is no file."""
    content = _content(path)
    return [] if content is None else content["starts"]


def known_run_id(path: Path) -> str | None:
    """Return what tells this run from all others, made at its first start; None before that."""
    content = _content(path)
    return None if content is None else content.get("run_id")


def _content(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(
            f"{path} is not the JSON that an earlier start wrote ({error}): move it away."
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("starts"), list):
        raise ConfigurationError(
            f"{path} holds something else than the list of this run's starts: move it away."
        )
    return content
