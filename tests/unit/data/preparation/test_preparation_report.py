import json
from collections import Counter

import datasets
import numpy as np
import preparation_samples as samples
from hypothesis import given
from hypothesis import strategies as st

from utils.data.prepare.pipeline import (
    PERCENTILES,
    length_percentiles,
    read_example,
    report_lines,
)
from utils.data.prepare.workspace import SplitCounts, UnitCounts


@given(st.lists(st.integers(1, 50), min_size=1, max_size=300))
def test_percentiles_of_the_histogram_are_those_of_the_lengths(lengths):
    histogram = dict(Counter(lengths))
    expected = {f"p{p}": int(np.percentile(lengths, p, method="inverted_cdf")) for p in PERCENTILES}
    assert length_percentiles(histogram) == {**expected, "max": max(lengths)}


def test_counts_of_units_add_up():
    one = UnitCounts(
        {"train": SplitCounts(2, 10, 5, 30, Counter({4: 1, 6: 1}))}, Counter(empty=1), ["a"]
    )
    two = UnitCounts(
        {"train": SplitCounts(1, 4, 4, 9, Counter({4: 1}))}, Counter(empty=2, overlong=1)
    )
    total = UnitCounts.total([one, two])
    assert total.splits["train"] == SplitCounts(3, 14, 9, 39, Counter({4: 2, 6: 1}))
    assert total.dropped == {"empty": 3, "overlong": 1}
    assert UnitCounts.from_json(json.loads(json.dumps(total, default=vars))) == total
    lines = "\n".join(report_lines(total, ["train"]))
    assert "64.3%" in lines
    assert "dropped: 3 empty, 1 overlong; truncated: 0" in lines
    assert "  dropped a" in lines


def test_an_example_marks_what_is_trained_on_and_escapes_what_steers_a_terminal(tmp_path):
    tokenizer = samples.tiny_tokenizer()
    prompt = tokenizer("say \x1b[31m")["input_ids"]
    answer = tokenizer("red\n\u202e<|im_end|>")["input_ids"]
    mask = [0] * len(prompt) + [1] * len(answer)
    columns = {"input_ids": [prompt + answer], "completion_mask": [mask]}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "train")
    shown = read_example(tmp_path / "train", "completion_mask", tokenizer)
    assert shown == "say \\x1b[31m[[red\n\\u202e<|im_end|>]]"
