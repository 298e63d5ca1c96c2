"""The description of a split: statistics, a fingerprint of the content, and the origin.

prepare_data.py writes a split's description to stoker.json. If a split has no stoker.json, every
token is read once, and the description is saved in the disk cache. stoker.json also has sizes and
modification times of the Arrow files, so that `open_token_dataset` notices changed files.
"""

import hashlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from utils.config.errors import ConfigurationError
from utils.data.arrow_columns import (
    IGNORED_LABEL,
    LABELS,
    PADDING,
    TOKENS,
    ListColumn,
    loss_mask_among,
    trained_on,
)
from utils.host.atomic_files import cache_path, file_states, read_cache, write_cache
from utils.host.foreign import read_object

DATASET_FORMAT = 1
DESCRIPTION_FILE = "stoker.json"
BLOCK_TOKENS = 1 << 20  # tokens read at a time, so that memory does not grow with the dataset

logger = logging.getLogger(__name__)


@dataclass
class Statistics:
    """Counts over all documents of a split, and the first document with each kind of fault.

    A field first_... has the document's row, counted from 0. None means that no document has the
    fault. first_row_without_loss: no token after the first token of this document is trained on.
    """

    documents: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    longest_document: int = 0
    shortest_document: int = 0
    min_token_id: int | None = None
    max_token_id: int | None = None
    first_empty_row: int | None = None
    first_row_without_loss: int | None = None
    first_bad_mask_row: int | None = None
    first_differing_label_row: int | None = None
    first_padded_row: int | None = None


@dataclass(frozen=True)
class Description:
    """Statistics, content fingerprint and origin of one split. Fields without a value are empty.

    tokenizer    {"path": relative to the split, "sha256": ..., "vocabulary_size": ...}
    preparation  sources, settings and counts of prepare_data.py, as JSON values
    files        {name of an Arrow file: size in bytes}, when the description was made
    modified_ns  {name of an Arrow file: modification time in ns}, when the description was made
    earlier      the split's versions before each append, oldest first. A version is {"statistics":
                 ..., "fingerprint": ..., "files": N}. The first N of `files` belong to the version.
    """

    statistics: Statistics
    fingerprint: str
    loss_mask: str | None = None
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    chat_template_sha256: str | None = None
    preparation: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    modified_ns: Mapping[str, int] = field(default_factory=dict)
    earlier: Sequence[Mapping[str, Any]] = field(default_factory=list)

    def version(self, fingerprints: Collection[str]) -> "Description":
        """Return the description of the split's newest version with one of `fingerprints`.

        Each append to the split makes a new version. If no version has one of the fingerprints,
        return the description of the current version.
        """
        if self.fingerprint in fingerprints:
            return self
        found = [each for each in self.earlier if each["fingerprint"] in fingerprints]
        if not found:
            return self
        count = found[-1]["files"]
        return replace(
            self,
            statistics=Statistics(**found[-1]["statistics"]),
            fingerprint=found[-1]["fingerprint"],
            files=dict(islice(self.files.items(), count)),
            modified_ns=dict(islice(self.modified_ns.items(), count)),
        )

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Description":
        """Return a Description from JSON. Unknown keys are ignored.

        Raises KeyError or TypeError if a required key is missing.
        """
        known = {each.name: content.get(each.name) for each in fields(cls)}
        given = {name: value for name, value in known.items() if value is not None}
        counts = {each.name: content["statistics"][each.name] for each in fields(Statistics)}
        return cls(**given | {"statistics": Statistics(**counts)})


def states_of(files: Sequence[Path]) -> tuple[dict[str, int], dict[str, int]]:
    """Return {name: size in bytes} and {name: modification time in ns}, in the order of `files`."""
    stats = [(file.name, file.stat()) for file in files]
    return {name: s.st_size for name, s in stats}, {name: s.st_mtime_ns for name, s in stats}


def read_description(directory: Path) -> Description | None:
    """Return the description in a split's stoker.json, or None if the split has no such file.

    Raises ConfigurationError if the file is invalid.
    """
    path = directory / DESCRIPTION_FILE
    if not path.exists():
        return None
    content = read_object(path)
    try:
        if content["format"] != DATASET_FORMAT:
            raise TypeError(f"this Stoker reads format {DATASET_FORMAT}, not {content['format']}")
        return Description.from_dict(content)
    except (KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path}: cannot be read ({error!r}). Prepare the data again, or delete the file to "
            "have the data measured."
        ) from error


