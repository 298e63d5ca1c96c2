"""The texts of `--help`, `--help NAME` and `--print_config`."""

import dataclasses
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from utils.config.declarations import Declaration, SettingValues, help_file, placeholder, shown
from utils.config.errors import ConfigurationError
from utils.config.foreign_words import refused, unknown_name
from utils.config.recipes import entry_text
from utils.config.rules import RULES

WIDTH = 98  # a hundred columns less two

OF_A_COMMAND = ("dry_run", "assume", "suggest")  # --print_config leaves them out
LIBRARIES = {
    "transformers": "https://huggingface.co/docs/transformers/main_classes/trainer",
    "trl": "https://huggingface.co/docs/trl/sft_trainer",
}


def help_text(
    declared: Mapping[str, Declaration], prog: str, description: str, words: Sequence[str] = ()
) -> str:
    """Return the text of `--help` (common settings), `--help all` or `--help NAME ...`.

    A name is that of a setting or a topic. Raises ConfigurationError for any other name; the
    message names similar settings and the topics.
    """
    is_run = "train_data" in declared
    if is_run and not words:
        description = description.partition("\n")[0]
    head = f"usage: {prog} [--config RECIPE.yaml ...] [--SETTING VALUE ...]\n\n{description}\n"
    if list(words) == ["all"] or not (words or is_run):
        return head + "\n".join(_all(declared)) + "\n"
    if not words:
        return head + "\n".join(_short(declared, prog)) + "\n"
    names = [word.lstrip("-").replace("-", "_") for word in words]
    topics = _topics(declared)
    problems = []
    for name in names:
        if name not in declared and name not in topics:
            alike = [each for each in declared if name in each] if name not in refused() else []
            near = f"; settings with {name} in their name: {', '.join(alike)}" if alike else ""
            problems.append(f"{unknown_name(name, declared)}{near}; topics: {', '.join(topics)}")
    if problems:
        raise ConfigurationError(problems)
    texts = [_story(each, declared) if each in declared else topics[each] for each in names]
    return "\n\n".join("\n".join(text) for text in texts) + "\n"


def _topics(declared: Mapping[str, Declaration]) -> dict[str, list[str]]:
    """Return the lines of `--help TOPIC` for each topic with settings of this script."""
    topics = {}
    for topic, content in help_file()["topics"].items():
        found = [declared[name] for name in content["settings"].split() if name in declared]
        if len(found) > 1:
            lines = [line for each in found for line in _entry(each)]
            topics[topic] = [content["about"], *lines]
    return topics


def _short(declared: Mapping[str, Declaration], prog: str) -> Iterator[str]:
    texts = help_file()
    left_out = texts["fine_tuning_only"].split() if prog == "pretrain.py" else []
    for title, names in texts["short"].items():
        yield f"\n{title}"
        for name in names.split():
            if name in left_out:
                continue
            declaration = declared[name]
            sentence = re.split(r"(?<=[a-z`)])\. ", declaration.help)[0].rstrip(".")
            text = textwrap.shorten(sentence, 160, placeholder=" ...") + _default(declaration)
            yield from _columns(f"--{name} {placeholder(declaration)}", text)
    yield "\nThe command"
    for flag, text in texts["flags"].items():
        yield from _columns(f"--{flag}", text)
    topics = f"A topic: --help {'|'.join(_topics(declared))}"
    yield ""
    yield from textwrap.wrap(topics, WIDTH, break_long_words=False)
    yield (
        f"All {len(declared)} settings: --help all. One of them: --help learning_rate. "
        "To read: docs/howto.md"
    )


def _columns(left: str, right: str, at: int = 38) -> list[str]:
    name, _, value = left.partition(" ")
    if len(value) > (room := at - len(name) - 4):
        value = f"{value[: max(0, room - 3)].rpartition('|')[0]}|...".lstrip("|")
    left = f"  {name} {value}".ljust(at)
    return textwrap.wrap(left + right, WIDTH, subsequent_indent=" " * at, break_on_hyphens=False)


def _all(declared: Mapping[str, Declaration]) -> Iterator[str]:
    """Yield the lines of `--help all`: class docstrings, and all settings with help and default."""
    yield "\nRecipes are YAML files of settings; later ones win over earlier ones, flags over all."
    for owner, declarations in itertools.groupby(declared.values(), lambda each: each.owner):
        yield f"\n{owner.__doc__}"
        for declaration in declarations:
            yield from _entry(declaration)


