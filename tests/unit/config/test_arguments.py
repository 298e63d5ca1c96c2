"""DIR=weight and NAME=DIR are parsed, or refused with the faulty entry."""

import pytest

from utils.config.arguments import eval_splits, train_sources


def test_train_entries_are_directories_with_a_weight_for_all_or_none():
    for entry, source in {
        "data/a": {"data/a": None},
        "data/a=0.5": {"data/a": 0.5},
        "/data/lr=3/a": {"/data/lr=3/a": None},
        "/data/lr=3/a=1e-2": {"/data/lr=3/a": 0.01},
    }.items():
        assert train_sources([entry]) == source
    for entry in ("a=", "a=x", "a=0", "a=nan", "a=inf", "=2"):
        with pytest.raises(ValueError, match=f"train_data '{entry}': expected DIR or DIR=weight"):
            train_sources([entry])
    with pytest.raises(ValueError, match="train_data gives no weight to b, c: weight all or none"):
        train_sources(["a=1", "b", "c"])
    with pytest.raises(ValueError, match="train_data names a twice: give it a weight instead"):
        train_sources(["a", "b", "a"])
    assert len(train_sources(["a=1", "b=2"])) == len(train_sources(["a", "b"])) == 2


def test_eval_entries_are_named_once_each():
    assert eval_splits(["b=data/x", "a_1=p=q", "data/Held-Out/"]) == {
        "b": "data/x", "a_1": "p=q", "held_out": "data/Held-Out/",
    }  # fmt: skip
    with pytest.raises(ValueError, match="eval_data names 'a' twice: x and y"):
        eval_splits(["a=x", "b=z", "a=y"])
    for entry in ("/", "=x", "a=", "A=x", "a-b=x", "a/b=x"):
        with pytest.raises(ValueError, match=f"eval_data '{entry}': expected NAME=DIR"):
            eval_splits([entry])
