"""Reads recipes and flags into setting values, all faults at once; prints `--help`."""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, get_origin

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
)
from utils.config.errors import ConfigurationError
from utils.config.recipes import EXTENDS, read_recipes
from utils.config.unknown_names import unknown_name

CONFIG_FLAG = "config"
_TRUTHS = {
    **dict.fromkeys(("true", "yes", "t", "y", "1"), True),
    **dict.fromkeys(("false", "no", "f", "n", "0"), False),
}

# Returns the values with some put back to their defaults or derived, and notes of it.
Settlement = Callable[[SettingValues], SettingValues]


def read_settings(
    argument_classes: Sequence[type],
    argv: Sequence[str] | None = None,
    *,
    settle: Sequence[Settlement] = (),
    checks: Sequence[Check] = (),
    prog: str | None = None,
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
        print_help(declared, prog, description)
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
            values = settlement(values)
    if complete:
        missing = [
            name
            for name, declaration in declared.items()
            if declaration.required and name not in {*values.given, *values.unusable}
        ]
        problems += [f"{name} is required: {declared[name].help}" for name in missing]
        values = replace(values, unusable=values.unusable | set(missing))
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
        shown, where = (f"--{name}", "") if is_flag else (name, f"{entry.source}: ")
        if name not in declared:
            problems.append(where + _unknown(shown, name, declared, refused))
            continue
        try:
            value = value_of_words(declared[name], entry.value) if is_flag else entry.value
            given[name] = replace(entry, value=checked_value(declared[name], value))
        except WrongValueError as error:
            problems.append(f"{where}{shown}: {error}")
            faulty.add(name)
    named = set(re.findall(r"\w+", " ".join(problems))) & declared.keys()
    return SettingValues(declared, given, frozenset(faulty | named - given.keys())), problems


def _unknown(
    shown: str, name: str, declared: Mapping[str, Declaration], refused: Mapping[str, str]
) -> str:
    if name in refused:
        return f"{shown} cannot be set here: {refused[name]}"
    if name == CONFIG_FLAG:
        return f"a recipe names others with {EXTENDS}"
    return unknown_name(shown, name, [*declared, CONFIG_FLAG])


def read_flags(
    argv: Sequence[str], declared: Mapping[str, Declaration]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the words after each flag by the setting's name, and the faults of the line.

    `--name=value`, `--other-spelling` and `--no_switch` (its word is false) are understood.
    """
    flags: dict[str, list[str]] = {}
    problems = []
    for flag, *rest in _split_by_flag(argv):
        if not flag.startswith("--"):
            way = f"--config {flag}" if flag.endswith((".yaml", ".yml")) else "--NAME VALUE"
            problems.append(f"unexpected argument {flag!r}: give it as {way}")
            continue
        option, equals, attached = flag.removeprefix("--").partition("=")
        name = option.replace("-", "_")
        words = [attached, *rest] if equals else rest
        switch = declared.get(name.removeprefix("no_"))
        if name not in declared and switch is not None and bool in switch.types and not words:
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
    is_list = any(get_origin(each) is list for each in declaration.types)
    if list(words) == ["null"]:
        return None
    if declaration.default == [] and list(words) in (["none"], ["None"]):
        return None
    if not words and bool in declaration.types:
        return True
    if not words:
        choices = ", ".join(map(str, declaration.choices or ()))
        what = f"one of {choices}" if choices else "at least one value" if is_list else "a value"
        raise WrongValueError(f"expected {what}")
    values = [_value_of_word(declaration, word) for word in words]
    if len(values) > 1 and not is_list:
        raise WrongValueError(f"unexpected argument {words[1]!r} after its value")
    return values if len(values) > 1 else values[0]


def _value_of_word(declaration: Declaration, word: str) -> Any:
    if bool in declaration.types and word.lower() in _TRUTHS:
        return _TRUTHS[word.lower()]
    for number in (int, float):
        if number in declaration.types:
            try:
                return number(word)
            except ValueError:
                continue
    return word


def print_help(
    declared: Mapping[str, Declaration], prog: str | None, description: str | None
) -> None:
    """Print every setting under the group of its class, with type, help and default."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        usage="%(prog)s [--config RECIPE.yaml ...] [--SETTING VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        f"--{CONFIG_FLAG}",
        nargs="+",
        metavar="RECIPE.yaml",
        help="recipe files; later ones win over earlier ones, flags over all of them",
    )
    groups: dict[type, Any] = {}
    for name, declaration in declared.items():
        owner = declaration.owner
        if owner not in groups:
            title = getattr(owner, "_argument_group_name", owner.__name__)
            groups[owner] = parser.add_argument_group(title)
        text = declaration.help + (" (required)" if declaration.required else "")
        if declaration.default not in (None, [], {}):
            text += f" (default: {declaration.default})"
        groups[owner].add_argument(
            f"--{name}", metavar=_placeholder(declaration), help=text.replace("%", "%%")
        )
    parser.print_help()


def _placeholder(declaration: Declaration) -> str:
    if declaration.choices is not None:
        return "|".join(
            str(choice) for choice in declaration.choices if choice not in (True, False)
        )
    words = {bool: "true|false", int: "INTEGER", float: "NUMBER", dict: "JSON", list: "VALUE ..."}
    types = [get_origin(each) or each for each in declaration.types]
    return next((word for each, word in words.items() if each in types), "TEXT")


def _split_by_flag(argv: Sequence[str]) -> list[list[str]]:
    """Cut the command line before every `--flag`; words before the first stand alone."""
    groups: list[list[str]] = []
    for word in argv:
        if word.startswith("--") or not groups or not groups[-1][0].startswith("--"):
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups
