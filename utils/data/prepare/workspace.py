"""The output directory and its workspace OUT/.shards: finished units that are not assembled yet.

A unit is done when its record is there. Records and files get their names by renaming, so a
preparation may be killed at any moment, and shards may write side by side.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from utils.config.errors import ConfigurationError
from utils.data.description import DESCRIPTION_FILE
from utils.data.prepare.documents import FILTERED
from utils.data.prepare.plan import TRAIN, WorkUnit
from utils.data.prepare.records import BadRow
from utils.data.prepare.tokenization import TokenizedDocument
from utils.support.files import replace_text
from utils.support.host import host_name

logger = logging.getLogger(__name__)

WORKSPACE = ".shards"
EXAMPLES_KEPT = 5
# Tokens per record batch. Few large batches keep the reader's table of chunks short; the batch is
# what a writer holds in memory (2 to 4 bytes a token, and 1 for its mask).
TOKENS_PER_BATCH = 1 << 20


# --- what a unit leaves: counts, and Arrow files


@dataclass
class SplitCounts:
    """What a unit put into one split; `lengths` maps tokens to the number of documents."""

    documents: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    text_bytes: int = 0
    file_bytes: int = 0
    lengths: dict[int, int] = field(default_factory=dict)

    def count(self, document: TokenizedDocument, text_bytes: int) -> None:
        """Count one document."""
        self.documents += 1
        self.tokens += len(document.ids)
        self.loss_tokens += document.loss_tokens
        self.text_bytes += text_bytes
        _add_counts(self.lengths, {len(document.ids): 1})

    def add(self, other: "SplitCounts") -> None:
        """Add the counts of another unit."""
        self.documents += other.documents
        self.tokens += other.tokens
        self.loss_tokens += other.loss_tokens
        self.text_bytes += other.text_bytes
        self.file_bytes += other.file_bytes
        _add_counts(self.lengths, other.lengths)


@dataclass
class UnitCounts:
    """What happened to the records of a unit; `dropped` by reason, with the first few messages."""

    splits: dict[str, SplitCounts] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    truncated: int = 0
    continued: int = 0
    without_earlier_thinking: int = 0

    def drop(self, row: BadRow) -> None:
        """Count a record that is left out."""
        _add_counts(self.dropped, {row.reason: 1})
        if row.reason != FILTERED and len(self.examples) < EXAMPLES_KEPT:
            self.examples.append(str(row))

    @classmethod
    def total(cls, counts: Iterable["UnitCounts"]) -> "UnitCounts":
        """Add up the counts of units."""
        total = cls()
        for unit in counts:
            for split, added in unit.splits.items():
                total.splits.setdefault(split, SplitCounts()).add(added)
            _add_counts(total.dropped, unit.dropped)
            total.examples = [*total.examples, *unit.examples][:EXAMPLES_KEPT]
            total.truncated += unit.truncated
            total.continued += unit.continued
            total.without_earlier_thinking += unit.without_earlier_thinking
        return total

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "UnitCounts":
        """Rebuild the counts from what `asdict` made of them."""
        splits = {}
        for name, split in content["splits"].items():
            lengths = {int(length): documents for length, documents in split["lengths"].items()}
            splits[name] = SplitCounts(**{**split, "lengths": lengths})
        return cls(**{**content, "splits": splits})


def _add_counts(total: dict[Any, int], added: Mapping[Any, int]) -> None:
    for key, number in added.items():
        total[key] = total.get(key, 0) + number


class TokenFileWriter:
    """Writes tokenized documents to one Arrow stream; a context manager that closes the file.

    The bytes depend on the documents alone.
    """

    def __init__(self, path: Path, schema: pa.Schema):
        self._documents: list[TokenizedDocument] = []
        self._tokens = 0
        self._schema = schema
        self._file = path.open("wb")
        self._stream = pa.ipc.new_stream(self._file, schema)

    def append(self, document: TokenizedDocument) -> None:
        """Add one document behind those before it."""
        self._documents.append(document)
        self._tokens += len(document.ids)
        if self._tokens >= TOKENS_PER_BATCH:
            self._flush()

    def _flush(self) -> None:
        if not self._documents:
            return
        lengths = [len(document.ids) for document in self._documents]
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        values = [[document.ids for document in self._documents]]
        if len(self._schema) == 2:
            values.append([d.loss_mask for d in self._documents if d.loss_mask is not None])
        columns = [
            pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(column))) for column in values
        ]
        self._stream.write_batch(pa.record_batch(columns, schema=self._schema))
        self._documents, self._tokens = [], 0

    def __enter__(self) -> "TokenFileWriter":
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error_type is None:
            self._flush()
            self._stream.close()
            self._file.flush()
            # The file counts as done once it is renamed: its content must be on disk by then.
            os.fsync(self._file.fileno())
        self._file.close()


def token_schema(id_type: np.dtype, mask_column: str | None) -> pa.Schema:
    """Return the Arrow schema of a split, with the features that `datasets` reads from it."""
    fields = [pa.field("input_ids", pa.list_(pa.from_numpy_dtype(id_type)))]
    if mask_column:
        fields.append(pa.field(mask_column, pa.list_(pa.int8())))
    info = {"info": {"features": token_features(id_type, mask_column)}}
    return pa.schema(fields, metadata={"huggingface": json.dumps(info)})


def token_features(id_type: np.dtype, mask_column: str | None) -> dict[str, Any]:
    """Return the features of a split as `datasets` writes them; mask_column None: no mask."""
    types = {"input_ids": id_type.name} | ({mask_column: "int8"} if mask_column else {})
    return {
        name: {"feature": {"dtype": dtype, "_type": "Value"}, "_type": "List"}
        for name, dtype in types.items()
    }


# --- the folder


class Workspace:
    """Files of one preparation; `digest` identifies its sources and settings."""

    def __init__(self, output_dir: Path, digest: str):
        self.output_dir = output_dir
        self.root = output_dir / WORKSPACE
        self.digest = digest

    @property
    def tokenizer(self) -> Path:
        """The folder that holds the tokenizer in use."""
        return self.root / "tokenizer"

    def open(self, *, may_discard: bool) -> None:
        """Create the workspace, or resume the one that is there.

        Units of other settings or sources are discarded, if `may_discard` and their assembly has
        not begun; else ConfigurationError is raised.
        """
        settings = self.root / "settings.json"
        if settings.exists():
            if _read(settings).get("digest") == self.digest:
                return
            units = len(list(self.root.glob("unit-*.json")))
            if units and not (may_discard and not (self.output_dir / TRAIN).exists()):
                raise ConfigurationError(
                    f"{self.root}: holds unfinished work of other settings or of sources that "
                    "have changed since: finish it with the settings it was started with, or "
                    f"remove it (rm -r {self.root}), or choose another --output_dir"
                )
            if units:
                logger.warning(
                    f"{self.root}: {units:,} finished work units of other settings or sources are "
                    "discarded; the preparation starts again"
                )
            shutil.rmtree(self.root)
        self.root.mkdir(parents=True, exist_ok=True)
        replace_text(settings, json.dumps({"digest": self.digest}, indent=1))

    def unit_file(self, unit: int, split: str) -> Path:
        """Return the file of the documents of a unit that belong to a split."""
        return self.root / f"unit-{unit:06d}-{split}.arrow"

    def prepare(
        self,
        unit: WorkUnit,
        splits: Sequence[str],
        prepare: Callable[[WorkUnit, dict[str, Path]], UnitCounts],
    ) -> None:
        """Have a unit prepared into files that count only once all of it is written."""
        partial = {split: partial_name(self.unit_file(unit.index, split)) for split in splits}
        try:
            counts = prepare(unit, partial)
            for split, path in partial.items():
                if counts.splits[split].documents:
                    path.replace(self.unit_file(unit.index, split))
                else:
                    del counts.splits[split]
        finally:
            for path in partial.values():
                path.unlink(missing_ok=True)
        record = {"digest": self.digest, "counts": asdict(counts)}
        replace_text(self._record(unit.index), json.dumps(record, indent=1))

    def counts_of(self, unit: int) -> UnitCounts | None:
        """Return the counts of a finished unit, None when it is still to be done."""
        try:
            record = _read(self._record(unit))
        except FileNotFoundError:
            return None
        return UnitCounts.from_json(record["counts"]) if record["digest"] == self.digest else None

    def remove(self) -> None:
        """Delete the workspace: its files have been moved to where they belong."""
        # Renamed first: a workspace that is half deleted must not look like unfinished work.
        finished = self.root.with_name(f"{self.root.name}.finished")
        if self.root.exists():
            self.root.replace(finished)
        shutil.rmtree(finished, ignore_errors=True)

    def _record(self, unit: int) -> Path:
        return self.root / f"unit-{unit:06d}.json"


def is_already_prepared(workspace: Workspace, used_tokenizer: str | None) -> bool:
    """Return whether the output directory holds the finished result of this very preparation.

    False for an empty directory and for unfinished work. Raises ConfigurationError when anything
    else is in it: nothing is overwritten. `used_tokenizer`: a tokenizer that lies in the output
    directory may stay if it is the one in use.
    """
    output_dir = workspace.output_dir
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigurationError(f"output_dir: {output_dir}: is a file, not a folder")
    if workspace.root.exists():
        return False
    try:
        content = json.loads((output_dir / TRAIN / DESCRIPTION_FILE).read_text(encoding="utf-8"))
        prepared = content["preparation"]["settings_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        prepared = None
    if prepared == workspace.digest:
        return True
    if prepared is not None:
        raise ConfigurationError(
            f"output_dir: {output_dir}: holds a dataset that was prepared with other settings or "
            "from sources that have changed since; nothing is overwritten: choose another "
            "--output_dir, or remove it first"
        )
    tokenizer = output_dir / "tokenizer"
    is_used = used_tokenizer is not None and Path(used_tokenizer).resolve() == tokenizer.resolve()
    entries = sorted(output_dir.iterdir()) if output_dir.exists() else []
    others = [entry.name for entry in entries if not (is_used and entry == tokenizer)]
    if others:
        raise ConfigurationError(
            f"output_dir: {output_dir}: holds other files ({', '.join(others[:5])}); nothing is "
            "overwritten: choose a new or empty folder"
        )
    return False


def partial_name(path: Path) -> Path:
    """Return a name beside `path` that no other process uses."""
    return path.with_name(f".{path.name}.{host_name()}.{os.getpid()}.partial")


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path}: is damaged ({error}): remove it") from error
