"""The settings of `prepare_data.py`, and their checks, which do not open the data."""

import logging
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from itertools import product
from typing import Any

from utils.config.command_line import read_settings
from utils.config.declarations import FLAGS_RANK, SettingValues, setting, shown
from utils.config.errors import ConfigurationError
from utils.config.own_code import source_of

logger = logging.getLogger(__name__)

TRAIN = "train"
VALIDATION = "validation"
FORMATS = (
    "auto", "text", "messages", "sharegpt", "alpaca", "prompt_completion", "segments", "tokens",
)  # fmt: skip
# Stoker's names of message keys, message roles and columns. `columns` maps the user's names to
# these names.
MESSAGE_KEYS = ("role", "content", "reasoning_content", "tool_calls", "weight")
MESSAGE_ROLES = ("user", "assistant", "tool", "system")
COLUMNS = (
    *("text", "messages", "conversations", "instruction", "input", "output", "history", "prompt"),
    *("completion", "system", "tools", "functions", "chat_template_kwargs", "segments"),
    *("input_ids", "labels", *MESSAGE_KEYS, *MESSAGE_ROLES[:-1]),  # `system` is there already
)


@dataclass(frozen=True, kw_only=True)
class RawDataArguments:
    """Settings for reading text or chats, in prepare_data.py and in training on raw files."""

    format: str = "auto"
    columns: list[str] = setting([])
    add_tokens: list[str] = setting([])
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    on_bad_row: str = setting("error", choices=("error", "skip"))
    validation_fraction: float = 0.0


@dataclass(frozen=True)
class PreparationArguments(RawDataArguments):
    """Settings of prepare_data.py: sources, tokenizer, output, and division over processes."""

    sources: list[str | dict[str, Any]] = setting([])
    tokenizer_name_or_path: str = ""
    output_dir: str = ""
    eval_sources: list[str | dict[str, Any]] = setting([])
    models: list[str] = setting([])
    offline_dir: str | None = None
    tokenizer_backend: str = setting("auto", choices=("auto", "tokenizers", "gigatoken"))
    template_date: str | None = None
    sequence_length: int | None = None
    on_overlong: str = setting("error", choices=("error", "truncate", "drop"))
    seed: int = 0
    num_proc: int = 1
    shard: str | None = None
    merge: int | None = None
    overwrite: bool = False
    append: bool = False


def parse_preparation(
    argv: Sequence[str] | None, description: str | None = None
) -> PreparationArguments:
    """Return the settings of `prepare_data.py`. Raises one ConfigurationError with all faults."""
    values = read_settings(
        (PreparationArguments,), argv, (override_sources,), (_check_required,), "prepare_data.py",
        description,
    )  # fmt: skip
    for note in values.notes:
        logger.info("%s", note)
    arguments = values.build(PreparationArguments)
    if arguments.append and not arguments.tokenizer_name_or_path:
        return replace(arguments, tokenizer_name_or_path=f"{arguments.output_dir}/tokenizer")
    return arguments


def override_sources(values: SettingValues) -> None:
    """Let the flags --format and --columns replace those of a recipe's sources. Add log lines.

    Exception: the chat_template_kwargs of a source override --chat_template_kwargs.
    """
    keys = ("format", "columns", "chat_template_kwargs")
    for name, key in product(("sources", "eval_sources"), keys):
        own = [each[key] for each in values[name] if isinstance(each, dict) and key in each]
        if not own or values.rank(key) != FLAGS_RANK or values.rank(name) == FLAGS_RANK:
            continue
        own_values = ", ".join(map(shown, own))
        if key == "chat_template_kwargs":
            values.notes.append(f"{key} of {name}, {own_values}, overrides --{key}")
            continue
        for number, each in enumerate(entries := list(values[name])):
            if isinstance(each, dict):
                entries[number] = {k: value for k, value in each.items() if k != key}
        values.given[name] = replace(values.given[name], value=entries)
        values.notes.append(f"--{key} {shown(values[key])} replaces {key} of {name}: {own_values}")


def _check_required(values: SettingValues) -> Iterator[str]:
    """Yield error texts on missing settings. A command that only downloads models needs none."""
    if values["sources"] or not values["models"]:
        for name in ("sources", "tokenizer_name_or_path", "output_dir"):
            if not values[name] and not (values["append"] and name == "tokenizer_name_or_path"):
                yield f"{name} is required: {values.declared[name].help}"


