"""Conversion of the datasets in another toolkit's config to `sources` and `eval_sources`."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils.config.declarations import Given
from utils.importing.toolkits import Conversion, is_off, listed

# {beginning of axolotl's type: our format}. None: the columns determine the format.
FORMATS = {
    "completion": "text", "pretrain": "text", "sharegpt": "sharegpt", "alpaca": "alpaca",
    "gpteacher": "alpaca", "chat_template": None, "messages": None,
}  # fmt: skip
NO_LIMIT = 8192  # tokens, where a toolkit has no limit
Entries = list[dict[str, Any]]


def convert_data(given: Conversion, folder: str) -> None:
    """Fill the data recipe and the data settings of the training recipe. folder: output_dir."""
    given.data["sources"] = [
        each["path"] if each.keys() == {"path"} else each for each in _read(given, "sources")
    ]
    given.run["train_data"] = ([f"{folder}/train"], "")
    _hold_out(given, folder)
    length, overlong = given.value("sequence_length"), given.take("overlong")
    if length is None:
        length, overlong = NO_LIMIT, "error"
        given.drop("sequence_length", f"no limit there: raise {NO_LIMIT} until every document fits")
        given.given["sequence_length"] = Given(length, "no limit there")
    given.move("sequence_length")
    if not given.pretraining:
        given.data["sequence_length"] = length
        given.data["on_overlong"] = "error" if overlong == "raise" else overlong
    tokens = given.take("add_tokens")
    if isinstance(tokens, Mapping):
        given.note("tokens", "special tokens are those of the tokenizer")
    elif tokens:
        given.data["add_tokens"] = listed(tokens)
    given.data["num_proc"] = given.take("num_proc") or None
    variables = {**(given.take("chat_template_kwargs") or {})}
    if (thinking := given.take("enable_thinking")) is not None:
        variables["enable_thinking"] = thinking
    given.data["chat_template_kwargs"] = variables
    for key in ("chat_template", "chat_template_jinja", "chat_template_path"):
        if "{" in str(given.value(key)):
            given.template = str(given.take(key))
        elif str(given.value(key)).endswith(".jinja"):
            given.data["chat_template"] = given.take(key)
    given.data["output_dir"] = folder
    tokenizer = given.take("tokenizer_config") or given.take("tokenizer_name_or_path")
    model, _ = given.run.get("model_name_or_path", ("", ""))
    given.data["tokenizer_name_or_path"] = tokenizer or model


def _hold_out(given: Conversion, folder: str) -> None:
    """Convert the held-out data: named datasets, or a share of the training documents."""
    splits = []
    if given.value("eval_sources"):
        found = _read(given, "eval_sources")
        held_out = [{"name": f"heldout_{n}" if n else "heldout", **e} for n, e in enumerate(found)]
        given.data["eval_sources"] = held_out
        splits = [each["name"] for each in held_out]
    share = given.value("validation")
    if isinstance(share, float | int) and 0 < share < 1:
        given.data["validation_fraction"] = float(given.take("validation"))
        splits.append("validation")
    why = f"{share} documents: validation_fraction is a share" if share else "nothing is held out"
    given.drop("validation", why)
    if splits:
        given.put("eval_data", [f"{folder}/{split}" for split in splits])


def _read(given: Conversion, name: str) -> Entries:
    """Return the datasets of the setting `name` as entries for our data recipe; add notes."""
    reader = {"axolotl": _axolotl, "llamafactory": _factory, "trl": _trl}[given.kind]
    source = given.given[name].source
    entries = reader(given, source, given.take(name))
    for entry in entries:
        split, bracket, rest = str(entry.pop("split", None) or "").partition("[")
        share = re.fullmatch(r":(\d+)%\]", rest)
        if share and name == "sources":
            entry["weight"] = int(share[1]) / 100
        elif bracket:
            why = f"all of {split} is taken, not [{rest}; max_tokens of a source limits it"
            given.note(f"{source}.split", why)
        if split and (split != "train" or name == "eval_sources"):
            entry["split"] = split
        if name == "eval_sources" and entry.pop("weight", None):
            given.note(f"{source}.weight", "all of a held-out split is evaluated")
    return [{k: v for k, v in entry.items() if v not in (None, "", {})} for entry in entries]


def _axolotl(given: Conversion, source: str, entries: Any) -> Entries:
    found: Entries = []
    for entry in (dict(e) if isinstance(e, dict) else {"path": e} for e in listed(entries)):
        path, kind = str(entry.pop("path", None)), entry.pop("type", None) or ""
        made = {ours: entry.pop(theirs, None) for ours, theirs in (
            ("subset", "name"), ("split", "split"), ("revision", "revision"))}  # fmt: skip
        made["columns"] = _axolotl_columns(given, source, entry, kind)
        formats = [form for start, form in FORMATS.items() if str(kind).startswith(start)]
        made["format"] = formats[0] if formats else None
        if kind and not made["format"]:
            shown = kind if isinstance(kind, str) else "of its own"
            given.note(f"{source}.type", f"{shown}: the columns tell the format")
        if shards := entry.pop("shards", None):
            made["weight"] = round(1 / shards, 6)
            given.note(f"{source}.shards", f"{shards}: a share of 1/{shards}, of other rows")
        is_builder = path in ("json", "csv", "parquet", "text")
        for file in listed(entry.pop("data_files", None)):
            if file and not is_builder:
                given.note(file, "hf download it into sources/, or name where it is")
            where = file if is_builder and file else f"sources/{path}/{file}" if file else path
            found.append({"path": where, **made})
        given.leave_all(source, entry)
    return found


def _axolotl_columns(
    given: Conversion, source: str, entry: dict[str, Any], kind: Any
) -> dict[str, str]:
    """Remove the keys that name columns from `entry`; return {column: our name for the column}."""
    columns = {}
    custom = dict(kind) if isinstance(kind, Mapping) else {}
    for fields in (custom, entry):
        for part in ("instruction", "input", "output", "system", "tools"):
            if column := fields.pop(f"field_{part}", None):
                columns[column] = part
    given.leave_all(f"{source}.type", custom)
    if field := entry.pop("field", None) or entry.pop("text_column", None):
        columns[field] = "text"
    keys = entry.get("message_property_mappings") or {}
    usual = "from" if str(kind).startswith("sharegpt") else "role"
    role = keys.get("role") or entry.get("message_field_role") or usual
    ours = "conversations" if role == "from" else "messages"
    columns[entry.pop("field_messages", None) or ours] = ours
    return {theirs: ours for theirs, ours in columns.items() if theirs != ours}


def _factory(given: Conversion, source: str, names: Any) -> Entries:
    """Convert LLaMA-Factory's names of datasets, which dataset_info.json describes.

    The setting dataset_dir (default: data) names the folder of dataset_info.json. This folder is
    in the working directory, or in a folder above the config.
    """
    folder, known = Path(given.value("dataset_dir") or "data"), {}
    for base in (Path(), *given.path.absolute().parents):
        with suppress(OSError, ValueError):
            known = json.loads((base / folder / "dataset_info.json").read_text(encoding="utf-8"))
            folder = base / folder
            break
    found: Entries = []
    for name in listed(names):
        info, where = dict(known.get(name, {})), f"{source}.{name}"
        is_chat = info.get("formatting", "alpaca" if info else "") != "alpaca"
        if not info:
            given.note(name, "no dataset_info.json has it: name its file or Hub dataset in sources")
        file = str(folder / info.pop("file_name")) if "file_name" in info else f"sources/{name}"
        usual = "role" if info.pop("formatting", None) == "openai" else "from"
        role = (info.get("tags") or {}).get("role_tag", usual)
        ours = {"prompt": "instruction", "query": "input", "response": "output", "system": "system",
                "history": "history", "tools": "tools",
                "messages": "conversations" if role == "from" else "messages"}  # fmt: skip
        if given.pretraining:
            ours = {"prompt": "text"}
        named = dict(info.pop("columns", None) or {})
        columns = {named.pop(key): ours[key] for key in list(named) if key in ours}
        found.append({
            "path": info.pop("hf_hub_url", None) or file, "subset": info.pop("subset", None),
            "split": info.pop("split", None),
            "columns": {theirs: our for theirs, our in columns.items() if theirs != our},
            "format": None if is_chat or given.pretraining else "alpaca",
        })  # fmt: skip
        given.leave_all(where, info)
        given.leave_all(f"{where}.columns", named)
    return found


def _trl(given: Conversion, source: str, value: Any) -> Entries:
    """Convert a dataset's name, TRL's mixture, or the Alignment Handbook's {name: weight}."""
    subset, split = given.take("dataset_config"), given.take("dataset_train_split")
    is_mixture = not isinstance(value, str)
    if isinstance(value, Mapping) and "datasets" in value:
        rest = dict(value)
        value = rest.pop("datasets")
        if share := rest.pop("test_split_size", None):
            given.given.setdefault("validation", Given(share, "test_split_size"))
        given.leave_all(source, rest)
    elif isinstance(value, Mapping):
        value = [{"id": name, "weight": weight} for name, weight in value.items()]
    elif not isinstance(value, list):
        value = [{"id": value, "config": subset, "split": split}]
    found: Entries = []
    for entry in (dict(e) if isinstance(e, Mapping) else {"id": e} for e in value):
        names = [entry.pop(key, None) for key in ("id", "path", "config", "subset", "name")]
        path = names[0] or names[1] or names.pop()
        weight = entry.pop("weight", None)
        found.append({
            "path": path, "subset": next(filter(None, names[2:]), None),
            "split": entry.pop("split", None), "weight": None if weight == 1 else weight,
        })  # fmt: skip
        given.leave_all(source, entry)
    # TRL evaluates on the split `test` if eval_strategy asks for evaluations.
    named, strategy = given.value("dataset_test_split"), given.value("eval_strategy", "no")
    if is_off(strategy) or strategy == "no":
        given.drop("dataset_test_split", "eval_strategy is no there: nothing is evaluated")
    elif not given.value("validation") and (named or not is_mixture):
        held_out = [
            {"id": each["path"], "config": each["subset"], "split": named or "test"}
            for each in found
        ]
        given.given.setdefault("eval_sources", Given(held_out, "dataset_test_split"))
    elif given.value("validation"):
        given.drop("dataset_test_split", "the share of the training data that is held out decides")
    given.take("dataset_test_split")
    return found
