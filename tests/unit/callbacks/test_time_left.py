from utils.callbacks.journal_lines import TimeLeft


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_neither_what_comes_before_the_first_step_nor_that_step_counts_for_the_others():
    clock = Clock()
    left = TimeLeft(clock)
    assert left.seconds(40, 100) is None
    clock.now = 600.0  # an evaluation before the first step
    left.begin_step(40)
    assert left.seconds(40, 100) is None
    clock.now += 50.0  # it is compiled
    left.end_step(41)
    assert left.seconds(41, 100) == 50 * 59, "the only step known"
    for step in (41, 42):
        left.begin_step(step)
        clock.now += 2.0
        left.end_step(step + 1)
    assert left.seconds(43, 100) == 2 * 57
    clock.now += 2.0  # an evaluation between steps counts for all of them
    assert left.seconds(43, 100) == 3 * 57
    assert left.seconds(100, 100) == 0
