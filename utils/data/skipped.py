"""The file of `skip_documents`: a line for each document that is not trained on."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from utils.config.errors import ConfigurationError
from utils.data.token_dataset import TokenDataset


def read_skipped(file: str | None, datasets: Sequence[TokenDataset]) -> list[np.ndarray]:
    """Return the skipped rows of each dataset, in rising order. Raises ConfigurationError."""
    found: list[set[int]] = [set() for _ in datasets]
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").split("\n") if file else []
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"skip_documents {file}: cannot be read: {error}.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line) if line.lstrip().startswith("{") else {}
            if content:
                name, row = content["dataset"], str(content["document"])
            else:
                name, row = line.rsplit(maxsplit=1)
            path = Path(name).expanduser().resolve()
            places = [data.path in (path, path / "train") for data in datasets]
            source, document = places.index(True), int(row)
            described = datasets[source].description
            made = content.get("fingerprint", described.fingerprint)
            known = made == described.version([made]).fingerprint  # also before an append
            if not known or not 0 <= document < len(datasets[source]):
                raise ValueError
        except (ValueError, KeyError, TypeError, OSError, RuntimeError) as error:
            rows = ", ".join(f"{data.path} has rows 0 to {len(data) - 1}" for data in datasets)
            raise ConfigurationError(
                f"skip_documents {file}, line {number}: {line[:80]!r} names no document that the "
                f"run trains on ({rows}; data that was made again has another fingerprint): give "
                "lines of status.py RUN --step N --json, or DATASET ROW."
            ) from error
        found[source].add(document)
    return [np.array(sorted(rows), dtype=np.int64) for rows in found]
