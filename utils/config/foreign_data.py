"""What datasets another toolkit's config names, as `sources` and `eval_sources` of our recipe."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils.config.declarations import Given
from utils.config.toolkits import Conversion

# torchtune's builders that name no source.
TORCHTUNE = {
    "alpaca_dataset": "tatsu-lab/alpaca", "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
    "grammar_dataset": "liweili/c4_200m", "samsum_dataset": "knkarthick/samsum",
    "slimorca_dataset": "Open-Orca/SlimOrca-Dedup",
    "wikitext_dataset": "EleutherAI/wikitext_document_level",
    "cnn_dailymail_articles_dataset": "ccdv/cnn_dailymail",
}  # fmt: skip
# axolotl's names of formats, by how they begin; others are told by the columns.
FORMATS = {
    "completion": "text", "pretrain": "text", "sharegpt": "sharegpt", "alpaca": "alpaca",
    "gpteacher": "alpaca",
}  # fmt: skip
TEMPLATES = ("chat_template", "chat_template_jinja")
FILE = re.compile(r"\.(jsonl?|csv|parquet|txt|arrow)(\.\w+)?$")
Entries = list[dict[str, Any]]


def convert_data(given: Conversion, name: str, path: Path) -> None:
    """Make the data recipe, and the training recipe's words for it."""
    folder = f"data/{name}"
    _join_split(given)
    sources = _read_sources(given, "sources", path)
    plain = [each["path"] if each.keys() == {"path"} else each for each in sources]
    given.data["sources"] = (plain, "")
    given.run["train_data"] = ([f"{folder}/train"], "")
    _hold_out(given, folder, path)
    length, overlong = given.value("sequence_length"), given.take("overlong")
    given.move("sequence_length")
    if not given.pretraining:
        given.data["sequence_length"] = (length, "")
        if overlong in ("drop", "truncate"):
            given.data["on_overlong"] = (overlong, given.its_default)
    if tokens := given.take("add_tokens"):
        tokens = tokens if isinstance(tokens, list) else str(tokens).split(",")
        given.data["add_tokens"] = (tokens, "")
    if workers := given.take("num_proc"):
        given.data["num_proc"] = (workers, "")
    for key in TEMPLATES:
        if "{" in str(given.value(key)):
            given.template = str(given.take(key))
    given.data["output_dir"] = (folder, "")


def _hold_out(given: Conversion, folder: str, path: Path) -> None:
    """Convert the data that is evaluated on, splits of their own or a share of all."""
    splits = []
    if "eval_sources" in given.given:
        found = _read_sources(given, "eval_sources", path)
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


def _join_split(given: Conversion) -> None:
    """Make train[:95%] and train[95%:] of one dataset a share that is held out."""
    pair = [given.value(name) for name in ("sources", "eval_sources")]
    if all(isinstance(each, dict) for each in pair):
        splits = [str(each.get("split")) for each in pair]
        found = re.fullmatch(r"train\[(\d+)%:\]", splits[1])
        if found and splits[0] == f"train[:{found[1]}%]":
            given.take("eval_sources")
            given.given["sources"] = Given({**pair[0], "split": "train"}, "dataset")
            given.given["validation"] = Given((100 - int(found[1])) / 100, "dataset_val")


def _read_sources(given: Conversion, name: str, path: Path) -> Entries:
    """Return an entry for each dataset that is named; raises nothing, and notes what is unclear."""
    readers: dict[str, Callable[..., Entries]] = {
        "axolotl": _axolotl, "llamafactory": _factory, "torchtune": _torchtune, "trl": _trl,
    }  # fmt: skip
    return readers[given.kind](given, given.take(name), path, name == "eval_sources")


def _entry(given: Conversion, is_evaluation: bool, **keys: Any) -> dict[str, Any]:
    """Return a mapping of what is given, where a part of a split is a weight."""
    split = str(keys.pop("split", None) or "")
    name, bracket, rest = split.partition("[")
    slice_ = bracket + rest
    if slice_ and (share := re.fullmatch(r"\[:(\d+)%\]", slice_)) and not is_evaluation:
        keys["weight"] = int(share[1]) / 100
    elif slice_:
        given.note(f"split {split}", f"all of {name} is taken; max_tokens of a source limits it")
    if name and (name != "train" or is_evaluation):
        keys["split"] = name
    return {key: value for key, value in keys.items() if value not in (None, "", {})}