def measure_once(
    directory: Path, files: Sequence[Path], columns: Mapping[str, ListColumn], why: str
) -> Description:
    """Return a split's description from the disk cache, or measure the split and store the result.

    The cache key has the paths, order, sizes and modification times of the files. A measurement
    reads all tokens and logs its reason (`why`).
    """
    path = cache_path("statistics", file_states(files))
    found = read_cache(path, Description.from_dict)
    if found is None:
        tokens = int(columns[TOKENS].offsets[-1])
        logger.info("%s %s: measuring its %s tokens once.", directory, why, f"{tokens:,}")
        found = describe_columns(columns)
        write_cache(path, asdict(found))
    return found


def describe_columns(columns: Mapping[str, ListColumn]) -> Description:
    """Read every token of a split; return a Description with statistics and a fingerprint.

    The fingerprint is a hash of the document lengths, the token ids and the loss mask, with the
    integer types of ids and mask. Paths, other columns and the division into files and record
    batches do not change the fingerprint.
    """
    tokens, loss_mask = columns[TOKENS], loss_mask_among(columns)
    lengths = np.diff(tokens.offsets)
    statistics = Statistics(
        documents=len(lengths),
        tokens=int(lengths.sum()),
        loss_tokens=int(lengths.sum()) if loss_mask is None else 0,
        longest_document=int(lengths.max()),
        shortest_document=int(lengths.min()),
        first_empty_row=int(lengths.argmin()) if lengths.min() == 0 else None,
    )
    hashed = [tokens] if loss_mask is None else [tokens, columns[loss_mask]]
    digests = [hashlib.blake2b(digest_size=16) for _ in hashed]
    for chunk, first, last in _blocks(tokens):
        block = {name: column.documents(chunk, first, last) for name, column in columns.items()}
        _add_block(statistics, first, tokens.offsets[first : last + 1], block)
        for digest, column in zip(digests, hashed, strict=True):
            digest.update(block[column.name].view(np.uint8).data)
    whole = hashlib.blake2b(digest_size=16)
    whole.update(hashlib.blake2b(lengths.astype("<i8").data, digest_size=16).digest())
    for digest, column in zip(digests, hashed, strict=True):
        whole.update(f"{column.name}:{column.values[0].dtype.str}".encode())
        whole.update(digest.digest())
    return Description(statistics, whole.hexdigest(), loss_mask)


def _blocks(tokens: ListColumn) -> Iterator[tuple[int, int, int]]:
    """Divide all documents into blocks of about 2**20 tokens; yield (chunk, first, stop) of each.

    A block has the documents [first, stop), which are in one chunk.
    """
    ends = np.append(tokens.first_documents[1:], len(tokens.offsets) - 1)
    for chunk, end in enumerate(ends.tolist()):
        first = int(tokens.first_documents[chunk])
        while first < end:
            wanted = tokens.offsets[first] + BLOCK_TOKENS
            last = int(np.searchsorted(tokens.offsets, wanted, side="right")) - 1
            last = min(max(last, first + 1), end)
            yield chunk, first, last
            first = last


def _add_block(
    statistics: Statistics, first: int, offsets: np.ndarray, block: Mapping[str, np.ndarray]
) -> None:
    ids, starts, loss_mask = block[TOKENS], offsets - offsets[0], loss_mask_among(block)
    if ids.size:
        ends = [int(ids.min()), int(ids.max()), statistics.min_token_id, statistics.max_token_id]
        known = [end for end in ends if end is not None]
        statistics.min_token_id, statistics.max_token_id = min(known), max(known)
    faults = {}  # by name: bool (tokens,)
    if PADDING in block:
        faults["first_padded_row"] = block[PADDING] == 0
    if loss_mask is not None:
        mask = block[loss_mask]
        trained = trained_on(loss_mask, mask)
        if loss_mask == LABELS:
            faults["first_differing_label_row"] = (mask != IGNORED_LABEL) & (mask != ids)
        else:
            faults["first_bad_mask_row"] = (mask != 0) & (mask != 1)
        statistics.loss_tokens += int(np.count_nonzero(trained))
        sums = np.concatenate([[0], trained.cumsum()])
        # For each document: the number of trained tokens after its first token.
        after_first = sums[starts[1:]] - sums[np.minimum(starts[:-1] + 1, starts[1:])]
        rows_without_loss = np.flatnonzero((after_first == 0) & (np.diff(starts) > 0))
        if rows_without_loss.size and statistics.first_row_without_loss is None:
            statistics.first_row_without_loss = first + int(rows_without_loss[0])
    for name, fault in faults.items():
        if getattr(statistics, name) is None and fault.any():
            row = int(np.searchsorted(starts, fault.argmax(), side="right")) - 1
            setattr(statistics, name, first + row)