def _entry(declaration: Declaration) -> list[str]:
    """Return a setting's lines in `--help all` and in `--help TOPIC`."""
    text, indent = declaration.help + _default(declaration), " " * 6
    text = textwrap.fill(text, 96, initial_indent=indent, subsequent_indent=indent)
    return [f"  --{declaration.name} {placeholder(declaration)}", text]


def _default(declaration: Declaration) -> str:
    if declaration.required:
        return " (required)"
    nothing = declaration.default in (None, [], {}, "")
    return "" if nothing else f" (default: {shown(declaration.default)})"


def _story(name: str, declared: Mapping[str, Declaration]) -> Iterator[str]:
    """Yield the lines of `--help NAME`: all facts about one setting."""
    declaration = declared[name]
    value = placeholder(declaration)
    yield f"--{name} {value if len(value) < 80 else 'CHOICE'}"
    default = shown(declaration.default)
    text = "none: it is required" if declaration.required else default
    facts = {"": declaration.help, "default": f"{text} {_whose_default(declaration)}"}
    if declaration.choices is not None:
        facts["choices"] = ", ".join(map(shown, declaration.choices))
    if "train_data" in declared and (conflicts := list(_conflicts(name, declared))):
        facts["no effect"] = "; ".join(conflicts)
    documents = [page for page, names in help_file()["pages"].items() if name in names.split()]
    owners = [each for each in declaration.owner.__mro__ if name in inspect.get_annotations(each)]
    libraries = [LIBRARIES.get(each.__module__.partition(".")[0]) for each in owners]
    documents += [*filter(None, libraries)][:1]
    facts["documents"] = ", ".join([*documents, "docs/settings.md"])
    for fact, text in facts.items():
        yield from _columns(fact, text, at=13)


def _whose_default(declaration: Declaration) -> str:
    """Return who set the default and what it replaces, as in "(Stoker; transformers has 500)"."""
    if declaration.required:
        return ""
    sources: dict[str, type] = {}
    for each in declaration.owner.__mro__:
        if declaration.name in inspect.get_annotations(each):
            sources.setdefault(each.__module__.partition(".")[0], each)
    first, *others = sources
    text = f"({'Stoker' if first == 'utils' else first}"
    for library in others[:1]:
        field = next(
            each for each in dataclasses.fields(sources[library]) if each.name == declaration.name
        )
        made = field.default_factory
        value = field.default if made is dataclasses.MISSING else made()
        theirs = shown(getattr(value, "value", value))
        text += f"; {library} has {theirs}" if theirs != shown(declaration.default) else ""
    return text + ")"


def _conflicts(name: str, declared: Mapping[str, Declaration]) -> Iterator[str]:
    """Yield "while X is Y" or "unless X is Y" for each rule that makes the setting ineffective."""
    for cause, applies, names in RULES:
        if name in names.split():
            known = declared[cause].choices or (
                (True, False) if bool in declared[cause].types else ()
            )
            values = [shown(value) for value in known if applies(value)]
            if not values or applies(None):
                values = ["not given"] if applies(declared[cause].default) else values or ["given"]
            if len(values) < 4:
                yield f"while {cause} is {' or '.join(values)}"
            else:
                rest = [shown(value) for value in known if not applies(value)]
                yield f"unless {cause} is {' or '.join(rest)}"


def config_text(values: SettingValues, every: bool) -> str:
    """Return settings as a recipe, each with its source in a comment.

    Derived settings are comments, because the script derives them again. With `every`, defaults are
    listed as comments.
    """
    lines, derived, defaults = [], [], []
    for name in values:
        if name in OF_A_COMMAND:
            continue
        source, changed = values.source(name), values.changed(name)
        if values.rank(name) > 0:
            if every or changed:
                lines.append(entry_text(name, values.written(name), source))
        elif name in values.given and changed:
            derived.append(entry_text(name, values.written(name), source))
        elif every:
            whose = _whose_default(values.declared[name])
            defaults.append(entry_text(name, values.written(name), f"default {whose}"))
    moot = [f"# {note}" for note in values.notes if " has no effect: " in note]
    parts = ["".join(lines), "\n".join(moot)]
    for title, texts in {"Derived, and again at each start": derived, "Defaults": defaults}.items():
        if texts:
            parts.append(textwrap.indent(f"{title}:\n{''.join(texts)}", "# "))
    return "\n\n".join(part.strip() for part in parts if part) + "\n"
