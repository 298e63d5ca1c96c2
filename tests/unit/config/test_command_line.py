"""Recipes and flags become typed values with a fixed precedence; all faults come at once."""

import itertools
from dataclasses import dataclass, field

import pytest

from utils.config.command_line import read_settings
from utils.config.declarations import help_texts
from utils.config.errors import ConfigurationError
from utils.config.settings import parse_pretraining


@dataclass
class First:
    sources: list[str]
    learning_rate: float = field(default=1e-3, metadata={"help": "step size"})
    seed: int = field(default=0, metadata={"help": "key"})
    limit: int | None = field(default=7, metadata={"help": "null: none"})
    loud: bool = field(default=False, metadata={"help": "say more"})


@dataclass
class Second:
    kind: str = field(default="plain", metadata={"help": "which", "choices": ("plain", "none")})
    name: str | None = field(default=None, metadata={"help": "what to call it"})
    options: dict | str | None = field(default=None, metadata={"help": "keywords"})
    reports: str | list[str] | None = None
    items: list[str] = field(default_factory=list)
    use_cache: bool = True


CLASSES = (First, Second)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    numbers = itertools.count()

    def write(text):
        name = f"recipe{next(numbers)}.yaml"
        (tmp_path / name).write_text(text)
        return name

    return write


def read(*argv):
    return read_settings(CLASSES, ["--sources", "a", *argv])


def problems_of(*argv, **options):
    with pytest.raises(ConfigurationError) as caught:
        read_settings(CLASSES, argv, **options)
    return caught.value.problems


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], {}),
        (["--learning_rate", "1e-4", "--limit", "null"], {"learning_rate": 1e-4, "limit": None}),
        (["--kind=none", "--seed=-3", "--loud"], {"kind": "none", "seed": -3, "loud": True}),
        (["--learning-rate", "2", "--loud", "yes"], {"learning_rate": 2.0, "loud": True}),
        (["--options", '{"a": [1]}'], {"options": {"a": [1]}}),
        (["--reports", "x", "y", "--name", "1e-4"], {"reports": ["x", "y"], "name": "1e-4"}),
    ],
)
def test_flags_have_the_type_of_their_setting(argv, expected):
    values = read(*argv)
    assert {name: values[name] for name in values if values.changed(name)} == {
        "sources": ["a"], **expected,
    }  # fmt: skip
    values["items"].append("x")
    assert values["items"] == values.build(Second).items == [], "defaults are not shared"


def test_flags_win_over_recipes_and_later_recipes_over_earlier_ones(recipe):
    first = recipe("learning_rate: 1\nseed: 1\nlimit: 1\nitems: x\n")
    later = recipe("\nseed: 2\nlimit: 2\n")
    values = read("--limit", "3", "--config", first, later)
    assert [values.shown(name) for name in ("learning_rate", "seed", "limit", "loud")] == [
        f"learning_rate 1 ({first}:1)", f"seed 2 ({later}:2)", "limit 3 (--limit)",
        "loud false (default)",
    ]  # fmt: skip
    assert isinstance(values["learning_rate"], float)
    assert values["items"] == ["x"]


def test_every_fault_of_recipes_and_flags_comes_at_once(recipe):
    path = recipe("learning_rte: 1\nseed: true\nloud: 1\nkind: fancy\nconfig: x\nuse_cache: 3\n"
                  "items: [1]\n")  # fmt: skip
    assert problems_of(
        "stray", "--config", path, "gone.yaml", "--learning_rate", "fast", "--sed", "3",
        "--options", "[1]", "--limit", "1", "2", "--use_cache", "1", "--zzz", "1", "--name",
    ) == [
        "unexpected argument 'stray': give it as --NAME VALUE",
        "gone.yaml: cannot be read: No such file or directory",
        f"{path}:1: unknown setting learning_rte: did you mean learning_rate?",
        f"{path}:2: seed: expected an integer, got true",
        f"{path}:3: loud: expected true or false, got 1",
        f'{path}:4: kind: expected one of plain, none; got "fancy"',
        f"{path}:5: unknown setting config: a recipe names others with extends",
        "--use_cache cannot be set here: with a cache, packed documents would attend to each other",
        f"{path}:7: items: expected a list, got [1]",
        '--learning_rate: expected a number, got "fast"',
        "unknown setting --sed: did you mean --seed?",
        '--options: expected a mapping or null, got "[1]"',
        "--limit: unexpected argument '2' after its value",
        "unknown setting --zzz: --help all lists all settings",
        "--name: expected TEXT",
    ]  # fmt: skip
    assert problems_of("--sources", "a", "--seed", "1", "--seed", "2", "--config") == [
        "--seed is given twice", "--config: expected at least one recipe file",
    ]  # fmt: skip


def test_a_list_without_values_says_how_to_have_none():
    with pytest.raises(ConfigurationError, match=r"--eval_data: expected VALUE .*; null for none"):
        parse_pretraining(["--eval_data", "--train_data", "d", "--output_dir", "o"], "")


def test_checks_see_all_values_and_their_faults_join_the_others(recipe):
    def check_seed(values):
        if values["seed"] > values["learning_rate"]:
            yield f"{values.shown('seed')} is above {values.shown('learning_rate')}"

    def check_sources(values):
        yield f"reads {values['sources']}"

    checks = (check_seed, check_sources)
    assert problems_of("--seed", "3", "--zzz", "x", checks=checks) == [
        "unknown setting --zzz: --help all lists all settings",
        f"sources is required: {help_texts()['sources']}",
        "seed 3 (--seed) is above learning_rate 0.001 (default)",
    ]
    faulty = problems_of("--sources", "a", "--seed", "x", checks=checks)
    assert faulty[1:] == ["reads ['a']"], "a check that reads a faulty setting is left out"
    for argv in (["--config", "gone.yaml"], ["--config", recipe("sources: {a: b}\n")]):
        assert len(problems_of(*argv)) == 1, "what may have been given is not called missing"
