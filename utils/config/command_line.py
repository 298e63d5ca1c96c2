"""Parser of settings from flags and recipes (YAML files). One error lists all faults."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from utils.config.declarations import (
    FLAGS_RANK,
    Declaration,
    SettingsCheck,
    SettingValue,
    SettingValues,
    UnusableSettingError,
    checked_value,
    declared_settings,
    placeholder,
    shown,
)
from utils.config.display import config_text, help_text
from utils.config.errors import Answer, ConfigurationError
from utils.config.foreign_words import other_names, our_name, refused, unknown_name
from utils.config.recipes import read_recipes, scalar

CONFIG_FLAG = "config"
FOREIGN_COMMANDS = ("train", "sft", "pretrain", "preprocess")  # as in axolotl train, trl sft
MIN_FOREIGN_SETTINGS = 4  # this many unknown settings suggest a recipe of another toolkit
_TRUTHS = {
    **dict.fromkeys(("true", "yes", "t", "y", "1"), True),
    **dict.fromkeys(("false", "no", "f", "n", "0"), False),
}

# A word of Hydra's command lines, such as lr=3e-4, optimizer.lr=3e-4 or +experiment=small.
_OVERRIDE = re.compile(r"[+~]*[A-Za-z_][\w.@]*=")

# A function that resets or derives settings and adds a line to `notes` for each.
Derivation = Callable[[SettingValues], None]


def read_settings(
    argument_classes: Sequence[type],
    argv: Sequence[str] | None = None,
    settle: Sequence[Derivation] = (),
    checks: Sequence[SettingsCheck] = (),
    prog: str = "",
    description: str | None = None,
) -> SettingValues:
    """Return the settings that the dataclasses declare, read from flags, recipes and defaults.

    A flag wins over recipes, and a later recipe wins over an earlier one. settle: functions that
    reset settings without effect and derive missing ones. checks: functions that yield faults. A
    function ends early if it reads a missing or faulty setting. Raises ConfigurationError with all
    faults, Answer with the text of `--print_config`, and SystemExit after `--help`.
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
    complete = not problems  # a faulty file may have the settings that seem to be missing
    entries = dict(without_sections(entries, declared))
    entries |= {name: SettingValue(words, f"--{name}", FLAGS_RANK) for name, words in flags.items()}
    values = _checked_values(entries, declared, problems)
    problems[:0] = _import_advice(entries, values)
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


def _import_advice(entries: Mapping[str, SettingValue], values: SettingValues) -> Iterator[str]:
    """Yield the import command for each recipe that has many unknown settings."""
    names = (name for name in values.unusable - values.declared.keys() if "." not in name)
    unknown = [entries[name] for name in names]  # the importer's toolkits have flat configs
    files = Counter(each.source.rpartition(":")[0] for each in unknown if each.rank != FLAGS_RANK)
    for file, number in files.items():
        if number >= MIN_FOREIGN_SETTINGS:
            yield (
                f"{file}: if it is a config of axolotl, LLaMA-Factory or TRL, convert it with "
                f"python -m utils.importing {file} --output_dir imported"
            )


def check_required(values: SettingValues) -> Iterator[str]:
    """Yield an error text for each missing required setting; add its name to `unusable`."""
    for name, declaration in values.declared.items():
        if declaration.required and name not in {*values.given, *values.unusable}:
            values.unusable.add(name)
            yield f"{name} is required: {declaration.help}"


def _checked_values(
    entries: Mapping[str, SettingValue], declared: Mapping[str, Declaration], problems: list[str]
) -> SettingValues:
    """Convert the entries to the types of the settings. Add error texts to `problems`."""
    values = SettingValues(declared, {})
    # First whole mappings, then single keys (lr_scheduler_kwargs.min_lr), weakest source first.
    for name, entry in sorted(entries.items(), key=lambda item: "." in item[0] and item[1].rank):
        is_flag, value = entry.rank == FLAGS_RANK, entry.value
        place, written = ("", f"--{name}") if is_flag else (f"{entry.source}: ", name)
        if mapping := mapping_of(name, declared):
            path = name.partition(".")[2].split(".")
            values.given[mapping] = with_value(values.given.get(mapping), path, entry)
            continue
        if name not in declared:
            known = [*declared, CONFIG_FLAG] if is_flag else [*declared]
            typed = _value_as_typed(our_name(name, known), entry, declared)
            problems.append(place + unknown_name(written, known, typed))
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


