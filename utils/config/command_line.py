"""Check one value of a recipe or flag against the type that its setting declares."""

import argparse
import copy
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin

from transformers import HfArgumentParser

from utils.config.declarations import (
    Declaration,
    Settings,
    SettingValues,
    UnusableSettingError,
    declared_settings,
    refused_settings,
    union_members,
)
from utils.config.errors import ConfigurationError
from utils.config.recipes import EXTENDS, RecipeValue, read_recipes
from utils.config.unknown_names import UnknownName, unknown_name

_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a mapping",
    Path: "a path",
    NoneType: "null",
}
# Defaults that mean "nothing": null says the same.
NOTHING: tuple[Any, ...] = (None, [], {}, "", "no", "none", False, 0, -1)
_PLURALS = {str: "strings", int: "integers", float: "numbers", Path: "paths"}


class WrongValueError(ValueError):
    """A value that its setting cannot take; the text says what was expected and what came."""


def checked_value(declaration: Declaration, value: Any) -> Any:
    """Return the value as the type of the setting, raise WrongValueError where it is none.

    Nothing is converted that could hide a mistake: an integer may stand for a number and one
    value for a list of one, but 4.0 is no integer, 1 is not true, and "3" is no number. Null
    empties what has a default of nothing: an empty list, 0, false, -1 of max_steps.
    """
    members = union_members(declaration.hint)
    if value is None and NoneType in members:
        return None
    if value is None and not declaration.required:
        if declaration.default in NOTHING:
            return declaration.default
        raise WrongValueError(f"it cannot be null; leave it out for {declaration.default}")
    if declaration.choices is not None:
        several = isinstance(value, list) and list in map(_origin, members)
        for item in value if several else [value]:
            _check_choice(declaration.choices, item)
        return value
    if dict in map(_origin, members):
        # transformers writes `dict | str`, the string being JSON or a file: JSON alone is taken.
        members = tuple(member for member in members if member is not str)
    for member in members:
        matched, converted = _match(member, value)
        if matched:
            return converted
    expected = " or ".join(dict.fromkeys(map(_describe, members)))
    raise WrongValueError(f"expected {expected}, got {shown(value)}")


def shown(value: Any) -> str:
    """Write a value as a recipe would, with its type where that is not plain to see."""
    if isinstance(value, str):
        return f"the string {value!r}"
    if isinstance(value, Mapping | list):
        kind = "mapping" if isinstance(value, Mapping) else "list"
        return f"the {kind} {json.dumps(value, default=str)}"
    return json.dumps(value, default=str)


def _check_choice(choices: tuple[Any, ...], value: Any) -> None:
    # 1 and true are equal, and one of them is no choice of the other.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        words = (json.dumps(each) if isinstance(each, bool) else str(each) for each in choices)
        allowed = ", ".join(words)
        raise WrongValueError(f"expected one of {allowed}; got {shown(value)}")


def _origin(hint: Any) -> Any:
    return get_origin(hint) or hint


def _match(hint: Any, value: Any) -> tuple[bool, Any]:
    """Whether the value is of the hinted type, and the value as that type."""
    origin = _origin(hint)
    if origin is list:
        return _match_list(get_args(hint), value)
    if origin is dict:
        return _match_mapping(value)
    if origin is Literal:
        return value in get_args(hint), value
    if isinstance(value, bool):
        return origin is bool, value
    if (origin, type(value)) in ((float, int), (Path, str)):
        return True, origin(value)
    return isinstance(value, origin), value


def _match_list(element_hints: tuple[Any, ...], value: Any) -> tuple[bool, Any]:
    """Match a list of the hinted elements, or one element alone."""
    element_hint = element_hints[0] if element_hints else str
    items = value if isinstance(value, list) else [value]
    matches = [_match_any(union_members(element_hint), item) for item in items]
    return all(matched for matched, _ in matches), [converted for _, converted in matches]


def _match_any(hints: tuple[Any, ...], value: Any) -> tuple[bool, Any]:
    matches = (_match(hint, value) for hint in hints)
    return next((match for match in matches if match[0]), (False, value))


