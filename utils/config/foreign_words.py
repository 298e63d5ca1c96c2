"""Error messages for unknown and refused settings: what to type instead, or why it is refused.

foreign_words.yaml has other toolkits' names, and the reasons for refused settings.
"""

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any


def by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Turn a table {answer: names separated by spaces} into {name: answer}."""
    return {name: answer for answer, names in table.items() for name in names.split()}


@cache
def _table() -> Mapping[str, Any]:
    import yaml  # the launcher imports this module before it checks the packages

    text = Path(__file__).with_name("foreign_words.yaml").read_text(encoding="utf-8")
    return {part: by_name(table) for part, table in yaml.safe_load(text).items()}


def refused() -> dict[str, str]:
    """Return {library setting that Stoker refuses: the reason}."""
    return _table()["refused"]


def other_names() -> dict[str, str]:
    """Return {setting of another toolkit: Stoker's name of the setting, or advice}."""
    return _table()["names"]


def our_name(name: str, known: Collection[str]) -> str:
    """Return Stoker's name of another toolkit's setting such as lr, or "" if it is unknown."""
    plain = name.rpartition(".")[2]  # other toolkits have sections, as in training.steps
    ours = other_names().get(plain, plain)
    return ours if ours.partition(".")[0] in known else ""


def unknown_name(written: str, known: Iterable[str], value: str = "") -> str:
    """Return the error message for a setting that does not exist here, or is refused.

    written: the setting as the user wrote it, "--lr" on a command line, "lr" in a recipe. known:
    names of Stoker's settings. value: text after Stoker's name in the message, such as ": 0.1".
    """
    known, name = list(known), written.removeprefix("--")
    dashes = written.removesuffix(name)
    answers = {each: f"{dashes}{each} cannot be set here: {why}" for each, why in refused().items()}
    if name in answers:
        return answers[name]
    switch = name.removeprefix("no_")
    if dashes and switch != name and switch in known:
        return f"unknown setting {written}: give --{switch} false"
    for other, ours in other_names().items():
        if ours.partition(".")[0] in known:
            answers[other] = f"here it is {dashes}{ours}"
        elif not ours.isidentifier():
            answers[other] = ours
    plain, ours = name.rpartition(".")[2], our_name(name, known)
    exact = f"here it is {dashes}{ours}{value}" if ours else answers.get(plain)
    answers |= {each: f"did you mean {dashes}{each}?" for each in known}
    near = get_close_matches(plain, answers, n=1, cutoff=0.9)
    near = near or get_close_matches(plain, known, n=1, cutoff=0.8)
    advice = answers[near[0]] if near else "--help all lists all settings"
    return f"unknown setting {written}: {exact or advice}"