def prepare_command(arguments: PreparationArguments) -> str:
    """Return the command of prepare_data.py with these settings, quoted for a shell."""
    words = ["python", "prepare_data.py"]
    for each in fields(arguments):
        value = getattr(arguments, each.name)
        if value not in (each.default, []):
            words += [f"--{each.name}", *map(shown, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def shard_of(arguments: PreparationArguments) -> tuple[int, int]:
    """Return (index from 0, number of shards) of the setting `shard`, by default (0, 1)."""
    index, _, number = (arguments.shard or "0/1").partition("/")
    return int(index), int(number)


def check_preparation(given: PreparationArguments) -> None:
    """Raise one ConfigurationError that lists all invalid and contradictory settings."""
    valid_shard = re.fullmatch(r"\d+/\d+", given.shard or "0/1") is not None
    index, number = shard_of(given) if valid_shard else (1, 0)
    faults = {
        "sources is empty: give at least one path": not (given.sources or given.models),
        f"validation_fraction is {given.validation_fraction}: give a share from 0 (no held-out "
        "split) to below 1": not 0.0 <= given.validation_fraction < 1.0,
        f"shard is {given.shard!r}: give I/N, I from 0 to N-1, as in --shard 0/8": index >= number,
        f"on_overlong is {given.on_overlong}, but no length is given: give --sequence_length": (
            given.on_overlong != "error" and given.sequence_length is None
        ),
        "add_tokens has an empty token: leave it out": not all(map(str.strip, given.add_tokens)),
        "append adds to the datasets in output_dir, and overwrite replaces them: give one": (
            given.append and given.overwrite
        ),
        "shard and merge are separate steps: run every shard, then --merge N": (
            given.shard is not None and given.merge is not None
        ),
    }
    problems = [text for text, is_fault in faults.items() if is_fault]
    for name, minimum in (("num_proc", 1), ("sequence_length", 2), ("merge", 1)):
        value = getattr(given, name)
        if value is not None and value < minimum:
            problems.append(f"{name} is {value}: it must be at least {minimum}")
    try:
        date.fromisoformat(given.template_date or "2000-01-01")
    except ValueError:
        problems.append(f"template_date is {given.template_date!r}: give a day as YYYY-MM-DD")
    try:
        check_template_variables(given.chat_template_kwargs)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ConfigurationError(problems)


def check_template_variables(given: Any, what: str = "chat_template_kwargs") -> None:
    """Raise ValueError if chat template variables are wrong. what: the setting in the message."""
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"{what} is {given!r}: give a mapping, such as {{enable_thinking: false}}")
    for name, value in (given or {}).items():
        if str(value).lower() in ("true", "false") and not isinstance(value, bool):
            raise ValueError(
                f"{what}: {name} is the text {value!r}, which templates take for "
                f"true: write {str(value).lower()} without quotes"
            )
        if name in ("messages", "tools", "add_generation_prompt"):
            raise ValueError(f"{what}: {name} is given with each chat; leave it out")


@dataclass(frozen=True)
class Source:
    """A source of documents, from the setting `sources` or `eval_sources`.

    split: name of the split to write, "train" or an evaluation split. from_split: the split to read
    in a folder with several splits. None means the split with the same name as `split`.
    columns: pairs (name in the files, our name). own_format: FILE.py:NAME of the user's function
    that converts a record. subset, revision and max_files are for datasets of the Hub.
    """

    paths: tuple[str, ...]
    split: str
    from_split: str | None = None
    format: str = "auto"
    own_format: str = ""
    columns: tuple[tuple[str, str], ...] = ()
    filters: tuple[tuple[str, Any], ...] = ()
    weight: float = 1.0
    max_tokens: int | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    subset: str | None = None
    revision: str | None = None
    max_files: int | None = None


ENTRY_KEYS = (
    *("path", "split", "format", "columns", "filter", "weight", "max_tokens"),
    *("chat_template_kwargs", "subset", "revision", "max_files"),
)


def parse_sources(arguments: PreparationArguments) -> list[Source]:
    """Parse the settings `sources` and `eval_sources`. Raises ConfigurationError.

    All plain paths of a split become one Source. Each mapping becomes another Source.
    """
    sources: dict[Any, Source] = {}
    problems: list[str] = []
    for name in ("sources", "eval_sources"):
        for number, entry in enumerate(getattr(arguments, name)):
            try:
                is_evaluation = name == "eval_sources"
                source = _parse_source(arguments, entry, is_evaluation)
                if is_evaluation:
                    _check_evaluation(source, arguments)
            except ValueError as error:
                problems.append(f"{name}: {entry}: {error}")
                continue
            key = source.split if isinstance(entry, str) else (name, number)
            if key in sources:
                source = replace(source, paths=sources[key].paths + source.paths)
            sources[key] = source
    if problems:
        raise ConfigurationError(problems)
    return list(sources.values())


def _parse_source(arguments: PreparationArguments, entry: Any, is_evaluation: bool) -> Source:
    """Parse an entry of `sources` or `eval_sources`. Raises ValueError if a key is wrong."""
    options = dict(entry) if isinstance(entry, Mapping) else {"path": entry}
    known = ("name", *ENTRY_KEYS) if is_evaluation else ENTRY_KEYS
    if unknown := sorted(options.keys() - known):
        raise ValueError(f"unknown key {unknown[0]!r}: known are {', '.join(known)}")
    if is_evaluation and isinstance(entry, str):
        options["name"], _, options["path"] = entry.partition("=")
        if not options["path"]:
            raise ValueError("give NAME=PATH")
    paths = options.get("path")
    paths = [paths] if isinstance(paths, str) else paths
    if not isinstance(paths, list) or not paths:
        raise ValueError("needs a path")
    options = {"format": arguments.format, "weight": 1.0} | options
    options["filter"] = dict(options.get("filter") or {})
    _check_entry(options)
    return Source(
        paths=tuple(map(str, paths)),
        split=options.get("name") or "" if is_evaluation else "train",
        from_split=options.get("split"),
        format="auto" if ":" in options["format"] else options["format"],
        own_format=options["format"] if ":" in options["format"] else "",
        columns=_parse_columns(options.get("columns", arguments.columns)),
        filters=tuple(options["filter"].items()),
        weight=options["weight"],
        chat_template_kwargs=options.get("chat_template_kwargs"),
        **{key: options.get(key) for key in ("max_tokens", "subset", "revision", "max_files")},
    )


def _check_entry(options: Mapping[str, Any]) -> None:
    weight = options["weight"]
    if ":" in str(options["format"]):
        source_of(options["format"])
    elif options["format"] not in FORMATS:
        raise ValueError(f"format {options['format']!r} is none of {', '.join(FORMATS)}")
    if type(weight) not in (int, float) or not 0 < weight <= 1000:
        raise ValueError(
            f"weight is {weight!r}: give a number above 0, up to 1000, that says how often each "
            "document is written; 0.5 takes half of them"
        )
    check_template_variables(options.get("chat_template_kwargs"))
    for key in ("max_tokens", "max_files"):
        if (number := options.get(key)) is not None and (type(number) is not int or number < 1):
            raise ValueError(f"{key} is {number!r}: give a whole number above 0")
    for key in ("split", "subset", "revision"):
        if not isinstance(options.get(key), str | None):
            raise ValueError(f"{key} is {options[key]!r}: write it in quotes, as a text")
    for column, wanted in options["filter"].items():
        if isinstance(wanted, Mapping) and (not wanted or wanted.keys() - {"min", "max"}):
            raise ValueError(f"filter {column}: give a value, a list of values, or min and max")


def _check_evaluation(source: Source, arguments: PreparationArguments) -> None:
    reserved = ["train", "tokenizer", *([VALIDATION] if arguments.validation_fraction else [])]
    if not re.fullmatch(r"[a-z0-9_]+", source.split) or source.split in reserved:
        raise ValueError(
            f"name {source.split!r}: use lower-case letters, digits and _ only, and none of "
            f"{', '.join(reserved)}"
        )
    if source.weight != 1.0:
        raise ValueError("a weight is for training; evaluate on every document once")


def _parse_columns(columns: Mapping[str, str] | Iterable[str]) -> tuple[tuple[str, str], ...]:
    if isinstance(columns, Mapping):
        pairs = list(columns.items())
    else:
        pairs = [(theirs, ours) for theirs, _, ours in (str(g).rpartition("=") for g in columns)]
    targets = [ours for _, ours in pairs]
    for theirs, ours in pairs:
        is_twice = targets.count(ours) > 1 and ours not in MESSAGE_ROLES
        if not theirs or ours not in COLUMNS or is_twice:
            raise ValueError(
                f"columns: {theirs or '?'}={ours}: give THEIRS=OURS, ours being one of "
                f"{', '.join(COLUMNS)}, each once (a role several times)"
            )
    return tuple(pairs)
