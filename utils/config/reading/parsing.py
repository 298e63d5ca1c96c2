"""Parse recipes and command line into argument dataclasses, all faults at once."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from utils.config.reading.recipes import EXTENDS, RecipeValue, read_recipes
from utils.config.reading.settings import Settings, SettingValues, UnusableSettingError
from utils.config.reading.values import WrongValueError, checked_value

Check = Callable[[SettingValues], Iterable[str]]
# Returns the values with some overruled by a stronger source, or derived, and lines to log.
Settlement = Callable[[SettingValues], tuple[SettingValues, list[str]]]
FLAGS_RANK = 10**6  # above any number of recipe files


def parse_arguments(
    argument_classes: tuple[type, ...],
    argv: Sequence[str] | None = None,
    *,
    checks: Sequence[Check] = (),
    settle: Sequence[Settlement] = (),
    prog: str | None = None,
    description: str | None = None,
) -> Settings:
    """Read the settings that the dataclasses declare from flags, recipes and defaults.

    Flags win over recipes (`--config A.yaml B.yaml`, which is no field of a class), later recipes
    over earlier ones, all of them over the defaults. `argv` is the command line without the
    program's name (None: this process's). `settle` puts what a stronger source makes moot back to
    its default and derives what nobody gave; it leaves notes. Then each check gets all values and
    yields one line for each contradiction; one that reads a missing or faulty setting is left out.
    A class with a classmethod `from_settings(given, values)` is
    built by it, others by their constructor.

    Raises ConfigurationError with every fault of recipes, flags and checks. No class is
    instantiated before all of that is in order; a ValueError of a constructor becomes a
    ConfigurationError too. `--help` prints and leaves the process with 0, as argparse does.
    """
    parser = SettingsParser(argument_classes, prog, description)
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        parser.print_help()
        parser.exit()
    values, problems, complete = _read(parser, argv)
    notes: list[str] = []
    for settlement in settle:
        try:
            values, lines = settlement(values)
        except UnusableSettingError:
            continue  # that fault is said
        notes += lines
    missing = _missing(values)
    values = SettingValues(
        values.declared, values.given, values.sources, values.unusable | missing.keys(),
        values.ranks,
    )  # fmt: skip
    if complete:
        problems += [*missing.values(), *_contradictions(checks, values)]
    if problems:
        raise ConfigurationError(problems)
    built = tuple(_build(cls, values) for cls in argument_classes)
    return Settings(built, values, tuple(notes))


def _read(parser: SettingsParser, argv: Sequence[str]) -> tuple[SettingValues, list[str], bool]:
    """Read flags and recipes; returns the values, the faults, and whether every file was read.

    A setting whose value or spelling is at fault is unusable: nothing that would follow from its
    absence is looked at.
    """
    flags = parser.read(argv)
    recipes = _read_known_recipes(parser, flags.values.pop(CONFIG_FLAG, None) or [])
    sources = {name: recipe.source for name, recipe in recipes.values.items()}
    sources |= {name: f"--{name}" for name in flags.values}
    ranks = {name: recipe.rank for name, recipe in recipes.values.items()}
    ranks |= dict.fromkeys(flags.values, FLAGS_RANK)
    given = {name: recipe.value for name, recipe in recipes.values.items()} | flags.values
    given, faults = _checked(parser.declared, given)
    problems = flags.problems + recipes.problems
    for name, fault in faults.items():
        where = sources[name] if name in flags.values else f"{sources[name]}: {name}"
        problems.append(f"{where}: {fault}")
    meant = (flags.meant | recipes.meant) - given.keys()
    unusable = frozenset(faults.keys() | flags.faulty | meant)
    complete = flags.complete and not recipes.unread and CONFIG_FLAG not in flags.faulty
    return SettingValues(parser.declared, given, sources, unusable, ranks), problems, complete


@dataclass
class _KnownRecipes:
    values: dict[str, RecipeValue]
    problems: list[str]
    meant: set[str]
    unread: bool


def _read_known_recipes(parser: SettingsParser, paths: Sequence[str]) -> _KnownRecipes:
    """Read the recipes; a key that is no setting is a problem and dropped."""
    reading = read_recipes(paths)
    known = _KnownRecipes({}, reading.problems, set(), reading.unread)
    for name, recipe in reading.values.items():
        if name in parser.declared:
            known.values[name] = recipe
        elif name in parser.refused:
            known.problems.append(f"{recipe.source}: {refusal(name, name, parser.refused)}")
            known.meant |= parser.named_by_refusal(name)
        elif name == CONFIG_FLAG:
            known.problems.append(f"{recipe.source}: a recipe names others with {EXTENDS}")
        else:
            unknown = unknown_setting(name, name, parser.declared)
            known.problems.append(f"{recipe.source}: {unknown.message}")
            known.meant |= unknown.meant
    return known


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


def _missing(values: SettingValues) -> dict[str, str]:
    return {
        name: f"{name} is required: {declaration.help}"
        for name, declaration in values.declared.items()
        if declaration.required and name not in values.given and name not in values.unusable
    }


def _contradictions(checks: Sequence[Check], values: SettingValues) -> list[str]:
    problems: list[str] = []
    for check in checks:
        try:
            problems += check(values)
        except UnusableSettingError:
            continue
    return problems


def _build(argument_class: type, values: SettingValues) -> Any:
    own = {
        name: value
        for name, value in values.given.items()
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
