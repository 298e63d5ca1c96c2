"""What is known about a split: stoker.json beside its files, or a cache of our own.

A dataset that Stoker prepared carries its description. For any other the statistics are cached
under $XDG_CACHE_HOME/stoker, and nothing is ever written into the user's folder.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from utils.config.errors import ConfigurationError
from utils.data.splits import read_json_object
from utils.data.statistics import Statistics

FORMAT = 1
DESCRIPTION_FILE = "stoker.json"
DESCRIBE_AGAIN = f"Prepare it again, or delete {DESCRIPTION_FILE} to have it measured anew."

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Description:
    """Statistics, content fingerprint and origin of one split; the last three are None if unknown.

    tokenizer: {"path": relative to the split, "sha256": ..., "vocabulary_size": ...}.
    """

    statistics: Statistics
    fingerprint: str
    loss_mask: str | None
    tokenizer: Mapping[str, Any] | None = None
    chat_template_sha256: str | None = None
    preparation: Mapping[str, Any] | None = None


def write_description(directory: Path, files: Sequence[Path], description: Description) -> None:
    """Write stoker.json into a split that Stoker made, atomically."""
    content = {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "loss_mask": description.loss_mask,
        "statistics": description.statistics.as_dict(),
        "files": {file.name: file.stat().st_size for file in files},
        "fingerprint": description.fingerprint,
        "tokenizer": description.tokenizer,
        "chat_template_sha256": description.chat_template_sha256,
        "preparation": description.preparation,
        "versions": _versions(),
    }
    _replace_json(directory / DESCRIPTION_FILE, content)


def read_description(directory: Path, files: Sequence[Path]) -> Description | None:
    """Return what stoker.json says, None without one; refuse it if the files have changed since."""
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
        )
    except (KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path}: {error} is missing or broken. {DESCRIBE_AGAIN}"
        ) from error


def cache_path(directory: Path, files: Sequence[Path]) -> Path:
    """Return where the statistics of a split without stoker.json are kept.

    The name depends on the path and on the files' names, sizes and modification times.
    """
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = json.dumps([FORMAT, str(directory.resolve()), stats]).encode()
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    name = hashlib.blake2b(key, digest_size=16).hexdigest() + ".json"
    return root / "stoker" / "statistics" / name


def read_cached(path: Path) -> Description | None:
    """Return a cached description; None when there is none that can be read."""
    try:
        content = json.loads(path.expanduser().read_text(encoding="utf-8"))
        return Description(
            statistics=Statistics.from_dict(content["statistics"]),
            fingerprint=content["fingerprint"],
            loss_mask=content["loss_mask"],
        )
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s: cannot be used (%r); measuring the dataset again.", path, error)
        return None


def write_cached(path: Path, description: Description) -> None:
    """Keep a description for the next start; a cache that cannot be written is said, no error."""
    content = {
        "statistics": description.statistics.as_dict(),
        "fingerprint": description.fingerprint,
        "loss_mask": description.loss_mask,
    }
    try:
        path = path.expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace_json(path, content)
    except (OSError, RuntimeError) as error:
        logger.warning(
            "Statistics are not cached (%s); every start measures the dataset again. "
            "Set XDG_CACHE_HOME to a writable folder.",
            error,
        )


def _replace_json(path: Path, content: Mapping[str, Any]) -> None:
    # The process id keeps ranks that measure at the same time out of each other's file.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


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
