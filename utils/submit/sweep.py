"""Reads a sweep file and works with its points; slurm/submit.sh and slurm/sweep_job.sh call it.

    python -m utils.submit.sweep points FILE          number, name and state of every point
    python -m utils.submit.sweep unfinished FILE      numbers of the points left to run, as 0,2
    python -m utils.submit.sweep point FILE INDEX     a point's script and arguments, NUL-terminated
    python -m utils.submit.sweep check FILE           dry-runs every point

A sweep file:

    script: pretrain.py
    config: [recipes/pretrain/demo_cpu.yaml]    # as on the command line
    settings: {max_steps: 20}                   # of every point
    grid: {learning_rate: [1.0e-3, 2.0e-3], seed: [1, 2]}    # every combination, the last fastest
    list: [{learning_rate: 5.0e-3, warmup_steps: 10}]        # points after those of the grid
    output_dir: runs/my-sweep                   # holds a run directory per point
"""

import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.config.errors import ConfigurationError
from utils.config.recipes import YamlError, load_mapping
from utils.launch.script import run_script

USAGE = "usage: python -m utils.submit.sweep points|unfinished|check FILE, or point FILE INDEX"
KEYS = ("script", "config", "settings", "grid", "list", "output_dir")
_RESERVED = {
    "output_dir": "the sweep's output_dir holds a directory per point, named from its values",
    "config": "name recipes in the sweep's `config`, they are the same for all points",
    "dry_run": "slurm/submit.sh dry-runs every point",
}
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]")
# File systems end at 255 bytes; temporary names of checkpoints need some of them.
_LONGEST_NAME = 120


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its number in the job array, its directory's name, its own settings."""

    index: int
    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Sweep:
    """A valid sweep; paths are relative to the repository's root."""

    file: str
    script: str
    config: tuple[str, ...]
    settings: Mapping[str, Any]
    points: tuple[Point, ...]
    output_dir: Path

    def run_directory(self, point: Point) -> Path:
        """Return the directory of a point's run."""
        return self.output_dir / point.name

    def point(self, index: str) -> Point:
        """Return a point by its number; raises ConfigurationError."""
        if not index.isdecimal() or int(index) >= len(self.points):
            raise ConfigurationError(
                f"{self.file} has {len(self.points)} points, numbered from 0: there is no point "
                f"{index}. Give --array=0-{len(self.points) - 1}."
            )
        return self.points[int(index)]

    def arguments(self, point: Point) -> list[str]:
        """Return the point's command line: the script and its arguments."""
        settings = {**self.settings, **point.settings, "output_dir": str(self.run_directory(point))}
        recipes = ["--config", *self.config] if self.config else []
        flags = [word for name, value in settings.items() for word in flag_words(name, value)]
        return [self.script, *recipes, *flags]

    def state(self, point: Point) -> str:
        """Return "finished", "started" or "not started"."""
        directory = self.run_directory(point)
        if (directory / "final").is_dir():  # written in one step at the end of a run
            return "finished"
        return "started" if (directory / "config.yaml").exists() else "not started"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first word names."""
    command, *words = [*(sys.argv[1:] if argv is None else argv), "", ""][:3]
    if command not in ("points", "unfinished", "point", "check") or not words[0]:
        raise ConfigurationError(USAGE)
    sweep = read_sweep(words[0])
    if command == "check":
        check_points(sweep, lambda line: print(line, flush=True))  # noqa: T201 - for the user
    elif command == "point":
        arguments = sweep.arguments(sweep.point(words[1]))
        sys.stdout.write("".join(f"{word}\0" for word in arguments))
    elif command == "unfinished":
        left = [str(point.index) for point in sweep.points if sweep.state(point) != "finished"]
        sys.stderr.write(f"{sweep.file}: {len(left)} of {len(sweep.points)} points left to run\n")
        sys.stdout.write(",".join(left))
    else:
        for point in sweep.points:
            sys.stdout.write(f"{point.index}\t{point.name}\t{sweep.state(point)}\n")
    return 0


def flag_words(name: str, value: Any) -> list[str]:
    """Write a setting as words of a command line; raises ValueError if no words can express it."""
    if not isinstance(value, list):
        return [f"--{name}={_flag_text(value)}"]
    texts = [_flag_text(item) for item in value]
    if not texts:
        raise ValueError("an empty list cannot be given as a flag: put it into a recipe")
    if len(texts) == 1:
        return [f"--{name}={texts[0]}"]
    if any(text.startswith("-") for text in texts):
        raise ValueError("list entries that begin with - cannot be given as flags: use a recipe")
    return [f"--{name}", *texts]


def _flag_text(value: Any) -> str:
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError("a command line cannot hold the character NUL")
        return value
    if isinstance(value, list):
        raise ValueError("a list in a list cannot be given as a flag: put it into a recipe")
    if isinstance(value, bool) or value is None or isinstance(value, dict):
        return json.dumps(value)
    return str(value)


def point_name(settings: Mapping[str, Any]) -> str:
    """Name a point from its values: safe as a directory, unique, the same at every reading.

    >>> point_name({"learning_rate": 1e-3, "seed": 2})
    'learning_rate=0.001,seed=2'
    """
    texts = {
        name: "+".join(map(_flag_text, value)) if isinstance(value, list) else _flag_text(value)
        for name, value in settings.items()
    }
    name = ",".join(f"{key}={_UNSAFE.sub('_', text)}" for key, text in texts.items())
    exact = not any(
        _UNSAFE.search(text) or not text or isinstance(settings[key], list)
        for key, text in texts.items()
    )
    if exact and len(name) <= _LONGEST_NAME:
        return name
    words = json.dumps([flag_words(key, value) for key, value in settings.items()])
    digest = hashlib.sha256(words.encode()).hexdigest()[:8]
    return f"{name[:_LONGEST_NAME]}~{digest}"


def read_sweep(file: str) -> Sweep:
    """Read a sweep; raises ConfigurationError with every fault of the file."""
    try:
        content, faults = load_mapping(Path(file).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot read the sweep: {error.strerror}") from error
    except YamlError as error:
        raise ConfigurationError(f"{file}{error}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{file}: not UTF-8 text") from error
    reading = _Reading(file, content, [f"{file}{fault}" for fault in faults])
    sweep = reading.sweep()
    if reading.problems:
        raise ConfigurationError(list(dict.fromkeys(reading.problems)))
    return sweep


class _Reading:
    """Checks the keys of a sweep file and collects their faults in `problems`."""

    def __init__(
        self, file: str, content: Mapping[str, tuple[Any, int]], problems: list[str]
    ) -> None:
        self.file, self.problems = file, problems
        self.values = {key: value for key, (value, _) in content.items()}
        self.lines = {key: line for key, (_, line) in content.items()}
        for key in self.values.keys() - set(KEYS):
            self.fault(key, f"unknown key: a sweep has {', '.join(KEYS)}")

    def fault(self, key: str, text: str) -> None:
        line = f":{self.lines[key]}" if key in self.lines else ""
        self.problems.append(f"{self.file}{line}: {key}: {text}")

    def sweep(self) -> Sweep:
        """Return the sweep; valid only if `problems` stays empty."""
        script, output_dir = self.values.get("script"), self.values.get("output_dir")
        if not isinstance(script, str) or not Path(script).is_file():
            self.fault(
                "script", f"there is no file {script} (paths are from the repository's root)"
            )
        if not isinstance(output_dir, str):
            self.fault("output_dir", "give the folder for the points' run directories")
        config = self.values.get("config", [])
        config = [config] if isinstance(config, str) else config
        if not isinstance(config, list) or not all(isinstance(entry, str) for entry in config):
            self.fault("config", "expected recipe files, as on the command line")
            config = []
        fixed = self._settings("settings", self.values.get("settings", {}))
        points = self._points(fixed)
        return Sweep(self.file, str(script), tuple(config), fixed, points, Path(str(output_dir)))

    def _settings(self, key: str, value: Any) -> dict[str, Any]:
        """Return the settings that can be flags; the others are faults."""
        if not isinstance(value, dict):
            self.fault(key, f"expected settings as `name: value`, not {value!r}")
            return {}
        valid = {}
        for name, given in value.items():
            try:
                if name in _RESERVED:
                    raise ValueError(_RESERVED[name])
                if not str(name).isidentifier():
                    raise ValueError("is not the name of a setting")
                flag_words(name, given)
                valid[name] = given
            except ValueError as error:
                self.fault(key, f"{name}: {error}")
        return valid

    def _points(self, fixed: Mapping[str, Any]) -> tuple[Point, ...]:
        found = [*self._grid(), *self._listed()]
        if not found and not self.problems:
            self.fault("grid", "a sweep needs a grid, a list of points, or both")
        points: list[Point] = []
        first: dict[frozenset[tuple[str, ...]], int] = {}
        for index, (key, settings) in enumerate(found):
            for shared in settings.keys() & fixed.keys():
                self.fault(key, f"{shared}: is among `settings` too, which all points share")
            identity = frozenset(tuple(flag_words(*item)) for item in settings.items())
            if (same := first.setdefault(identity, index)) != index:
                self.fault(key, f"point {index} is point {same} again: {point_name(settings)}")
            points.append(Point(index, point_name(settings), settings))
        return tuple(points)

    def _grid(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield every combination, the last setting changing fastest."""
        grid = self.values.get("grid")
        if grid is None:
            return
        if not isinstance(grid, dict) or not all(isinstance(axis, list) for axis in grid.values()):
            self.fault("grid", "expected `setting: [values]`")
            return
        for values in itertools.product(*grid.values()):
            if settings := self._settings("grid", dict(zip(grid, values, strict=True))):
                yield "grid", settings

    def _listed(self) -> Iterator[tuple[str, dict[str, Any]]]:
        listed = self.values.get("list") or []
        if not isinstance(listed, list):
            self.fault("list", "expected points, each `{setting: value}`")
            return
        for point in listed:
            if settings := self._settings("list", point):
                yield "list", settings


