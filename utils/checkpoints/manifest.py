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
    """A committed checkpoint: of which run and step, made by what, from what, and its files.

    `samples` and `tokens` (real ones, no padding) are those consumed since step 0. `fingerprints`
    has the digests of data, tokenizer and settings, `versions` those of the packages.
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
    """Commit the checkpoint in `directory`, whose files are on stable storage already.

    The manifest appears in one step: a kill leaves a checkpoint that is committed or is not.
    Raises OSError.
    """
    flush(directory.parent)  # the entry of the directory itself
    replace_text(directory / MANIFEST, _text(dataclasses.asdict(manifest)))
    flush(directory)


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a committed checkpoint.

    Raises DamagedCheckpointError for one that is not as it was written, to the last bit; OSError
    for one that cannot be read; ConfigurationError for one of a later version of Stoker.
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
    """Write a checkpoint's facts out, with their own digest, in the one way there is."""
    digest = hashlib.sha256(json.dumps(committed, sort_keys=True).encode()).hexdigest()
    content = {"format": FORMAT, "checkpoint": committed, "sha256": digest}
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def check_layout(checkpoint: Path, strategy: str) -> None:
    """Raise ConfigurationError for a checkpoint that `strategy` (LaunchFacts) cannot load.

    The libraries end in a traceback about missing files, after the model was built on all ranks.
    """
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
