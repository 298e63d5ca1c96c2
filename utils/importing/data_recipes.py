"""Conversion of another toolkit's data settings to data recipes for texts, chats, completions."""

from collections.abc import Mapping, Sequence
from typing import Any

from utils.config.declarations import SettingValue
from utils.importing.sources import Entries, read_sources
from utils.importing.toolkits import BY_DEFAULT, DATA, Conversion, listed

NO_LIMIT = 8192  # sequence_length in tokens if the config has no limit
NUMBER = "{0} documents there, a share here: write {0} / number of documents as validation_fraction"
CHAT_FORMAT = "messages"
# {format of a source: kind of its documents}. All other formats are chats.
FOREIGN_FORMATS = {
    "text": "text",
    **dict.fromkeys(("prompt_completion", "segments", "tokens"), "prompt_completion"),
}


def convert_data(state: Conversion, folder: str) -> None:
    """Convert all data settings to the data recipes and the training recipe in `state`.

    folder: the output_dir of the first data recipe. Further recipes write to FOLDER-2, FOLDER-3.
    """
    groups = _group_datasets(state, read_sources(state, "sources"))
    state.more_data = [{"output_dir": f"{folder}-{n}"} for n in range(2, len(groups) + 1)]
    state.data["output_dir"] = folder
    recipes = [state.data, *state.more_data]
    masked = state.kind != "trl" or state.take("assistant_only_loss")
    if not (masked or state.pretraining or "dataset_text_field" in state.given):
        state.change("assistant_only_loss: false", "of a chat TRL trains on every token, Stoker on "
                     "the answers; plain text is trained on whole in both")  # fmt: skip
    trained = []
    for recipe, (entries, share) in zip(recipes, groups, strict=True):
        recipe["sources"] = [e["path"] if e.keys() == {"path"} else e for e in entries]
        weight = "" if share is None else f"={share:g}"
        trained.append(f"{recipe['output_dir']}/train{weight}")
    comment = "" if len(recipes) == 1 else "datasets that are prepared apart"
    state.run["train_data"] = (trained, comment)
    _convert_evaluation_data(state, recipes)
    state.take("dataset_dir")
    all_entries = [entry for entries, _ in groups for entry in entries]
    if all(entry.get("format") in state.functions for entry in all_entries):
        state.drop("train_on_inputs", BY_DEFAULT)
    length, overlong = state.value("sequence_length"), state.take("overlong")
    if length is None:
        length, overlong = NO_LIMIT, "error"
        state.drop("sequence_length", f"no limit there: raise {NO_LIMIT} until every document fits")
        state.given["sequence_length"] = SettingValue(length, "no limit there")
    state.move("sequence_length")
    if not state.pretraining:
        state.data["sequence_length"] = length
        state.data["on_overlong"] = "error" if overlong == "raise" else overlong
    tokens = state.take("add_tokens")
    if isinstance(tokens, Mapping):
        state.note("tokens", "special tokens are those of the tokenizer")
    elif tokens:
        state.data["add_tokens"] = listed(tokens)
    state.data["num_proc"] = state.take("num_proc") or None
    _convert_template(state, recipes)
    tokenizer = state.take("tokenizer_config") or state.take("tokenizer_name_or_path")
    model, _ = state.run.get("model_name_or_path", ("", ""))
    state.data["tokenizer_name_or_path"] = tokenizer or model


def _convert_template(state: Conversion, recipes: Sequence[dict[str, Any]]) -> None:
    """Convert the chat template (a name, a text or a file) and its variables.

    recipes: the data recipes. If there are several, only recipes with chats get the variables.
    """
    variables = {**(state.take("chat_template_kwargs") or {})}
    if (thinking := state.take("enable_thinking")) is not None:
        variables["enable_thinking"] = thinking
    for recipe in recipes:
        has_chats = len(recipes) == 1 or _document_kind(state, recipe["sources"][0]) == CHAT_FORMAT
        recipe["chat_template_kwargs"] = variables if has_chats else {}
    named = DATA["templates"].get(state.kind, {})
    for key in ("template", "chat_template", "chat_template_jinja", "chat_template_path"):
        text = named.get(str(state.value(key)), str(state.value(key)))
        if "{" in text:
            state.template = text
            state.take(key)
        elif text.endswith(".jinja"):
            state.data["chat_template"] = text
            state.take(key)


