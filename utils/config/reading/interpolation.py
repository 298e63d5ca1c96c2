"""Resolve `${...}` in setting values, through OmegaConf.

`${seed}` is the value of another setting, wherever that came from: flag, recipe or default.
`${oc.env:SCRATCH}` reads an environment variable, and only one of a short list: resolved settings
are printed, saved and logged, so a variable that may hold a secret must not reach them.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

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
