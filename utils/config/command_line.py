"""Reads recipes and flags into setting values, all faults at once; prints `--help`."""

import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from utils.config.declarations import (
    FLAGS_RANK,
    Check,
    Declaration,
    Given,
    SettingValues,
    UnusableSettingError,
    WrongValueError,
    checked_value,
    declared_settings,
    refused_settings,
    shown,
)
from utils.config.errors import ConfigurationError
from utils.config.recipes import EXTENDS, read_recipes
from utils.config.unknown_names import unknown_name

CONFIG_FLAG = "config"
_TRUTHS = {
    **dict.fromkeys(("true", "yes", "t", "y", "1"), True),
    **dict.fromkeys(("false", "no", "f", "n", "0"), False),
}

# Puts values back to their defaults or derives some, and notes it.
Settlement = Callable[[SettingValues], None]


def read_settings(
    argument_classes: Sequence[type],
    argv: Sequence[str] | None = None,
    *,
    settle: Sequence[Settlement] = (),
    checks: Sequence[Check] = (),
    prog: str = "",
    description: str | None = None,
) -> SettingValues:
    """Read the settings that the dataclasses declare from flags, recipes and defaults.

    Flags win over recipes (`--config A.yaml B.yaml`, which is no field of a class), later recipes
    over earlier ones, all of them over the defaults. `argv` is the command line without the
    program's name (None: this process's). `settle` puts what a stronger source makes moot back to
    its default and derives what nobody gave. Then each check gets all values and yields one line
    for each contradiction; one that reads a missing or faulty setting is left out.

    Raises ConfigurationError with every fault of recipes, flags and checks. `--help` prints and
    leaves the process with 0, as argparse does.
    """
    declared = declared_settings(argument_classes)
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        sys.stdout.write(help_text(declared, prog, description or ""))
        raise SystemExit(0)
    flags, problems = read_flags(argv, declared)
    recipes, recipe_problems = read_recipes(flags.pop(CONFIG_FLAG, []))
    problems += recipe_problems
    complete = not problems  # or a file or word is missing that may have said more
    entries = recipes | {
        name: Given(words, f"--{name}", FLAGS_RANK) for name, words in flags.items()
    }
    values, faults = _checked(declared, refused_settings(argument_classes), entries)
    problems += faults
    for settlement in settle:
        with suppress(UnusableSettingError):  # a fault above says why
            settlement(values)
    if complete:
        for name, declaration in declared.items():
            if declaration.required and name not in {*values.given, *values.unusable}:
                problems.append(f"{name} is required: {declaration.help}")
                values.unusable.add(name)
        for check in checks:
            with suppress(UnusableSettingError):  # a fault above says why
                problems.extend(check(values))
    if problems:
        raise ConfigurationError(problems)
    return values


def _checked(
    declared: Mapping[str, Declaration], refused: Mapping[str, str], entries: Mapping[str, Given]
) -> tuple[SettingValues, list[str]]:
    """Return the entries that are settings with a value of their type, and a line for each other.

    A setting that such a line names is unusable unless it is given: an unknown or refused name may
    have stood for it, so nothing is to be concluded from its absence.
    """
    given: dict[str, Given] = {}
    problems = []
    faulty = set()
    for name, entry in entries.items():
        is_flag = entry.rank == FLAGS_RANK
        written, where = (f"--{name}", "") if is_flag else (name, f"{entry.source}: ")
        if name in refused and name not in declared:
            problems.append(f"{where}{written} cannot be set here: {refused[name]}")
        elif name == CONFIG_FLAG:
            problems.append(f"{where}a recipe names others with {EXTENDS}")
        elif name not in declared:
            problems.append(where + unknown_name(written, name, [*declared, CONFIG_FLAG]))
        else:
            try:
                value = value_of_words(declared[name], entry.value) if is_flag else entry.value
                given[name] = replace(entry, value=checked_value(declared[name], value))
            except WrongValueError as error:
                problems.append(f"{where}{written}: {error}")
                faulty.add(name)
    named = set(re.findall(r"\w+", " ".join(problems))) & declared.keys()
    return SettingValues(declared, given, faulty | (named - given.keys())), problems


def read_flags(
    argv: Sequence[str], declared: Mapping[str, Declaration]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the words after each flag by the setting's name, and the faults of the line.

    `--name=value`, `--other-spelling` and `--no_switch` (its word is false) are understood.
    """
    flags: dict[str, list[str]] = {}
    problems = []
    words: list[str] | None = None
    for word in argv:
        if not word.startswith("--"):
            if words is None:
                way = f"--config {word}" if word.endswith((".yaml", ".yml")) else "--NAME VALUE"
                problems.append(f"unexpected argument {word!r}: give it as {way}")
            else:
                words.append(word)
            continue
        option, equals, attached = word.removeprefix("--").partition("=")
        name, words = option.replace("-", "_"), [attached] if equals else []
        switch = declared.get(name.removeprefix("no_"))
        if name not in declared and switch is not None and bool in switch.types and not equals:
            name, words = switch.name, ["false"]
        if name in flags:
            problems.append(f"--{name} is given twice")
        flags[name] = words
    if flags.get(CONFIG_FLAG) == []:
        problems.append(f"--{CONFIG_FLAG}: expected at least one recipe file")
    return flags, problems


def value_of_words(declaration: Declaration, words: Sequence[str]) -> Any:
    """Return what a flag's words stand for, to be checked as a value of a recipe is.

    Raises WrongValueError where the number of words is wrong.
    """
    is_list = list in declaration.origins
    empty = ("null", "none", "None") if declaration.default == [] else ("null",)
    if len(words) == 1 and words[0] in empty:
        return None
    if not words:
        if bool in declaration.types:
            return True
        raise WrongValueError(f"expected {_placeholder(declaration)}")
    if len(words) > 1 and not is_list:
        raise WrongValueError(f"unexpected argument {words[1]!r} after its value")
    values = [_value_of_word(declaration, word) for word in words]
    return values if len(values) > 1 else values[0]


def _value_of_word(declaration: Declaration, word: str) -> Any:
    if bool in declaration.types and word.lower() in _TRUTHS:
        return _TRUTHS[word.lower()]
    for number in (int, float):
        if number in declaration.types:
            with suppress(ValueError):
                return number(word)
    return word


def help_text(declared: Mapping[str, Declaration], prog: str, description: str) -> str:
    """Return every setting under the group of its class, with type, help and default."""
    lines = [
        f"usage: {prog} [--{CONFIG_FLAG} RECIPE.yaml ...] [--SETTING VALUE ...]\n",
        description,
        "\nRecipes are YAML files of settings; later ones win over earlier ones, flags over all.",
    ]
    for owner, declarations in itertools.groupby(declared.values(), lambda each: each.owner):
        lines.append(f"\n{getattr(owner, '_argument_group_name', owner.__name__)}:")
        for declaration in declarations:
            text = declaration.help + (" (required)" if declaration.required else "")
            if declaration.default not in (None, [], {}):
                text += f" (default: {shown(declaration.default)})"
            lines.append(f"  --{declaration.name} {_placeholder(declaration)}")
            indent = " " * 6
            lines.append(textwrap.fill(text, 96, initial_indent=indent, subsequent_indent=indent))
    return "\n".join(lines) + "\n"


def _placeholder(declaration: Declaration) -> str:
    if declaration.choices is not None:
        return "|".join(map(shown, declaration.choices))
    words = {bool: "true|false", int: "INTEGER", float: "NUMBER", dict: "JSON", list: "VALUE ..."}
    return next((word for each, word in words.items() if each in declaration.origins), "TEXT")
