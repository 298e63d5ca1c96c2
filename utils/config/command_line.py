"""Reader of settings from flags and recipes, with all faults in one error."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    checked_value,
    declared_settings,
    placeholder,
    unknown_name,
)
from utils.config.display import config_text, help_text
from utils.config.errors import Answer, ConfigurationError
from utils.config.recipes import read_recipes

CONFIG_FLAG = "config"
_TRUTHS = {
    **dict.fromkeys(("true", "yes", "t", "y", "1"), True),
    **dict.fromkeys(("false", "no", "f", "n", "0"), False),
}

# A function that resets settings to defaults or derives settings, with a line in `notes`.
Settlement = Callable[[SettingValues], None]


def read_settings(
    argument_classes: Sequence[type],
    argv: Sequence[str] | None = None,
    settle: Sequence[Settlement] = (),
    checks: Sequence[Check] = (),
    prog: str = "",
    description: str | None = None,
) -> SettingValues:
    """Read the settings that the dataclasses declare, from flags, recipes and defaults.

    Flags win over recipes, later recipes win over earlier ones. `settle` has functions that reset
    settings without effect and derive missing settings; `checks` has functions that yield faults. A
    function of either list ends at a missing or faulty setting. Raises ConfigurationError with
    every fault. `--help` exits with code 0. `--print_config` checks the settings as for a dry run,
    then raises Answer with the text to print.
    """
    declared = declared_settings(argument_classes)
    argv = ["--help" if word == "-h" else word for word in (sys.argv[1:] if argv is None else argv)]
    flags, problems = read_flags(argv)
    if "help" in flags:
        sys.stdout.write(help_text(declared, prog, description or "", flags["help"]))
        raise SystemExit(0)
    printed = flags.pop("print_config", None)
    if printed is not None and "dry_run" in declared:
        flags["dry_run"] = ["true"]
    entries, recipe_problems = read_recipes(flags.pop(CONFIG_FLAG, []))
    problems += recipe_problems
    complete = not problems  # a missing setting may be in a faulty file
    entries |= {name: Given(words, f"--{name}", FLAGS_RANK) for name, words in flags.items()}
    values = _checked_values(entries, declared, problems)
    for settlement in settle:
        with suppress(UnusableSettingError):  # the fault is already in `problems`
            settlement(values)
    if complete:
        for check in (check_required, *checks):
            with suppress(UnusableSettingError):  # the fault is already in `problems`
                problems.extend(check(values))
    if printed not in (None, [], ["all"]):
        problems.append(f"--print_config: expected nothing or all, got {' '.join(printed)}")
    if problems:
        raise ConfigurationError(problems)
    if printed is not None:
        raise Answer(config_text(values, every=bool(printed)))
    return values


def check_required(values: SettingValues) -> Iterator[str]:
    """Yield a fault for each missing required setting, and mark the setting unusable."""
    for name, declaration in values.declared.items():
        if declaration.required and name not in {*values.given, *values.unusable}:
            values.unusable.add(name)
            yield f"{name} is required: {declaration.help}"


def _checked_values(
    entries: Mapping[str, Given], declared: Mapping[str, Declaration], problems: list[str]
) -> SettingValues:
    """Return the given values in the types of the settings; add faults to `problems`."""
    values = SettingValues(declared, {})
    for name, entry in entries.items():
        is_flag, value = entry.rank == FLAGS_RANK, entry.value
        place, written = ("", f"--{name}") if is_flag else (f"{entry.source}: ", name)
        if name not in declared:
            problems.append(place + unknown_name(written, [*declared, CONFIG_FLAG]))
            values.unusable.add(name)
            continue
        try:
            if is_flag:
                value = value_of_words(declared[name], value)
            values.given[name] = replace(entry, value=checked_value(declared[name], value))
        except ValueError as error:
            problems.append(f"{place}{written}: {error}")
            values.unusable.add(name)
    return values


def read_flags(argv: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return {flag: words after the flag} and faults; `--a-b=word` is the same as `--a_b word`."""
    flags: dict[str, list[str]] = {}
    problems = []
    words: list[str] | None = None
    for word in argv:
        if word.startswith("--"):
            option, equals, attached = word.removeprefix("--").partition("=")
            name, words = option.replace("-", "_"), [attached] if equals else []
            if name in flags:
                problems.append(f"--{name} is given twice")
            flags[name] = words
        elif words is not None:
            words.append(word)
        else:
            way = f"--config {word}" if word.endswith((".yaml", ".yml")) else "--NAME VALUE"
            problems.append(f"unexpected argument {word!r}: give it as {way}")
    if flags.get(CONFIG_FLAG) == []:
        problems.append(f"--{CONFIG_FLAG}: expected at least one recipe file")
    return flags, problems


def value_of_words(declaration: Declaration, words: Sequence[str]) -> Any:
    """Return the value of the words after a flag; raises ValueError for a wrong number of words."""
    if not words and bool in declaration.types:
        return True
    if not words:
        raise ValueError(f"expected {placeholder(declaration)}")
    if len(words) > 1 and list not in declaration.origins:
        raise ValueError(f"unexpected argument {words[1]!r} after its value")
    if len(words) > 1:
        return list(words)
    word = words[0]
    if word in (("null", "none", "None") if declaration.default == [] else ("null",)):
        return None
    if bool in declaration.types and word.lower() in _TRUTHS:
        return _TRUTHS[word.lower()]
    for number in (int, float):
        if number in declaration.types:
            with suppress(ValueError):
                return number(word)
    return word
