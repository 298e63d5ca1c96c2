"""The plan of a preparation: the files, their format, the work units, and a digest of the plan.

The sources are cut into work units that are prepared independently of each other. Where they are
cut depends only on the sources, never on the number of processes or shards. A unit becomes one
Arrow file per split, so the output has the same bytes however the work is divided.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa

from utils.config.errors import ConfigurationError
from utils.config.preparation import TRAIN, PreparationArguments, Source, sources_of
from utils.prepare.hints import misreading, naming_hint
from utils.prepare.hub import HubCache, cached_files
from utils.prepare.records import FilePart, cut_file, read_records
from utils.prepare.rows import (
    DOCUMENT_FORMATS,
    NEEDED,
    RowSettings,
    detect_formats,
    holds_chats,
    parse_document,
    renamed,
)
from utils.prepare.source_files import SourceFile, list_sources
from utils.prepare.values import MEDIA, BadRow, Record

logger = logging.getLogger(__name__)

# Increase when a code change gives other output for the same sources and settings.
OUTPUT_VERSION = 3
VALIDATION = "validation"
COLUMNS_SHOWN = 20

SMALLEST_UNIT_BYTES = 1 << 20
LARGEST_UNIT_BYTES = 64 << 20
UNITS_WANTED = 64
# With a small max_tokens few units are read, so that each gets enough tokens for whole documents.
LEAST_TOKENS_OF_A_UNIT = 1 << 13


@dataclass(frozen=True)
class WorkUnit:
    """Consecutive file parts of one source; max_tokens: the most tokens to write from them."""

    index: int
    split: str
    parts: tuple[FilePart, ...]
    size: int
    source: int = 0
    max_tokens: int | None = None


@dataclass(frozen=True)
class UnitSettings:
    """All settings that decide the output of a unit, apart from its tokenizer and files."""

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
    """Files, work units and settings: all that decides the output, except the tokenizer.

    `sources` maps each split to its files, `train` first; `units` are cut from them.
    `needs_chat_template`: documents are messages, or prompts and completions made of messages.
    `commits` are the commits of the Hub's datasets, by `HubDataset.key`.
    """

    sources: Mapping[str, Sequence[SourceFile]]
    units: Sequence[WorkUnit]
    settings: UnitSettings
    needs_chat_template: bool
    commits: Mapping[str, str]

    @property
    def splits(self) -> list[str]:
        """The splits that are written, in order."""
        held_out = [VALIDATION] if self.settings.validation_fraction > 0 else []
        return [TRAIN, *held_out, *(name for name in self.sources if name != TRAIN)]

    def digest(self, tokenizer: Mapping[str, Any]) -> str:
        """Return a hash of sources, settings, `tokenizer` and the versions of its libraries.

        The number of processes and the shards are left out, because they change no byte.
        """
        content = {
            "output_version": OUTPUT_VERSION,
            "sources": {name: [f.identity for f in files] for name, files in self.sources.items()},
            "settings": asdict(self.settings),
            "tokenizer": tokenizer,
            "versions": {name: metadata.version(name) for name in ("tokenizers", "transformers")},
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def plan_preparation(arguments: PreparationArguments) -> PreparationPlan:
    """Find the files, cut them into work units and decide the format by the first records.

    Raises ConfigurationError with every missing path, empty source and unknown file type.
    """
    given, commits = _find_sources(arguments)
    units = cut_into_units(given)
    document_format, rows, is_chat = _decide_formats(given, units, arguments.on_bad_row)
    sources: dict[str, list[SourceFile]] = {}
    for source, files in given:
        sources.setdefault(source.split, []).extend(files)
    # The default date is that of the newest file: shards that run on two days need the same date.
    newest = max(file.mtime_ns for files in sources.values() for file in files)
    day = datetime.fromtimestamp(newest / 1e9, UTC).date().isoformat()
    settings = UnitSettings(
        document_format=document_format,
        sources=tuple(rows),
        on_bad_row=arguments.on_bad_row,
        on_overlong=arguments.on_overlong,
        sequence_length=arguments.sequence_length,
        validation_fraction=arguments.validation_fraction,
        seed=arguments.seed,
        template_date=None if document_format == "text" else arguments.template_date or day,
    )
    size_mib = sum(unit.size for unit in units) / 2**20
    logger.info(f"{document_format}: {size_mib:.1f} MiB in {len(units):,} work units")
    return PreparationPlan(sources, units, settings, is_chat, commits)


# --- which files


def _find_sources(
    arguments: PreparationArguments,
) -> tuple[list[tuple[Source, list[SourceFile]]], dict[str, str]]:
    """Return each source with its files, and the commits of the Hub's datasets by dataset.

    Raises ConfigurationError for paths that cannot be read, and files that would be trained twice.
    """
    problems = []
    if arguments.chat_template is not None and not Path(arguments.chat_template).is_file():
        problems.append(f"chat_template: {arguments.chat_template}: no such file")
    cache = HubCache(arguments)
    found = []
    commits: dict[str, str] = {}
    owner: dict[str, Source] = {}
    for source in sources_of(arguments):
        split, is_named = source.from_split or source.split, source.from_split is not None
        paths, hub_files, faults = cached_files(cache, source)
        commits |= {cached.dataset_key: cached.commit for cached in hub_files.values()}
        files, more = list_sources(paths, source.format, split, is_named=is_named)
        for number, file in enumerate(files):
            if cached := hub_files.get(file.path):
                files[number] = replace(file, url=cached.url, mtime_ns=cached.mtime_ns)
        problems.extend(f"{source.split}: {fault}" for fault in faults + more)
        found.append((source, files))
        for file in files:
            other = owner.setdefault(str(Path(file.path).resolve()), source)
            if other.split != source.split:
                problems.append(f"{file.path}: is given for both {other.split} and {source.split}")
            elif other is not source and other.filters == source.filters:
                problems.append(
                    f"{file.path}: is given twice for {source.split}; give it a weight instead"
                )
    if problems:
        raise ConfigurationError(problems)
    return found, commits


# --- which work units


def cut_into_units(sources: Sequence[tuple[Source, Sequence[SourceFile]]]) -> list[WorkUnit]:
    """Cut the files of every source into work units of about equal size.

    Raises ConfigurationError naming every Parquet file or datasets folder that cannot be opened.
    """
    total = sum(file.size for _, files in sources for file in files)
    unit_bytes = min(max(total // UNITS_WANTED, SMALLEST_UNIT_BYTES), LARGEST_UNIT_BYTES)
    units: list[WorkUnit] = []
    problems: list[str] = []
    for number, (source, files) in enumerate(sources):
        groups: list[list[FilePart]] = []
        size = 0
        for file in files:
            try:
                parts = list(cut_file(file, unit_bytes))
            except (pa.ArrowException, OSError, ValueError) as error:
                problems.append(f"{file.path}: cannot be opened ({error})")
                continue
            for part in parts:
                if not groups or size + part.size > unit_bytes:
                    groups.append([])
                    size = 0
                groups[-1].append(part)
                size += part.size
        for group, max_tokens in _share_of_tokens(groups, source.max_tokens):
            size = sum(part.size for part in group)
            units.append(WorkUnit(len(units), source.split, tuple(group), size, number, max_tokens))
    if problems:
        raise ConfigurationError(problems)
    return units


def _share_of_tokens(
    groups: Sequence[list[FilePart]], max_tokens: int | None
) -> list[tuple[list[FilePart], int | None]]:
    """Return the groups of file parts to read, each with its share of `max_tokens`.

    A small `max_tokens` is read from few groups, evenly spread over the source. The shares are
    fixed in advance, so no unit depends on another one.
    """
    if max_tokens is None or not groups:
        return [(group, None) for group in groups]
    read = max(1, min(len(groups), max_tokens // LEAST_TOKENS_OF_A_UNIT))
    ends = [max_tokens * number // read for number in range(read + 1)]
    return [
        (groups[(2 * number + 1) * len(groups) // (2 * read)], ends[number + 1] - ends[number])
        for number in range(read)
    ]


# --- which format


def _decide_formats(
    sources: Sequence[tuple[Source, list[SourceFile]]], units: Sequence[WorkUnit], on_bad_row: str
) -> tuple[str, list[RowSettings], bool]:
    """Return the format of all documents, how to read each source, and whether any are chats.

    Raises ConfigurationError with every source of an unknown format, or of another format than the
    first source.
    """
    problems: list[str] = []
    rows: list[RowSettings] = []
    document_format, decided_by, is_chat = "", None, False
    for number, (source, _) in enumerate(sources):
        parts = [part for unit in units if unit.source == number for part in unit.parts]
        try:
            record = _first_record(parts, source, on_bad_row)
            read = _row_settings(source, record, document_format, on_bad_row)
        except ConfigurationError as error:
            problems.extend(error.problems)
            continue
        rows.append(read)
        made = DOCUMENT_FORMATS.get(read.row_format, read.row_format)
        chats = holds_chats(renamed(record.fields, source.columns), read.row_format)
        is_chat |= chats
        if source.chat_template_kwargs and not chats:
            problems.append(
                f"{record.location}: chat_template_kwargs of a source are for chats, and this is "
                f"{read.row_format}: leave them out"
            )
        document_format, decided_by = document_format or made, decided_by or record.location
        if made != document_format:
            problems.append(
                f"{record.location}: the format {read.row_format} makes {made}, but {decided_by} "
                f"makes {document_format}, and one dataset holds one kind: prepare them apart"
                + _columns_for_chats(read)
            )
    if problems:
        raise ConfigurationError(problems)
    return document_format, rows, is_chat


def _columns_for_chats(read: RowSettings) -> str:
    if read.row_format != "prompt_completion":
        return ""
    prompt, completion = read.read_columns[:2]
    return f", or make chats of these rows: columns {prompt}=instruction {completion}=output"


def _first_record(parts: Sequence[FilePart], source: Source, on_bad_row: str) -> Record:
    """Return the first record, with all its columns; ConfigurationError if there are no records."""
    text_column = RowSettings("text", source.columns).read_columns
    for part in parts:
        for record in read_records(part, text_column if part.file.kind == "text" else None):
            if isinstance(record, Record):
                return record
            record.refuse(on_bad_row)
    raise ConfigurationError(f"{source.split}: empty source: no record in its files")


def _row_settings(
    source: Source, record: Record, document_format: str, on_bad_row: str
) -> RowSettings:
    """Return and log how to read the rows of a source; `record` is the source's first record.

    If several formats fit, the one that makes documents like the earlier sources
    (`document_format`) is chosen. Raises ConfigurationError if no format fits.
    """
    row_format, found = source.format, detect_formats(renamed(record.fields, source.columns))
    if row_format == "auto":
        same = [name for name in found if DOCUMENT_FORMATS.get(name, name) == document_format]
        if len(same or found) != 1:
            raise ConfigurationError(_format_problem(record, source, same or found))
        (row_format,) = same or found
    elif found and row_format not in found and on_bad_row == "error":
        needed = map(RowSettings(row_format, source.columns).name_of, NEEDED[row_format])
        raise ConfigurationError(
            f"{record.location}: the format {row_format} needs {' and '.join(needed)}; "
            f"it looks like {found[0]}: --format {found[0]}"
        )
    if problem := misreading(record.fields, source):
        raise ConfigurationError(f"{record.location}: {problem}")
    if absent := [name for name, _ in source.columns if name not in record.fields]:
        logger.warning(
            "%s: --columns names %s, which the first record does not have (columns: %s)",
            record.location.path, ", ".join(absent), ", ".join(sorted(record.fields)),
        )  # fmt: skip
    read = RowSettings(
        row_format, source.columns, source.filters, source.weight, source.max_tokens,
        source.chat_template_kwargs,
    )  # fmt: skip
    document = parse_document(record, read)
    if isinstance(document, BadRow):
        document.refuse(on_bad_row)
    used = [name for name in read.read_columns if name in record.fields and name not in MEDIA]
    unused = sorted(record.fields.keys() - used)
    logger.info(
        f"{source.split}: {record.location.path}: {row_format}, from {', '.join(used)}"
        + (f"; not used: {', '.join(unused)}" if unused else "")
    )
    return read


def _format_problem(record: Record, source: Source, found: Sequence[str]) -> str:
    if found:
        formats = " or ".join(f"--format {name}" for name in found)
        return f"{record.location}: could be {' or '.join(found)}: choose one with {formats}"
    columns = sorted(record.fields)
    shown = ", ".join(columns[:COLUMNS_SHOWN]) + (", ..." if len(columns) > COLUMNS_SHOWN else "")
    if absent := [name for name, _ in source.columns if name not in record.fields]:
        return (
            f"{record.location}: --columns names {', '.join(absent)}, which this record does not "
            f"have (columns: {', '.join(record.fields)})"
        )
    formats = "; ".join(f"{name}: {', '.join(needed)}" for name, needed in NEEDED.items())
    return (
        f"{record.location}: no known format (columns: {shown or 'none'}): "
        f"{naming_hint(record.fields)}. Without --columns a record needs: {formats}"
    )
