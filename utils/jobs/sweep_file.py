"""Reads a sweep: a script, recipes, and the points of settings that it is run with.

script: pretrain.py
config: [recipes/pretrain/demo_cpu.yaml]    # as on the command line
settings: {max_steps: 20}                   # of every point
grid: {learning_rate: [1.0e-3, 2.0e-3], seed: [1, 2]}    # every combination, the last fastest
list: [{learning_rate: 5.0e-3, warmup_steps: 10}]        # points after those of the grid
output_dir: runs/my-sweep                   # one run directory a point in it
metric: eval_heldout_loss                   # what the table is sorted by; may be left out
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.config.errors import ConfigurationError
from utils.config.reading.strict_yaml import YamlError, load_mapping

KEYS = ("script", "config", "settings", "grid", "list", "output_dir", "metric")
# These are the sweep's own to set.
_RESERVED = {
    "output_dir": "each point has a directory of its own, named from its values in the sweep's "
    "output_dir",
    "config": "the sweep's config names the recipes, of all points alike",
    "dry_run": "slurm/submit.sh dry-runs every point",
}
_NAME = re.compile(r"[A-Za-z_]\w*")
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]")
# File systems end at 255 bytes; checkpoints' temporary names need some of them.
_LONGEST_NAME = 120


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its place, the name of its directory, and what distinguishes it."""

    index: int
    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Sweep:
    """A sweep whose file is in order; paths are from the repository's root, as in recipes."""

    file: str
    script: str
    config: tuple[str, ...]
    settings: Mapping[str, Any]
    points: tuple[Point, ...]
    output_dir: Path
    metric: str | None

    def run_directory(self, point: Point) -> Path:
        """Return where a point's run is kept."""
        return self.output_dir / point.name

    def point(self, index: int) -> Point:
        """Return a point by its number in the job array; raises ConfigurationError."""
        if not 0 <= index < len(self.points):
            raise ConfigurationError(
                f"{self.file} has {len(self.points)} points, numbered from 0: there is no point "
                f"{index}. Give --array=0-{len(self.points) - 1}."
            )
        return self.points[index]

    def arguments(self, point: Point) -> list[str]:
        """Return the point's command line: the script and its arguments."""
        settings = {**self.settings, **point.settings, "output_dir": str(self.run_directory(point))}
        recipes = ["--config", *self.config] if self.config else []
        flags = [word for name, value in settings.items() for word in flag_words(name, value)]
        return [self.script, *recipes, *flags]


def flag_words(name: str, value: Any) -> list[str]:
    """Write a setting as words of a command line; raises ValueError for what none can say."""
    if not isinstance(value, list):
        return [f"--{name}={flag_text(value)}"]
    texts = [flag_text(item) for item in value]
    if not texts:
        raise ValueError("an empty list cannot be given as a flag: put it into a recipe")
    if len(texts) == 1:
        return [f"--{name}={texts[0]}"]
    if any(text.startswith("-") for text in texts):
        raise ValueError("list entries that begin with - cannot be given as flags: use a recipe")
    return [f"--{name}", *texts]


