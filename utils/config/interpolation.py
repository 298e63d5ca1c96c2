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
    """A `${...}` that cannot be resolved; the text says why."""


def has_interpolation(value: Any) -> bool:
    """Whether any string in the value, at any depth, holds a `${`."""
    return any("${" in text for text in _strings(value))


def resolve_interpolations(
    values: Mapping[str, Any], context: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Resolve the values against the context, a superset of them with the defaults.

    Returns the resolved values, and for each setting that could not be resolved the reason.
    """
    interpolated = [name for name, value in values.items() if has_interpolation(value)]
    resolved, faults = dict(values), {}
    for name in interpolated:
        try:
            for text in _strings(values[name]):
                _check_references(text)
            resolved[name] = _resolve(name, context)
        except InterpolationError as fault:
            faults[name] = str(fault)
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


def _check_references(text: str) -> None:
    """Refuse every `${` that is neither a setting nor an allowed environment variable."""
    references = {match.start(): match for match in _REFERENCE.finditer(text)}
    for start in (match.start() for match in re.finditer(r"\$\{", text)):
        if start not in references:
            raise InterpolationError(
                f"{text!r}: only ${{setting}} and ${{oc.env:VARIABLE}} are understood"
            )
        variable = references[start]["variable"]
        if variable is not None and not _ALLOWED_PATTERN.fullmatch(variable):
            raise InterpolationError(
                f"the environment variable {variable!r} may hold a secret, which would end in "
                f"logs and files; allowed are {', '.join(ALLOWED_VARIABLES)}, SLURM_JOB_* and "
                "SLURM_ARRAY_*"
            )


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
