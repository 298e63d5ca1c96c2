"""Recipes: later files win, `extends` goes depth first, every fault names file and line."""

import pytest

from utils.config.recipes import read_recipes


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    return write


def values(reading):
    assert reading.problems == []
    return {name: recipe.value for name, recipe in reading.values.items()}


def test_later_files_win_and_each_value_keeps_file_and_line(recipe):
    reading = read_recipes([recipe("a.yaml", "x: 1\ny: 2\n"), recipe("b.yaml", "\ny: 3\n")])
    assert values(reading) == {"x": 1, "y": 3}
    assert reading.values["x"].source == "a.yaml:1"
    assert reading.values["y"].source == "b.yaml:2"


def test_lists_and_mappings_are_replaced_as_a_whole(recipe):
    first = recipe("a.yaml", "l: [1, 2]\nm: {min_lr: 1, cycles: 2}\n")
    assert values(read_recipes([first, recipe("b.yaml", "l: [3]\nm: {min_lr: 2}\n")])) == {
        "l": [3],
        "m": {"min_lr": 2},
    }


def test_the_extending_file_wins_over_what_it_extends_in_order_and_depth(recipe):
    recipe("base/root.yaml", "who: root\nroot: 1\nkept: root\n")
    recipe("base/left.yaml", "extends: [root.yaml]\nwho: left\nleft: 1\nkept: left\n")
    recipe("base/right.yaml", "who: right\nright: 1\n")
    top = recipe("top.yaml", "extends: [base/left.yaml, base/right.yaml]\ntop: 1\n")
    reading = read_recipes([top])
    assert values(reading) == {
        "who": "right",
        "kept": "left",
        "root": 1,
        "left": 1,
        "right": 1,
        "top": 1,
    }
    assert reading.values["root"].source == "base/root.yaml:2"


def test_one_extended_file_needs_no_list_and_may_be_shared(recipe):
    recipe("base.yaml", "x: 1\n")
    left = recipe("left.yaml", "extends: base.yaml\n")
    right = recipe("right.yaml", "extends: [base.yaml, base.yaml]\ny: 2\n")
    assert values(read_recipes([left, right])) == {"x": 1, "y": 2}


def test_a_circle_is_refused_with_its_files(recipe):
    a = recipe("a.yaml", "extends: b.yaml\nx: 1\n")
    recipe("b.yaml", "extends: sub/../a.yaml\n")
    (problem,) = read_recipes([a]).problems
    assert problem == ("a.yaml: recipes extend each other in a circle: a.yaml -> b.yaml -> a.yaml")


def test_a_recipe_that_extends_itself_is_a_circle(recipe):
    (problem,) = read_recipes([recipe("a.yaml", "extends: a.yaml\n")]).problems
    assert "in a circle: a.yaml -> a.yaml" in problem


@pytest.mark.parametrize("extends", ["3", "[1]", "{a: b}", "null"])
def test_extends_names_files(recipe, extends):
    (problem,) = read_recipes([recipe("a.yaml", f"x: 1\nextends: {extends}\n")]).problems
    assert problem == ("a.yaml:2: extends: expected a list of recipe files, relative to this file")


def test_unreadable_files_are_all_named(recipe, tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    (tmp_path / "folder.yaml").mkdir()
    paths = ["missing.yaml", "latin.yaml", "folder.yaml", recipe("bad.yaml", "a: [\n"), "empty"]
    recipe("empty", "")
    assert read_recipes(paths).problems == [
        "missing.yaml: cannot read the recipe: No such file or directory",
        "latin.yaml: the recipe is not UTF-8 text (byte 3)",
        "folder.yaml: cannot read the recipe: Is a directory",
        "bad.yaml:2: not valid YAML: expected the node content, but found '<stream end>'",
        "empty: it is empty",
    ]


def test_a_missing_extended_file_is_named_relative_to_the_working_directory(recipe):
    recipe("sub/a.yaml", "extends: ../gone.yaml\n")
    (problem,) = read_recipes(["sub/a.yaml"]).problems
    assert problem.startswith("gone.yaml: cannot read the recipe")


def test_a_byte_order_mark_is_no_key(recipe):
    assert values(read_recipes([recipe("a.yaml", "\ufeffx: 1\n")])) == {"x": 1}


def test_duplicate_keys_are_a_problem_with_both_lines(recipe):
    reading = read_recipes([recipe("a.yaml", "seed: 1\nseed: 2\n")])
    assert reading.problems == ["a.yaml:2: seed is given twice, first in line 1"]
