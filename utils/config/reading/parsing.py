"""Parse recipes and command line into argument dataclasses, all faults at once."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from utils.config.errors import ConfigurationError
from utils.config.reading.command_line import (
    CONFIG_FLAG,
    SettingsParser,
    refusal,
    unknown_setting,
)
from utils.config.reading.declarations import Declaration
from utils.config.reading.interpolation import resolve_interpolations
from utils.config.reading.recipes import EXTENDS, RecipeReading, RecipeValue, read_recipes
from utils.config.reading.settings import Settings, SettingValues, UnusableSettingError
from utils.config.reading.values import WrongValueError, checked_value

Check = Callable[[SettingValues], Iterable[str]]


def parse_arguments(
    argument_classes: tuple[type, ...],
    argv: Sequence[str] | None = None,
    *,
    checks: Sequence[Check] = (),
    prog: str | None = None,
    description: str | None = None,
) -> Settings:
    """Read the settings that the dataclasses declare from flags, recipes and defaults.

    Flags win over recipes (`--config A.yaml B.yaml`, which is no field of a class), later recipes
    over earlier ones, all of them over the defaults. `argv` is the command line without the
    program's name (None: this process's). Each check gets all values and yields one line for each
    contradiction; a check that reads a missing or faulty setting is left out. A class with a
    classmethod `from_settings(given, values)` is built by it, others by their constructor; with a
    classmethod `settled_by_machine(values)` it decides settings left open, before the checks.

    Raises ConfigurationError with every fault of recipes, flags and checks. No class is
    instantiated before all of that is in order; a ValueError of a constructor becomes a
    ConfigurationError too. `--help` prints and leaves the process with 0, as argparse does.
    """
    parser = SettingsParser(argument_classes, prog, description)
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        parser.print_help()
        parser.exit()
    flags = parser.read(argv)
    recipes = _read_known_recipes(parser, flags.values.pop(CONFIG_FLAG, None) or [])
    sources = {name: recipe.source for name, recipe in recipes.values.items()}
    sources |= {name: f"--{name}" for name in flags.values}
    given = {name: recipe.value for name, recipe in recipes.values.items()} | flags.values
    given, faults = _checked(parser.declared, given)
    missing = _missing(parser.declared, given.keys() | faults.keys() | flags.faulty)
    problems = flags.problems + recipes.problems
    for name, fault in faults.items():
        where = sources[name] if name in flags.values else f"{sources[name]}: {name}"
        problems.append(f"{where}: {fault}")
    if not recipes.problems:
        problems += missing.values()
    unusable = frozenset(faults.keys() | missing.keys() | flags.faulty)
    values = SettingValues(parser.declared, given, sources, unusable)
    for name, (value, why) in _settled(argument_classes, values).items():
        given[name], sources[name] = value, why
    values = SettingValues(parser.declared, given, sources, unusable)
    problems += _contradictions(checks, values)
    if problems:
        raise ConfigurationError(problems)
    return Settings(tuple(_build(cls, given, values) for cls in argument_classes), values)


def _read_known_recipes(parser: SettingsParser, paths: Sequence[str]) -> RecipeReading:
    """Read the recipes; a key that is no setting is a problem and dropped."""
    reading = read_recipes(paths)
    known: dict[str, RecipeValue] = {}
    for name, recipe in reading.values.items():
        if name in parser.declared:
            known[name] = recipe
        elif name in parser.refused:
            reading.problems.append(f"{recipe.source}: {refusal(name, name, parser.refused)}")
        elif name == CONFIG_FLAG:
            reading.problems.append(f"{recipe.source}: a recipe names others with {EXTENDS}")
        else:
            reading.problems.append(
                f"{recipe.source}: {unknown_setting(name, name, parser.declared)}"
            )
    return RecipeReading(known, reading.problems)


def _checked(
    declared: Mapping[str, Declaration], given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Resolve `${...}` and check the types: returns the usable values, and a fault by setting."""
    defaults = {
        name: declaration.default
        for name, declaration in declared.items()
        if isinstance(declaration.default, str | int | float)
    }
    resolved, faults = resolve_interpolations(given, defaults | dict(given))
    usable: dict[str, Any] = {}
    for name, value in resolved.items():
        if name in faults:
            continue
        try:
            usable[name] = checked_value(declared[name], value)
        except WrongValueError as error:
            faults[name] = str(error)
    return usable, faults


def _missing(declared: Mapping[str, Declaration], given: Iterable[str]) -> dict[str, str]:
    present = set(given)
    return {
        name: f"{name} is required: {declaration.help}"
        for name, declaration in declared.items()
        if declaration.required and name not in present
    }


def _contradictions(checks: Sequence[Check], values: SettingValues) -> list[str]:
    problems: list[str] = []
    for check in checks:
        try:
            problems += check(values)
        except UnusableSettingError:
            continue
    return problems


def _settled(argument_classes: Iterable[type], values: SettingValues) -> dict[str, tuple[Any, str]]:
    settled: dict[str, tuple[Any, str]] = {}
    for argument_class in argument_classes:
        try:
            if hasattr(argument_class, "settled_by_machine"):
                settled |= argument_class.settled_by_machine(values)
        except UnusableSettingError:
            continue  # that fault is said
    return settled


def _build(argument_class: type, given: Mapping[str, Any], values: SettingValues) -> Any:
    own = {
        name: value
        for name, value in given.items()
        if values.declared[name].owner is argument_class
    }
    try:
        if hasattr(argument_class, "from_settings"):
            return argument_class.from_settings(own, values)
        return argument_class(**own)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