def check_points(sweep: Sweep, say: Callable[[str], None]) -> None:
    """Dry-run the points in this process, showing the first one's lines.

    Raises ConfigurationError with the faults of all points, shared ones once.
    """
    main = runpy.run_path(sweep.script, run_name="a_sweeps_script")["main"]
    faults: dict[str, list[Point]] = {}
    for point in sweep.points:
        output, before = io.StringIO(), dict(os.environ)
        say(f"point {point.index}: {point.name}")
        try:
            with contextlib.redirect_stdout(output):
                main([*sweep.arguments(point)[1:], "--dry_run"])
        except ConfigurationError as error:
            for problem in error.problems:
                faults.setdefault(problem, []).append(point)
        finally:  # TrainingArguments writes some settings into it
            os.environ.clear()
            os.environ.update(before)
        if point.index == 0:
            say(output.getvalue().rstrip())
    if faults:
        raise ConfigurationError(
            [f"{_whose(points, sweep)}: {problem}" for problem, points in faults.items()]
        )


def _whose(points: list[Point], sweep: Sweep) -> str:
    if len(points) == len(sweep.points):
        return "every point"
    shown = [f"{point.index} ({point.name})" for point in points[:3]]
    more = f" and {len(points) - 3} more" if len(points) > 3 else ""
    return f"point{'s' if len(points) > 1 else ''} {', '.join(shown)}{more}"


if __name__ == "__main__":
    sys.exit(run_script(main))
