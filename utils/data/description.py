"""What is known of a split: its statistics, content fingerprint and origin, and for how long.

stoker.json beside the files says it where Stoker prepared them; else every token is read once and
the result kept in the disk cache. A description speaks for files that are as they were when it was
made: sizes tell most changes; where modification times differ, the contents decide.
"""

import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from utils.config.errors import ConfigurationError
from utils.data.columns import (
    IGNORED_LABEL,
    LABELS,
    PADDING,
    TOKENS,
    ListColumn,
    loss_mask_among,
    read_json_object,
    trained_on,
)
from utils.support.files import cache_path, file_states, read_cache, replace_text, write_cache

FORMAT = 1
DESCRIPTION_FILE = "stoker.json"
DESCRIBE_AGAIN = f"Prepare it again, or delete {DESCRIPTION_FILE} to have it measured again."
BLOCK_TOKENS = 1 << 20  # read at a time: memory stays bounded whatever the size of the dataset

logger = logging.getLogger(__name__)


@dataclass
class Statistics:
    """Counts over all documents of a split, and the first row of every kind of fault (or None).

    Rows are document indices. A target is a token that is trained on and has a token before it in
    its document to be predicted from.
    """

    documents: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    loss_targets: int = 0
    longest_document: int = 0
    shortest_document: int = 0
    min_token_id: int | None = None
    min_token_row: int | None = None
    max_token_id: int | None = None
    max_token_row: int | None = None
    empty_documents: int = 0
    first_empty_row: int | None = None
    documents_without_loss: int = 0
    first_row_without_loss: int | None = None
    first_bad_mask_row: int | None = None
    first_differing_label_row: int | None = None
    first_padded_row: int | None = None

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Statistics":
        """Read the JSON form; KeyError for a field that is missing, others are ignored."""
        return cls(**{field.name: content[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class Description:
    """Statistics, content fingerprint and origin of one split; what is unknown is None or empty.

    tokenizer: {"path": relative to the split, "sha256": ..., "vocabulary_size": ...}.
    chat_template_sha256: of the template that rendered it, None if none did.
    modified_ns: modification time of each file, in order, when it was described.
    """

    statistics: Statistics
    fingerprint: str
    loss_mask: str | None
    tokenizer: Mapping[str, Any] | None = None
    chat_template_sha256: str | None = None
    preparation: Mapping[str, Any] | None = None
    modified_ns: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Description":
        """Read the JSON form; raises KeyError, TypeError or ValueError for another content."""
        return cls(
            Statistics.from_dict(content["statistics"]),
            str(content["fingerprint"]),
            content["loss_mask"],
            content.get("tokenizer"),
            content.get("chat_template_sha256"),
            content.get("preparation"),
            dict(content.get("modified_ns", {})),
        )


def write_description(directory: Path, files: Sequence[Path], description: Description) -> None:
    """Write stoker.json into a split that Stoker made, atomically."""
    versions = {}
    for package in ("datasets", "pyarrow", "tokenizers", "transformers", "trl"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    content = {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **asdict(description),
        "files": {file.name: file.stat().st_size for file in files},
        "modified_ns": {file.name: file.stat().st_mtime_ns for file in files},
        "versions": versions,
    }
    replace_text(directory / DESCRIPTION_FILE, json.dumps(content, indent=1) + "\n")


def read_description(directory: Path, files: Sequence[Path]) -> Description | None:
    """Return what stoker.json says, None without one; refuse it if the sizes differ."""
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
            f"{path}: describes files of other sizes than {directory} holds "
            f"(described: {content.get('files')}, found: {sizes}). {DESCRIBE_AGAIN}"
        )
    try:
        return Description.from_dict(content)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path}: {error} is missing or broken. {DESCRIBE_AGAIN}"
        ) from error


def changed_files(described: Description, files: Sequence[Path]) -> list[str]:
    """Return the files that may hold something else than when the description was made.

    Those have another modification time or another index in the order; all of them where the
    description is of a version that did not record the times.
    """
    order = list(described.modified_ns)
    return [
        file.name
        for index, file in enumerate(files)
        if order[index : index + 1] != [file.name]
        or described.modified_ns[file.name] != file.stat().st_mtime_ns
    ]


def check_contents(
    directory: Path, described: Description, found: Description, changed: Sequence[str]
) -> None:
    """Refuse a description whose fingerprint is not the one that was found in `changed` files."""
    if described.fingerprint == found.fingerprint and described.statistics == found.statistics:
        return
    others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    raise ConfigurationError(
        f"{directory / DESCRIPTION_FILE}: describes other contents than {directory} holds, though "
        f"the sizes are the same (fingerprint: {described.fingerprint} described, "
        f"{found.fingerprint} found; changed or moved since then: {changed[0]}{others}). A run "
        "that began with the old contents resumes only with them: put them back. For a new run: "
        f"{DESCRIBE_AGAIN}"
    )


def measure_once(
    directory: Path, files: Sequence[Path], columns: Mapping[str, ListColumn], why: str
) -> Description:
    """Return statistics, fingerprint and loss mask of a split, from the disk cache if it has them.

    The cache goes by the files' paths, order, sizes and modification times. `why` is logged.
    """
    path = cache_path("statistics", file_states(files))
    found = read_cache(path, Description.from_dict)
    if found is None:
        tokens = int(columns[TOKENS].offsets[-1])
        logger.info("%s %s: measuring its %s tokens once.", directory, why, f"{tokens:,}")
        loss_mask = loss_mask_among(columns)
        statistics, fingerprint = measure(columns, loss_mask)
        found = Description(statistics, fingerprint, loss_mask)
        content = {
            "statistics": asdict(statistics),
            "fingerprint": fingerprint,
            "loss_mask": loss_mask,
        }
        write_cache(path, content)
    return found


def measure(columns: Mapping[str, ListColumn], loss_mask: str | None) -> tuple[Statistics, str]:
    """Return the statistics of a split and the fingerprint of its content.

    The fingerprint hashes token ids, loss mask and document lengths in order with the integer
    types, and nothing else: record batches, the split into files, list or large_list, other columns
    and the path do not change it.
    """
    tokens = columns[TOKENS]
    lengths = np.diff(tokens.offsets)
    empty = np.flatnonzero(lengths == 0)
    found = Statistics(
        documents=len(lengths),
        tokens=int(lengths.sum()),
        longest_document=int(lengths.max()),
        shortest_document=int(lengths.min()),
        empty_documents=empty.size,
        first_empty_row=int(empty[0]) if empty.size else None,
    )
    if loss_mask is None:
        found.loss_tokens = found.tokens
        found.loss_targets = found.tokens - (found.documents - found.empty_documents)
    hashed = [tokens] if loss_mask is None else [tokens, columns[loss_mask]]
    digests = [hashlib.blake2b(digest_size=16) for _ in hashed]
    for chunk, first, last in _blocks(tokens):
        offsets = tokens.offsets[first : last + 1] - tokens.offsets[first]
        ids = tokens.documents(chunk, first, last)
        row_of = functools.partial(_row_of, first, offsets)
        if ids.size:
            _add_ids(found, ids, row_of)
        if loss_mask is not None:
            mask = columns[loss_mask].documents(chunk, first, last)
            _add_loss(found, first, offsets, trained_on(loss_mask, mask))
            if loss_mask == LABELS:
                differs = (mask != IGNORED_LABEL) & (mask != ids)
                _note_first(found, "first_differing_label_row", differs, row_of)
            else:
                _note_first(found, "first_bad_mask_row", (mask != 0) & (mask != 1), row_of)
        if PADDING in columns:
            padded = columns[PADDING].documents(chunk, first, last) == 0
            _note_first(found, "first_padded_row", padded, row_of)
        for digest, column in zip(digests, hashed, strict=True):
            digest.update(column.documents(chunk, first, last).view(np.uint8).data)
    whole = hashlib.blake2b(digest_size=16)
    whole.update(hashlib.blake2b(lengths.astype("<i8").data, digest_size=16).digest())
    for digest, column in zip(digests, hashed, strict=True):
        whole.update(f"{column.name}:{column.values[0].dtype.str}".encode())
        whole.update(digest.digest())
    return found, whole.hexdigest()


def _blocks(tokens: ListColumn) -> Iterator[tuple[int, int, int]]:
    """Yield (chunk, first, last): documents [first, last) of one chunk, about BLOCK_TOKENS long."""
    ends = np.append(tokens.first_documents[1:], len(tokens.offsets) - 1)
    for chunk, end in enumerate(ends.tolist()):
        first = int(tokens.first_documents[chunk])
        while first < end:
            wanted = tokens.offsets[first] + BLOCK_TOKENS
            last = int(np.searchsorted(tokens.offsets, wanted, side="right")) - 1
            last = min(max(last, first + 1), end)
            yield chunk, first, last
            first = last


def _row_of(first: int, offsets: np.ndarray, position: int) -> int:
    return first + int(np.searchsorted(offsets, position, side="right")) - 1


def _note_first(
    found: Statistics, name: str, fault: np.ndarray, row_of: Callable[[int], int]
) -> None:
    if getattr(found, name) is None and fault.any():
        setattr(found, name, row_of(int(fault.argmax())))


def _add_ids(found: Statistics, ids: np.ndarray, row_of: Callable[[int], int]) -> None:
    smallest, largest = int(ids.min()), int(ids.max())
    if found.min_token_id is None or smallest < found.min_token_id:
        found.min_token_id, found.min_token_row = smallest, row_of(int(ids.argmin()))
    if found.max_token_id is None or largest > found.max_token_id:
        found.max_token_id, found.max_token_row = largest, row_of(int(ids.argmax()))


def _add_loss(found: Statistics, first: int, offsets: np.ndarray, loss: np.ndarray) -> None:
    rows = np.flatnonzero(np.diff(offsets))  # reduceat needs non-empty ranges
    if not rows.size:
        return
    starts = offsets[rows]
    tokens = np.add.reduceat(loss.view(np.int8), starts, dtype=np.int64)
    targets = tokens - loss[starts]
    found.loss_tokens += int(tokens.sum())
    found.loss_targets += int(targets.sum())
    without = rows[targets == 0]
    found.documents_without_loss += without.size
    if without.size and found.first_row_without_loss is None:
        found.first_row_without_loss = first + int(without[0])
