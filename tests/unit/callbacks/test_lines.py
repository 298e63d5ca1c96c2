import pytest

from utils.callbacks.journal_lines import duration, quantity, readable_line


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (941, "941"), (999.6, "1.00k"), (12_400, "12.4k"), (99_960, "100k"),
     (1_210_000, "1.21M"), (9_996_000, "10.0M"), (5e12, "5000G")],
)  # fmt: skip
def test_quantities_have_three_digits(value, text):
    assert quantity(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (271, "4m31s"), (3599.7, "1h00m"),
     (11_100, "3h05m"), (187_200, "2d04h")],
)  # fmt: skip
def test_durations_have_two_units(seconds, text):
    assert duration(seconds) == text


def test_steps_align_whatever_their_width():
    lines = [
        readable_line({"event": "train", "step": step, "loss": 1.0}, 1000, None)
        for step in (1, 999)
    ]
    assert lines[0].index("loss") == lines[1].index("loss")


def test_an_evaluation_names_its_split_and_step():
    line = {"event": "eval", "split": "validation", "step": 120}
    line |= {"eval_validation_loss": 3.2, "eval_validation_perplexity": 24.5325}
    shown = readable_line(line, 800, None)
    assert shown == "eval validation  loss 3.2000  perplexity 24.53  (step 120)"


def test_an_unnamed_evaluation_reads_well_too():
    line = {"event": "eval", "split": None, "step": 5, "eval_loss": 3.2}
    assert readable_line(line, 800, None) == "eval  loss 3.2000  (step 5)"


def test_the_summary_tells_time_and_loss():
    line = {"event": "summary", "step": 800, "train_runtime": 271.0, "train_loss": 2.5}
    assert readable_line(line, 800, None) == "finished at step 800 after 4m31s  mean loss 2.5000"


def test_a_stopped_run_is_not_called_finished():
    line = {"event": "stopped", "step": 8, "train_runtime": 271.0}
    assert readable_line(line, 800, None) == "stopped at step 8 after 4m31s"


def test_a_loss_that_is_not_a_number_is_shown():
    line = readable_line({"event": "train", "step": 1, "loss": float("nan")}, 2, None)
    assert "loss nan" in line
