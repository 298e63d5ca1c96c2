"""The plan of a preparation: which files, which format, which work units, under which digest."""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from utils.config.errors import ConfigurationError
from utils.config.preparation import PreparationArguments
from utils.data.preparation.documents import columns_of, detect_format
from utils.data.preparation.records import BadRow, Record, read_records
from utils.data.preparation.sources import SourceFile, list_sources
from utils.data.preparation.unit import TRAIN, VALIDATION, UnitSettings
from utils.data.preparation.work_units import WorkUnit, cut_into_units

logger = logging.getLogger(__name__)

# Raised whenever the same sources and settings would give other bytes than before.
OUTPUT_VERSION = 2
SPLIT_NAME = re.compile(r"[a-z0-9_]+")
RESERVED_NAMES = {TRAIN, "tokenizer"}


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
    sources = _find_sources(arguments)
    units = cut_into_units(sources)
    document_format = _decide_format(arguments, units)
    settings = UnitSettings(
        document_format=document_format,
        text_column=arguments.text_column,
        on_bad_row=arguments.on_bad_row,
        on_overlong=arguments.on_overlong,
        sequence_length=arguments.sequence_length,
        validation_fraction=arguments.validation_fraction,
        seed=arguments.seed,
        template_date=None if document_format == "text" else _template_date(arguments, sources),
    )
    size = sum(unit.size for unit in units)
    logger.info(
        "%s: %s files, %.1f MiB in %s work units",
        document_format,
        f"{sum(len(files) for files in sources.values()):,}",
        size / 2**20,
        f"{len(units):,}",
    )
    first = _first_record([unit for unit in units if unit.split == TRAIN], arguments)
    needs_chat_template = document_format == "messages" or (
        first is not None
        and document_format == "prompt_completion"
        and isinstance(first.fields.get("prompt"), list)
    )
    return PreparationPlan(sources, units, settings, needs_chat_template)


def _template_date(
    arguments: PreparationArguments, sources: Mapping[str, Sequence[SourceFile]]
) -> str:
    """Return the day that chat templates print: given, else that of the newest source file.

    Shards that run on two days agree.
    """
    if arguments.template_date is not None:
        return arguments.template_date
    newest = max(file.mtime_ns for files in sources.values() for file in files)
    return datetime.fromtimestamp(newest / 1e9, UTC).date().isoformat()


def _find_sources(arguments: PreparationArguments) -> dict[str, list[SourceFile]]:
    paths, problems = _paths_by_split(arguments)
    template = arguments.chat_template
    if template is not None and not Path(template).is_file():
        problems.append(f"chat_template: {template}: no such file")
    sources: dict[str, list[SourceFile]] = {}
    for split, given_paths in paths.items():
        listing = list_sources(given_paths, arguments.format)
        problems.extend(f"{split}: {problem}" for problem in listing.problems)
        sources[split] = listing.files
        if listing.ignored:
            passed_over = ", ".join(f"{n} x {what}" for what, n in sorted(listing.ignored.items()))
            logger.warning("%s: files passed over: %s", split, passed_over)
    problems.extend(_overlap_problems(sources))
    if problems:
        raise ConfigurationError(problems)
    return sources


def _paths_by_split(arguments: PreparationArguments) -> tuple[dict[str, list[str]], list[str]]:
    paths: dict[str, list[str]] = {TRAIN: list(arguments.sources)}
    problems = []
    reserved = RESERVED_NAMES | ({VALIDATION} if arguments.validation_fraction > 0 else set())
    for given in arguments.eval_sources:
        name, separator, path = given.partition("=")
        if not separator or not path:
            problems.append(f"eval_sources: {given!r}: give NAME=PATH")
        elif not SPLIT_NAME.fullmatch(name):
            problems.append(f"eval_sources: {name!r}: use lower-case letters, digits and _ only")
        elif name in reserved:
            problems.append(f"eval_sources: {name!r} is taken: choose another name")
        else:
            paths.setdefault(name, []).append(path)
    return paths, problems


def _overlap_problems(sources: Mapping[str, Sequence[SourceFile]]) -> Iterator[str]:
    """Name the files that are in two splits: evaluation would be on trained documents."""
    owner: dict[str, str] = {}
    for split, files in sources.items():
        for file in files:
            real = str(Path(file.path).resolve())
            if real in owner:
                yield f"{file.path}: is given for both {owner[real]} and {split}"
            owner[real] = split


def _decide_format(arguments: PreparationArguments, units: Sequence[WorkUnit]) -> str:
    """Return the format, from the first record when it is "auto"; every split has to fit it."""
    problems: list[str] = []
    decided = arguments.format
    # A record that does not fit a format the user named is a bad row like any other.
    skips = arguments.on_bad_row == "skip"
    for split in dict.fromkeys(unit.split for unit in units):
        record = _first_record([unit for unit in units if unit.split == split], arguments)
        if record is None:
            problems.append(f"{split}: empty source: no record in its files")
            continue
        found = detect_format(record.fields, arguments.text_column)
        if decided == "auto" and len(found) == 1:
            decided = found[0]
        elif decided not in found and (arguments.format == "auto" or not skips):
            problems.append(_format_problem(record, decided, found, arguments.text_column))
    if problems:
        raise ConfigurationError(problems)
    return decided


def _first_record(units: Sequence[WorkUnit], arguments: PreparationArguments) -> Record | None:
    """Return the first record; raises ConfigurationError at a bad row unless they are skipped."""
    columns = {
        name
        for document_format in ("text", "messages", "prompt_completion")
        for name in columns_of(document_format, arguments.text_column)
    }
    ordered = [arguments.text_column, *sorted(columns - {arguments.text_column})]
    for unit in units:
        for piece in unit.pieces:
            for record in read_records(piece, ordered):
                if isinstance(record, Record):
                    return record
                if isinstance(record, BadRow) and arguments.on_bad_row == "error":
                    raise ConfigurationError(str(record))
    return None


def _format_problem(record: Record, decided: str, found: Sequence[str], text_column: str) -> str:
    columns = ", ".join(sorted(record.fields)) or "none"
    if decided != "auto":
        needed = [c for c in columns_of(decided, text_column) if c != "tools"]
        return (
            f"{record.place}: the format is {decided}, but the record has not its column "
            f"{' and '.join(needed)} (columns: {columns})"
        )
    if found:
        return f"{record.place}: could be {' or '.join(found)}: choose one with --format"
    return (
        f"{record.place}: no known format: needed is {text_column!r} (--text_column names "
        f"another), 'messages', or 'prompt' and 'completion' (columns: {columns})"
    )
