"""Conversion of another toolkit's data settings to data recipes, one for each kind of documents."""

from collections.abc import Mapping, Sequence
from typing import Any

from utils.config.declarations import Given
from utils.importing.sources import Entries, read_sources
from utils.importing.toolkits import BY_DEFAULT, DATA, Conversion, listed

NO_LIMIT = 8192  # sequence_length in tokens if the config has no limit
NUMBER = "{0} documents there, a share here: write {0} / number of documents as validation_fraction"
CHATS = "messages"
# {format of a source: kind of its documents}. All other formats are chats.
KINDS = {
    "text": "text",
    **dict.fromkeys(("prompt_completion", "segments", "tokens"), "prompt_completion"),
}


def convert_data(given: Conversion, folder: str) -> None:
    """Convert all data settings to the data recipes and the training recipe in `given`.

    folder: the output_dir of the first data recipe. Further recipes write to FOLDER-2, FOLDER-3.
    """
    groups = _divided(given, read_sources(given, "sources"))
    given.more_data = [{"output_dir": f"{folder}-{n}"} for n in range(2, len(groups) + 1)]
    given.data["output_dir"] = folder
    recipes = [given.data, *given.more_data]
    masked = given.kind != "trl" or given.take("assistant_only_loss")
    if not (masked or given.pretraining or "dataset_text_field" in given.given):
        given.change("assistant_only_loss: false", "of a chat TRL trains on every token, Stoker on "
                     "the answers; plain text is trained on whole in both")  # fmt: skip
    trained = []
    for recipe, (entries, share) in zip(recipes, groups, strict=True):
        recipe["sources"] = [e["path"] if e.keys() == {"path"} else e for e in entries]
        weight = "" if share is None else f"={share:g}"
        trained.append(f"{recipe['output_dir']}/train{weight}")
    apart = "" if len(recipes) == 1 else "datasets that are prepared apart"
    given.run["train_data"] = (trained, apart)
    _hold_out(given, recipes)
    given.take("dataset_dir")
    every = [entry for entries, _ in groups for entry in entries]
    if all(entry.get("format") in given.functions for entry in every):
        given.drop("train_on_inputs", BY_DEFAULT)
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
    _convert_template(given, recipes)
    tokenizer = given.take("tokenizer_config") or given.take("tokenizer_name_or_path")
    model, _ = given.run.get("model_name_or_path", ("", ""))
    given.data["tokenizer_name_or_path"] = tokenizer or model


def _convert_template(given: Conversion, recipes: Sequence[dict[str, Any]]) -> None:
    """Convert the chat template (a name, a text or a file) and its variables.

    recipes: the data recipes. Only recipes with chats get the variables.
    """
    variables = {**(given.take("chat_template_kwargs") or {})}
    if (thinking := given.take("enable_thinking")) is not None:
        variables["enable_thinking"] = thinking
    for recipe in recipes:
        has_chats = len(recipes) == 1 or _kind(given, recipe["sources"][0]) == CHATS
        recipe["chat_template_kwargs"] = variables if has_chats else {}
    named = DATA["templates"].get(given.kind, {})
    for key in ("template", "chat_template", "chat_template_jinja", "chat_template_path"):
        text = named.get(str(given.value(key)), str(given.value(key)))
        if "{" in text:
            given.template = text
            given.take(key)
        elif text.endswith(".jinja"):
            given.data["chat_template"] = text
            given.take(key)


def _divided(given: Conversion, entries: Entries) -> list[tuple[Entries, float | None]]:
    """Group the datasets by kind of documents, and return (entries, None) for each data recipe.

    LLaMA-Factory's interleaved mixtures are not grouped. They give (entries, weight) for each
    dataset, where the weight is the dataset's share of the training.
    """
    strategy, shares = str(given.value("mix_strategy")), given.value("interleave_probs")
    if strategy.startswith("interleave") and len(entries) > 1:
        weights = [float(each) for each in listed(shares or [1] * len(entries))]
        for key in {"mix_strategy", "interleave_probs"} & given.given.keys():
            given.take(key)
            given.change(key, "shares of documents there, of packed sequences here")
        return [([entry], weight) for entry, weight in zip(entries, weights, strict=True)]
    kinds: dict[str, Entries] = {}
    for entry in entries:
        kinds.setdefault(_kind(given, entry), []).append(entry)
    return [(group, None) for group in kinds.values()] or [([], None)]


def _kind(given: Conversion, entry: Mapping[str, Any] | str) -> str:
    """Return the kind of a source's documents: text, prompt_completion, or messages for chats."""
    row_format = "" if isinstance(entry, str) else entry.get("format", "")
    return "prompt_completion" if row_format in given.functions else KINDS.get(row_format, CHATS)


def _hold_out(given: Conversion, recipes: Sequence[dict[str, Any]]) -> None:
    """Convert the evaluation data: named datasets, and a share of the training documents."""
    splits = []
    found = read_sources(given, "eval_sources") if given.value("eval_sources") else []
    kinds = [_kind(given, recipe["sources"][0]) for recipe in recipes if recipe["sources"]]
    for number, entry in enumerate(found):
        kind, name = _kind(given, entry), f"heldout_{number}" if number else "heldout"
        recipe = recipes[kinds.index(kind) if kind in kinds else 0]
        recipe.setdefault("eval_sources", []).append({"name": name, **entry})
        splits.append(f"{recipe['output_dir']}/{name}")
    share = given.value("validation")
    if isinstance(share, float | int) and share > 0:
        source = given.given.pop("validation").source
        if share >= 1 and given.kind == "trl" and given.value("eval_strategy", "no") == "no":
            given.change(source, f"{share} documents are held out there, none are here")
        else:
            given.data["validation_fraction"] = share
            for number, recipe in enumerate(recipes, 1):
                name = f"validation_{number}=" if number > 1 else ""
                splits.append(f"{name}{recipe['output_dir']}/validation")
            if share >= 1:
                given.change(source, NUMBER.format(share))
    given.drop("validation", "nothing is held out")
    if splits:
        given.put("eval_data", splits)


def limit_tokens(given: Conversion) -> None:
    """Limit the only source of a pretraining to 1.1 times the tokens of max_steps."""
    steps, sources = given.value("max_steps", 0), given.data["sources"]
    if not given.pretraining or not steps or steps < 0 or len(sources) != 1:
        return
    size, length = given.run["global_batch_size"][0], given.run["sequence_length"][0]
    entry = {"path": sources[0]} if isinstance(sources[0], str) else sources[0]
    given.data["sources"] = [{**entry, "max_tokens": steps * size * length * 11 // 10}]
    key = given.given["max_steps"].source
    given.note(f"{key}: {steps}", "max_tokens of the source is its tokens, and a tenth more")
