"""The plan of a preparation: which files, which format, which work units, under which digest.

The sources are cut into work units that are prepared independently of each other. The cut depends
on the sources alone, never on the number of processes or shards: a unit becomes one Arrow file, so
the output has the same bytes however the work is divided.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa

from utils.config.errors import ConfigurationError
from utils.config.preparation import PreparationArguments, Source, sources_of
from utils.data.prepare.records import FilePart, Record, cut, read_records
from utils.data.prepare.rows import (
    DOCUMENT_FORMATS,
    NEEDED,
    RowSettings,
    columns_to_read,
    detect_formats,
    naming_hint,
    renamed,
)
from utils.data.prepare.sources import SourceFile, list_sources

logger = logging.getLogger(__name__)

# Raised whenever the same sources and settings would give other bytes than before.
OUTPUT_VERSION = 2
TRAIN, VALIDATION = "train", "validation"
MEDIA = ("images", "image", "videos", "video", "audios", "audio")

SMALLEST_UNIT_BYTES = 1 << 20
LARGEST_UNIT_BYTES = 64 << 20
UNITS_WANTED = 64
# A source of which few tokens are wanted is read in few places, so that each holds whole documents.
LEAST_TOKENS_OF_A_UNIT = 1 << 13


@dataclass(frozen=True)
class WorkUnit:
    """Consecutive file parts of one source; `index` counts over all sources, as `source` does.

    `max_tokens`: the unit ends before the document that would go beyond it.
    """

    index: int
    split: str
    parts: tuple[FilePart, ...]
    size: int
    source: int = 0
    max_tokens: int | None = None


@dataclass(frozen=True)
class UnitSettings:
    """What decides the output of a unit, besides the tokenizer and the files.

    `sources` says how the rows of each are read; template_date: what a chat template prints for
    today's date.
    """

    document_format: str
    sources: tuple[RowSettings, ...]
    on_bad_row: str
    on_overlong: str
    sequence_length: int | None
    validation_fraction: float
    seed: int
    template_date: str | None = None


@dataclass(frozen=True)
class PreparationPlan:
    """Everything that decides the output, but for the tokenizer.

    `sources` maps each split to its files, `train` first; `units` are cut from them.
    `needs_chat_template`: documents are messages, or prompts and completions made of messages.
    """

    sources: Mapping[str, Sequence[SourceFile]]
    units: Sequence[WorkUnit]
    settings: UnitSettings
    needs_chat_template: bool

    @property
    def splits(self) -> list[str]:
        """The splits to be written, in order."""
        held_out = [VALIDATION] if self.settings.validation_fraction > 0 else []
        return [TRAIN, *held_out, *(name for name in self.sources if name != TRAIN)]

    def digest(self, tokenizer: Mapping[str, Any]) -> str:
        """Return a hash of sources, settings, `tokenizer` and the libraries that matter.

        The number of processes and the shards are not part of it: they change no byte.
        """
        content = {
            "output_version": OUTPUT_VERSION,
            "sources": {name: [asdict(f) for f in files] for name, files in self.sources.items()},
            "settings": asdict(self.settings),
            "tokenizer": tokenizer,
            "versions": {name: metadata.version(name) for name in ("tokenizers", "transformers")},
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def plan_preparation(arguments: PreparationArguments) -> PreparationPlan:
    """Find the sources, decide the format and cut the work; reads no more than first records.

    Raises ConfigurationError with every missing path, empty source and unknown file type.
    """
    given = _find_sources(arguments)
    units = cut_into_units(given)
    document_format, rows, is_chat = _decide_formats(arguments, given, units)
    sources: dict[str, list[SourceFile]] = {}
    for source, files in given:
        sources.setdefault(source.split, []).extend(files)
    every_file = [file for files in sources.values() for file in files]
    template_date = arguments.template_date
    if template_date is None:  # shards that run on two days agree on that of the newest file
        newest = max(file.mtime_ns for file in every_file)
        template_date = datetime.fromtimestamp(newest / 1e9, UTC).date().isoformat()
    settings = UnitSettings(
        document_format=document_format,
        sources=tuple(rows),
        on_bad_row=arguments.on_bad_row,
        on_overlong=arguments.on_overlong,
        sequence_length=arguments.sequence_length,
        validation_fraction=arguments.validation_fraction,
        seed=arguments.seed,
        template_date=None if document_format == "text" else template_date,
    )
    size_mib = sum(unit.size for unit in units) / 2**20
    logger.info(
        f"{document_format}: {len(every_file):,} files, {size_mib:.1f} MiB in {len(units):,} "
        "work units"
    )
    return PreparationPlan(sources, units, settings, is_chat)


# --- which files


def _find_sources(arguments: PreparationArguments) -> list[tuple[Source, list[SourceFile]]]:
    """Return each source with its files; logs what is not taken of them."""
    template = arguments.chat_template
    missing = template is not None and not Path(template).is_file()
    problems = [f"chat_template: {template}: no such file"] if missing else []
    try:
        sources = sources_of(arguments)
    except ConfigurationError as error:
        raise ConfigurationError([*problems, *error.problems]) from error
    found = []
    for source in sources:
        split, is_named = source.from_split or source.split, source.from_split is not None
        listing = list_sources(source.paths, source.format, split, is_named=is_named)
        problems.extend(f"{source.split}: {problem}" for problem in listing.problems)
        found.append((source, listing.files))
        for note in listing.notes:
            logger.warning("%s: %s", source.split, note)
        if listing.ignored:
            skipped = ", ".join(f"{n} x {what}" for what, n in sorted(listing.ignored.items()))
            logger.warning("%s: files skipped: %s", source.split, skipped)
    problems.extend(_overlap_problems(found))
    if problems:
        raise ConfigurationError(problems)
    return found


def _overlap_problems(sources: Sequence[tuple[Source, list[SourceFile]]]) -> Iterator[str]:
    """Name the files that are given twice: trained on twice, or evaluated on after training."""
    owner: dict[str, Source] = {}
    for source, files in sources:
        for file in files:
            other = owner.setdefault(str(Path(file.path).resolve()), source)
            if other.split != source.split:
                yield f"{file.path}: is given for both {other.split} and {source.split}"
            elif other is not source and other.filters == source.filters:
                yield f"{file.path}: is given twice for {source.split}; give it a weight instead"


# --- which work units


def cut_into_units(sources: Sequence[tuple[Source, Sequence[SourceFile]]]) -> list[WorkUnit]:
    """Cut the files of every source into work units of about equal size.

    A cap in tokens is shared out over units spread evenly over the source, so that what is taken
    depends on no other unit. Raises ConfigurationError naming every Parquet file or datasets folder
    that cannot be opened.
    """
    total = sum(file.size for _, files in sources for file in files)
    unit_bytes = min(max(total // UNITS_WANTED, SMALLEST_UNIT_BYTES), LARGEST_UNIT_BYTES)
    units: list[WorkUnit] = []
    problems: list[str] = []
    for number, (source, files) in enumerate(sources):
        parts: list[FilePart] = []
        for file in files:
            try:
                parts.extend(cut(file, unit_bytes))
            except (pa.ArrowException, OSError, ValueError) as error:
                problems.append(f"{file.path}: cannot be opened ({error})")
        for group, max_tokens in _capped(_groups(parts, unit_bytes), source.max_tokens):
            size = sum(part.size for part in group)
            units.append(WorkUnit(len(units), source.split, tuple(group), size, number, max_tokens))
    if problems:
        raise ConfigurationError(problems)
    return units


def _groups(parts: Iterable[FilePart], unit_bytes: int) -> list[list[FilePart]]:
    groups: list[list[FilePart]] = []
    size = 0
    for part in parts:
        if not groups or size + part.size > unit_bytes:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part.size
    return groups


def _capped(
    groups: Sequence[list[FilePart]], max_tokens: int | None
) -> Iterator[tuple[list[FilePart], int | None]]:
    """Yield the groups that are read, each with its share of the tokens."""
    if max_tokens is None:
        yield from ((group, None) for group in groups)
        return
    read = max(1, min(len(groups), max_tokens // LEAST_TOKENS_OF_A_UNIT)) if groups else 0
    for number in range(read):
        share = max_tokens * (number + 1) // read - max_tokens * number // read
        yield groups[(2 * number + 1) * len(groups) // (2 * read)], share


# --- which format


def _decide_formats(
    arguments: PreparationArguments,
    sources: Sequence[tuple[Source, list[SourceFile]]],
    units: Sequence[WorkUnit],
) -> tuple[str, list[RowSettings], bool]:
    """Return the format of all documents, how the rows of each source are read, and if they chat.

    The first record of a source decides where its format is "auto"; all have to give documents of
    one format. Raises ConfigurationError with every source that does not.
    """
    problems: list[str] = []
    rows: list[RowSettings] = []
    decided: tuple[str, Record] | None = None
    is_chat = False
    for number, (source, _) in enumerate(sources):
        own = [unit for unit in units if unit.source == number]
        record = _first_record(own, source, arguments.on_bad_row)
        if record is None:
            problems.append(f"{source.split}: empty source: no record in its files")
            continue
        fields = renamed(record.fields, source.columns)
        found = detect_formats(fields)
        wanted = decided[0] if decided else None
        row_format = _row_format(source, found, wanted, skips=arguments.on_bad_row == "skip")
        if row_format is None:
            problems.append(_format_problem(record, source, found))
            continue
        read = RowSettings(
            row_format, source.columns, source.filters, source.weight, source.max_tokens
        )
        rows.append(read)
        absent = [name for name, _ in read.filters if name not in record.fields]
        if absent and arguments.on_bad_row == "error":
            problems.append(
                f"{record.location}: no column {absent[0]!r}, which the filter asks for (columns: "
                f"{', '.join(sorted(record.fields))})"
            )
        _log_what_is_read(source, record, read)
        document_format = DOCUMENT_FORMATS.get(row_format, row_format)
        is_chat |= document_format == "messages" or isinstance(fields.get("prompt"), list)
        if decided is None:
            decided = document_format, record
        elif document_format != decided[0]:
            problems.append(
                f"{record.location}: the format is {row_format}, which makes "
                f"{document_format}, but {decided[1].location} makes {decided[0]}: one dataset "
                "holds one kind; prepare them apart, or name columns (--columns "
                "question=instruction answer=output makes chats)"
            )
    if problems or decided is None:
        raise ConfigurationError(problems)
    return decided[0], rows, is_chat


def _first_record(units: Sequence[WorkUnit], source: Source, on_bad_row: str) -> Record | None:
    """Return the first record with all its columns; raises ConfigurationError at a bad row."""
    text_column = columns_to_read("text", source.columns)
    for part in (part for unit in units for part in unit.parts):
        for record in read_records(part, text_column if part.file.kind == "text" else None):
            if isinstance(record, Record):
                return record
            if on_bad_row == "error":
                raise ConfigurationError(str(record))
    return None


def _row_format(
    source: Source, found: Sequence[str], wanted: str | None, *, skips: bool
) -> str | None:
    """Return the format to read a source with, None when its first record does not tell one."""
    if source.format != "auto":
        # A record that does not fit a format the user named is a bad row like any other.
        return source.format if source.format in found or skips else None
    if len(found) > 1:  # what the sources before it make decides
        found = [name for name in found if DOCUMENT_FORMATS.get(name, name) == wanted]
    return found[0] if len(found) == 1 else None


def _log_what_is_read(source: Source, record: Record, read: RowSettings) -> None:
    path = record.location.path
    used = [name for name in read.read_columns if name in record.fields]
    unused = sorted(record.fields.keys() - used)
    parts = [f"{source.split}: {path}: {read.row_format}, from {', '.join(used)}"]
    if unused:
        parts.append(f"not used: {', '.join(unused)}")
    if read.weight != 1:
        parts.append(f"weight {read.weight:g}")
    if read.max_tokens is not None:
        parts.append(f"at most {read.max_tokens:,} tokens")
    logger.info("%s", "; ".join(parts))
    media = [name for name in MEDIA if name in record.fields]
    if media and read.row_format != "text":
        logger.warning(
            f"{path}: column {media[0]} is not used: only the texts are trained on, including "
            "whatever stands in them for images or sound"
        )


def _format_problem(record: Record, source: Source, found: Sequence[str]) -> str:
    names = sorted(renamed(record.fields, source.columns))
    columns = ", ".join(names) or "none"
    if source.format != "auto":
        missing = [name for name in NEEDED[source.format] if name not in names]
        like = f"; it looks like {found[0]}: --format {found[0]}" if found else ""
        return (
            f"{record.location}: the format is {source.format}, but the record has no "
            f"{' and no '.join(map(repr, missing))} (columns: {columns}){like}"
        )
    if found:
        return f"{record.location}: could be {' or '.join(found)}: choose one with --format"
    formats = "; ".join(f"{name}: {', '.join(needed)}" for name, needed in NEEDED.items())
    return (
        f"{record.location}: no known format (columns: {columns}): {naming_hint(names)}. "
        f"Without --columns a record needs: {formats}"
    )


# The tokenizer of a preparation: the given one, or one trained on the plan's documents.
