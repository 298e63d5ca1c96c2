"""Converts the datasets of another toolkit's config to `sources` and `eval_sources`."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils.config.declarations import Given
from utils.importing.toolkits import Conversion, is_off

# The beginning of axolotl's types -> our format; None if the columns determine it.
FORMATS = {
    "completion": "text", "pretrain": "text", "sharegpt": "sharegpt", "alpaca": "alpaca",
    "gpteacher": "alpaca", "chat_template": None, "messages": None,
}  # fmt: skip
KNOWN_KEYS = {"role": "content", "from": "value"}  # keys of a message that we can read
# LLaMA-Factory's tag of a role -> the words for this role that we can read.
TAGS = {
    "user_tag": ("human", "user"), "assistant_tag": ("gpt", "assistant"),
    "system_tag": ("system",), "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "tool_call"),
}  # fmt: skip
NO_LIMIT = 8192  # tokens, where a toolkit has no limit
Entries = list[dict[str, Any]]


def convert_data(given: Conversion, folder: str) -> None:
    """Fill the data recipe, which writes to `folder`, and the training recipe's lines on data."""
    sources = _read_sources(given, "sources")
    plain = [each["path"] if each.keys() == {"path"} else each for each in sources]
    given.data["sources"] = (plain, "")
    given.run["train_data"] = ([f"{folder}/train"], "")
    _hold_out(given, folder)
    _convert_length(given)
    tokens = given.use("add_tokens")
    if isinstance(tokens, Mapping):
        given.note("tokens", "special tokens are those of the tokenizer")
    elif tokens:
        given.data["add_tokens"] = (listed(tokens), "")
    if workers := given.use("num_proc"):
        given.data["num_proc"] = (workers, "")
    variables = {**(given.use("chat_template_kwargs") or {})}
    if (thinking := given.use("enable_thinking")) is not None:
        variables["enable_thinking"] = thinking
    if variables:
        given.data["chat_template_kwargs"] = (variables, "")
    for key in ("chat_template", "chat_template_jinja", "chat_template_path"):
        if "{" in str(given.value(key)):
            given.template = str(given.use(key))
        elif str(given.value(key)).endswith(".jinja"):
            given.data["chat_template"] = (given.use(key), "")
    given.data["output_dir"] = (folder, "")
    tokenizer = given.use("tokenizer_config") or given.use("tokenizer_name_or_path")
    model, _ = given.run.get("model_name_or_path", ("", ""))
    given.data["tokenizer_name_or_path"] = (tokenizer or model, "")


def _convert_length(given: Conversion) -> None:
    length, overlong = given.value("sequence_length"), given.use("overlong")
    if length is None:  # the toolkit sets no limit
        entry = given.given.pop("sequence_length")
        length, overlong = NO_LIMIT, "error"
        given.note(entry.source, f"no limit there: raise {NO_LIMIT} until no document is too long")
        given.given["sequence_length"] = Given(length, "no limit there")
    given.move("sequence_length")
    if not given.pretraining:
        given.data["sequence_length"] = (length, "")
        overlong = {"raise": "error"}.get(overlong, overlong)
        given.data["on_overlong"] = (overlong, given.its_default)


def listed(value: Any) -> list[Any]:
    """Return the value as a list, because toolkits also accept "a, b" or a single entry."""
    if isinstance(value, str):
        return re.split(r"\s*,\s*", value)
    return value if isinstance(value, list) else [value]


def _hold_out(given: Conversion, folder: str) -> None:
    """Convert held-out data: separate splits, or a share of all documents."""
    splits = []
    if given.value("eval_sources"):
        found = _read_sources(given, "eval_sources")
        held_out = [{"name": f"heldout_{n}" if n else "heldout", **e} for n, e in enumerate(found)]
        given.data["eval_sources"] = (held_out, "")
        splits = [each["name"] for each in held_out]
    key = given.given["validation"].source if "validation" in given.given else ""
    share = given.use("validation")
    if isinstance(share, float | int) and 0 < share < 1:
        given.data["validation_fraction"] = (float(share), "")
        splits.append("validation")
    elif key:
        why = "nothing is held out there" if not share else f"{share} documents: "
        given.note(key, why + ("validation_fraction is a share" if share else ""))
    if splits:
        given.put("eval_data", [f"{folder}/{split}" for split in splits])


def _read_sources(given: Conversion, name: str) -> Entries:
    """Return our entry for each dataset, and add notes on settings that are not converted."""
    readers: dict[str, Callable[[Conversion, str, Any], Entries]] = {
        "axolotl": _axolotl, "llamafactory": _factory, "trl": _trl,
    }  # fmt: skip
    source = given.given[name].source
    entries = readers[given.kind](given, source, given.use(name))
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
        take = entry.pop
        path = str(take("path", None))
        made = {name: take(theirs, None) for name, theirs in (
            ("subset", "name"), ("split", "split"), ("revision", "revision"))}  # fmt: skip
        kind = take("type") if entry.get("type") else ""
        made["columns"] = _axolotl_columns(given, source, entry, kind)
        formats = [form for start, form in FORMATS.items() if str(kind).startswith(start)]
        made["format"] = formats[0] if formats else None
        if kind and not made["format"]:
            shown = kind if isinstance(kind, str) else "of its own"
            given.note(f"{source}.type", f"{shown}: the columns tell the format")
        if shards := take("shards", None):
            made["weight"] = round(1 / shards, 6)
            given.note(f"{source}.shards", f"{shards}: a share of 1/{shards}, of other rows")
        files = listed(take("data_files", None))
        is_builder = path in ("json", "csv", "parquet", "text")
        for file in files:
            if file and not is_builder:
                given.note(file, "hf download it into sources/, or name where it is")
            where = file if is_builder and file else f"sources/{path}/{file}" if file else path
            found.append({"path": where, **made})
        given.leave_all(source, entry)
    return found