def _group_datasets(state: Conversion, entries: Entries) -> list[tuple[Entries, float | None]]:
    """Return (entries, weight) for each data recipe. entries: the datasets of the recipe.

    Datasets with the same kind of documents share a recipe without a weight (None). Exception: each
    dataset of an interleaved mixture (LLaMA-Factory) gets a separate recipe. Then the weight is the
    dataset's share of the training.
    """
    strategy, shares = str(state.value("mix_strategy")), state.value("interleave_probs")
    if strategy.startswith("interleave") and len(entries) > 1:
        weights = [float(each) for each in listed(shares or [1] * len(entries))]
        for key in {"mix_strategy", "interleave_probs"} & state.given.keys():
            state.take(key)
            state.change(key, "shares of documents there, of packed sequences here")
        return [([entry], weight) for entry, weight in zip(entries, weights, strict=True)]
    kinds: dict[str, Entries] = {}
    for entry in entries:
        kinds.setdefault(_document_kind(state, entry), []).append(entry)
    return [(group, None) for group in kinds.values()] or [([], None)]


def _document_kind(state: Conversion, entry: Mapping[str, Any] | str) -> str:
    """Return the kind of a source's documents: text, prompt_completion, or messages for chats."""
    row_format = "" if isinstance(entry, str) else entry.get("format", "")
    return (
        "prompt_completion"
        if row_format in state.functions
        else FOREIGN_FORMATS.get(row_format, CHAT_FORMAT)
    )


def _convert_evaluation_data(state: Conversion, recipes: Sequence[dict[str, Any]]) -> None:
    """Convert the evaluation data: named datasets, and a share of the training documents."""
    splits = []
    found = read_sources(state, "eval_sources") if state.value("eval_sources") else []
    kinds = [_document_kind(state, recipe["sources"][0]) for recipe in recipes if recipe["sources"]]
    for number, entry in enumerate(found):
        kind, name = _document_kind(state, entry), f"heldout_{number}" if number else "heldout"
        recipe = recipes[kinds.index(kind) if kind in kinds else 0]
        recipe.setdefault("eval_sources", []).append({"name": name, **entry})
        splits.append(f"{recipe['output_dir']}/{name}")
    share = state.value("validation")
    if isinstance(share, float | int) and share > 0:
        source = state.given.pop("validation").source
        if share >= 1 and state.kind == "trl" and state.value("eval_strategy", "no") == "no":
            state.change(source, f"{share} documents are held out there, none are here")
        else:
            state.data["validation_fraction"] = share
            for number, recipe in enumerate(recipes, 1):
                name = f"validation_{number}=" if number > 1 else ""
                splits.append(f"{name}{recipe['output_dir']}/validation")
            if share >= 1:
                state.change(source, NUMBER.format(share))
    state.drop("validation", "nothing is held out")
    if splits:
        state.put("eval_data", splits)


def limit_tokens(state: Conversion) -> None:
    """Limit a pretraining with a single source to 1.1 times the tokens of max_steps."""
    steps, sources = state.value("max_steps", 0), state.data["sources"]
    if not state.pretraining or not steps or steps < 0 or len(sources) != 1:
        return
    size, length = state.run["global_batch_size"][0], state.run["sequence_length"][0]
    entry = {"path": sources[0]} if isinstance(sources[0], str) else sources[0]
    state.data["sources"] = [{**entry, "max_tokens": steps * size * length * 11 // 10}]
    key = state.given["max_steps"].source
    state.note(f"{key}: {steps}", "max_tokens of the source is its tokens, and a tenth more")
