"""Sweep files. A sweep file describes several runs, called points.

    python -m utils.submit.sweep points FILE          number, name and state of every point
    python -m utils.submit.sweep point FILE INDEX     a point's script and arguments, NUL-terminated
    python -m utils.submit.sweep check FILE           dry-runs every point

recipes/sweep/demo_cpu.yaml is an example of a sweep file.
"""

import contextlib
import io
import itertools
import json
import os
import re
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.config.errors import ConfigurationError
from utils.config.recipes import YamlError, load_file
from utils.launch.script import run_script

FORMS = {
    "script": "a script that is there (paths are from the repository's root)",
    "config": "recipe files, as on the command line",
    "settings": "settings of all points as `name: value`",
    "grid": "`setting: [values]`, at least one",
    "output_dir": "the folder for the points' run directories",
}
_SWEEP_SETTINGS = ("output_dir", "config", "dry_run")  # settings that Stoker sets for each point
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]")
# File systems allow 255 bytes per name. Temporary names of checkpoints need some of them.
_LONGEST_NAME = 120


@dataclass(frozen=True)
class Sweep:
    """A valid sweep of several runs (points). Paths are relative to the repository's root.

    points: {name of the point's directory in `output_dir`: script and arguments}.
    """

    script: str
    points: Mapping[str, list[str]]
    output_dir: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `points`, `point` or `check`; return the exit code."""
    command, *words = sys.argv[1:] if argv is None else argv
    if (command, len(words)) not in (("points", 1), ("check", 1), ("point", 2)):
        raise ConfigurationError("usage: utils.submit.sweep points|check FILE, or point FILE INDEX")
    sweep = read_sweep(words[0])
    if command == "check":
        check_points(sweep)
    elif command == "points":
        for number, name in enumerate(sweep.points):
            # A finished run has final/, which it writes in one step at its end.
            finished = "\tfinished" if (sweep.output_dir / name / "final").is_dir() else ""
            sys.stdout.write(f"{number}\t{name}{finished}\n")
    else:
        last, index = len(sweep.points) - 1, words[1]
        if not index.isdecimal() or int(index) > last:
            raise ConfigurationError(
                f"{words[0]} has {last + 1} points, numbered from 0: there is no point {index}. "
                f"Give --array=0-{last}."
            )
        sys.stdout.write("".join(f"{word}\0" for word in list(sweep.points.values())[int(index)]))
    return 0


def read_sweep(file: str) -> Sweep:
    """Return the sweep in a file. Raises a ConfigurationError that lists all errors of the file."""
    try:
        content = load_file(Path(file))
    except YamlError as error:
        raise ConfigurationError(str(error)) from error
    fields: dict[str, Any] = dict.fromkeys(FORMS) | {"config": [], "settings": {}}
    fields |= {key: value for key, (value, _) in content.items()}
    config = [fields["config"]] if isinstance(fields["config"], str) else fields["config"]
    fixed, grid, output_dir = fields["settings"], fields["grid"], fields["output_dir"]
    values = list(grid.values()) if isinstance(grid, dict) else []
    valid = {
        "script": Path(str(fields["script"])).is_file(),
        "config": isinstance(config, list) and all(isinstance(entry, str) for entry in config),
        "settings": isinstance(fixed, dict),
        "grid": bool(values) and all(isinstance(each, list) and each for each in values),
        "output_dir": isinstance(output_dir, str),
    }
    known = ", ".join(FORMS)
    faults = [(key, f"expected {FORMS[key]}") for key in FORMS if not valid[key]]
    faults += [(key, f"unknown key: a sweep has {known}") for key in fields.keys() - FORMS.keys()]
    names, combinations = [], []
    if valid["settings"] and valid["grid"]:
        faults += _setting_faults(fixed, grid)
        combinations = [dict(zip(grid, each, strict=True)) for each in itertools.product(*values)]
        names = [point_name(combination) for combination in combinations]
        clash = "two points would have this directory, or the name is too long"
        wrong = (name for name in names if names.count(name) > 1 or len(name) > _LONGEST_NAME)
        faults += [("grid", f"{name}: {clash}") for name in wrong]
    if faults:
        lines = {key: f":{line}" for key, (_, line) in content.items()}
        raise ConfigurationError(
            [f"{file}{lines.get(key, '')}: {key}: {fault}" for key, fault in dict.fromkeys(faults)]
        )
    points = {}
    for name, combination in zip(names, combinations, strict=True):
        words = [fields["script"], *(["--config", *config] if config else [])]
        settings = {**fixed, **combination, "output_dir": str(Path(str(output_dir), name))}
        for setting, value in settings.items():
            texts = _flag_words(value)
            single = len(texts) == 1  # one word, so that a value may begin with "-"
            words += [f"--{setting}={texts[0]}"] if single else [f"--{setting}", *texts]
        points[name] = words
    return Sweep(fields["script"], points, Path(str(output_dir)))


def _setting_faults(
    fixed: Mapping[str, Any], grid: Mapping[str, list[Any]]
) -> Iterator[tuple[str, str]]:
    """Yield (key of the sweep file, fault) for each setting that cannot be a command line flag.

    fixed: the settings of all points. grid: {setting: values}.
    """
    settings = [("settings", name, value) for name, value in fixed.items()]
    settings += [("grid", name, value) for name, values in grid.items() for value in values]
    for key, name, value in settings:
        words = _flag_words(value)
        nested = isinstance(value, list) and any(isinstance(item, list) for item in value)
        if name in _SWEEP_SETTINGS:
            own = "it has `output_dir` and `config`, and submit.sh dry-runs every point"
            yield key, f"{name}: the sweep sets it: {own}"
        elif nested or not words or (len(words) > 1 and any(word[:1] == "-" for word in words)):
            odd = "an empty list, a list in a list, or entries that begin with -"
            yield key, f"{name}: {odd}, are no flag: use a recipe"
        elif key == "grid" and name in fixed:
            yield key, f"{name}: is among `settings` too, which all points share"


def _flag_words(value: Any) -> list[str]:
    """Return a setting's value as a list of words for a command line."""
    values = value if isinstance(value, list) else [value]
    return [each if isinstance(each, str) else json.dumps(each) for each in values]


