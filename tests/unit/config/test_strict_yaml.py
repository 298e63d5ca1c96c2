"""Recipes are YAML 1.2 without surprises; what we write, any reader reads alike."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.config.recipes import YamlError, dump_yaml, load_mapping


def value_of(text: str):
    values, faults = load_mapping(f"key: {text}")
    assert faults == []
    return values["key"][0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3E5", 3e5),
        ("-1.5e+3", -1500.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("7", 7),
        ("-1", -1),
        ("1_000_000", 1_000_000),
        ("010", "010"),
        ("1:30", "1:30"),
        ("2024-01-31", "2024-01-31"),
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("none", "none"),
        ("e5", "e5"),
        ("'1e-4'", "1e-4"),
        ("<<", "<<"),
        ("0x10", "0x10"),
        (".inf", float("inf")),
        ("[a, 1, 2.0]", ["a", 1, 2.0]),
        ("{a: {b: 1e-1}}", {"a": {"b": 0.1}}),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text, value):
    read = value_of(text)
    assert (read, type(read)) == (value, type(value))


def test_each_key_keeps_its_line():
    values, _ = load_mapping("# comment\na: 1\n\nb:\n  c: 2\nd: 3\n")
    assert {key: line for key, (_, line) in values.items()} == {"a": 2, "b": 4, "d": 6}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: 1\nb: 2\na: 3\n", ":3: a is given twice, first in line 1"),
        ("a:\n  c: 1\n  c: 2\n", ":3: c is given twice, first in line 2"),
        ("a:\n  - {c: 1, c: 2}\n", ":2: c is given twice, first in line 2"),
        ("1: x\n", ":1: a key has to be a plain name"),
        ("? [1]\n: x\n", ":1: a key has to be a plain name"),
        ("a:\n  null: x\n", ":2: a key has to be a plain name"),
    ],
)
def test_bad_keys_are_faults_at_any_depth(text, fault):
    assert load_mapping(text)[1] == [fault]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"^: it is empty"),
        ("# only a comment\n", r"^: it is empty"),
        ("- a\n- b\n", r"^:1: expected settings as `name: value` lines"),
        ("just words\n", r"^:1: expected settings"),
        ("a: 1\nb: [1, 2\n", r"^:3: not valid YAML: expected ',' or ']'"),
        ("a: 1\n\tb: 2\n", r"^:2: not valid YAML: .*'\\t'"),
        ("a: 1\n---\nb: 2\n", r"not valid YAML: but found another document"),
        ("a: !!python/object/apply:os.system [ls]\n", r"^:1: not valid YAML: could not determine"),
        ("a: !!python/name:os.system\n", r"^:1: not valid YAML: could not determine"),
        ("a: *missing\n", r"^:1: not valid YAML: found undefined alias"),
        ("a: &x [*x]\n", r"^:1: not valid YAML: found unconstructable recursive node"),
        ("a: &x {b: *x}\n", r"^:1: not valid YAML: found unconstructable recursive node"),
        ("a: \x00\n", r"not valid YAML: special characters are not allowed"),
    ],
)
def test_unreadable_text_names_its_line(text, message):
    with pytest.raises(YamlError, match=message):
        load_mapping(text)


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


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from(["a", "no", "1e-4", "b_c"]), PLAIN, min_size=1))
def test_what_is_written_is_read_back_by_us_and_by_yaml_1_1(values):
    text = dump_yaml(values)
    read, faults = load_mapping(text)
    assert faults == []
    assert {key: value for key, (value, _) in read.items()} == values
    assert yaml.safe_load(text) == values
