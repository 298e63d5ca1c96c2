"""Conversion of the datasets in another toolkit's config to entries of a data recipe."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from utils.config.declarations import SettingValue
from utils.config.preparation import COLUMNS, MESSAGE_KEYS, MESSAGE_ROLES
from utils.importing.toolkits import BY_DEFAULT, DATA, Conversion, is_off, listed

# Models whose template prints an empty thought, which axolotl does not train on.
EMPTY_THOUGHTS = re.compile(r"qwen-?3(?!.*(2507|coder|vl|omni|next|embedding))", re.IGNORECASE)
Entries = list[dict[str, Any]]


def read_sources(state: Conversion, name: str) -> Entries:
    """Return data recipe entries for the datasets in a setting, and note differences in `state`.

    name: the setting, `sources` or `eval_sources`.
    """
    readers = {"axolotl": _axolotl_entries, "llamafactory": _llamafactory_entries}
    read = readers.get(state.kind, _trl_entries)
    source = state.given[name].source
    entries = read(state, source, state.take(name))
    for entry in entries:
        split, bracket, rest = str(entry.pop("split", None) or "").partition("[")
        share = re.fullmatch(r":(\d+)%\]", rest)
        if share and name == "sources":
            entry["weight"] = int(share[1]) / 100
            selection = f"a share of {share[1]} %, chosen by content, is taken"
        elif bracket:
            selection = f"all of {split} is taken"
        if bracket:
            why = f"{selection}, not [{rest}; for the same rows name as path what datasets makes: "
            why += f"load_dataset(..., split='{split}[{rest}').save_to_disk('sources/slice')"
            state.change(f"{source}.split", why)
        if split and (split != "train" or name == "eval_sources"):
            entry["split"] = split
        if name == "eval_sources" and entry.pop("weight", None):
            state.note(f"{source}.weight", "all of a held-out split is evaluated")
    return [{k: v for k, v in entry.items() if v not in (None, "", {})} for entry in entries]


def _axolotl_entries(state: Conversion, source: str, entries: Any) -> Entries:
    found: Entries = []
    splits_thinking = False
    for entry in (dict(e) if isinstance(e, dict) else {"path": e} for e in listed(entries)):
        path, kind = str(entry.pop("path", None)), entry.pop("type", None) or ""
        common = {ours: entry.pop(theirs, None) for ours, theirs in (
            ("subset", "name"), ("split", "split"), ("revision", "revision"))}  # fmt: skip
        if name := _add_prompt_function(state, source, entry, kind):
            common["format"] = name
        else:
            common["columns"] = _axolotl_columns(state, source, entry, kind)
            common["format"] = _axolotl_format(state, f"{source}.type", kind)
        if shards := entry.pop("shards", None):
            common["weight"] = round(1 / shards, 6)
            state.change(f"{source}.shards", f"{shards}: a share of 1/{shards}, of other rows")
        is_builder = path in ("json", "csv", "parquet", "text")
        for file in listed(entry.pop("data_files", None)):
            where = file if is_builder and file else f"sources/{path}/{file}" if file else path
            if file and not is_builder:
                state.commands.append(
                    f"hf download {path} {file} --repo-type dataset --local-dir sources/{path}"
                )
            found.append({"path": where, **common})
        splits_thinking |= bool(entry.get("split_thinking"))
        state.leave_all(source, entry)
    columns = [ours for entry in found for ours in entry.get("columns", {}).values()]
    are_chats = any(entry["format"] in (None, "sharegpt") for entry in found)
    if are_chats and not splits_thinking and "reasoning_content" not in columns:
        _disable_thinking(state)
    return found


def _axolotl_format(state: Conversion, key: str, kind: str) -> str | None:
    """Return Stoker's row format for `kind`, a dataset type of axolotl.

    An empty result means that Stoker detects the format. key: the config's key, for notes.
    """
    if not kind:
        state.note(key, "empty: the rows have input_ids and labels")
        return "tokens"
    formats = [form for start, form in DATA["formats"].items() if kind.startswith(start)]
    if not formats:
        state.change(key, f"{kind}: its prompt is not known here: write it as a function, and name "
                     "that as format of the source (docs/own-code.md)")  # fmt: skip
    elif not formats[0]:
        state.note(key, f"{kind}: the columns tell the format")
    return formats[0] if formats else None


def _add_prompt_function(state: Conversion, source: str, entry: dict[str, Any], kind: Any) -> str:
    """Add a Python function that builds the prompts of `kind`, a dataset type of axolotl.

    Return the function's name, or "" if the type needs no function or is unknown. entry: the
    dataset's entry in the config. Its keys that name columns are removed.
    """
    custom = dict(kind) if isinstance(kind, Mapping) else {}
    base, _, style = ("" if custom else str(kind)).partition(":")
    known = DATA["prompts"].get(base.removesuffix(".load"))
    if base.startswith("alpaca_chat"):
        style = style or entry.pop("conversation", "")
    if not custom and (not known or style not in {"", *DATA["styles"]}):
        return ""
    known = known or {"columns": ["instruction", "input", "output"], "style": "", "system": None}
    names = dict(zip(("instruction", "input", "output"), known["columns"], strict=True))
    names["system"] = "system"
    for fields in (custom, entry):
        names |= {
            part: fields.pop(f"field_{part}") for part in names if fields.get(f"field_{part}")
        }
    formats = DATA["styles"].get(style or known["style"]) or [
        custom.pop("system_format", None) or "{system}",
        custom.pop("format", None) or "{instruction} {input} ",
        custom.pop("no_input_format", None) or "{instruction} ",
    ]
    system = f"row.get({names['system']!r}, {custom.pop('system_prompt', None) or ''!r})"
    if known["system"]:
        system = "{!r} if given else {!r}".format(*known["system"])
    name = re.sub(r"\W", "_", str(kind)) if base else f"prompt_{len(state.functions) + 1}"
    state.leave_all(f"{source}.type", custom)
    text = partial(
        DATA["function"].format,
        kind=kind if base else "{...}", system=system, system_format=formats[0], turn=formats[1],
        alone=formats[2], trained=bool(state.value("train_on_inputs")), input=names["input"],
        instruction=names["instruction"], output=names["output"],
    )  # fmt: skip
    while state.functions.setdefault(name, text(name=name)) != text(name=name):
        name += "_"  # the name is taken by the same type with other columns
    return name


def _disable_thinking(state: Conversion) -> None:
    """Set `enable_thinking: false` if the model's chat template prints an empty thought (Qwen3).

    With this setting, the empty thought is not trained on, as in axolotl.
    """
    model = f"{state.run.get('model_name_or_path', '')} {state.value('chat_template')}"
    variables = state.value("chat_template_kwargs") or {}
    if state.value("chat_template") in DATA["templates"]["axolotl"]:
        return
    if EMPTY_THOUGHTS.search(model) and "enable_thinking" not in {*variables, *state.given}:
        state.given["enable_thinking"] = SettingValue(False, state.its_default)
        state.change("enable_thinking: false", "the template's empty thought is not trained on, as "
                     "in axolotl; leave the line out if the data have thoughts")  # fmt: skip


def _axolotl_columns(
    state: Conversion, source: str, entry: dict[str, Any], kind: str
) -> dict[str, str]:
    """Return {column of the data: Stoker's name}. Remove keys that name columns from `entry`."""
    columns = {}
    for part in ("instruction", "input", "output", "system", "tools"):
        if column := entry.pop(f"field_{part}", None):
            columns[column] = part
    if field := entry.pop("field", None) or entry.pop("text_column", None):
        columns[field] = "text"
    keys = dict(entry.pop("message_property_mappings", None) or {})
    for ours in ("role", "content"):
        keys.setdefault(ours, entry.pop(f"message_field_{ours}", None))
    keys["weight"] = entry.pop("message_field_training", None)
    keys.setdefault("reasoning_content", entry.pop("field_thinking", None))
    for ours, theirs in list(keys.items()):
        if ours in MESSAGE_KEYS and theirs not in (None, *DATA["as_here"][ours]):
            columns[theirs] = ours
        elif ours not in MESSAGE_KEYS and theirs != ours:
            state.leave(f"{source}.message_property_mappings.{ours}", theirs)
    usual = "from" if kind.startswith("sharegpt") else "role"
    ours = "conversations" if (keys["role"] or usual) == "from" else "messages"
    columns[entry.pop("field_messages", None) or ours] = ours
    columns |= _role_names(state, f"{source}.roles", entry.pop("roles", None) or {})
    return {theirs: ours for theirs, ours in columns.items() if theirs != ours}


def _role_names(state: Conversion, where: str, roles: Mapping[str, Any]) -> dict[str, str]:
    """Return {role in the data: Stoker's role}, without the roles that Stoker maps by default.

    roles: {Stoker's role: roles in the data}. where: the config's key, for notes.
    """
    known = {role: roles[role] for role in roles if role in MESSAGE_ROLES}
    state.leave_all(where, {role: roles[role] for role in roles if role not in known})
    words = {word: role for role, found in known.items() for word in listed(found) if word}
    return {word: role for word, role in words.items() if DATA["roles"].get(word) != role}


def _llamafactory_entries(state: Conversion, source: str, names: Any) -> Entries:
    """Return data recipe entries for datasets of LLaMA-Factory.

    names: the datasets' names in dataset_info.json. This file is in the folder `dataset_dir`
    (default: data). A relative folder is searched in the working directory, then in the config's
    folder and in all folders above.
    """
    where, known = str(state.value("dataset_dir") or "data"), {}
    remote, folder = where.partition(":")[2], Path(where)
    for base in (Path(), *state.path.absolute().parents):
        with suppress(OSError, ValueError):
            known = json.loads((base / folder / "dataset_info.json").read_text(encoding="utf-8"))
            folder = base / folder
            break
    found: Entries = []
    for name in listed(names):
        info, where = dict(known.get(name, {})), f"{source}.{name}"
        is_chat = info.get("formatting", "alpaca" if info else "") != "alpaca"
        if not info:
            why = "no dataset_info.json has it: name its file or Hub dataset in sources"
            hub = f"{where}: hf download {remote} --repo-type dataset, and name its file in sources"
            state.change(name, hub if remote else why)
        file = str(folder / info.pop("file_name")) if "file_name" in info else f"sources/{name}"
        usual = "role" if info.pop("formatting", None) == "openai" else "from"
        tags = dict(info.pop("tags", None) or {})
        role = tags.get("role_tag", usual)
        ours = {"prompt": "instruction", "query": "input", "response": "output", "system": "system",
                "history": "history", "tools": "tools",
                "messages": "conversations" if role == "from" else "messages"}  # fmt: skip
        if state.pretraining:
            ours = {"prompt": "text"}
        named = dict(info.pop("columns", None) or {})
        columns = {named.pop(key): ours[key] for key in list(named) if key in ours}
        for key, our in (("role_tag", "role"), ("content_tag", "content")):
            if (theirs := tags.pop(key, None)) not in (None, *DATA["as_here"][our]):
                columns[theirs] = our
        words = {our: tags.pop(key, None) for our, key in DATA["tags"].items()}
        columns |= _role_names(state, where, words)
        state.leave_all(f"{where}.tags", tags)
        found.append({
            "path": info.pop("hf_hub_url", None) or file, "subset": info.pop("subset", None),
            "split": info.pop("split", None),
            "columns": {theirs: our for theirs, our in columns.items() if theirs != our},
            "format": None if is_chat or state.pretraining else "alpaca",
        })  # fmt: skip
        state.leave_all(where, info)
        state.leave_all(f"{where}.columns", named)
    return found


def _trl_entries(state: Conversion, source: str, value: Any) -> Entries:
    """Return data recipe entries for the dataset of a TRL config.

    value: a dataset's name, several datasets (TRL), or {name: weight} (Alignment Handbook).
    """
    subset, split = state.take("dataset_config"), state.take("dataset_train_split")
    is_mixture = not isinstance(value, str)
    if isinstance(value, Mapping) and "datasets" in value:
        rest = dict(value)
        value = rest.pop("datasets")
        if share := rest.pop("test_split_size", None):
            state.given.setdefault("validation", SettingValue(share, "test_split_size"))
        if rest.pop("seed", None) is not None:
            state.note(f"{source}.seed", "the order of the documents follows from seed here")
        state.leave_all(source, rest)
    elif isinstance(value, Mapping):
        value = [{"id": name, "weight": weight} for name, weight in value.items()]
    elif not isinstance(value, list):
        value = [{"id": value, "config": subset, "split": split}]
    found: Entries = []
    for entry in (dict(e) if isinstance(e, Mapping) else {"id": e} for e in value):
        names = [entry.pop(key, None) for key in ("id", "path", "config", "subset", "name")]
        path = names[0] or names[1] or names.pop()
        weight = entry.pop("weight", None)
        columns = listed(entry.pop("columns", None) or [])
        if unread := [each for each in columns if each not in COLUMNS]:
            state.leave(f"{source}.columns", unread)
        elif columns:
            state.note(f"{source}.columns", BY_DEFAULT)
        found.append({
            "path": path, "subset": next(filter(None, names[2:]), None),
            "split": entry.pop("split", None), "weight": None if weight == 1 else weight,
        })  # fmt: skip
        state.leave_all(source, entry)
    _trl_evaluation(state, found, is_mixture)
    return found


def _trl_evaluation(state: Conversion, found: Entries, is_mixture: bool) -> None:
    """Set `eval_sources` to the test split of each dataset if eval_strategy is on, as in TRL.

    found: the entries of the training data. is_mixture: whether the config has a list of datasets.
    If the config has a list, TRL evaluates only if dataset_test_split names the split.
    """
    named, strategy = state.value("dataset_test_split"), state.value("eval_strategy", "no")
    if is_off(strategy) or strategy == "no":
        state.drop("dataset_test_split", "eval_strategy is no there: nothing is evaluated")
    elif not state.value("validation") and (named or not is_mixture):
        held_out = [
            {"id": each["path"], "config": each["subset"], "split": named or "test"}
            for each in found
        ]
        state.given.setdefault("eval_sources", SettingValue(held_out, "dataset_test_split"))
    elif state.value("validation"):
        state.drop("dataset_test_split", "the share of the training data that is held out decides")
    state.take("dataset_test_split")