def _axolotl(given: Conversion, entries: Any, _: Path, is_evaluation: bool) -> Entries:
    found: Entries = []
    entries = entries if isinstance(entries, list) else [entries]
    for each in (e if isinstance(e, dict) else {"path": e} for e in entries):
        kind = each.get("type") or ""
        columns = {}
        if isinstance(kind, Mapping):
            ours = {"instruction": "instruction", "input": "input", "output": "output",
                    "system": "system"}  # fmt: skip
            columns = {kind[f"field_{k}"]: v for k, v in ours.items() if f"field_{k}" in kind}
            columns = {theirs: o for theirs, o in columns.items() if theirs != o}
            given.note(f"{each.get('path')}", "the prompt format of `type` is the template's")
            kind = ""
        if (field := each.get("field") or each.get("text_column")) and field != "text":
            columns[field] = "text"
        if (field := each.get("field_messages")) not in (None, "messages", "conversations"):
            columns[field] = "conversations" if _is_sharegpt(each) else "messages"
        elif field == "conversations" and not _is_sharegpt(each):
            columns[field] = "messages"
        files = each.get("data_files")
        files = files if isinstance(files, list) else [files]
        form = next((ours for k, ours in FORMATS.items() if str(kind).startswith(k)), None)
        known = re.match(r"chat_template|messages", str(kind)) or form or not kind
        if not known:
            given.note(f"{each.get('path')}", f"type {kind}: the columns tell the format")
        for file in files:
            path = each.get("path")
            if file:
                path = (
                    file if path in ("json", "csv", "parquet", "text") else f"sources/{path}/{file}"
                )
                given.note(f"{file}", "hf download it into sources/, or name where it is")
            found.append(_entry(
                given, is_evaluation, path=path, subset=each.get("name"), split=each.get("split"),
                revision=each.get("revision"), format=form, columns=columns,
            ))  # fmt: skip
    return found


def _is_sharegpt(each: Mapping[str, Any]) -> bool:
    mapping = each.get("message_property_mappings") or {}
    role = mapping.get("role") or each.get("message_field_role") or "from"
    return role == "from"


def _factory(given: Conversion, names: Any, path: Path, is_evaluation: bool) -> Entries:
    """Look names up in dataset_info.json, beside the config or in LLaMA-Factory's `data`."""
    folder, known = Path(given.value("dataset_dir", "data")), {}
    for base in (Path(), *path.absolute().parents):
        with suppress(OSError, ValueError):
            known = json.loads((base / folder / "dataset_info.json").read_text(encoding="utf-8"))
            folder = base / folder
            break
    given.given.pop("dataset_dir", None)
    found: Entries = []
    for name in names if isinstance(names, list) else re.split(r"\s*,\s*", str(names)):
        info = known.get(name, {})
        if not info:
            given.note(name, "no dataset_info.json has it: name its file or Hub dataset in sources")
        file = str(folder / info["file_name"]) if "file_name" in info else f"sources/{name}"
        named = info.get("columns") or {}
        chat = info.get("formatting") == "sharegpt"
        from_value = (info.get("tags") or {}).get("role_tag", "from") == "from"
        ours = {"prompt": "instruction", "query": "input", "response": "output", "system": "system",
                "history": "history", "tools": "tools",
                "messages": "conversations" if from_value else "messages"}  # fmt: skip
        columns = {theirs: ours[k] for k, theirs in named.items() if ours.get(k, theirs) != theirs}
        if given.pretraining:
            columns = {theirs: "text" for k, theirs in named.items() if k == "prompt"}
        found.append(_entry(
            given, is_evaluation, path=info.get("hf_hub_url") or file, subset=info.get("subset"),
            split=info.get("split"), columns=columns,
            format="alpaca" if info and not chat and not given.pretraining else None,
        ))  # fmt: skip
    return found


def _torchtune(given: Conversion, value: Any, _: Path, is_evaluation: bool) -> Entries:
    found: Entries = []
    for each in value if isinstance(value, list) else [value]:
        builder = str(each.get("_component_", "")).rpartition(".")[2]
        source = each.get("source") or TORCHTUNE.get(builder)
        if not source:
            given.note(f"{builder}", "name its file or Hub dataset in sources")
        files = each.get("data_files")
        ours = {"input": "prompt", "output": "completion", "conversations": "conversations",
                "messages": "messages", "instruction": "instruction"}  # fmt: skip
        columns = each.get("column_map") or {}
        columns = {t: ours[k] for k, t in columns.items() if k in ours and ours[k] != t}
        if (column := each.get("column") or each.get("conversation_column")) in (
            "text",
            "messages",
        ):
            column = None
        columns |= {column: "text" if "text" in builder else "conversations"} if column else {}
        found.append(_entry(
            given, is_evaluation, path=files or source or f"sources/{builder}",
            split=each.get("split"), subset=each.get("name"), columns=columns,
        ))  # fmt: skip
    return found


def _trl(given: Conversion, value: Any, _: Path, is_evaluation: bool) -> Entries:
    subset, split = given.take("subset"), given.take("split")
    test = given.take("test_split")
    if isinstance(value, Mapping) and "datasets" in value:
        share = value.get("test_split_size")
        if share:
            given.given.setdefault("validation", Given(share, "test_split_size"))
        value = value["datasets"]
    elif isinstance(value, Mapping):
        value = [{"id": name, "weight": weight} for name, weight in value.items()]
    elif not isinstance(value, list):
        value = [{"id": value, "config": subset, "split": split}]
    found: Entries = []
    for each in (e if isinstance(e, Mapping) else {"id": e} for e in value):
        weight = each.get("weight")
        path = each.get("id") or each.get("path") or each.get("name")
        found.append(_entry(
            given, is_evaluation, path=path, subset=each.get("config") or each.get("subset"),
            split=each.get("split"), weight=None if weight == 1 else weight,
        ))  # fmt: skip
        if test and not is_evaluation and FILE.search(str(path)) is None:
            held_out = {"id": path, "split": test, "config": each.get("config")}
            given.given.setdefault("eval_sources", Given([held_out], "dataset_test_split"))
    return found
