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


def test_a_part_that_is_compiled_stands_for_us():
    compiled = f"{OURS}, compiled"
    speeds = {OURS: 40.0, compiled: 90.0, "other": 60.0}
    part = {
        "title": "Part",
        "unit": "tokens",
        "sizes": [7],
        "contestants": {
            name: {"per_second": {"7": speed}, "repeats": {"7": [speed]}}
            for name, speed in speeds.items()
        },
        "ratios": {name: {"7": RATIO | {"median": 0.5}} for name in (compiled, "other")},
    }
    assert speed_figures.summary([part]).splitlines()[2:] == [
        "| Part; size 7 | 90.0 tokens/s | other: 60.0 | 1.50 |"
    ]


def test_figures_replace_those_between_the_marks():
    document = f"before\n{speed_figures.BEGIN}\nold\n{speed_figures.END}\nafter"
    made = speed_figures.with_figures(document, "new \\1")
    assert made == f"before\n{speed_figures.BEGIN}\nnew \\1\n{speed_figures.END}\nafter"


def test_the_documents_say_that_nothing_is_from_a_gpu_until_something_is(monkeypatch):
    results = {"cpu": [TRAINING], "gpu": []}
    monkeypatch.setattr(speed_figures, "load_results", lambda group, _: results.get(group, []))
    monkeypatch.setattr(speed_figures, "_made", lambda _: "made")
    monkeypatch.setattr(speed_figures, "table", lambda result: result["title"])
    for text in list(speed_figures.documents().values())[:2]:
        assert "No figures from a GPU are here yet" in text
    results["gpu"] = [TRAINING | {"title": "Work on a GPU"}, {"title": "Probes", "probes": {}}]
    readme, performance, _ = speed_figures.documents().values()
    assert "| Work on a GPU | 100 tokens/s |" in readme
    assert "Work on a GPU" in performance
    assert "Probes" in performance
    for text in (readme, performance):
        assert "No figures from a GPU" not in text
