"""Recipes and flags become dataclasses, in a fixed precedence, with every fault at once."""

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.config.command_line import parse_arguments
from utils.config.errors import ConfigurationError
from utils.config.recipes import dump_yaml


@dataclass
class First:
    sources: list[str] = field(metadata={"help": "what to read, 5% of it"})
    learning_rate: float = field(default=1e-3, metadata={"help": "step size"})
    seed: int = field(default=0, metadata={"help": "key"})
    limit: int | None = field(default=7, metadata={"help": "null: none"})
    loud: bool = field(default=False, metadata={"help": "say more"})
    careful: bool = field(default=True, metadata={"help": "take care"})


@dataclass
class Second:
    kind: Literal["plain", "none"] = field(default="plain", metadata={"help": "which"})
    name: str | None = field(default=None, metadata={"help": "what to call it"})
    options: dict | str | None = field(default=None, metadata={"help": "keywords"})
    folder: Path = field(default=Path("runs"), metadata={"help": "where"})


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    numbers = itertools.count()

    def write(text):
        name = f"recipe{next(numbers)}.yaml"
        (tmp_path / name).write_text(text)
        return name

    return write


def parse(*argv, **options):
    return parse_arguments((First, Second), ["--sources", "a", *argv], **options)


def problems_of(*argv, classes=(First, Second), **options):
    with pytest.raises(ConfigurationError) as caught:
        parse_arguments(classes, argv, **options)
    return caught.value.problems


def test_settings_unpack_into_instances_of_the_classes():
    first, second = parse("--learning_rate", "1e-4", "--limit", "null", "--kind=none")
    assert first == First(sources=["a"], learning_rate=1e-4, limit=None)
    assert second == Second(kind="none")


def test_flags_take_lists_switches_mappings_and_both_spellings():
    first, second = parse(
        "--loud", "--no_careful", "--seed=-3", "--options", '{"a": [1]}', "--learning-rate", "2"
    )
    assert (first.loud, first.careful, first.seed, first.learning_rate) == (True, False, -3, 2.0)
    assert second.options == {"a": [1]}
    assert parse("--loud", "false").instances[0].loud is False


def test_recipes_give_typed_values_and_flags_win(recipe):
    path = recipe(
        "sources: [x, y]\nlearning_rate: 1e-4\nseed: 5\nloud: true\nkind: none\n"
        "name: no\noptions: {min_lr: 1e-5}\nfolder: a/${seed}\nlimit: null\n"
    )
    result = parse_arguments((First, Second), ["--config", path, "--seed", "6"])
    first, second = result
    assert first == First(["x", "y"], 1e-4, 6, None, loud=True)
    assert second == Second("none", "no", {"min_lr": 1e-5}, Path("a/6"))
    assert result.sources["learning_rate"] == f"{path}:2"
    assert result.sources["seed"] == "--seed"
    assert result.sources["careful"] == "default"
    assert result.changed().keys() == result.sources.keys() - {"careful"}


def test_references_see_defaults_recipes_and_flags(recipe):
    path = recipe("name: ${learning_rate}-${seed}-${kind}\nseed: 5\n")
    _, second = parse("--config", path, "--kind", "none")
    assert second.name == "0.001-5-none"
    assert parse("--name", "at-${seed}").instances[1].name == "at-0"


KEYS = st.sampled_from(["learning_rate", "seed", "limit"])
VALUES = st.dictionaries(KEYS, st.integers(1, 99))


