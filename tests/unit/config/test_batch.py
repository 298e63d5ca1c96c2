"""The global batch is what the user set: it divides, or the nearest ones that do are named."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from utils.config.batch import accumulation_steps, batch_arithmetic
from utils.config.errors import ConfigurationError

COUNTS = st.integers(1, 64)


@given(COUNTS, COUNTS, COUNTS)
def test_accumulation_times_ranks_times_micro_batch_is_the_global_batch(steps, micro, ranks):
    assert accumulation_steps(steps * micro * ranks, micro, ranks) == steps


@given(st.integers(-5, 5000), COUNTS, COUNTS)
def test_what_is_refused_comes_with_the_nearest_sizes_that_work(size, micro, ranks):
    if size > 0 and size % (micro * ranks) == 0:
        return
    with pytest.raises(ConfigurationError) as caught:
        accumulation_steps(size, micro, ranks)
    text = str(caught.value)
    advised = re.search(r"use global_batch_size (\d+)(?: or (\d+))?", text)
    sizes = [int(number) for number in advised.groups() if number]
    divisible = [n for n in range(1, size + 2 * micro * ranks + 9) if n % (micro * ranks) == 0]
    below = [n for n in divisible if n < size][-1:]
    above = [n for n in divisible if n > size][:1]
    assert sizes == below + above
    smaller = re.search(r"per_device_train_batch_size (\d+)", text)
    fitting = [m for m in range(1, micro) if size > 0 and size % (m * ranks) == 0]
    assert (int(smaller[1]) if smaller else None) == (fitting[-1] if fitting else None)


def test_the_message_shows_the_arithmetic():
    message = (
        "global_batch_size 100 does not divide over 4 ranks of 8 sequences each, which makes 32 "
        "at once: use global_batch_size 96 or 128, or per_device_train_batch_size 5"
    )
    with pytest.raises(ConfigurationError, match=message):
        accumulation_steps(100, 8, 4)


def test_the_arithmetic_is_written_out():
    assert batch_arithmetic(8, 4096, 16, 2) == (
        "8 sequences x 4,096 tokens x 16 ranks x 2 accumulation = 1,048,576 tokens/step"
    )
    assert " x 1 rank x " in batch_arithmetic(8, 4096, 1, 2)
