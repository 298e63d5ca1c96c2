"""The count of consumed tokens: each step once, over all starts, also when the sources change."""

from pathlib import Path

import numpy as np
import pytest

from utils.data.loader import ConsumedTokens, source_names


class Steps:
    """Step k holds 100 + k tokens of the first source and 10 of the second."""

    def __init__(self):
        self.asked: list[int] = []

    def __call__(self, step: int) -> np.ndarray:
        self.asked.append(step)
        return np.array([100 + step, 10])


def test_every_step_is_counted_once_whoever_asks():
    steps = Steps()
    consumed = ConsumedTokens(steps, ["web", "code"])
    assert consumed.count(0) == 0
    assert consumed.count(2) == 100 + 101 + 20
    assert consumed.count(2) == consumed.count(1) == 221
    assert consumed.count(3) == 221 + 102 + 10
    assert steps.asked == [0, 1, 2]
    assert consumed.by_source.tolist() == [303, 30]


def test_a_start_goes_on_from_what_its_checkpoint_carries():
    whole = ConsumedTokens(Steps(), ["web", "code"])
    whole.count(5)
    carried = whole.carried()
    assert carried == {"web": 510, "code": 50}
    steps = Steps()
    resumed = ConsumedTokens(steps, ["web", "code"])
    resumed.take_over(5, carried)
    assert resumed.count(8) == whole.count(8)
    assert resumed.carried() == whole.carried()
    assert steps.asked == [5, 6, 7], "a long run is not counted again from its start"


def test_tokens_of_a_source_that_went_still_count():
    consumed = ConsumedTokens(Steps(), ["web", "books"])
    consumed.take_over(5, {"web": 510, "code": 50})
    assert consumed.by_source.tolist() == [510, 0]
    assert consumed.count(6) == 560 + 105 + 10
    assert consumed.carried() == {"code": 50, "web": 615, "books": 10}


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/d/web", "/d/code"], ["web", "code"]),
        (["/d/web/train", "/d/code/train"], ["web", "code"]),
        (["/a/web", "/b/web", "/b/code"], ["a/web", "b/web", "b/code"]),
        (["/train", "/a/train"], ["/", "a"]),
        (["/one"], ["one"]),
    ],
)
def test_names_are_short_and_differ(paths, names):
    assert source_names([Path(path) for path in paths]) == names