@settings(max_examples=30, deadline=None)
@given(files=st.lists(VALUES, max_size=3), flags=VALUES)
def test_defaults_then_files_in_order_then_flags(tmp_path_factory, files, flags):
    folder = tmp_path_factory.mktemp("recipes")
    paths = []
    for number, content in enumerate(files):
        path = folder / f"{number}.yaml"
        path.write_text("kind: plain\n" + "".join(f"{k}: {v}\n" for k, v in content.items()))
        paths.append(str(path))
    argv = ["--config", *paths] if paths else []
    argv += [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    result = parse(*argv)
    expected: dict[str, Any] = {"learning_rate": 1e-3, "seed": 0, "limit": 7}
    for layer in (*files, flags):
        expected |= layer
    assert {key: getattr(result.instances[0], key) for key in expected} == expected
    for key in expected:
        source = result.sources[key]
        holders = [path for path, content in zip(paths, files, strict=True) if key in content]
        if key in flags:
            assert source == f"--{key}"
        else:
            assert source.rpartition(":")[0] == holders[-1] if holders else source == "default"


def test_every_fault_of_recipes_and_flags_comes_at_once(recipe):
    path = recipe("learning_rte: 1\nseed: 4.5\nloud: 1\nname: ${gone}\nkind: fancy\nconfig: x\n")
    problems = problems_of(
        "stray", "--config", path, "gone.yaml", "--learning_rate", "fast", "--sed", "3",
        "--options", "[1]", "--limit", "1", "2",
    )  # fmt: skip
    assert problems == [
        "unexpected argument 'stray': give it as --NAME VALUE",
        "--learning_rate: invalid float value: 'fast'",
        "unknown setting --sed: did you mean --seed?",
        "--limit: unexpected argument '2' after its value",
        "gone.yaml: cannot read the recipe: No such file or directory",
        f"{path}:1: unknown setting learning_rte: did you mean learning_rate?",
        f"{path}:6: a recipe names others with extends",
        f"{path}:4: name: Interpolation key 'gone' not found",
        f"{path}:2: seed: expected an integer, got 4.5",
        f"{path}:3: loud: expected true or false, got 1",
        f"{path}:5: kind: expected one of plain, none; got the string 'fancy'",
        "--options: expected a mapping or null, got the string '[1]'",
    ]


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--zzzzz", "1"], "unknown setting --zzzzz: --help lists all settings"),
        (["--no_loud"], "unknown setting --no_loud: use --loud false"),
        (["--seed", "1", "--seed", "2"], "--seed is given twice"),
        (["--careful", "--no_careful"], "--careful is given twice"),
        (["--seed"], "--seed: expected one argument"),
        (["--kind", "null"], "--kind: it cannot be null; leave it out for plain"),
        (["--kind=null"], "--kind: it cannot be null; leave it out for plain"),
        (["--seed", "1.5"], "--seed: invalid int value: '1.5'"),
        (["--kind", "x"], "--kind: invalid choice: 'x' (choose from 'plain', 'none')"),
        (["--learn", "1"], "unknown setting --learn: --help lists all settings"),
        (["--config"], "--config: expected at least one argument"),
    ],
)
def test_flags_at_fault(argv, problem):
    assert problems_of("--sources", "a", *argv) == [problem]


def test_a_missing_required_setting_is_named_with_its_help():
    assert problems_of() == ["sources is required: what to read, 5% of it"]


def test_nothing_is_called_missing_when_a_recipe_could_not_be_read():
    assert problems_of("--config", "gone.yaml") == [
        "gone.yaml: cannot read the recipe: No such file or directory"
    ]


def test_a_required_setting_at_fault_is_not_called_missing_too(recipe):
    assert len(problems_of("--config", recipe("sources: {a: b}\n"))) == 1
    assert len(problems_of("--sources")) == 1


def test_checks_see_all_values_and_their_faults_join_the_others():
    def check_seed(values):
        if values["seed"] > values["learning_rate"]:
            yield f"{values.shown('seed')} is above {values.shown('learning_rate')}"

    def check_name(values):
        if values["name"] is None:
            yield "no name"

    checks = (check_seed, check_name)
    assert problems_of("--sources", "a", "--seed", "3", "--zzz", "x", checks=checks) == [
        "unknown setting --zzz: --help lists all settings",
        "seed 3 (--seed) is above learning_rate 0.001 (default)",
        "no name",
    ]