def _match_mapping(value: Any) -> tuple[bool, Any]:
    """Match a mapping, or on the command line its JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return False, None
    return isinstance(value, Mapping), value


def _describe(hint: Any) -> str:
    origin = _origin(hint)
    if origin is list:
        element = get_args(hint)[0] if get_args(hint) else str
        return f"a list of {_PLURALS.get(element, 'values')}"
    if origin is Literal:
        return " or ".join(map(shown, get_args(hint)))
    return _NAMES.get(origin, getattr(origin, "__name__", str(origin)))


# Resolve `${...}` in setting values, through OmegaConf.

ALLOWED_VARIABLES = ("HOME", "PROJECT", "SCRATCH", "TMPDIR", "USER", "WORK")
_ALLOWED_PATTERN = re.compile(rf"{'|'.join(ALLOWED_VARIABLES)}|SLURM_(?:ARRAY|JOB)_[A-Z_]+")
_REFERENCE = re.compile(
    r"\$\{(?:(?P<setting>[A-Za-z_]\w*(?:\.\w+)*)"
    r"|oc\.env:(?P<variable>[^,:${}]*)(?:,[^${}]*)?)\}"
)


class InterpolationError(ValueError):
    """A `${...}` that leads nowhere; the text says why."""


def has_interpolation(value: Any) -> bool:
    """Whether any string in the value, at any depth, holds a `${`."""
    return any("${" in text for text in _strings(value))


def resolve_interpolations(
    values: Mapping[str, Any], context: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Resolve the values against the context, a superset of them with the defaults.

    Returns the resolved values, and for each setting that could not be resolved the reason.
    """
    resolved, faults = dict(values), {}
    interpolated = [name for name, value in values.items() if has_interpolation(value)]
    for name in interpolated:
        for text in _strings(values[name]):
            if fault := _reference_fault(text):
                faults[name] = fault
    # OmegaConf parses every value it is given: one bad value must not spoil the others.
    sound = {name: value for name, value in context.items() if name not in faults}
    for name in interpolated:
        if name in sound:
            try:
                resolved[name] = _resolve(name, sound)
            except InterpolationError as error:
                faults[name] = str(error)
    return resolved, faults


def _resolve(name: str, context: Mapping[str, Any]) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        value = OmegaConf.create(dict(context))[name]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        raise InterpolationError(str(error).splitlines()[0]) from error
    except RecursionError as error:
        raise InterpolationError("the settings refer to each other in a circle") from error


def _reference_fault(text: str) -> str | None:
    """Say what is wrong with a `${` that is neither a setting nor an allowed variable."""
    references = {match.start(): match for match in _REFERENCE.finditer(text)}
    for opening in re.finditer(r"\$\{", text):
        reference = references.get(opening.start())
        if reference is None:
            return f"{text!r}: only ${{setting}} and ${{oc.env:VARIABLE}} are understood"
        variable = reference["variable"]
        if variable is not None and not _ALLOWED_PATTERN.fullmatch(variable):
            return (
                f"the environment variable {variable!r} may hold a secret, which would end in "
                f"logs and files; allowed are {', '.join(ALLOWED_VARIABLES)}, SLURM_JOB_* and "
                "SLURM_ARRAY_*"
            )
    return None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


# The flags of the declared settings, on transformers' HfArgumentParser.

CONFIG_FLAG = "config"