def without_sections(
    entries: Mapping[str, SettingValue], declared: Mapping[str, Declaration]
) -> Iterator[tuple[str, SettingValue]]:
    """Yield (name, value) of all entries. A section `optimizer: {lr: 1}` becomes `optimizer.lr`."""
    for name, entry in entries.items():
        is_value = name in declared and f"{name}_overrides" not in declared
        has_answer = name in refused() or not other_names().get(name, "x").isidentifier()
        if isinstance(entry.value, dict) and entry.value and not (is_value or has_answer):
            inner = entry.value.items()
            parts = {f"{name}.{key}": replace(entry, value=value) for key, value in inner}
            yield from without_sections(parts, declared)
        else:
            yield name, entry


def mapping_of(name: str, declared: Mapping[str, Declaration]) -> str:
    """Return the setting to which a name SETTING.KEY adds a key, or "" for other names.

    lr_scheduler_kwargs.KEY is a key of lr_scheduler_kwargs, and model_config.KEY is a key of
    model_config_overrides.
    """
    head, dot, _ = name.partition(".")
    found = (each for each in (head, f"{head}_overrides") if each in declared)
    return next((each for each in found if dot and dict in declared[each].origins), "")


def with_value(
    mapping: SettingValue | None, path: Sequence[str], entry: SettingValue
) -> SettingValue:
    """Return a copy of the mapping with the value of `entry` at `path`, a list of nested keys.

    If the mapping has a higher rank than `entry`, return the mapping unchanged (see SettingValue).
    """
    if mapping is not None and mapping.rank > entry.rank:
        return mapping
    value = entry.value
    if entry.rank == FLAGS_RANK:
        parsed = [scalar(word) for word in value]
        value = parsed[0] if len(parsed) == 1 else parsed or True
    inner = whole = dict(mapping.value) if mapping and isinstance(mapping.value, dict) else {}
    for section in path[:-1]:
        before = inner.get(section)
        inner[section] = dict(before) if isinstance(before, dict) else {}
        inner = inner[section]
    inner[path[-1]] = value
    return SettingValue(whole, entry.source, entry.rank)


def _value_as_typed(ours: str, entry: SettingValue, declared: Mapping[str, Declaration]) -> str:
    """Return the value of `entry` as the user would type it after the setting's name `ours`.

    Returns "" if the value does not have the setting's type.
    """
    value, is_flag = entry.value, entry.rank == FLAGS_RANK
    with suppress(ValueError):
        if ours in declared:
            value = value_of_words(declared[ours], value) if is_flag else value
            value = checked_value(declared[ours], value)
        return f"{'' if is_flag else ':'} {shown(value)}"
    return ""


def read_flags(argv: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return {flag: words after the flag}, and a list of error texts.

    `--a-b=word` means `--a_b word`. Before the first flag and after --config, Hydra's form
    `a.b=word` means `--a.b word`. After other flags, `a.b=word` is a value of the flag.
    """
    flags: dict[str, list[str]] = {}
    problems = []
    name = ""
    words: list[str] | None = None
    for word in argv:
        is_recipe = word.endswith((".yaml", ".yml"))
        is_file = name == CONFIG_FLAG and is_recipe and Path(word).is_file()  # as lr=1/config.yaml
        may_override = words is None or (name == CONFIG_FLAG and not is_file)
        is_override = may_override and _OVERRIDE.match(word)
        if word.startswith("--") or is_override or re.fullmatch("-[a-z]", word):
            option, equals, attached = word.lstrip("-").partition("=")
            name, words = option.replace("-", "_"), [attached] if equals else []
            if name in flags:
                problems.append(f"--{name} is given twice")
            flags[name] = words
            words = None if is_override else words
        elif words is not None:
            words.append(word)
        else:
            hint = f"give it as {f'--config {word}' if is_recipe else '--NAME VALUE'}"
            advice = "leave it out: each script has one task" if word in FOREIGN_COMMANDS else hint
            problems.append(f"unexpected argument {word!r}: {advice}")
    if flags.get(CONFIG_FLAG) == []:
        problems.append(f"--{CONFIG_FLAG}: expected at least one recipe file")
    return flags, problems


def value_of_words(declaration: Declaration, words: Sequence[str]) -> Any:
    """Convert the words after a flag to a boolean, number, list or text, or to None for `null`.

    Raises ValueError if there are too few or too many words.
    """
    if not words and bool in declaration.types:
        return True
    if not words:
        none = "; null for none" if declaration.default == [] else ""
        raise ValueError(f"expected {placeholder(declaration)}{none}")
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