@pytest.mark.parametrize("fault", [["--seed", "x"], ["--seed", "null"]])
def test_a_check_that_reads_a_faulty_setting_is_left_out(fault):
    def check(values):
        yield f"reads {values['seed']}"

    assert len(problems_of("--sources", "a", *fault, checks=(check,))) == 1


def test_a_check_that_reads_a_missing_setting_is_left_out():
    def check(values):
        yield f"reads {values['sources']}"

    assert problems_of(checks=(check,)) == ["sources is required: what to read, 5% of it"]


@dataclass
class Picky:
    refused_settings: ClassVar[dict[str, str]] = {"old": "say new instead"}
    old: int = 1
    new: int = 2

    def __post_init__(self) -> None:
        if self.new < 0:
            raise ValueError("new is negative")
        if self.new == 0:
            raise ConfigurationError(["first", "second"])


def test_refused_settings_are_no_flags_and_say_what_to_use(recipe):
    path = recipe("old: 3\n")
    assert problems_of("--old", "1", "--config", path, classes=(Picky,)) == [
        "--old cannot be set here: say new instead",
        f"{path}:1: old cannot be set here: say new instead",
    ]
    assert "old" not in parse_arguments((Picky,), []).as_dict()


def test_a_value_error_of_a_constructor_is_a_configuration_error():
    assert problems_of("--new", "-1", classes=(Picky,)) == ["new is negative"]
    assert problems_of("--new", "0", classes=(Picky,)) == ["first", "second"]


def test_no_class_is_built_while_anything_is_at_fault():
    built = []

    @dataclass
    class Heavy:
        size: int = 1

        def __post_init__(self) -> None:
            built.append(self.size)

    problems_of("--size", "2", "--sized", "3", classes=(Heavy,))
    problems_of(classes=(Heavy,), checks=(lambda _: ["no"],))
    assert built == []
    parse_arguments((Heavy,), [])
    assert built == [1]


def test_a_class_may_build_itself_from_what_was_given():
    @dataclass
    class Own:
        size: int = 1

        @classmethod
        def from_settings(cls, given, values):
            return given, values["seed"]

    result = parse_arguments((First, Own), ["--sources", "a", "--size", "4", "--seed", "2"])
    assert result.instances[1] == ({"size": 4}, 2)


def test_two_classes_must_not_share_a_setting():
    with pytest.raises(AssertionError, match="two argument classes declare"):
        parse_arguments((First, First), [])


def test_mutable_defaults_are_not_shared():
    @dataclass
    class Listed:
        items: list[str] = field(default_factory=list)

    parse_arguments((Listed,), []).instances[0].items.append("x")
    assert parse_arguments((Listed,), []).instances[0].items == []
    parse_arguments((Listed,), []).as_dict()["items"].append("x")
    assert parse_arguments((Listed,), []).as_dict() == {"items": []}


def test_the_written_settings_are_a_recipe_of_the_same_settings(recipe):
    first = parse("--learning_rate", "1e-4", "--name", "1e-4", "--options", '{"no": "on"}')
    path = recipe(dump_yaml(first.as_dict()))
    second = parse_arguments((First, Second), ["--config", path])
    assert second.instances == first.instances
    assert second.as_dict() == first.as_dict()


def test_help_prints_each_setting_with_help_and_default_and_leaves_with_0(capsys):
    with pytest.raises(SystemExit) as left:
        parse_arguments((First, Second), ["--seed", "x", "--help"], description="What it does.")
    text = " ".join(capsys.readouterr().out.split())
    assert left.value.code == 0
    assert "What it does." in text
    assert "what to read, 5% of it (required)" in text
    assert "step size (default: 0.001)" in text
    assert "--config RECIPE.yaml" in text
    assert "--learning-rate" not in text


def test_the_command_line_of_the_process_is_read_by_default(monkeypatch):
    monkeypatch.setattr("sys.argv", ["script.py", "--sources", "x"])
    assert parse_arguments((First,)).instances[0].sources == ["x"]
