"""Raw training data: files of text or chats in train_data. A run tokenizes them before training."""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

from utils.config.arguments import DataArguments, eval_splits, train_sources
from utils.config.declarations import FLAGS_RANK, SettingValue, SettingValues
from utils.config.errors import did_you_mean
from utils.config.preparation import TRAIN, VALIDATION, RawDataArguments
from utils.host.redaction import redact

PREPARED = "data"  # in output_dir
_RESERVED = re.compile("tokenizer|val.*|dev|test.*|eval.*")  # a source `test` reads the split test
# A folder with one of these files, in it or one level below, is a dataset, a model or a run.
_NOT_RAW = ("*.arrow", "*.safetensors", "*state.json", "dataset_info.json", "stoker.json",
            "config.json", "config.yaml", "provenance.json")  # fmt: skip


@dataclass(frozen=True)
class RawData:
    """The raw files that a run tokenizes, and the names of the datasets that it writes.

    sources: paths. eval_sources: entries NAME=PATH. folder: where the datasets are written.
    tokenizer: the setting tokenizer_name_or_path. prepared_data: a value of train_data that names
    the written datasets.
    """

    sources: list[str]
    eval_sources: list[str]
    folder: str
    tokenizer: str | None
    prepared_data: str


def is_raw(path: str) -> bool:
    """Return whether a path is a file, or a non-empty folder that is no dataset, model or run."""
    given = Path(path)
    marks = [name for mark in _NOT_RAW for name in (mark, f"*/{mark}")]
    with suppress(OSError):  # a path without permission is reported when it is opened
        if not given.is_dir():
            return given.is_file()
        return any(given.iterdir()) and not any(any(given.glob(mark)) for mark in marks)
    return False


def datasets_of_raw(sources: Mapping[str, float | None], taken: Collection[str]) -> dict[str, str]:
    """Return {raw file: name of the dataset that is made from the file}.

    sources: {path: weight or None}. taken: names of evaluation splits, which no dataset gets.
    All raw files without weights become one dataset, `train`. With weights, each file becomes a
    dataset. The first dataset is `train`. The others are named after their files.
    """
    raw = [path for path in sources if is_raw(path)]
    names = dict.fromkeys(raw, TRAIN)
    if any(sources[path] is not None for path in raw):
        for number, path in enumerate(raw[1:], 2):
            name = re.sub(r"[^a-z0-9]+", "_", redact(Path(path).stem).lower()).strip("_")
            is_taken = _RESERVED.fullmatch(name) or name in {"", *taken, *names.values()}
            names[path] = f"source_{number}" if is_taken else name
    return names


def replace_raw_files(data: DataArguments, output_dir: str) -> tuple[DataArguments, RawData | None]:
    """Replace raw files in train_data and eval_data by the datasets that the run prepares.

    Return the new settings and the raw files. Without raw files, return `data` itself and None.
    """
    sources, splits = train_sources(data.train_data), eval_splits(data.eval_data)
    raw = datasets_of_raw(sources, splits)
    if not raw:
        return data, None
    folder, train = f"{output_dir}/{PREPARED}", list[str]()
    for path, weight in sources.items():
        entry = f"{folder}/{raw[path]}" if path in raw else path
        train.append(entry if weight is None else f"{entry}={weight:.12g}")
    held_out = {name: path for name, path in splits.items() if is_raw(path)}
    splits |= {name: f"{folder}/{name}" for name in held_out}
    if data.validation_fraction and held_out.get(VALIDATION) in raw:  # see `add_validation_split`
        del held_out[VALIDATION]
    named = [(name, path) for path, name in raw.items() if name != TRAIN] + [*held_out.items()]
    replaced = replace(
        data,
        train_data=list(dict.fromkeys(train)),  # several raw files may make one dataset
        eval_data=[f"{name}={path}" for name, path in splits.items()],
        tokenizer_name_or_path=None,
    )
    prepared = RawData(
        sources=[path for path, name in raw.items() if name == TRAIN],
        eval_sources=[f"{name}={path}" for name, path in named],
        folder=folder,
        tokenizer=data.tokenizer_name_or_path,
        prepared_data=" ".join(replaced.train_data).removesuffix(f"/{TRAIN}"),
    )
    return replaced, prepared


def add_validation_split(values: SettingValues) -> None:
    """Add the split `validation` to eval_data if validation_fraction splits raw files."""
    with suppress(ValueError):  # check_forms reports it
        raw = [path for path in train_sources(values["train_data"] or []) if is_raw(path)]
        splits = values["eval_data"]
        if values.rank("eval_data") < values.rank("train_data"):  # eval_data of an overruled recipe
            splits = [each for each in splits if VALIDATION not in eval_splits([each])]
        if raw and values["validation_fraction"] and VALIDATION not in eval_splits(splits):
            rank = max(values.rank("eval_data"), values.rank("validation_fraction"))
            source = values.source("validation_fraction")
            values.given["eval_data"] = SettingValue(
                [*splits, f"{VALIDATION}={raw[0]}"], source, rank
            )


def check_raw_data(values: SettingValues) -> Iterator[str]:
    """Yield a line for each missing file, and each setting that does not fit the training data.

    Settings of RawDataArguments need raw files. validation_fraction does not work with several
    weighted raw files.
    """
    sources = train_sources(values["train_data"])
    raw = [path for path in sources if is_raw(path)]
    if len(raw) > 1 and sources[raw[0]] is not None and values["validation_fraction"]:
        yield (
            f"{values.shown('validation_fraction')}: several raw files with weights are several "
            "datasets: name held-out files in eval_data, or leave the weights out"
        )
    paths = [*sources, *eval_splits(values["eval_data"]).values()]
    missing = [path for path in paths if not Path(path).exists()]
    if raw or values.unusable:  # report before raw data is prepared, or with other faults
        advice = ""
        if raw and values.rank("eval_data") < values.rank("train_data"):
            advice = (
                f" (eval_data is from {values.source('eval_data')}): --validation_fraction 0.05 "
            )
            advice += f"holds out one in twenty of {raw[0]}, --eval_data none leaves evaluation out"
        yield from (
            f"{path}: no such file or folder{did_you_mean(path)}{advice * (path not in sources)}"
            for path in missing
        )
    if raw or missing:
        return
    for each in fields(RawDataArguments):
        if values.changed(each.name):
            problem = f"{values.shown(each.name)} has no effect: no raw file is in train_data"
            if values.rank(each.name) == FLAGS_RANK:
                yield f"{problem}, and prepared data stays as it is"
            values.notes.append(problem)