def _axolotl_columns(
    given: Conversion, source: str, entry: dict[str, Any], kind: Any
) -> dict[str, str]:
    """Remove the names of columns from an entry, and return them as our `columns`."""
    columns = {}
    custom = dict(kind) if isinstance(kind, Mapping) else {}
    for fields in (custom, entry):
        for part in ("instruction", "input", "output", "system", "tools"):
            if column := fields.pop(f"field_{part}", part if fields is custom else None):
                columns[column] = part
    given.leave_all(f"{source}.type", custom)
    if field := entry.pop("field", None) or entry.pop("text_column", None):
        columns[field] = "text"
    keys = dict(entry.pop("message_property_mappings", None) or {})
    old = "from" if str(kind).startswith("sharegpt") else "role"
    role = keys.get("role") or entry.get("message_field_role") or old
    content = keys.get("content") or entry.get("message_field_content")
    if content in (None, KNOWN_KEYS.get(role)):
        for each in ("role", "content"):
            for path, values, key in (
                ("message_property_mappings.", keys, each), ("", entry, f"message_field_{each}")
            ):  # fmt: skip
                if values.pop(key, None):
                    given.note(f"{source}.{path}{key}", "messages with these keys are read")
    given.leave_all(f"{source}.message_property_mappings", keys)
    ours = "conversations" if role == "from" else "messages"
    columns[entry.pop("field_messages", None) or ours] = ours
    return {theirs: ours for theirs, ours in columns.items() if theirs != ours}


def _factory(given: Conversion, source: str, names: Any) -> Entries:
    """Convert datasets that have only a name, with the entries of dataset_info.json.

    The file is in dataset_dir (default: data), below the working directory or a parent of the
    config.
    """
    folder, known = Path(given.value("dataset_dir") or "data"), {}
    for base in (Path(), *given.path.absolute().parents):
        with suppress(OSError, ValueError):
            known = json.loads((base / folder / "dataset_info.json").read_text(encoding="utf-8"))
            folder = base / folder
            break
    found: Entries = []
    for name in listed(names):
        info = dict(known.get(name, {}))
        if not info:
            given.note(name, "no dataset_info.json has it: name its file or Hub dataset in sources")
        found.append(_factory_entry(given, f"{source}.{name}", info, folder, name))
    return found


def _factory_entry(
    given: Conversion, source: str, info: dict[str, Any], folder: Path, name: str
) -> dict[str, Any]:
    """Convert an entry of dataset_info.json, with a note for each key without a counterpart."""
    take, is_known = info.pop, bool(info)
    file = str(folder / take("file_name")) if "file_name" in info else f"sources/{name}"
    path = take("hf_hub_url", None) or file
    form = take("formatting", "alpaca")
    named, tags = dict(take("columns", None) or {}), dict(take("tags", None) or {})
    is_chat = form in ("sharegpt", "openai")
    role, content = ("role", "content") if form == "openai" else ("from", "value")
    role, content = tags.pop("role_tag", role), tags.pop("content_tag", content)
    if KNOWN_KEYS.get(role) != content:
        tags |= {"role_tag": role, "content_tag": content}
    usual = {tag: words for tag, words in TAGS.items() if tags.get(tag) in words}
    tags = {tag: word for tag, word in tags.items() if tag not in usual}
    ours = {"prompt": "instruction", "query": "input", "response": "output", "system": "system",
            "history": "history", "tools": "tools",
            "messages": "conversations" if role == "from" else "messages"}  # fmt: skip
    if given.pretraining:
        ours = {"prompt": "text"}
    columns = {theirs: ours[key] for key, theirs in named.items() if key in ours}
    made = {
        "path": path, "subset": take("subset", None), "split": take("split", None),
        "columns": {theirs: our for theirs, our in columns.items() if theirs != our},
        "format": "alpaca" if is_known and not is_chat and not given.pretraining else None,
    }  # fmt: skip
    unread = {key: each for key, each in named.items() if key not in ours}
    given.leave_all(source, info)
    given.leave_all(f"{source}.columns", unread)
    given.leave_all(f"{source}.tags", tags)
    return made


def _trl(given: Conversion, source: str, value: Any) -> Entries:
    subset, split = given.use("dataset_config"), given.use("dataset_train_split")
    is_mixture = not isinstance(value, str)
    if isinstance(value, Mapping) and "datasets" in value:
        rest = dict(value)
        value, share = rest.pop("datasets"), rest.pop("test_split_size", None)
        if share:
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
    if not given.value("validation"):
        _trl_test_split(given, found, is_mixture)
    return found


def _trl_test_split(given: Conversion, found: Entries, is_mixture: bool) -> None:
    """Add the split that TRL evaluates on: `test`, if eval_strategy asks for evaluations."""
    named, strategy = given.use("dataset_test_split"), given.value("eval_strategy", "no")
    if is_off(strategy) or strategy == "no":
        if named:
            given.note("dataset_test_split", "eval_strategy is no there: nothing is evaluated")
    elif named or not is_mixture:
        why = "dataset_test_split" if named else given.its_default
        held_out = [
            {"id": each["path"], "config": each["subset"], "split": named or "test"}
            for each in found
        ]
        given.given.setdefault("eval_sources", Given(held_out, why))
