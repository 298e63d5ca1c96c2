"""What datasets another toolkit's config names, as `sources` and `eval_sources` of our recipe."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils.config.declarations import Given
from utils.importing.toolkits import Conversion

# axolotl's types by how they begin, and our format; None: the columns tell it.
FORMATS = {
    "completion": "text", "pretrain": "text", "sharegpt": "sharegpt", "alpaca": "alpaca",
    "gpteacher": "alpaca", "chat_template": None, "messages": None,
}  # fmt: skip
Entries = list[dict[str, Any]]


def convert_data(given: Conversion, folder: str) -> None:
    """Make the data recipe, whose output is `folder`, and the training recipe's words for it."""
    sources = _read_sources(given, "sources")
    plain = [each["path"] if each.keys() == {"path"} else each for each in sources]
    given.data["sources"] = (plain, "")
    given.run["train_data"] = ([f"{folder}/train"], "")
    _hold_out(given, folder)
    length, overlong = given.value("sequence_length"), given.take("overlong")
    given.move("sequence_length")
    if not given.pretraining:
        given.data["sequence_length"] = (length, "")
        if overlong in ("drop", "truncate"):
            given.data["on_overlong"] = (overlong, given.its_default)
    tokens = given.take("add_tokens")
    if isinstance(tokens, Mapping):
        given.note("tokens", "special tokens are those of the tokenizer")
    elif tokens:
        given.data["add_tokens"] = (listed(tokens), "")
    if workers := given.take("num_proc"):
        given.data["num_proc"] = (workers, "")
    for key in ("chat_template", "chat_template_jinja"):
        if "{" in str(given.value(key)):
            given.template = str(given.take(key))
    given.data["output_dir"] = (folder, "")
    tokenizer = given.take("tokenizer_config") or given.take("tokenizer_name_or_path")
    model, _ = given.run.get("model_name_or_path", ("", ""))
    given.data["tokenizer_name_or_path"] = (tokenizer or model, "")


def listed(value: Any) -> list[Any]:
    """Return the list that is meant, where a toolkit takes "a, b" or one entry for it too."""
    if isinstance(value, str):
        return re.split(r"\s*,\s*", value)
    return value if isinstance(value, list) else [value]


def _hold_out(given: Conversion, folder: str) -> None:
    """Convert the data that is evaluated on, splits of their own or a share of all."""
    splits = []
    if "eval_sources" in given.given:
        found = _read_sources(given, "eval_sources")
        held_out = [{"name": f"heldout_{n}" if n else "heldout", **e} for n, e in enumerate(found)]
        given.data["eval_sources"] = (held_out, "")
        splits = [each["name"] for each in held_out]
    share = given.take("validation")
    if isinstance(share, float | int) and 0 < share < 1:
        given.data["validation_fraction"] = (float(share), "")
        splits.append("validation")
    elif share:
        given.note(f"{share} held-out documents", "validation_fraction is a share of them")
    if splits:
        given.put("eval_data", [f"{folder}/{split}" for split in splits])


def _read_sources(given: Conversion, name: str) -> Entries:
    """Return an entry for each dataset that is named, and note what is unclear."""
    readers: dict[str, Callable[[Conversion, Any], Entries]] = {
        "axolotl": _axolotl, "llamafactory": _factory, "trl": _trl,
    }  # fmt: skip
    entries = readers[given.kind](given, given.take(name))
    for entry in entries:
        split, bracket, rest = str(entry.pop("split", None) or "").partition("[")
        share = re.fullmatch(r":(\d+)%\]", rest)
        if share and name == "sources":
            entry["weight"] = int(share[1]) / 100
        elif bracket:
            why = f"all of {split} is taken; max_tokens of a source limits it"
            given.note(f"split {split}[{rest}", why)
        if split and (split != "train" or name == "eval_sources"):
            entry["split"] = split
    return [{k: v for k, v in entry.items() if v not in (None, "", {})} for entry in entries]


