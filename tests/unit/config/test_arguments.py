"""DIR=weight, NAME=DIR and the global batch are what the user set, or refused with the entry."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from utils.config.arguments import (
    accumulation_steps,
    batch_arithmetic,
    eval_splits,
    train_sources,
)
from utils.config.errors import ConfigurationError


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


COUNTS = st.integers(1, 64)


@given(st.integers(-5, 5000), COUNTS, COUNTS)
def test_what_is_refused_comes_with_the_nearest_sizes_that_work(size, micro, ranks):
    if size > 0 and size % (micro * ranks) == 0:
        assert accumulation_steps(size, micro, ranks) * micro * ranks == size
        return
    with pytest.raises(ConfigurationError) as caught:
        accumulation_steps(size, micro, ranks)
    text = str(caught.value)
    advised = re.search(r"use global_batch_size (\d+)(?: or (\d+))?", text)
    sizes = [int(number) for number in advised.groups() if number]
    divisible = [n for n in range(1, size + 2 * micro * ranks + 9) if n % (micro * ranks) == 0]
    assert sizes == [n for n in divisible if n < size][-1:] + [n for n in divisible if n > size][:1]
    smaller = re.search(r"per_device_train_batch_size (\d+)", text)
    fitting = [m for m in range(1, micro) if size > 0 and size % (m * ranks) == 0]
    assert (int(smaller[1]) if smaller else None) == (fitting[-1] if fitting else None)


def test_the_arithmetic_is_written_out():
    assert batch_arithmetic(8, 4096, 16, 2) == (
        "8 sequences x 4,096 tokens x 16 ranks x 2 accumulation = 1,048,576 tokens/step"
    )
