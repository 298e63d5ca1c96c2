"""The flags of the declared settings, on transformers' HfArgumentParser."""

import argparse
import copy
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, get_args, get_origin

from transformers import HfArgumentParser

from utils.config.reading.declarations import (
    Declaration,
    declared_settings,
    refused_settings,
    union_members,
)
from utils.config.reading.unknown_names import UnknownName, unknown_name

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
