"""The plan of a preparation: the files, their format, the work units, and a digest of the plan.

The sources are cut into work units that are prepared independently of each other. Where they are
cut depends only on the sources, never on the number of processes or shards. A unit becomes one
Arrow file per split, so the output has the same bytes for any number of processes and shards.
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
from utils.config.own_code import sha256_of
from utils.config.preparation import (
    MESSAGE_ROLES,
    TRAIN,
    VALIDATION,
    PreparationArguments,
    Source,
    sources_of,
)
from utils.host.atomic_files import from_here
from utils.prepare.hub_datasets import HubCache, cached_files
from utils.prepare.messages import ROLES, are_messages, role_word
from utils.prepare.records import FilePart, converter, cut_file, read_records
from utils.prepare.rows import DOCUMENT_FORMATS, NEEDED, RowSettings, detect_formats, holds_chats
from utils.prepare.source_files import Remarks, SourceFile, list_sources
from utils.prepare.values import FILTERED, MEDIA, REPAIR, Record, decoded, renamed

logger = logging.getLogger(__name__)

# Increase when a code change gives other output for the same sources and settings.
OUTPUT_VERSION = 3
COLUMNS_SHOWN = 20
NAMING = (
    "name its columns: --columns question=instruction answer=output (or chosen=output), "
    "conversation=messages or body=text, with its own names on the left"
)

SMALLEST_UNIT_BYTES = 1 << 20
LARGEST_UNIT_BYTES = 64 << 20
UNITS_WANTED = 64
# With a small max_tokens few units are read, so that each gets enough tokens for whole documents.
LEAST_TOKENS_OF_A_UNIT = 1 << 13

SourceFiles = Sequence[tuple[Source, Sequence[SourceFile]]]


@dataclass(frozen=True)
class WorkUnit:
    """Consecutive file parts of source number `source`; at most `max_tokens` tokens are written."""

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

    sources: the files of each split, `train` first; `units` are cut from these files.
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
        """The splits that are written, in order."""
        held_out = [VALIDATION] if self.settings.validation_fraction > 0 else []
        return [TRAIN, *held_out, *(name for name in self.sources if name != TRAIN)]

    def digest(self, tokenizer: Mapping[str, Any], folder: Path | None = None) -> str:
        """Return a hash of the sources, settings, `tokenizer` and versions of tokenizer libraries.

        Paths are relative to `folder`. Processes and shards change no byte and are left out.
        """
        splits = self.sources.items()
        content = {
            "output_version": OUTPUT_VERSION,
            "sources": {name: [file.identity(folder) for file in files] for name, files in splits},
            "settings": asdict(self.settings, dict_factory=_without_unset_code),
            "tokenizer": tokenizer,
            "versions": {name: metadata.version(name) for name in ("tokenizers", "transformers")},
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def log(self) -> None:
        """Log the files, formats and columns that the plan reads or leaves out."""
        for level, text in self.lines:
            logger.log(level, text)


def _without_unset_code(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Leave out own_format and own_sha256 without a value: older versions did not have them."""
    return {name: value for name, value in fields if value or not name.startswith("own_")}


def plan_preparation(arguments: PreparationArguments) -> PreparationPlan:
    """Find the files, cut work units, derive formats. Raises ConfigurationError with all faults."""
    remarks = Remarks()
    with remarks.lines:  # an error carries the lines before it
        return _plan(arguments, remarks)


