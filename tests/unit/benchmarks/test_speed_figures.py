"""What the documents say of speed."""

from benchmarks.cells.kinds import OURS, OURS_TUNED
from benchmarks.figures import speed as speed_figures

RATIO = {"low": 1.0, "high": 9.0}
TRAINING = {
    "title": "Work",
    "contestants": {
        name: {"tokens_per_second": speed}
        for name, speed in {OURS: 90.0, OURS_TUNED: 100.0, "slow": 20.0, "fast": 50.0}.items()
    },
    "ratios": {"slow": RATIO | {"median": 5.0}, "fast": RATIO | {"median": 2.0}},
}
COMPONENT = {
    "title": "Part",
    "unit": "documents",
    "sizes": [10, 200, 3000],
    "contestants": {
        OURS: {"per_second": {"10": 900.0, "200": 800.0, "3000": 700.0}},
        f"{OURS}, otherwise": {"per_second": {"200": 700.0}},
        "other": {"per_second": {"10": 3.0, "200": 2.0}},
    },
    "ratios": {
        "other": {"10": RATIO | {"median": 3.0}, "200": RATIO | {"median": 4.0}},
        f"{OURS}, otherwise": {"200": RATIO | {"median": 1.1}},
    },
}


def test_the_summary_has_the_closest_rival_at_the_largest_size_that_it_did():
    assert speed_figures.summary([TRAINING, COMPONENT]).splitlines()[2:] == [
        "| Work | 100 tokens/s | fast: 50 | 2.00 (1.00-9.00) |",
        "| Part; size 200 | 800 documents/s | other: 2.0 | 4.00 (1.00-9.00) |",
    ]


def test_figures_replace_those_between_the_marks():
    document = f"before\n{speed_figures.BEGIN}\nold\n{speed_figures.END}\nafter"
    made = speed_figures.with_figures(document, "new \\1")
    assert made == f"before\n{speed_figures.BEGIN}\nnew \\1\n{speed_figures.END}\nafter"
