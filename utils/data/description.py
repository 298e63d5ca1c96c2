"""What is known about a split, and how long it holds: stoker.json beside its files.

It speaks for files that are as they were when it was made. Sizes tell most changes at once; where
the modification times are others too, the contents decide, see utils/data/token_dataset.py.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from utils.config.errors import ConfigurationError
from utils.data.columns import read_json_object
from utils.data.statistics import Statistics
from utils.support.files import replace_text

FORMAT = 1
DESCRIPTION_FILE = "stoker.json"
DESCRIBE_AGAIN = f"Prepare it again, or delete {DESCRIPTION_FILE} to have it measured anew."


@dataclass(frozen=True)
class Description:
    """Statistics, content fingerprint and origin of one split; what is unknown is None or empty.

    tokenizer: {"path": relative to the split, "sha256": ..., "vocabulary_size": ...}.
    chat_template_sha256: of the template that rendered it; None for what no template rendered.
    modified_ns: modification time of each file, in row order, when it was described.
    """

    statistics: Statistics
    fingerprint: str
    loss_mask: str | None
    tokenizer: Mapping[str, Any] | None = None
    chat_template_sha256: str | None = None
    preparation: Mapping[str, Any] | None = None
    modified_ns: Mapping[str, int] = field(default_factory=dict)


def write_description(directory: Path, files: Sequence[Path], description: Description) -> None:
    """Write stoker.json into a split that Stoker made, atomically."""
    content = {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "loss_mask": description.loss_mask,
        "statistics": description.statistics.as_dict(),
        "files": {file.name: file.stat().st_size for file in files},
        "modified_ns": {file.name: file.stat().st_mtime_ns for file in files},
        "fingerprint": description.fingerprint,
        "tokenizer": description.tokenizer,
        "chat_template_sha256": description.chat_template_sha256,
        "preparation": description.preparation,
        "versions": _versions(),
    }
    replace_text(directory / DESCRIPTION_FILE, json.dumps(content, indent=1) + "\n")


def read_description(directory: Path, files: Sequence[Path]) -> Description | None:
    """Return what stoker.json says, None without one; refuse it if the sizes are others."""
    path = directory / DESCRIPTION_FILE
    if not path.exists():
        return None
    content = read_json_object(path)
    if content.get("format") != FORMAT:
        raise ConfigurationError(
            f"{path}: format {content.get('format')!r}; this Stoker reads format {FORMAT}. "
            f"Use the Stoker that wrote it. {DESCRIBE_AGAIN}"
        )
    sizes = {file.name: file.stat().st_size for file in files}
    if content.get("files") != sizes:
        raise ConfigurationError(
            f"{path}: describes other data files than {directory} holds "
            f"({_difference(content.get('files'), sizes)}). {DESCRIBE_AGAIN}"
        )
    try:
        return Description(
            statistics=Statistics.from_dict(content["statistics"]),
            fingerprint=str(content["fingerprint"]),
            loss_mask=content["loss_mask"],
            tokenizer=content.get("tokenizer"),
            chat_template_sha256=content.get("chat_template_sha256"),
            preparation=content.get("preparation"),
            modified_ns=dict(content.get("modified_ns", {})),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path}: {error} is missing or broken. {DESCRIBE_AGAIN}"
        ) from error


def changed_files(described: Description, files: Sequence[Path]) -> list[str]:
    """Return the files that may hold something else than when the description was made.

    Those are the ones with another modification time or in another place of the order; all of
    them where the description is of a Stoker that did not write these down.
    """
    order = list(described.modified_ns)
    return [
        file.name
        for place, file in enumerate(files)
        if order[place : place + 1] != [file.name]
        or described.modified_ns[file.name] != file.stat().st_mtime_ns
    ]


def check_contents(
    directory: Path, described: Description, found: Description, changed: Sequence[str]
) -> None:
    """Refuse a description whose fingerprint or statistics are not those that were found.

    changed: the files that may be the reason. Raises ConfigurationError.
    """
    was, is_now = _figures(described), _figures(found)
    differing = [name for name in was if was[name] != is_now[name]]
    if not differing:
        return
    first = differing[0]
    others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    raise ConfigurationError(
        f"{directory / DESCRIPTION_FILE}: describes other contents than {directory} holds, though "
        f"the sizes are the same ({first}: {was[first]} described, {is_now[first]} found; "
        f"changed or moved since then: {changed[0]}{others}). A run that began with the old "
        f"contents goes on with them alone: put them back. For a new run: {DESCRIBE_AGAIN}"
    )


def _figures(description: Description) -> dict[str, Any]:
    return {"fingerprint": description.fingerprint, **description.statistics.as_dict()}


def _difference(described: object, found: Mapping[str, int]) -> str:
    if not isinstance(described, dict):
        return "it lists no files"
    for name in sorted(described.keys() | found.keys()):
        if described.get(name) != found.get(name):
            return f"{name}: {described.get(name)} bytes described, {found.get(name)} found"
    return "no difference"


def _versions() -> dict[str, str]:
    versions = {}
    for package in ("datasets", "pyarrow", "tokenizers", "transformers", "trl"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
