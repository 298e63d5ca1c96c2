"""Reads a sweep file and works with its points; slurm/submit.sh and slurm/sweep_job.sh call it.

    python -m utils.submit.sweep points FILE          number and name of every point; which finished
    python -m utils.submit.sweep point FILE INDEX     a point's script and arguments, NUL-terminated
    python -m utils.submit.sweep check FILE           dry-runs every point

A sweep file:

    script: pretrain.py
    config: [recipes/pretrain/demo_cpu.yaml]    # as on the command line
    settings: {max_steps: 20}                   # of every point
    grid: {learning_rate: [1.0e-3, 2.0e-3], seed: [1, 2]}    # every combination, the last fastest
    output_dir: runs/my-sweep                   # holds a run directory per point
"""

import contextlib
import io
import itertools
import json
import os
import re
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.config.errors import ConfigurationError
from utils.config.recipes import YamlError, load_file
from utils.launch.script import run_script

USAGE = "usage: python -m utils.submit.sweep points|check FILE, or point FILE INDEX"
KEYS = ("script", "config", "settings", "grid", "output_dir")
_OWN = ("output_dir", "config", "dry_run")  # of the sweep, not of its points
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]")
# File systems end at 255 bytes; temporary names of checkpoints need some of them.
_LONGEST_NAME = 120


@dataclass(frozen=True)
class Sweep:
    """A valid sweep: its points' own settings by the names of their directories, in order.

    Paths are relative to the repository's root.
    """

    script: str
    config: Sequence[str]
    settings: Mapping[str, Any]
    points: Mapping[str, Mapping[str, Any]]
    output_dir: Path

    def arguments(self, index: int) -> list[str]:
        """Return the command line of a point by its number: the script and its arguments."""
        name = list(self.points)[index]
        output_dir = {"output_dir": str(self.output_dir / name)}
        settings = {**self.settings, **self.points[name], **output_dir}
        words = [self.script, *(["--config", *self.config] if self.config else [])]
        for setting, value in settings.items():
            words += flag_words(setting, value)
        return words


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first word names."""
    command, *words = sys.argv[1:] if argv is None else argv
    if (command, len(words)) not in (("points", 1), ("check", 1), ("point", 2)):
        raise ConfigurationError(USAGE)
    sweep = read_sweep(words[0])
    if command == "check":
        check_points(sweep)
    elif command == "points":
        for number, name in enumerate(sweep.points):
            # A run writes its model in one step at its end.
            finished = "\tfinished" if (sweep.output_dir / name / "final").is_dir() else ""
            sys.stdout.write(f"{number}\t{name}{finished}\n")
    else:
        last, index = len(sweep.points) - 1, words[1]
        if not index.isdecimal() or int(index) > last:
            raise ConfigurationError(
                f"{words[0]} has {last + 1} points, numbered from 0: there is no point {index}. "
                f"Give --array=0-{last}."
            )
        sys.stdout.write("".join(f"{word}\0" for word in sweep.arguments(int(index))))
    return 0


def flag_words(name: str, value: Any) -> list[str]:
    """Write a setting as words of a command line; raises ValueError if no words can express it."""
    values = value if isinstance(value, list) else [value]
    texts = [_flag_text(item) for item in values]
    nested, odd = any(isinstance(item, list) for item in values), "\0" in "".join(texts)
    if nested or odd or not texts or (len(texts) > 1 and any(text[:1] == "-" for text in texts)):
        raise ValueError(
            "an empty list, or entries that begin with -, a list in a list, or the character NUL, "
            "are no flag: use a recipe"
        )
    return [f"--{name}={texts[0]}"] if len(texts) == 1 else [f"--{name}", *texts]


def _flag_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def point_name(settings: Mapping[str, Any]) -> str:
    """Name a point's directory from its values.

    >>> point_name({"learning_rate": 1e-3, "seed": 2})
    'learning_rate=0.001,seed=2'
    """
    texts = {
        name: "+".join(map(_flag_text, value if isinstance(value, list) else [value]))
        for name, value in settings.items()
    }
    return ",".join(f"{name}={_UNSAFE.sub('_', text)}" for name, text in texts.items())


def read_sweep(file: str) -> Sweep:
    """Read a sweep; raises ConfigurationError with every fault of the file."""
    try:
        content = load_file(Path(file))
    except YamlError as error:
        raise ConfigurationError(str(error)) from error
    values: dict[str, Any] = {key: value for key, (value, _) in content.items()}
    faults = [(key, f"unknown key: a sweep has {', '.join(KEYS)}") for key in values.keys() - KEYS]
    script, config = str(values.get("script")), values.get("config", [])
    config = [config] if isinstance(config, str) else config
    fixed, grid = values.get("settings", {}), values.get("grid")
    if not Path(script).is_file():
        faults.append(("script", f"no file {script} (paths are from the repository's root)"))
    if not isinstance(values.get("output_dir"), str):
        faults.append(("output_dir", "give the folder for the points' run directories"))
    if not isinstance(config, list) or not all(isinstance(entry, str) for entry in config):
        faults.append(("config", "expected recipe files, as on the command line"))
    points: dict[str, dict[str, Any]] = {}
    if not isinstance(fixed, dict):
        faults.append(("settings", "expected settings as `name: value`"))
    elif not (
        isinstance(grid, dict) and grid and all(isinstance(v, list) and v for v in grid.values())
    ):
        faults.append(("grid", "expected `setting: [values]`, at least one"))
    else:
        faults += [("settings", fault) for fault in _faults_of(fixed)]
        points, grid_faults = _grid_points(grid, fixed)
        faults += [("grid", fault) for fault in grid_faults]
    if faults:
        lines = {key: f":{line}" for key, (_, line) in content.items()}
        raise ConfigurationError(
            [f"{file}{lines.get(key, '')}: {key}: {fault}" for key, fault in dict.fromkeys(faults)]
        )
    return Sweep(script, config, fixed, points, Path(values["output_dir"]))


def _grid_points(
    grid: Mapping[str, Sequence[Any]], fixed: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return every combination by its name, the last setting changing fastest, and the faults."""
    points: dict[str, dict[str, Any]] = {}
    faults = [
        f"{name}: is among `settings` too, which all points share" for name in grid & fixed.keys()
    ]
    for values in itertools.product(*grid.values()):
        settings = dict(zip(grid, values, strict=True))
        if own := _faults_of(settings):
            faults += own
            continue
        name = point_name(settings)
        if name in points or len(name) > _LONGEST_NAME:
            faults.append(f"{name}: two points would have this directory, or the name is too long")
        points[name] = settings
    return points, faults