def _axolotl(given: Conversion, entries: Any) -> Entries:
    found: Entries = []
    for each in (e if isinstance(e, dict) else {"path": e} for e in listed(entries)):
        path, kind = str(each.get("path")), each.get("type") or ""
        columns = {}
        if isinstance(kind, Mapping):
            for part in ("instruction", "input", "output", "system"):
                if (column := kind.get(f"field_{part}", part)) != part:
                    columns[column] = part
            given.note(path, "the prompt format of `type` is the template's")
            kind = ""
        if (field := each.get("field") or each.get("text_column")) and field != "text":
            columns[field] = "text"
        roles = each.get("message_property_mappings") or {}
        role = roles.get("role") or each.get("message_field_role") or "from"
        ours = "conversations" if role == "from" else "messages"
        if (field := each.get("field_messages")) not in (None, "messages", ours):
            columns[field] = ours
        formats = [form for start, form in FORMATS.items() if str(kind).startswith(start)]
        if kind and not formats:
            given.note(path, f"type {kind}: the columns tell the format")
        for file in listed(each.get("data_files")):
            where = path
            if file:
                given.note(file, "hf download it into sources/, or name where it is")
                is_builder = path in ("json", "csv", "parquet", "text")
                where = file if is_builder else f"sources/{path}/{file}"
            found.append({
                "path": where, "subset": each.get("name"),
                "split": each.get("split"), "revision": each.get("revision"),
                "format": formats[0] if formats else None, "columns": columns,
            })  # fmt: skip
    return found


def _factory(given: Conversion, names: Any) -> Entries:
    """Look names up in dataset_info.json, beside the config or in LLaMA-Factory's `data`."""
    folder, known = Path(given.take("dataset_dir", "data")), {}
    for base in (Path(), *given.path.absolute().parents):
        with suppress(OSError, ValueError):
            known = json.loads((base / folder / "dataset_info.json").read_text(encoding="utf-8"))
            folder = base / folder
            break
    found: Entries = []
    for name in listed(names):
        info = known.get(name, {})
        if not info:
            given.note(name, "no dataset_info.json has it: name its file or Hub dataset in sources")
        file = str(folder / info["file_name"]) if "file_name" in info else f"sources/{name}"
        named = info.get("columns") or {}
        is_chat = info.get("formatting") == "sharegpt"
        from_value = (info.get("tags") or {}).get("role_tag", "from") == "from"
        ours = {"prompt": "instruction", "query": "input", "response": "output", "system": "system",
                "history": "history", "tools": "tools",
                "messages": "conversations" if from_value else "messages"}  # fmt: skip
        columns = {theirs: ours[k] for k, theirs in named.items() if ours.get(k, theirs) != theirs}
        if given.pretraining:
            columns = {theirs: "text" for k, theirs in named.items() if k == "prompt"}
        found.append({
            "path": info.get("hf_hub_url") or file, "subset": info.get("subset"),
            "split": info.get("split"), "columns": columns,
            "format": "alpaca" if info and not is_chat and not given.pretraining else None,
        })  # fmt: skip
    return found


def _trl(given: Conversion, value: Any) -> Entries:
    subset, split = given.take("dataset_config"), given.take("dataset_train_split")
    test = given.take("dataset_test_split")
    if isinstance(value, Mapping) and "datasets" in value:
        if share := value.get("test_split_size"):
            given.given.setdefault("validation", Given(share, "test_split_size"))
        value = value["datasets"]
    elif isinstance(value, Mapping):
        value = [{"id": name, "weight": weight} for name, weight in value.items()]
    elif not isinstance(value, list):
        value = [{"id": value, "config": subset, "split": split}]
    found: Entries = []
    for each in (e if isinstance(e, Mapping) else {"id": e} for e in value):
        path, weight = each.get("id") or each.get("path") or each.get("name"), each.get("weight")
        found.append({
            "path": path, "subset": each.get("config") or each.get("subset"),
            "split": each.get("split"), "weight": None if weight == 1 else weight,
        })  # fmt: skip
        if test:
            held_out = {"id": path, "split": test, "config": each.get("config")}
            given.given.setdefault("eval_sources", Given([held_out], "dataset_test_split"))
    return found
