"""The settings that argument classes declare: name, type, default, and which are refused."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclasses.dataclass(frozen=True)
class Declaration:
    """One setting: a field of one argument class, with its type hint resolved."""

    name: str
    owner: type
    hint: Any
    field: dataclasses.Field

    @property
    def required(self) -> bool:
        """Whether the user has to give it."""
        return (
            self.field.default is dataclasses.MISSING
            and self.field.default_factory is dataclasses.MISSING
        )

    @property
    def default(self) -> Any:
        """The declared default (a fresh one where it is mutable); None where it is required."""
        if self.required:
            return None
        if self.field.default_factory is not dataclasses.MISSING:
            return self.field.default_factory()
        default = self.field.default
        return default.value if isinstance(default, Enum) else default

    @property
    def help(self) -> str:
        """The help text, with argparse's doubled percent signs undone."""
        return str(self.field.metadata.get("help", "see --help")).replace("%%", "%")

    @property
    def choices(self) -> tuple[Any, ...] | None:
        """The values allowed besides null, None when any value of the type is.

        As in transformers' HfArgumentParser, `SomeEnum | str` means the values of the enum.
        """
        if "choices" in self.field.metadata:
            return tuple(self.field.metadata["choices"])
        for member in union_members(self.hint):
            if isinstance(member, type) and issubclass(member, Enum):
                return tuple(item.value for item in member)
        named = [member for member in union_members(self.hint) if member is not NoneType]
        if all(get_origin(member) is Literal for member in named):
            return tuple(choice for member in named for choice in get_args(member))
        return None


def union_members(hint: Any) -> tuple[Any, ...]:
    """`X | Y` and `Optional[X]` as their members; anything else as itself alone."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def declared_settings(argument_classes: Iterable[type]) -> dict[str, Declaration]:
    """Return every setting the user may give, by name, in the order of the classes' fields."""
    declared: dict[str, Declaration] = {}
    for owner in argument_classes:
        refused = refused_settings([owner])
        hints = get_type_hints(owner)
        for field in dataclasses.fields(owner):
            if not field.init or field.name in refused:
                continue
            assert field.name not in declared, f"two argument classes declare {field.name}"
            declared[field.name] = Declaration(field.name, owner, hints[field.name], field)
    return declared


def refused_settings(argument_classes: Sequence[type]) -> dict[str, str]:
    """Return the inherited settings that have no place here, with what to use instead.

    An argument class lists them in a class variable `refused_settings`, a mapping from the name
    to the reason. They are no flags and keep the default of the class.
    """
    refused: dict[str, str] = {}
    for owner in argument_classes:
        listed: Mapping[str, str] = getattr(owner, "refused_settings", {})
        refused.update(listed)
    return refused
