"""What the user may set for `prepare_data.py`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

from utils.config.command_line import read_settings
from utils.config.errors import ConfigurationError

FORMATS = ("auto", "text", "messages", "sharegpt", "alpaca", "prompt_completion")
SPLIT_NAME = re.compile(r"[a-z0-9_]+")
COLUMNS = (
    *("text", "messages", "conversations", "instruction", "input", "output", "history", "prompt"),
    *("completion", "system", "tools", "functions", "chat_template_kwargs"),
)


def _setting(default: Any, description: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": description, **metadata})


@dataclass
class PreparationArguments:
    """Documents, tokenizer, held-out share and division of the work."""

    sources: list[str | dict[str, Any]] = field(
        metadata={
            "help": "files, folders or globs with the training documents: text, JSONL, JSON, CSV "
            "(also .gz, .zst), Parquet, or a folder written by datasets' save_to_disk; in a recipe "
            "also mappings of path, split, format, columns, filter, weight and max_tokens"
        }
    )
    output_dir: str = field(metadata={"help": "folder for the tokenizer and one dataset per split"})
    eval_sources: list[str | dict[str, Any]] = field(
        default_factory=list,
        metadata={
            "help": "named evaluation splits as NAME=PATH (of a folder with splits, the one of "
            "that name); a name given again adds a path to it; in a recipe also mappings, with name"
        },
    )
    format: str = _setting(
        "auto",
        "what a record holds: text, messages, sharegpt (conversations), alpaca (instruction, "
        "output) or prompt_completion; auto reads it off the first record's columns",
        choices=list(FORMATS),
    )
    columns: list[str] = field(
        default_factory=list,
        metadata={
            "help": "names of columns in the files as THEIRS=OURS, such as question=prompt "
            "answer=completion"
        },
    )
    text_column: str = _setting("text", "column that holds the text of a text record")
    tokenizer_name_or_path: str | None = _setting(
        None, "tokenizer folder (or Hub name) to use; the other way is train_tokenizer"
    )
    train_tokenizer: int | None = _setting(
        None, "train a byte-level BPE tokenizer of exactly this many tokens on the documents"
    )
    tokenizer_sample_bytes: int = _setting(
        1 << 30, "at most this many bytes of source are read to train the tokenizer"
    )
    tokenizer_backend: str = _setting(
        "auto",
        "what tokenizes texts (chats are rendered by the tokenizer itself): tokenizers, or "
        "gigatoken, many times faster; auto takes gigatoken where it is installed and gives the "
        "same ids, which is checked before and meanwhile",
        choices=["auto", "tokenizers", "gigatoken"],
    )
    add_tokens: list[str] = field(
        default_factory=list,
        metadata={
            "help": "tokens to add to the tokenizer: training gives the model's embedding a row "
            "for each, which begins as the mean of the others"
        },
    )
    tokenizer_only: bool = _setting(False, "stop once output_dir/tokenizer is written")
    chat_template: str | None = _setting(None, "Jinja file; None: the tokenizer's own template")
    template_date: str | None = _setting(
        None,
        "YYYY-MM-DD that a chat template prints where it prints today's date; None: the day of the "
        "newest source file, the same for every shard. It is recorded",
    )
    sequence_length: int | None = _setting(
        None, "tokens; chats longer than this fall under on_overlong. None: lengths are not limited"
    )
    on_overlong: str = _setting(
        "error",
        "what to do with a chat longer than sequence_length (texts are kept: training splits them)",
        choices=["error", "truncate", "drop"],
    )
    on_bad_row: str = _setting(
        "error",
        "stop at a record that cannot be used, or skip and count it",
        choices=["error", "skip"],
    )
    validation_fraction: float = _setting(
        0.0, "share of the documents, chosen by their content, that goes to the split 'validation'"
    )
    seed: int = _setting(0, "key of the choice of held-out documents")
    num_proc: int = _setting(
        1,
        "cores to use: worker processes, or threads of one where the work is little; the output "
        "does not depend on it",
    )
    shard: str | None = _setting(
        None, "I/N, I from 0: do only this share of the work (job arrays); then run with merge N"
    )
    merge: int | None = _setting(
        None, "check that all N shards are complete and assemble the datasets"
    )


def parse_preparation(
    argv: Sequence[str] | None, description: str | None = None
) -> PreparationArguments:
    """Read the settings of `prepare_data.py`; raises ConfigurationError with every fault."""
    values = read_settings(
        (PreparationArguments,), argv, prog="prepare_data.py", description=description
    )
    return values.build(PreparationArguments)


@dataclass(frozen=True)
class Source:
    """One entry of `sources` or `eval_sources`: which rows are read, as what, and how many.

    split: "train", or the name of the evaluation split that the documents go to. from_split: the
    split to take of a folder that has several; None: that of the same name. columns: pairs
    (name in the files, our name).
    """

    paths: tuple[str, ...]
    split: str
    from_split: str | None = None
    format: str = "auto"
    columns: tuple[tuple[str, str], ...] = ()
    filters: tuple[tuple[str, Any], ...] = ()
    weight: float = 1.0
    max_tokens: int | None = None


def sources_of(arguments: PreparationArguments) -> list[Source]:
    """Read what to prepare; plain training paths are one source, every mapping is one of its own.

    Raises ConfigurationError with every entry that cannot be read.
    """
    sources: dict[Any, Source] = {}
    problems: list[str] = []
    for setting in ("sources", "eval_sources"):
        for number, entry in enumerate(getattr(arguments, setting)):
            try:
                source = _source(arguments, setting, entry)
            except ValueError as error:
                problems.append(f"{setting}: {error}")
                continue
            key = source.split if isinstance(entry, str) else (setting, number)
            if key in sources:
                source = replace(source, paths=sources[key].paths + source.paths)
            sources[key] = source
    if problems:
        raise ConfigurationError(problems)
    return list(sources.values())


def _source(arguments: PreparationArguments, setting: str, entry: Any) -> Source:
    given = dict(entry) if isinstance(entry, Mapping) else {"path": entry}
    known = _ENTRY_KEYS if setting == "eval_sources" else _ENTRY_KEYS[1:]
    unknown = sorted(given.keys() - known)
    if unknown:
        raise ValueError(f"{entry}: unknown key {unknown[0]!r}: known are {', '.join(known)}")
    if setting == "sources":
        given["name"] = "train"
    elif isinstance(entry, str):
        given["name"], separator, given["path"] = entry.partition("=")
        if not separator or not given["path"]:
            raise ValueError(f"{entry!r}: give NAME=PATH")
    paths = given.get("path")
    paths = [paths] if isinstance(paths, str) else paths
    if not isinstance(paths, list) or not paths:
        raise ValueError(f"{entry}: needs a path")
    columns = _columns_of(given.get("columns", arguments.columns))
    if arguments.text_column != "text" and "text" not in dict(columns).values():
        columns = (*columns, (arguments.text_column, "text"))
    source = Source(
        tuple(map(str, paths)),
        given.get("name") or "",
        given.get("split"),
        given.get("format", arguments.format),
        columns,
        tuple(dict(given.get("filter") or {}).items()),
        given.get("weight", 1.0),
        given.get("max_tokens"),
    )
    _check_source(arguments, setting, source)
    return source


def _check_source(arguments: PreparationArguments, setting: str, source: Source) -> None:
    """Raise ValueError at the first value that cannot be."""
    where = source.paths[0]
    if setting == "eval_sources":
        _check_evaluation(arguments, source)
    if source.format not in FORMATS:
        raise ValueError(f"{where}: format {source.format!r} is none of {', '.join(FORMATS)}")
    if isinstance(source.weight, bool) or not isinstance(source.weight, int | float):
        raise ValueError(f"{where}: weight {source.weight!r} must be a number")
    if not 0 < source.weight <= 1000:
        raise ValueError(
            f"{where}: weight is {source.weight}: it says how often each document is written; 0.5 "
            "takes half of them"
        )
    if source.max_tokens is not None and (
        type(source.max_tokens) is not int or source.max_tokens < 1
    ):
        raise ValueError(
            f"{where}: max_tokens is {source.max_tokens!r}: give a whole number above 0"
        )
    for column, kept in source.filters:
        if isinstance(kept, Mapping) and (not kept or kept.keys() - {"min", "max"}):
            raise ValueError(
                f"{where}: filter {column}: {kept}: give a value, a list of values, or min and max"
            )


def _check_evaluation(arguments: PreparationArguments, source: Source) -> None:
    """Raise ValueError for a name that cannot be, or a weight."""
    taken = {"train", "tokenizer"}
    taken |= {"validation"} if arguments.validation_fraction > 0 else set()
    if not source.split:
        raise ValueError(f"{source.paths[0]}: an evaluation source needs a name")
    if not SPLIT_NAME.fullmatch(source.split):
        raise ValueError(f"{source.split!r}: use lower-case letters, digits and _ only")
    if source.split in taken:
        raise ValueError(f"{source.split!r} is taken: choose another name")
    if source.weight != 1.0:
        raise ValueError(
            f"{source.paths[0]}: a weight is for training; evaluate on every document once"
        )


def _columns_of(given: Mapping[str, str] | Iterable[str]) -> tuple[tuple[str, str], ...]:
    if isinstance(given, Mapping):
        pairs = list(given.items())
    else:
        pairs = [(theirs, ours) for theirs, _, ours in (str(g).rpartition("=") for g in given)]
    for theirs, ours in pairs:
        if not theirs or ours not in COLUMNS:
            raise ValueError(
                f"columns: {theirs or '?'}={ours}: give THEIRS=OURS, ours being one of "
                f"{', '.join(COLUMNS)}"
            )
    targets = [ours for _, ours in pairs]
    for ours in targets:
        if targets.count(ours) > 1:
            raise ValueError(f"columns: {ours} is given two columns: name one")
    return tuple(pairs)


_ENTRY_KEYS = ("name", "path", "split", "format", "columns", "filter", "weight", "max_tokens")


def check_preparation(arguments: PreparationArguments) -> None:
    """Refuse settings that contradict each other, before any file is looked at.

    Raises ConfigurationError with every fault found.
    """
    problems = [*_range_problems(arguments), *_tokenizer_problems(arguments)]
    if not arguments.sources:
        problems.append("sources is empty: give at least one path")
    if arguments.shard is not None:
        problems.extend(_shard_problems(arguments))
    if problems:
        raise ConfigurationError(problems)


def shard_of(arguments: PreparationArguments) -> tuple[int, int]:
    """Return (index, number of shards); an undivided run is shard 0 of 1."""
    if arguments.shard is None:
        return 0, 1
    index, _, number = arguments.shard.partition("/")
    return int(index), int(number)


def _range_problems(arguments: PreparationArguments) -> list[str]:
    problems = []
    if not 0.0 <= arguments.validation_fraction < 1.0:
        problems.append(
            f"validation_fraction is {arguments.validation_fraction}: give a share from 0 "
            "(no held-out split) to below 1"
        )
    for name, least in (
        ("num_proc", 1),
        ("sequence_length", 2),
        ("merge", 1),
        ("tokenizer_sample_bytes", 1),
    ):
        value = getattr(arguments, name)
        if value is not None and value < least:
            problems.append(f"{name} is {value}: it must be at least {least}")
    if arguments.template_date is not None:
        try:
            date.fromisoformat(arguments.template_date)
        except ValueError:
            problems.append(
                f"template_date is {arguments.template_date!r}: give a day as YYYY-MM-DD"
            )
    if arguments.on_overlong != "error" and arguments.sequence_length is None:
        problems.append(
            f"on_overlong is {arguments.on_overlong} but nothing says what is too long: "
            "give --sequence_length"
        )
    return problems


def _tokenizer_problems(arguments: PreparationArguments) -> list[str]:
    existing, vocabulary = arguments.tokenizer_name_or_path, arguments.train_tokenizer
    if existing is None and vocabulary is None:
        return ["no tokenizer: give --tokenizer_name_or_path DIR or --train_tokenizer VOCAB"]
    if existing is not None and vocabulary is not None:
        return [
            f"both tokenizer_name_or_path ({existing}) and train_tokenizer ({vocabulary}) are "
            "given: choose one"
        ]
    problems = []
    if arguments.tokenizer_only and vocabulary is None:
        problems.append("tokenizer_only trains a tokenizer: give --train_tokenizer VOCAB")
    if vocabulary is not None and arguments.add_tokens:
        problems.append("add_tokens goes with --tokenizer_name_or_path: train the tokenizer first")
    if any(not token or token.isspace() for token in arguments.add_tokens):
        problems.append("add_tokens has an empty token: leave it out")
    if vocabulary is not None and arguments.merge is not None:
        problems.append(
            "merge goes with the settings of the shards: give --tokenizer_name_or_path as they had"
        )
    if arguments.tokenizer_only and (arguments.shard or arguments.merge):
        problems.append("tokenizer_only does not go with shard or merge: train it in one job first")
    return problems


def _shard_problems(arguments: PreparationArguments) -> list[str]:
    problems = []
    try:
        index, number = shard_of(arguments)
    except ValueError:
        return [f"shard is {arguments.shard!r}: give I/N with I from 0, as in --shard 0/8"]
    if not 0 <= index < number:
        problems.append(
            f"shard is {arguments.shard!r}: the first number counts from 0 to N-1 "
            f"(here 0 to {number - 1})"
        )
    if arguments.merge is not None:
        problems.append("shard and merge are separate steps: run every shard, then --merge N")
    if arguments.train_tokenizer is not None:
        problems.append(
            "shards cannot each train a tokenizer: run once with --tokenizer_only, then give "
            "every shard --tokenizer_name_or_path OUT/tokenizer"
        )
    return problems
