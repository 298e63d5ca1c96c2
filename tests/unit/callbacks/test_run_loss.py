from utils.callbacks.metrics import RunLoss


def test_each_step_counts_once():
    loss = RunLoss()
    assert loss.mean() is None
    loss.count(4, 2.0)
    loss.count(5, 7.0)
    assert loss.mean() == (4 * 2.0 + 7.0) / 5


def test_of_a_checkpoint_that_carries_none_only_later_steps_count():
    loss = RunLoss.carried({}, logged=1000)
    loss.count(1010, 3.0)
    loss.count(1020, 1.0)
    assert (loss.mean(), loss.steps) == (2.0, 20)


def test_what_is_carried_goes_on():
    loss = RunLoss.carried({"run_loss": {"total": 8.0, "steps": 4, "through": 4}}, logged=4)
    loss.count(8, 4.0)
    assert loss.mean() == 3.0
