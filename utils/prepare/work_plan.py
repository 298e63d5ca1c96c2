"""The plan of a preparation: the files, their format, the work units, and a digest of the plan.

The sources are cut into work units that are prepared independently of each other. The cuts depend
only on the sources, never on the number of processes or shards. A unit becomes one Arrow file per
split, so the output has the same bytes for any number of processes and shards.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa

from utils.config.errors import ConfigurationError
from utils.config.own_code import sha256_of
from utils.config.preparation import TRAIN, VALIDATION, PreparationArguments, Source, parse_sources
from utils.data.arrow_columns import schema_problems
from utils.host.atomic_files import from_here
from utils.prepare.hints import absent_columns, naming_hint, unsuitable_reason
from utils.prepare.hub_datasets import HubCache, cached_files
from utils.prepare.records import FilePart, converter, cut_file, read_records
from utils.prepare.rows import (
    DOCUMENT_FORMATS,
    REQUIRED,
    RowSettings,
    becomes_chat,
    detect_formats,
    parse_document,
)
from utils.prepare.source_files import Remarks, SourceFile, list_sources
from utils.prepare.values import FILTERED, MEDIA, REPAIR, BadRow, Record, renamed

logger = logging.getLogger(__name__)

# Increase when a code change alters the output of the same sources and settings.
OUTPUT_VERSION = 3
COLUMNS_SHOWN = 20
# A source is refused before the work begins if its first ROWS_TRIED rows are all faulty.
ROWS_TRIED = 100

SMALLEST_UNIT_BYTES = 1 << 20
LARGEST_UNIT_BYTES = 64 << 20
UNITS_WANTED = 64
# With a small max_tokens few units are read. Each gets enough tokens for complete documents.
LEAST_TOKENS_OF_A_UNIT = 1 << 13

SourceFiles = Sequence[tuple[Source, Sequence[SourceFile]]]


@dataclass(frozen=True)
class WorkUnit:
    """A piece of a source that one worker tokenizes: consecutive parts of its files.

    source: the source's index. size: bytes on disk. max_tokens: most tokens to write or None (all).
    """

    index: int
    split: str
    parts: tuple[FilePart, ...]
    size: int
    source: int = 0
    max_tokens: int | None = None


@dataclass(frozen=True)
class UnitSettings:
    """Settings that decide the output of work units, together with the files and the tokenizer."""

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
    """The plan of a preparation: all that decides the output, except the tokenizer.

    sources: the files of each split, `train` first. `units` are cut from these files.
    needs_chat_template: some documents are chats. commits: {NAME@REVISION: commit} of Hub datasets.
    lines: (level, text) for the log.
    """

    sources: Mapping[str, Sequence[SourceFile]]
    units: Sequence[WorkUnit]
    settings: UnitSettings
    needs_chat_template: bool
    commits: Mapping[str, str]
    lines: Sequence[tuple[int, str]]

    @property
    def splits(self) -> list[str]:
        """The splits to write: train, validation if it is drawn from train, then the others."""
        held_out = [VALIDATION] if self.settings.validation_fraction > 0 else []
        return [TRAIN, *held_out, *(name for name in self.sources if name != TRAIN)]

    def digest(self, tokenizer: Mapping[str, Any], folder: Path | None = None) -> str:
        """Return a hash of the sources, settings, `tokenizer` and versions of tokenizer libraries.

        folder: makes the paths of local files relative to this folder. tokenizer: hashes of the
        tokenizer and its chat template. Numbers of processes and shards do not change the hash.
        """
        splits = self.sources.items()
        content = {
            "output_version": OUTPUT_VERSION,
            "sources": {name: [file.identity(folder) for file in files] for name, files in splits},
            "settings": asdict(self.settings, dict_factory=_without_empty_own_format),
            "tokenizer": tokenizer,
            "versions": {name: metadata.version(name) for name in ("tokenizers", "transformers")},
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def log(self) -> None:
        """Log the files, formats and columns that the plan reads or leaves out."""
        for level, text in self.lines:
            logger.log(level, text)


def _without_empty_own_format(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return fields as a dict, without empty own_format and own_sha256.

    Older versions did not have these two settings, and their digests must stay valid.
    """
    return {name: value for name, value in fields if value or not name.startswith("own_")}