def point_name(settings: Mapping[str, Any]) -> str:
    """Return the name of a point's directory, such as `learning_rate=0.001,seed=2`."""
    return ",".join(
        f"{name}={_UNSAFE.sub('_', '+'.join(_flag_words(value)))}"
        for name, value in settings.items()
    )


def check_points(sweep: Sweep) -> None:
    """Dry-run all points; print the first point's output.

    Raises one ConfigurationError that lists the errors of all points.
    """
    main = runpy.run_path(sweep.script, run_name="a_sweeps_script")["main"]
    faults: dict[str, list[str]] = {}
    for number, (name, (_, *arguments)) in enumerate(sweep.points.items()):
        output, before = io.StringIO(), dict(os.environ)
        print(f"point {number}: {name}", flush=True)  # noqa: T201 - for the user
        try:
            with contextlib.redirect_stdout(output):
                main([*arguments, "--dry_run"])
        except ConfigurationError as error:
            for problem in error.problems:
                faults.setdefault(problem, []).append(name)
            output.writelines(f"{text}\n" for _, text in error.report)
        finally:  # TrainingArguments writes some settings into the environment
            os.environ.clear()
            os.environ.update(before)
        if number == 0:
            print(output.getvalue().rstrip(), flush=True)  # noqa: T201 - for the user
    if faults:
        every = {len(sweep.points): "every point"}
        raise ConfigurationError(
            [f"{every.get(len(of), '; '.join(of))}: {fault}" for fault, of in faults.items()]
        )


if __name__ == "__main__":
    sys.exit(run_script(main))