def _plan(arguments: PreparationArguments, remarks: Remarks) -> PreparationPlan:
    cache = HubCache(arguments)
    given = _find_sources(arguments, cache, remarks)
    remarks.refuse()
    units = cut_into_units(given)
    rows, is_chat = _decide_formats(given, units, remarks)
    remarks.refuse()
    sources: dict[str, list[SourceFile]] = {}
    for source, files in given:
        sources.setdefault(source.split, []).extend(files)
    # The default date is that of the newest file: shards that run on two days need the same date.
    newest = max(file.mtime_ns for files in sources.values() for file in files)
    day = datetime.fromtimestamp(newest / 1e9, UTC).date().isoformat()
    document_format = _documents_of(rows[0])
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
    """Return each source with its files; add a problem for each file that is given twice."""
    if arguments.chat_template is not None and not Path(arguments.chat_template).is_file():
        remarks.problems.append(f"chat_template: {arguments.chat_template}: no such file")
    found = []
    owner: dict[str, Source] = {}
    for source in sources_of(arguments):
        paths, of_hub = cached_files(cache, source, remarks)
        split, is_named = source.from_split or source.split, source.from_split is not None
        files, more = list_sources(paths, source.format, split, is_named=is_named)
        remarks.problems += [f"{source.split}: {problem}" for problem in more.problems]
        remarks.lines += more.lines
        for number, file in enumerate(files):
            if file.path in of_hub:
                url, mtime_ns = of_hub[file.path]
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
    """Cut the files of every source into work units of about equal size."""
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
        for group, max_tokens in _share_of_tokens(groups, source.max_tokens):
            size = sum(part.size for part in group)
            units.append(WorkUnit(len(units), source.split, tuple(group), size, number, max_tokens))
    remarks.refuse()
    return units