def plan_preparation(arguments: PreparationArguments) -> PreparationPlan:
    """Find files, decide formats, cut work units. Raises ConfigurationError with all faults."""
    remarks = Remarks()
    with remarks.lines:  # an error also shows the log lines collected before it
        return _plan(arguments, remarks)


def _plan(arguments: PreparationArguments, remarks: Remarks) -> PreparationPlan:
    cache = HubCache(arguments)
    given = _find_sources(arguments, cache, remarks)
    remarks.refuse()
    units = cut_into_units(given)
    rows, is_chat = _decide_formats(given, units, arguments.on_bad_row, remarks)
    remarks.refuse()
    sources: dict[str, list[SourceFile]] = {}
    for source, files in given:
        sources.setdefault(source.split, []).extend(files)
    # The default date is the newest file's date: shards that run on two days need the same date.
    newest = max(file.mtime_ns for files in sources.values() for file in files)
    day = datetime.fromtimestamp(newest / 1e9, UTC).date().isoformat()
    document_format = DOCUMENT_FORMATS[rows[0].row_format]
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
    return PreparationPlan(sources, units, settings, is_chat, cache.commits, remarks.lines)


def _find_sources(
    arguments: PreparationArguments, cache: HubCache, remarks: Remarks
) -> list[tuple[Source, list[SourceFile]]]:
    """Return each source with its files. Add problems, such as repeated files, to `remarks`."""
    if arguments.chat_template is not None and not Path(arguments.chat_template).is_file():
        remarks.problems.append(f"chat_template: {arguments.chat_template}: no such file")
    found = []
    owner: dict[str, Source] = {}
    for source in parse_sources(arguments):
        paths, hub_files = cached_files(cache, source, remarks)
        split, is_named = source.from_split or source.split, source.from_split is not None
        files, list_remarks = list_sources(paths, source.format, split, is_named=is_named)
        remarks.problems += [f"{source.split}: {problem}" for problem in list_remarks.problems]
        remarks.lines += list_remarks.lines
        for number, file in enumerate(files):
            if file.path in hub_files:
                url, mtime_ns = hub_files[file.path]
                files[number] = replace(file, url=url, mtime_ns=mtime_ns)
            other = owner.setdefault(str(Path(file.path).resolve()), source)
            if other.split != source.split:
                fault = f"is given for both {other.split} and {source.split}"
                remarks.problems.append(f"{file.path}: {fault}")
            elif other is not source and other.filters == source.filters:
                fault = f"is given twice for {source.split}; give it a weight instead"
                remarks.problems.append(f"{file.path}: {fault}")
        found.append((source, files))
    return found


# --- work units


