"""The file that makes a directory a checkpoint: written last, it says what all others hold."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.checkpoints.files import MANIFEST, FileRecord, flush
from utils.config.errors import ConfigurationError
from utils.support.files import replace_text

FORMAT = 1
# Strategies that write the same: whole weights, and the optimizer's state whole or in equal parts.
ALIKE = [{"single", "ddp"}, {"zero1", "zero2"}]
# The files of a run directory beside its checkpoints.
CONFIG = "config.yaml"  # the settings of the first start
PROVENANCE = "provenance.json"  # how each of its starts came about
FINAL = "final"  # the finished model


class DamagedCheckpointError(Exception):
    """A checkpoint that is not as it was committed; the text says in what."""


@dataclass(frozen=True)
class Manifest:
    """What a committed checkpoint holds, and which run made it.

    `samples` and `tokens` (without padding) count from step 0. `fingerprints` are digests of data,
    tokenizer and settings; `versions` are the packages'.
    """

    run_id: str
    step: int
    samples: int
    tokens: int
    world_size: int
    strategy: str
    global_batch_size: int
    fingerprints: Mapping[str, Any]
    versions: Mapping[str, str | None]
    time: str
    files: Mapping[str, FileRecord]

    @property
    def size_bytes(self) -> int:
        """All files together."""
        return sum(record.size_bytes for record in self.files.values())


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Commit the checkpoint in `directory`, whose files are flushed already; raises OSError."""
    flush(directory.parent)  # the entry of the directory itself
    replace_text(directory / MANIFEST, _text(dataclasses.asdict(manifest)))
    flush(directory)


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a committed checkpoint.

    Raises DamagedCheckpointError if a bit of it changed, OSError if it cannot be read, and
    ConfigurationError if a later version of Stoker wrote it.
    """
    path = directory / MANIFEST
    if path.is_symlink():
        raise DamagedCheckpointError(f"{MANIFEST} is no regular file")
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        number = content["format"]
        if isinstance(number, int) and number > FORMAT:
            raise ConfigurationError(
                f"{path} has format {number}, a later version of Stoker wrote it (this one knows "
                f"{FORMAT}): update, or name another --output_dir."
            )
        committed = content["checkpoint"]
        if text != _text(committed):
            raise DamagedCheckpointError(f"{MANIFEST} is not as it was written")
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise DamagedCheckpointError(f"{MANIFEST} cannot be read ({error})") from error
    files = {name: FileRecord(**record) for name, record in committed.pop("files").items()}
    return Manifest(**committed, files=files)


def _text(committed: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(committed, sort_keys=True).encode()).hexdigest()
    content = {"format": FORMAT, "checkpoint": committed, "sha256": digest}
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def check_layout(checkpoint: Path, strategy: str) -> None:
    """Raise ConfigurationError for a checkpoint that `strategy` cannot load."""
    written = read_manifest(checkpoint).strategy
    if written == strategy or {written, strategy} in ALIKE:
        return
    raise ConfigurationError(
        f"{checkpoint} was written under {written} and cannot be loaded under {strategy}: resume "
        f"with the accelerate config of {written} (any number of ranks will do), or start a new "
        "run from its weights: --init_from with another --output_dir."
    )


def earlier_starts(path: Path) -> list[dict[str, Any]]:
    """Return the starts in a file that `write_provenance` wrote; none where there is no file."""
    return _provenance(path)["starts"]


def known_run_id(path: Path) -> str | None:
    """Return the run's id, made at its first start; None before that."""
    return _provenance(path).get("run_id")


def _provenance(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"starts": []}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["starts"][:]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} is not the JSON that an earlier start wrote ({error!r}): move it away."
        ) from error
    return content