def _share_of_tokens(
    groups: Sequence[list[FilePart]], max_tokens: int | None
) -> list[tuple[list[FilePart], int | None]]:
    """Return the groups of file parts to read, each with its share of `max_tokens`.

    A small `max_tokens` is read from few groups, evenly spread over the source. Fixed shares make
    the units independent of each other.
    """
    if max_tokens is None or not groups:
        return [(group, None) for group in groups]
    read = max(1, min(len(groups), max_tokens // LEAST_TOKENS_OF_A_UNIT))
    ends = [max_tokens * number // read for number in range(read + 1)]
    return [
        (groups[(2 * number + 1) * len(groups) // (2 * read)], ends[number + 1] - ends[number])
        for number in range(read)
    ]


# --- formats


def _documents_of(rows: RowSettings) -> str:
    return DOCUMENT_FORMATS.get(rows.row_format, rows.row_format)


def _decide_formats(
    sources: SourceFiles, units: Sequence[WorkUnit], remarks: Remarks
) -> tuple[list[RowSettings], bool]:
    """Return the settings to read each source with, and whether any source has chats.

    Adds to `remarks` a problem for each source whose first record is faulty or of unknown format,
    or makes another kind of document than the first source.
    """
    rows: list[RowSettings] = []
    decided_by, is_chat = "", False
    for number, (source, _) in enumerate(sources):
        parts = [part for unit in units if unit.source == number for part in unit.parts]
        wanted = _documents_of(rows[0]) if rows else ""
        try:
            record = _first_record(parts, source)
            if absent := _absent_columns(record.fields, source.columns):
                remarks.lines.warn(
                    f"{record.location}: --columns names {', '.join(absent)}, which the first "
                    f"record does not have (columns: {', '.join(sorted(record.fields))})"
                )
            read = RowSettings(
                _row_format(record, source, wanted), source.columns, source.filters,
                source.weight, source.max_tokens, source.chat_template_kwargs, source.own_format,
                sha256_of(source.own_format),
            )  # fmt: skip
            _check_first_record(record, read, source, remarks)
        except ConfigurationError as error:
            remarks.problems.extend(error.problems)
            continue
        rows.append(read)
        decided_by = decided_by or str(record.location)
        chats = holds_chats(renamed(record.fields, source.columns), read.row_format)
        is_chat |= chats
        if source.chat_template_kwargs and not chats:
            remarks.problems.append(
                f"{record.location}: chat_template_kwargs of a source are for chats, and this is "
                f"{read.row_format}: leave them out"
            )
        if wanted and _documents_of(read) != wanted:
            remarks.problems.append(
                f"{record.location}: the format {read.row_format} makes {_documents_of(read)}, but "
                f"{decided_by} makes {wanted}, and one dataset holds one kind: prepare them apart"
            )
    return rows, is_chat


def _first_record(parts: Sequence[FilePart], source: Source) -> Record:
    """Return the first record that can be read; ConfigurationError if there are no such records."""
    text_column = RowSettings("text", source.columns).read_columns
    convert = converter(source.own_format)
    fault = ""
    for part in parts:
        for given in read_records(part, text_column if part.file.kind == "text" else None):
            record = convert(given) if isinstance(given, Record) else given
            if isinstance(record, Record):
                return record
            if record.reason != FILTERED:
                fault = fault or f"{record}; {REPAIR}"
    raise ConfigurationError(fault or f"{source.split}: empty source: no record in its files")


def _row_format(record: Record, source: Source, wanted: str) -> str:
    """Return the format of a source's rows, from its setting or its first record.

    If several formats fit, the one that makes the documents of the earlier sources (`wanted`) is
    chosen. Raises ConfigurationError if no format fits.
    """
    row_format, found = source.format, detect_formats(renamed(record.fields, source.columns))
    where = record.location
    if row_format != "auto":
        return row_format
    found = [name for name in found if DOCUMENT_FORMATS.get(name, name) == wanted] or found
    if len(found) == 1:
        return found[0]
    if found:
        formats = " or ".join(f"--format {name}" for name in found)
        raise ConfigurationError(
            f"{where}: could be {' or '.join(found)}: choose one with {formats}"
        )
    columns = sorted(record.fields)
    shown = ", ".join(columns[:COLUMNS_SHOWN]) + (", ..." if len(columns) > COLUMNS_SHOWN else "")
    if "input_ids" in record.fields:
        advice = "its rows are tokenized: name a folder of save_to_disk with them as train_data"
    elif are_messages([record.fields]):
        advice = "each row is one message: put the messages of a chat into one row, as 'messages'"
    else:
        formats = "; ".join(f"{name}: {', '.join(needed)}" for name, needed in NEEDED.items())
        advice = f"{NAMING}. A record needs: {formats}"
    raise ConfigurationError(f"{where}: no known format (columns: {shown or 'none'}): {advice}")


def _check_first_record(
    record: Record, read: RowSettings, source: Source, remarks: Remarks
) -> None:
    """List the used and unused columns of a source's first record in `remarks`.

    Raises ConfigurationError for a row that would be trained on wrongly (see `_misreading`).
    """
    path = record.location.path
    problems = list(filter(None, [_misreading(record.fields, source)]))
    systems = [name for name, ours in source.columns if ours == "system" and name in record.fields]
    if len(systems) > 1:  # as a role, `system` may have several names
        problems.append(f"columns: {' and '.join(systems)} are both system: give one")
    if problems:
        raise ConfigurationError([f"{record.location}: {problem}" for problem in problems])
    used = [name for name in read.read_columns if name in record.fields and name not in MEDIA]
    unused = sorted(record.fields.keys() - used)
    remarks.lines.say(
        f"{source.split}: {from_here(path)}: {read.row_format}, from {', '.join(used)}"
        + (f"; not used: {', '.join(unused)}" if unused else "")
    )


def _absent_columns(fields: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> list[str]:
    """Return the names in `columns` that neither the row nor its messages have, except roles."""
    text = str(fields).replace('"', "'")  # messages may be JSON
    absent = [each for each in columns if each[0] not in fields and f"'{each[0]}'" not in text]
    return [name for name, ours in absent if ours not in MESSAGE_ROLES or ours == "system"]


def _misreading(given: Mapping[str, Any], source: Source) -> str:
    """Return why a row with known columns would be trained on wrongly; "" if the row is fine."""
    fields = renamed(given, source.columns)
    filtered = [name for name, _ in source.filters]
    one_message = "role" in fields and "text" in fields and "parent_id" in fields
    if one_message and "role" not in filtered:
        return (
            "each row is one message of a tree (OpenAssistant): put the messages of a chat into "
            "one row, or filter on role to train on each as a text"
        )
    label = str(fields.get("label")).lower()
    if label in ("true", "false") and "label" not in filtered and "text" not in fields:
        return (
            "its label says which answers are good (KTO): in a recipe give the source the filter "
            "{label: true}, or {label: [true, false]} to train on all"
        )
    if "chosen" in fields and "completion" not in fields:
        for name in ("messages", "conversations"):
            chat = decoded(fields.get(name))
            if are_messages(chat) and ROLES.get(role_word(chat[-1])) == "user":
                return f"its answers are apart: give --columns {name}=prompt chosen=completion"
    return ""