def cut_into_units(sources: SourceFiles) -> list[WorkUnit]:
    """Cut the files of every source into work units of about equal size in bytes."""
    total = sum(file.size for _, files in sources for file in files)
    unit_bytes = min(max(total // UNITS_WANTED, SMALLEST_UNIT_BYTES), LARGEST_UNIT_BYTES)
    units: list[WorkUnit] = []
    remarks = Remarks()
    for number, (source, files) in enumerate(sources):
        groups: list[list[FilePart]] = []
        size = 0
        for file in files:
            try:
                parts = list(cut_file(file, unit_bytes))
            except (pa.ArrowException, OSError, ValueError) as error:
                remarks.problems.append(f"{file.path}: cannot be opened ({error})")
                continue
            for part in parts:
                if not groups or size + part.size > unit_bytes:
                    groups.append([])
                    size = 0
                groups[-1].append(part)
                size += part.size
        for group, max_tokens in _groups_to_read(groups, source.max_tokens):
            size = sum(part.size for part in group)
            units.append(WorkUnit(len(units), source.split, tuple(group), size, number, max_tokens))
    remarks.refuse()
    return units


def _groups_to_read(
    groups: Sequence[list[FilePart]], max_tokens: int | None
) -> list[tuple[list[FilePart], int | None]]:
    """Return the groups of file parts to read, each with the most tokens to write from the group.

    These limits add up to `max_tokens`. None means no limit. For a small `max_tokens`, few groups
    are read, evenly spread over the source.
    """
    if max_tokens is None or not groups:
        return [(group, None) for group in groups]
    count = max(1, min(len(groups), max_tokens // LEAST_TOKENS_OF_A_UNIT))
    ends = [max_tokens * number // count for number in range(count + 1)]
    limits = [end - start for start, end in pairwise(ends)]
    middles = [(2 * number + 1) * len(groups) // (2 * count) for number in range(count)]
    return [(groups[middle], limit) for middle, limit in zip(middles, limits, strict=True)]


# --- formats


def _decide_formats(
    sources: SourceFiles, units: Sequence[WorkUnit], on_bad_row: str, remarks: Remarks
) -> tuple[list[RowSettings], bool]:
    """Return the row settings of each source, and whether any source has chats.

    Adds a problem to `remarks` for each source with a faulty first record, an unknown format, or a
    document format other than the first source's.
    """
    settings: list[RowSettings] = []
    decided_by, is_chat = "", False
    for number, (source, _) in enumerate(sources):
        parts = [part for unit in units if unit.source == number for part in unit.parts]
        wanted = DOCUMENT_FORMATS[settings[0].row_format] if settings else ""
        try:
            records = _converted_records(parts, source)
            record = _first_record(records, source, on_bad_row)
            rows = RowSettings(
                _row_format(record, source, wanted), source.columns, source.filters,
                source.weight, source.max_tokens, source.chat_template_kwargs, source.own_format,
                sha256_of(source.own_format),
            )  # fmt: skip
            _check_first_record(record, rows, source, remarks)
            if on_bad_row == "error":
                _check_first_rows(record, records, rows)
        except ConfigurationError as error:
            remarks.problems.extend(error.problems)
            continue
        settings.append(rows)
        decided_by = decided_by or str(record.location)
        chats = becomes_chat(renamed(record.fields, source.columns), rows.row_format)
        is_chat |= chats
        if source.chat_template_kwargs and not chats:
            remarks.problems.append(
                f"{record.location}: chat_template_kwargs of a source are for chats, and this is "
                f"{rows.row_format}: leave them out"
            )
        if wanted and (made := DOCUMENT_FORMATS[rows.row_format]) != wanted:
            fault = (
                f"{record.location}: the format {rows.row_format} makes {made}, but "
                f"{decided_by} makes {wanted}, and one dataset holds one kind: prepare them apart"
            )
            if rows.row_format == "prompt_completion":
                prompt, completion = rows.read_columns[:2]
                columns = f"columns {prompt}=instruction {completion}=output"
                fault += f", or make chats of these rows: {columns}"
            remarks.problems.append(fault)
    return settings, is_chat


def _converted_records(parts: Sequence[FilePart], source: Source) -> Iterator[Record | BadRow]:
    """Yield a source's records with all columns, converted by the user's function if any."""
    text_column = RowSettings("text", source.columns).read_columns
    convert = converter(source.own_format)
    for part in parts:
        for record in read_records(part, text_column if part.file.kind == "text" else None):
            yield convert(record) if isinstance(record, Record) else record


def _first_record(records: Iterator[Record | BadRow], source: Source, on_bad_row: str) -> Record:
    """Return the first readable record. Raises ConfigurationError without one.

    If on_bad_row is "error", the search ends after ROWS_TRIED faulty records.
    """
    fault, faults = "", 0
    for record in records:
        if isinstance(record, Record):
            return record
        if on_bad_row == "error" and record.reason != FILTERED:
            fault, faults = fault or f"{record}; {REPAIR}", faults + 1
        if faults == ROWS_TRIED:
            break
    raise ConfigurationError(fault or f"{source.split}: empty source: no record in its files")


def _check_first_rows(first: Record, others: Iterator[Record | BadRow], rows: RowSettings) -> None:
    """Raise ConfigurationError with the first fault if the first ROWS_TRIED rows are all faulty."""
    fault = ""
    for record in islice(chain([first], others), ROWS_TRIED):
        document = parse_document(record, rows) if isinstance(record, Record) else record
        if not isinstance(document, BadRow) or document.reason == FILTERED:
            return
        fault = fault or f"{document}; {REPAIR}"
    found = detect_formats(renamed(first.fields, rows.columns))
    if found and rows.row_format not in found:
        needed = " and ".join(map(rows.name_of, REQUIRED[rows.row_format]))
        fault = f"{first.location}: the format {rows.row_format} needs {needed}; it looks like "
        fault += f"{found[0]}: --format {found[0]}"
    raise ConfigurationError(fault)


def _row_format(record: Record, source: Source, wanted: str) -> str:
    """Return the name of a source's row format, from its setting or its first record.

    wanted: the document format of earlier sources, to choose between several formats that fit.
    Raises ConfigurationError if no format fits, or if several fit equally well.
    """
    row_format, found = source.format, detect_formats(renamed(record.fields, source.columns))
    where = record.location
    if row_format != "auto":
        return row_format
    found = [name for name in found if DOCUMENT_FORMATS[name] == wanted] or found
    if len(found) == 1:
        return found[0]
    if found:
        formats = " or ".join(f"--format {name}" for name in found)
        raise ConfigurationError(
            f"{where}: could be {' or '.join(found)}: choose one with {formats}"
        )
    columns = sorted(record.fields)
    shown = ", ".join(columns[:COLUMNS_SHOWN]) + (", ..." if len(columns) > COLUMNS_SHOWN else "")
    if absent := absent_columns(record.fields, source.columns):
        raise ConfigurationError(
            f"{where}: --columns names {', '.join(absent)}, which this record does not have "
            f"(columns: {shown})"
        )
    formats = "; ".join(f"{name}: {', '.join(needed)}" for name, needed in REQUIRED.items())
    raise ConfigurationError(
        f"{where}: no known format (columns: {shown or 'none'}): {naming_hint(record.fields)}. "
        f"Without --columns a record needs: {formats}"
    )


def _check_first_record(
    record: Record, rows: RowSettings, source: Source, remarks: Remarks
) -> None:
    """Add a log line to `remarks` with the used and unused columns of a source's first record.

    Raises ConfigurationError if training would misread the columns (see `unsuitable_reason`).
    """
    path = record.location.path
    problems = list(filter(None, [unsuitable_reason(record.fields, source)]))
    if rows.row_format == "tokens":
        problems += schema_problems(renamed(record.fields, source.columns))
    systems = [name for name, ours in source.columns if ours == "system" and name in record.fields]
    if len(systems) > 1:  # the role `system` may have several names, the column only one
        problems.append(f"columns: {' and '.join(systems)} are both system: give one")
    if problems:
        raise ConfigurationError([f"{record.location}: {problem}" for problem in problems])
    if absent := absent_columns(record.fields, source.columns):
        remarks.lines.warn(
            f"{path}: --columns names {', '.join(absent)}, which the first record does not have "
            f"(columns: {', '.join(sorted(record.fields))})"
        )
    used = [name for name in rows.read_columns if name in record.fields and name not in MEDIA]
    unused = sorted(record.fields.keys() - used)
    remarks.lines.say(
        f"{source.split}: {from_here(path)}: {rows.row_format}, from {', '.join(used)}"
        + (f"; not used: {', '.join(unused)}" if unused else "")
    )