def _faults_of(settings: Mapping[str, Any]) -> list[str]:
    """Say which settings cannot be flags of a point."""
    own = "the sweep sets it: it has `output_dir` and `config`, and submit.sh dry-runs every point"
    faults = [f"{name}: {own}" for name in settings if name in _OWN]
    for name, value in settings.items():
        try:
            flag_words(name, value)
        except ValueError as error:
            faults.append(f"{name}: {error}")
    return faults


def check_points(sweep: Sweep) -> None:
    """Dry-run the points in this process, showing the first one's lines.

    Raises ConfigurationError with the faults of all points, shared ones once.
    """
    main = runpy.run_path(sweep.script, run_name="a_sweeps_script")["main"]
    faults: dict[str, list[str]] = {}
    for number, name in enumerate(sweep.points):
        output, before = io.StringIO(), dict(os.environ)
        print(f"point {number}: {name}", flush=True)  # noqa: T201 - for the user
        try:
            with contextlib.redirect_stdout(output):
                main([*sweep.arguments(number)[1:], "--dry_run"])
        except ConfigurationError as error:
            for problem in error.problems:
                faults.setdefault(problem, []).append(name)
        finally:  # TrainingArguments writes some settings into it
            os.environ.clear()
            os.environ.update(before)
        if number == 0:
            print(output.getvalue().rstrip(), flush=True)  # noqa: T201 - for the user
    if faults:
        every = len(sweep.points)
        raise ConfigurationError(
            [
                f"{'every point' if len(names) == every else '; '.join(names)}: {fault}"
                for fault, names in faults.items()
            ]
        )


if __name__ == "__main__":
    sys.exit(run_script(main))