class FlagError(ValueError):
    """A flag that argparse cannot take; `meant` are settings that it may have been for."""

    def __init__(self, message: str, meant: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.meant = set(meant)


@dataclasses.dataclass
class FlagReading:
    """The settings given as flags, a line for every fault, the settings at fault, and those meant.

    `meant` are settings that an unknown or refused flag stands for: it is no news that they miss.
    """

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    faulty: set[str] = dataclasses.field(default_factory=set)
    meant: set[str] = dataclasses.field(default_factory=set)
    complete: bool = True  # no word without a flag, which may be a recipe


class SettingsParser(HfArgumentParser):
    """Flags and help of the settings of some argument classes, and `--config`.

    It only knows the flags: defaults, required settings and recipes are the caller's. Two hooks
    of HfArgumentParser are used, `_add_dataclass_arguments` and `_parse_dataclass_field`.
    """

    def __init__(
        self, argument_classes: Sequence[type], prog: str | None, description: str | None
    ) -> None:
        super().__init__(
            prog=prog,
            description=description,
            usage="%(prog)s [--config RECIPE.yaml ...] [--SETTING VALUE ...]",
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument(
            f"--{CONFIG_FLAG}",
            nargs="+",
            metavar="RECIPE.yaml",
            help="recipe files; later ones win over earlier ones, flags over all of them",
        )
        self.declared = declared_settings(argument_classes)
        self.refused = refused_settings(argument_classes)
        for argument_class in argument_classes:
            self._add_dataclass_arguments(argument_class)

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        group: Any = self.add_argument_group(getattr(dtype, "_argument_group_name", dtype.__name__))
        for declaration in self.declared.values():
            if declaration.owner is dtype:
                self._parse_dataclass_field(group, _field_for_argparse(declaration))

    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving the process: the caller collects the faults of all flags."""
        raise FlagError(re.sub(r"^argument (--\w+)(?:/\S+)?: ", r"\1: ", message))

    def read(self, argv: Sequence[str]) -> FlagReading:
        """Read the flags one by one: a fault in one does not hide the others."""
        reading = FlagReading()
        for flag, *words in _split_by_flag(argv):
            try:
                name, value = self._read_flag(flag, words)
                if name in reading.values:
                    raise FlagError(f"--{name} is given twice")
                reading.values[name] = value
            except FlagError as error:
                reading.problems.append(str(error))
                reading.faulty.add(_setting_name(flag))
                reading.complete &= flag.startswith("--")
                reading.meant |= error.meant
        return reading

    def named_by_refusal(self, name: str) -> set[str]:
        """Return the settings that the reason of a refusal names as the way."""
        words = re.findall(r"\w+", self.refused[name])
        return set(words) & self.declared.keys()

    def _read_flag(self, flag: str, words: list[str]) -> tuple[str, Any]:
        if not flag.startswith("--"):
            way = f"--config {flag}" if flag.endswith((".yaml", ".yml")) else "--NAME VALUE"
            raise FlagError(f"unexpected argument {flag!r}: give it as {way}")
        option, _, attached = flag.partition("=")
        name = _setting_name(flag)
        if name not in self.declared and name in self.refused:
            raise FlagError(refusal(option, name, self.refused), self.named_by_refusal(name))
        declaration = self.declared.get(name)
        if declaration is not None and _empties([*filter(None, [attached]), *words], declaration):
            return name, None  # checked as in a recipe
        if declaration is not None and not attached and not words:
            found = _without_value(option, declaration)
            if found is not None:
                return name, found
        namespace, rest = self.parse_known_args([flag, *words])
        if flag in rest:
            unknown = unknown_setting(option, name, self.declared)
            raise FlagError(unknown.message, unknown.meant)
        if rest:
            raise FlagError(f"{option}: unexpected argument {rest[0]!r} after its value")
        setting = name if hasattr(namespace, name) else name.removeprefix("no_")
        return setting, getattr(namespace, setting)


def unknown_setting(shown_name: str, name: str, declared: Mapping[str, Declaration]) -> UnknownName:
    """Say that a setting is unknown, and what was meant."""
    return unknown_name(shown_name, name, [*declared, CONFIG_FLAG])


def refusal(shown_name: str, name: str, refused: Mapping[str, str]) -> str:
    """Say why a setting of the libraries has no place here."""
    return f"{shown_name} cannot be set here: {refused[name]}"


def _empties(words: Sequence[str], declaration: Declaration) -> bool:
    """Whether a flag's words say "nothing": null, or none for a list that may be empty."""
    if words == ["null"]:
        return True
    return words in (["none"], ["None"]) and declaration.default == []


def _without_value(option: str, declaration: Declaration) -> bool | None:
    """Return what a flag without a value means: true where it may be. Raises FlagError."""
    if bool in union_members(declaration.hint):
        return True  # argparse alone takes --bf16 so where it cannot be null
    if declaration.choices is not None:
        allowed = ", ".join(map(str, declaration.choices))
        raise FlagError(f"{option}: expected one of {allowed}")
    if declaration.default == []:
        raise FlagError(f"{option}: expected at least one value; null empties it")
    return None


def _setting_name(flag: str) -> str:
    return flag.partition("=")[0].removeprefix("--").replace("-", "_")


def _split_by_flag(argv: Sequence[str]) -> list[list[str]]:
    """Cut the command line before every `--flag`; words before the first stand alone."""
    groups: list[list[str]] = []
    for word in argv:
        if word.startswith("--") or not groups or not groups[-1][0].startswith("--"):
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def _field_for_argparse(declaration: Declaration) -> dataclasses.Field:
    """Return a copy of the field with its type resolved.

    Mappings are read as JSON text. A required setting may come from a recipe, so argparse is not
    told that it is required; the help is.
    """
    field = copy.copy(declaration.field)
    help_text = declaration.help + (" (required)" if declaration.required else "")
    field.metadata = MappingProxyType(
        {**field.metadata, "help": help_text.replace("%", "%%")}  # argparse formats it with %
    )
    if declaration.required:
        field.default = None
    origins = [get_origin(member) or member for member in union_members(declaration.hint)]
    field.type = str | None if dict in origins else declaration.hint
    if origins == [list] and len(union_members(get_args(declaration.hint)[0])) > 1:
        field.type = list[str]  # the mappings among its values are for recipes
    if {bool, str} <= set(origins):
        # argparse takes any function for a type, and this is more than its annotations know.
        field.type = _truth_or_word
    return field


def _truth_or_word(word: str) -> bool | str:
    return {"true": True, "false": False}.get(word.lower(), word)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Each setting once, under its own spelling, with its default."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = action.option_strings[:1]
        return super()._format_action_invocation(shown)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, [], argparse.SUPPRESS) or action.nargs == 0:
            return action.help
        return f"{action.help} (default: %(default)s)"


# Parse recipes and command line into argument dataclasses, all faults at once.

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
