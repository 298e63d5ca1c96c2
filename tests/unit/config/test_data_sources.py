"""DIR=weight and NAME=DIR are read, or refused with the entry."""

import pytest

from utils.config.arguments import TrainSource, eval_splits, train_sources, weight_problems


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        ("data/a", TrainSource("data/a")),
        ("data/a=2", TrainSource("data/a", 2.0)),
        ("data/a=0.5", TrainSource("data/a", 0.5)),
        ("/data/lr=3/a", TrainSource("/data/lr=3/a")),
        ("/data/lr=3/a=1e-2", TrainSource("/data/lr=3/a", 0.01)),
    ],
)
def test_train_entries(entry, source):
    assert train_sources([entry]) == (source,)


@pytest.mark.parametrize("entry", ["a=", "a=x", "a=0", "a=-1", "a=nan", "a=inf", "=2"])
def test_bad_weights_are_refused(entry):
    with pytest.raises(ValueError, match=f"train_data '{entry}': expected DIR or DIR=weight"):
        train_sources([entry])


def test_weights_are_for_all_or_none_and_each_directory_counts_once():
    problems = weight_problems(train_sources(["a=1", "b", "c", "a=2"]))
    assert problems == [
        "train_data gives weights to some datasets and none to b, c: weight all or none",
        "train_data names a twice: give it a weight instead",
    ]
    assert weight_problems(train_sources(["a=1", "b=2"])) == []
    assert weight_problems(train_sources(["a", "b"])) == []


def test_eval_entries_keep_their_order_and_equals_signs():
    assert eval_splits(["b=data/x", "a_1=p=q"]) == {"b": "data/x", "a_1": "p=q"}
    assert eval_splits(["data/Held-Out/"]) == {"held_out": "data/Held-Out/"}


@pytest.mark.parametrize("entry", ["/", "=x", "a=", "A=x", "a-b=x", "a b=x", "a/b=x"])
def test_bad_eval_entries_are_refused(entry):
    with pytest.raises(ValueError, match=f"eval_data '{entry}': expected NAME=DIR"):
        eval_splits([entry])


def test_an_eval_name_given_twice_is_refused():
    with pytest.raises(ValueError, match="eval_data names 'a' twice: x and y"):
        eval_splits(["a=x", "b=z", "a=y"])
