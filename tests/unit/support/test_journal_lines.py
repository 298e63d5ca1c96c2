"""A line of metrics.jsonl has the types of docs/metrics.md, or is damaged."""

import json
import math
from typing import Any

import pytest

from utils.support.journal_file import read_line

LINE = {"event": "train", "step": 3, "time": 1.5}


def read(**fields: Any) -> dict[str, Any] | None:
    return read_line(json.dumps(LINE | fields).encode())


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("loss", 2.5, 2.5),
        ("loss", 2, 2),
        ("loss", "-Infinity", -math.inf),
        ("loss", 1e200, math.inf),
        ("step_time_s", 0.5, 0.5),
        ("slowest_host", "n1", "n1"),
        ("memory_by_rank", [{"rank": 0}], [{"rank": 0}]),
        ("of_a_hook", ["any", {"value": None}], ["any", {"value": None}]),
        ("of_a_hook", "Infinity", math.inf),
    ],
)
def test_values_of_their_type_are_read(name, value, expected):
    assert read(**{name: value}) == LINE | {name: expected}


def test_a_figure_may_be_no_number():
    line = read(loss="NaN")
    assert line is not None
    assert math.isnan(line["loss"])


@pytest.mark.parametrize("value", ["NaN", "Infinity", 1e19, -1e19, None])
@pytest.mark.parametrize("name", ["step_time_s", "memory_peak_gib", "mfu", "epoch"])
def test_a_measure_that_readers_cannot_add_up_is_left_out(name, value):
    assert read(**{name: value}) == LINE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("event", 1), ("event", "a\nb"), ("event", None), ("step", -1), ("step", True),
        ("step", 2.0), ("step", 2**60), ("step", "3"), ("time", -1), ("time", 1e12),
        ("time", "NaN"), ("loss", "2.5"), ("loss", True), ("step_time_s", [1]),
        ("memory_by_rank", [1]), ("memory_by_rank", {}), ("split", 1), ("a\nname", 1),
    ],
)  # fmt: skip
def test_values_of_other_types_damage_the_line(name, value):
    assert read(**{name: value}) is None


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"event": "train"}', "\udcff"])
def test_other_texts_are_damaged(text):
    assert read_line(text.encode("utf-8", "surrogateescape")) is None
