"""The rule for spikes, with numbers computed by hand, and the commands that follow a spike."""

import math
from pathlib import Path
from random import Random

import pytest

from utils.host.spikes import SHORTEST, WINDOW, next_commands, spikes_in


def logs(values, every=1, name="loss"):
    """Return training logs, one every so many steps."""
    return [{"step": every * (place + 1), name: value} for place, value in enumerate(values)]


# The median is 2.0. Half of the distances from ln 2 are 0, the next are ln 1.05 = 0.04879, so their
# median is 0.024395 (of an even number) and a deviation is 1.4826 * 0.024395 = 0.036168. The limit
# is 2 * exp(8 * 0.036168) = 2.6711.
USUAL = [2.0, 2.1, 2.0, 1.9] * 8


def test_a_value_is_a_spike_above_eight_deviations():
    assert spikes_in(logs([*USUAL, 2.671])) == []
    (spike,) = spikes_in(logs([*USUAL, 2.672]))
    assert (spike.step, spike.before) == (33, 2.0)
    assert spike.score == pytest.approx(math.log(1.336) / 0.036168, rel=1e-4)
    assert str(spike).startswith("step 33: loss 2.672, usually 2: 8.0 deviations above")


def test_a_smooth_curve_has_a_deviation_of_a_hundredth():
    flat = [3.0] * 20
    assert spikes_in(logs([*flat, 3.239])) == []
    (spike,) = spikes_in(logs([*flat, 3.25]))
    assert spike.score == pytest.approx(math.log(3.25 / 3.0) / 0.01)


def test_small_batches_with_a_long_tail_have_no_spikes():
    """Losses of a healthy SFT: their logarithms have a deviation of 0.5. Custom losses below 0."""
    random = Random(0)
    losses = [math.exp(random.gauss(0.0, 0.5)) for _ in range(20_000)]
    assert spikes_in(logs(losses)) == []
    (spike,) = spikes_in(logs([*losses, 100.0]))
    assert spike.step == 20_001
    assert spikes_in(logs([-2.0] * 40 + [1.0])) == []
    assert spikes_in(logs([2.0, 0.0] * 40)) == [], "steps without loss tokens"


def test_the_first_values_are_never_spikes_and_only_a_window_counts():
    assert spikes_in(logs([2.0] * (SHORTEST - 1) + [9.0])) == []
    assert len(spikes_in(logs([2.0] * SHORTEST + [9.0]))) == 1
    fallen = [9.0] * 200 + [2.0] * WINDOW
    assert [spike.step for spike in spikes_in(logs([*fallen, 4.0]))] == [201 + WINDOW]
    assert spikes_in(logs([9.0] * 200 + [2.0] * 20 + [4.0])) == [], "the median is still 9"


def test_consecutive_spikes_are_one_and_a_log_may_be_a_mean_over_steps():
    lines = logs([*USUAL, 4.0, 6.0, 5.0, 2.0, math.nan], every=10)
    high, nan = spikes_in(lines)
    assert (high.steps, high.last_step, high.value) == ("321-330", 350, 6.0)
    assert high.all_steps == "321-330", "30 steps are too many to show"
    assert spikes_in(logs([*USUAL, 4.0, 6.0]))[0].all_steps == "33-34"
    assert (nan.steps, nan.score) == ("361-370", math.inf)
    assert "(high until step 350)" in str(high)
    assert spikes_in(lines, "grad_norm") == []
    norms = [line | {"grad_norm": 1.0 + (line["step"] == 200)} for line in lines]
    assert [spike.steps for spike in spikes_in(norms, "grad_norm")] == ["191-200"]


def test_the_commands_resume_before_the_spike():
    (spike,) = spikes_in(logs([*USUAL, 9.0]))
    run = Path("runs/my run")
    shown, choose, skip = next_commands(run, spike, [10, 20, 32]).splitlines()
    assert shown.endswith("python status.py 'runs/my run' --step 33")
    assert choose.endswith("--step 33 --json | head -n 4 >>skip.jsonl")
    assert skip.endswith("with --skip_documents skip.jsonl --accept_changes skip_documents")
    elsewhere = (
        " --resume_from_checkpoint 'runs/my run/checkpoint-20' --output_dir 'runs/my run-skip'"
    )
    assert next_commands(run, spike, [40, 20]).endswith(f"skip_documents{elsewhere}")
    for saved in ([], [33, 40]):
        anew = next_commands(run, spike, saved)
        assert anew.endswith("--skip_documents skip.jsonl --output_dir 'runs/my run-skip'")