def flag_text(value: Any) -> str:
    """Write one value as a flag takes it.

    >>> flag_text(1e-3), flag_text(True), flag_text(None), flag_text({"a": 1})
    ('0.001', 'true', 'null', '{"a": 1}')
    """
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
    """Name a point from its values, safe as a directory and the same at every reading.

    Where a value had to be changed or cut for that, a digest of all values keeps the name unique.

    >>> point_name({"learning_rate": 1e-3, "seed": 2})
    'learning_rate=0.001,seed=2'
    """
    written = {
        name: "+".join(map(flag_text, value)) if isinstance(value, list) else flag_text(value)
        for name, value in settings.items()
    }
    name = ",".join(f"{key}={_UNSAFE.sub('_', text)}" for key, text in written.items())
    exact = not any(
        _UNSAFE.search(text) or not text or isinstance(settings[key], list)
        for key, text in written.items()
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
    except (UnicodeDecodeError, YamlError) as error:
        reason = str(error) if isinstance(error, YamlError) else ": it is not UTF-8 text"
        raise ConfigurationError(f"{file}{reason}") from error
    reading = _Reading(file, content, [f"{file}{fault}" for fault in faults])
    sweep = reading.sweep()
    if reading.problems:
        raise ConfigurationError(reading.problems)
    return sweep


class _Reading:
    """The keys of a sweep file, checked one by one; faults are collected."""

    def __init__(
        self, file: str, content: Mapping[str, tuple[Any, int]], problems: list[str]
    ) -> None:
        self.file, self.problems = file, problems
        self.values = {key: value for key, (value, _) in content.items()}
        self.lines = {key: line for key, (_, line) in content.items()}
        for key in self.values.keys() - set(KEYS):
            self.fault(key, f"unknown key: a sweep has {', '.join(KEYS)}")

    def fault(self, key: str, text: str) -> None:
        """Note a fault with its line, or with none where the key is missing."""
        line = f":{self.lines[key]}" if key in self.lines else ""
        self.problems.append(f"{self.file}{line}: {key}: {text}")

    def sweep(self) -> Sweep:
        """Return the sweep; it only counts if no problem was found."""
        script, output_dir = self._text("script"), self._text("output_dir")
        if script and not Path(script).is_file():
            self.fault("script", f"there is no {script} (paths are from the repository's root)")
        config = self.values.get("config", [])
        config = [config] if isinstance(config, str) else config
        if not isinstance(config, list) or not all(isinstance(entry, str) for entry in config):
            self.fault("config", "expected recipe files, as on the command line")
            config = []
        fixed = self._settings("settings", self.values.get("settings", {}))
        metric = self.values.get("metric")
        if not isinstance(metric, str | None):
            self.fault("metric", "expected the name of a figure, as eval_heldout_loss")
        points = self._points(fixed)
        return Sweep(
            self.file, script, tuple(config), fixed, points, Path(output_dir), metric
        )  # fmt: skip

    def _text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or not value:
            self.fault(key, "is required" if value is None else f"expected a path, not {value!r}")
            return ""
        return value

    def _settings(self, key: str, value: Any, where: str = "") -> dict[str, Any]:
        """Check names and that each value can be a flag; leave faulty ones out."""
        if not isinstance(value, dict):
            self.fault(key, f"{where}expected settings as `name: value`, not {value!r}")
            return {}
        sound = {}
        for name, given in value.items():
            try:
                if name in _RESERVED:
                    raise ValueError(_RESERVED[name])
                if not _NAME.fullmatch(str(name)):
                    raise ValueError("is no name of a setting")
                flag_words(name, given)
                sound[name] = given
            except ValueError as error:
                self.fault(key, f"{where}{name}: {error}")
        return sound

    def _points(self, fixed: Mapping[str, Any]) -> tuple[Point, ...]:
        if "grid" not in self.values and "list" not in self.values:
            self.fault("grid", "a sweep needs a grid, a list of points, or both")
            return ()
        found = [("grid", point) for point in self._grid()]
        found += [("list", point) for point in self._listed()]
        points: list[Point] = []
        first: dict[frozenset[tuple[str, ...]], int] = {}
        for index, (key, settings) in enumerate(found):
            for name in settings.keys() & fixed.keys():
                self.fault(key, f"{name}: is among `settings` too, which all points share")
            identity = frozenset(tuple(flag_words(*item)) for item in settings.items())
            if identity in first:
                self.fault(
                    key, f"point {index} is point {first[identity]} again: {point_name(settings)}"
                )
            first.setdefault(identity, index)
            points.append(Point(index, point_name(settings), settings))
        self.problems[:] = dict.fromkeys(self.problems)  # one fault of many points is one
        return tuple(points)

    def _grid(self) -> Iterator[dict[str, Any]]:
        """Yield every combination, the last setting changing fastest."""
        grid = self.values.get("grid")
        if grid is None and "grid" not in self.values:
            return
        if not isinstance(grid, dict) or not grid:
            self.fault("grid", "expected `setting: [values]`; it is empty")
            return
        axes: dict[str, Sequence[Any]] = {}
        for name, values in grid.items():
            if not isinstance(values, list) or not values:
                self.fault("grid", f"{name}: expected a list of values, at least one")
                continue
            axes[name] = [value for value in values if self._settings("grid", {name: value})]
        for combination in itertools.product(*axes.values()):
            yield dict(zip(axes, combination, strict=True))

    def _listed(self) -> Iterator[dict[str, Any]]:
        listed = self.values.get("list")
        if listed is None and "list" not in self.values:
            return
        if not isinstance(listed, list) or not listed:
            self.fault("list", "expected points, each `{setting: value}`; it is empty")
            return
        for number, point in enumerate(listed):
            settings = self._settings("list", point, where=f"entry {number}: ")
            if settings:
                yield settings
            elif point == {}:
                self.fault("list", f"entry {number}: a point without settings")
