"""Recipes are strict YAML 1.2; later files override earlier ones; faults name file and line."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.config.recipes import MASKED_NOTE, YamlError, dump_yaml, load_mapping, read_recipes


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3E5", 3e5), (".5", 0.5), ("5.", 5.0), ("-1", -1), ("1_000_000", 1_000_000), ("e5", "e5"),
        ("010", "010"), ("1:30", "1:30"), ("0x10", "0x10"), ("2024-01-31", "2024-01-31"),
        ("no", "no"), ("False", False), ("~", None), ("", None), ("none", "none"), ("<<", "<<"),
        ("'1e-4'", "1e-4"), (".inf", float("inf")), ("{a: [b, 1e-1]}", {"a": ["b", 0.1]}),
    ],
)  # fmt: skip
def test_plain_scalars_follow_yaml_1_2(text, value):
    values = load_mapping(f"# comment\nkey: {text}")
    assert values == {"key": (value, 2)}
    assert type(values["key"][0]) is type(value)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(blacklist_categories=("Cs", "Cc")))
    | st.sampled_from(["1e-4", "no", "1:30", "010", "null", "2024-01-31", "~", "=", "0o7", "1_0"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc_no1e-", min_size=1), inner),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None)  # the machine may be busy
@given(st.dictionaries(st.sampled_from(["a", "no", "1e-4", "b_c"]), PLAIN, min_size=1))
def test_what_is_written_is_read_back_by_us_and_by_yaml_1_1(values):
    text = dump_yaml(values)
    assert {key: value for key, (value, _) in load_mapping(text).items()} == values
    assert yaml.safe_load(text) == values


def test_unreadable_text_names_its_line():
    for text, message in {
        "# only a comment\n": "^:1: expected settings as `name: value` lines",
        "a: 1\nb: [1, 2\n": "^:3: not valid YAML: expected ',' or ']'",
        "a: 1\n---\nb: 2\n": "not valid YAML: but found another document",
        "a: !!python/object/apply:os.system [ls]\n": "^:1: not valid YAML: could not determine",
        "a:\n  - {c: 1, c: 2}\n": "^:2: not valid YAML: c is given twice",
        "1: x\n": "^:1: not valid YAML: a key has to be a name",
    }.items():
        with pytest.raises(YamlError, match=message):
            load_mapping(text)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        return name

    return write


def read(*paths):
    given, problems = read_recipes(paths)
    assert problems == []
    return {name: (entry.value, entry.source) for name, entry in given.items()}


def test_later_files_replace_whole_values_and_win_over_what_they_extend(recipe):
    first = recipe("a.yaml", "x: 1\nl: [1, 2]\nm: {min_lr: 1, cycles: 2}\n")
    later = recipe("b.yaml", "\ufeff\nl: [3]\nm: {min_lr: 2}\n")
    assert read(first, later) == {
        "x": (1, "a.yaml:1"), "l": ([3], "b.yaml:2"), "m": ({"min_lr": 2}, "b.yaml:3"),
    }  # fmt: skip
    recipe("base/root.yaml", "who: root\nroot: 1\ndeep: root\n")
    recipe("base/left.yaml", "extends: root.yaml\nwho: left\ndeep: left\n")
    recipe("base/right.yaml", "who: right\nright: 1\n")
    top = recipe("top.yaml", "extends: [base/left.yaml, base/right.yaml, base/right.yaml]\ntop: 1")
    found = read(top)
    assert found["root"] == (1, "base/root.yaml:2")
    assert {name: value for name, (value, _) in found.items()} == {
        "who": "right", "deep": "left", "root": 1, "right": 1, "top": 1,
    }  # fmt: skip


def test_a_mask_is_not_taken_for_the_value(recipe):
    text = "run_name: my ***\nseed: 1\nsample_prompts: ['***']\n"
    assert read(recipe("a.yaml", text))["run_name"] == ("my ***", "a.yaml:1"), "somebody's own"
    problems = read_recipes([recipe("config.yaml", f"# A run's.\n{MASKED_NOTE}\n{text}")])[1]
    assert [problem.split(" held a secret, ")[0] for problem in problems] == [
        "config.yaml:3: run_name", "config.yaml:5: sample_prompts",
    ]  # fmt: skip


def test_faults_of_files_are_all_named(recipe, tmp_path):
    recipe("a.yaml", "extends: b.yaml\nx: 1\n")
    recipe("b.yaml", "extends: sub/../a.yaml\n")
    recipe("sub/c.yaml", "extends: ../gone.yaml\nseed: 1\n")
    recipe("d.yaml", "x: 1\nextends: [1]\n")
    recipe("bad.yaml", "a: [\n")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    (tmp_path / "folder.yaml").mkdir()
    paths = ["a.yaml", "sub/c.yaml", "d.yaml", "latin.yaml", "folder.yaml", "bad.yaml"]
    assert read_recipes(paths)[1] == [
        "a.yaml: recipes extend each other in a circle",
        "gone.yaml: cannot be read: No such file or directory (did you mean folder.yaml?)",
        "d.yaml:2: extends: expected recipe files, not 1",
        "latin.yaml: not UTF-8 text",
        "folder.yaml: cannot be read: Is a directory",
        "bad.yaml:2: not valid YAML: expected the node content, but found '<stream end>'",
    ]
