"""The texts of `--help`, `--help NAME` and `--print_config`."""

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

HELP_WIDTH = 98  # columns of help texts

OF_A_COMMAND = ("dry_run", "assume", "suggest")  # --print_config leaves them out


def help_text(
    declared: Mapping[str, Declaration], prog: str, description: str, words: Sequence[str] = ()
) -> str:
    """Return the text of `--help` (common settings), `--help all` or `--help NAME ...`.

    words: the words after `--help`. NAME is a setting or a topic. Raises ConfigurationError for any
    other name.
    """
    is_run = "train_data" in declared
    if is_run and not words:
        description = description.partition("\n")[0]
    head = f"usage: {prog} [--config RECIPE.yaml ...] [--SETTING VALUE ...]\n\n{description}\n"
    if list(words) == ["all"] or not (words or is_run):
        return head + "\n".join(_full_help(declared)) + "\n"
    if not words:
        return head + "\n".join(_short_help(declared, prog)) + "\n"
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
    texts = [_setting_page(declared[each]) if each in declared else topics[each] for each in names]
    return "\n\n".join("\n".join(text) for text in texts) + "\n"


def _topics(declared: Mapping[str, Declaration]) -> dict[str, list[str]]:
    """Return {topic: lines of `--help TOPIC`} of topics with two or more declared settings."""
    topics = {}
    for topic, content in help_file()["topics"].items():
        found = [declared[name] for name in content["settings"].split() if name in declared]
        if len(found) > 1:
            lines = [line for each in found for line in _setting_lines(each)]
            topics[topic] = [content["about"], *lines]
    return topics


def _short_help(declared: Mapping[str, Declaration], prog: str) -> Iterator[str]:
    texts = help_file()
    left_out = texts["fine_tuning_only"].split() if prog == "pretrain.py" else []
    for title, names in texts["short"].items():
        yield f"\n{title}"
        for name in names.split():
            if name in left_out:
                continue
            declaration = declared[name]
            sentence = re.split(r"(?<=[a-z`)])\. ", declaration.help)[0].rstrip(".")
            text = textwrap.shorten(sentence, 160, placeholder=" ...") + _default_text(declaration)
            yield from _two_columns(f"--{name} {placeholder(declaration)}", text)
    yield "\nThe command"
    for flag, text in texts["flags"].items():
        yield from _two_columns(f"--{flag}", text)
    topics = f"A topic: --help {'|'.join(_topics(declared))}"
    yield ""
    yield from textwrap.wrap(topics, HELP_WIDTH, break_long_words=False)
    yield (
        f"All {len(declared)} settings: --help all. One of them: --help learning_rate. "
        "To read: docs/howto.md"
    )


def _two_columns(left: str, right: str, width: int = 38) -> list[str]:
    name, _, value = left.partition(" ")
    if len(value) > (room := width - len(name) - 4):
        value = f"{value[: max(0, room - 3)].rpartition('|')[0]}|...".lstrip("|")
    left = f"  {name} {value}".ljust(width)
    return textwrap.wrap(
        left + right, HELP_WIDTH, subsequent_indent=" " * width, break_on_hyphens=False
    )


def _full_help(declared: Mapping[str, Declaration]) -> Iterator[str]:
    """Yield the lines of `--help all`: class docstrings, and all settings with help and default."""
    yield "\nRecipes are YAML files of settings; later ones win over earlier ones, flags over all."
    for owner, declarations in itertools.groupby(declared.values(), lambda each: each.owner):
        yield f"\n{owner.__doc__}"
        for declaration in declarations:
            yield from _setting_lines(declaration)


def _setting_lines(declaration: Declaration) -> list[str]:
    """Return the help lines of a setting: its flag, then the indented help text."""
    value, text, indent = placeholder(declaration), declaration.help, " " * 6
    if len(value) > 80:
        value, text = "CHOICE", f"{text}; one of {value.replace('|', ', ')}"
    text += _default_text(declaration)
    text = textwrap.fill(text, 96, initial_indent=indent, subsequent_indent=indent)
    return [f"  --{declaration.name} {value}", text]


def _default_text(declaration: Declaration) -> str:
    if declaration.required:
        return " (required)"
    nothing = declaration.default in (None, [], {}, "")
    return "" if nothing else f" (default: {shown(declaration.default)})"


def _setting_page(declaration: Declaration) -> list[str]:
    """Return the lines of `--help NAME` on a setting.

    The lines have the help text, the library of the setting, the settings that switch it off, and
    documentation pages.
    """
    name = declaration.name
    causes = dict.fromkeys(cause for cause, _, names in RULES if name in names.split())
    pages = [page for page, names in help_file()["pages"].items() if name in names.split()]
    facts = {
        "a setting of": _declaring_library(declaration),
        "no effect with some values of": ", ".join(causes),
        "documents": ", ".join([*pages, "docs/settings.md"]),
    }
    lines = [line for fact, text in facts.items() if text for line in _two_columns(fact, text)]
    return [*_setting_lines(declaration), *lines]


def _declaring_library(declaration: Declaration) -> str:
    """Return the library that declares a setting and its default: Stoker, trl or transformers."""
    owners = declaration.owner.__mro__
    owner = next(each for each in owners if declaration.name in inspect.get_annotations(each))
    library = owner.__module__.partition(".")[0]
    return "Stoker" if library == "utils" else library


def config_text(values: SettingValues, every: bool) -> str:
    """Return the text of `--print_config`: a recipe with each setting's source in a comment.

    Derived settings are comments, because the script derives them again. With `every`, the text
    also has all defaults, as comments.
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
            library = _declaring_library(values.declared[name])
            defaults.append(entry_text(name, values.written(name), f"default ({library})"))
    moot = [f"# {note}" for note in values.notes if " has no effect: " in note]
    parts = ["".join(lines), "\n".join(moot)]
    for title, texts in {"Derived, and again at each start": derived, "Defaults": defaults}.items():
        if texts:
            parts.append(textwrap.indent(f"{title}:\n{''.join(texts)}", "# "))
    return "\n\n".join(part.strip() for part in parts if part) + "\n"
