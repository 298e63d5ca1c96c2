"""Starts that make no progress are refused."""

import pytest

from utils.config.errors import ExitCode, NoProgressError
from utils.runs.start import check_progress

JOB = {"job_id": "42", "cluster": "c", "restart_count": "3"}


def start(checkpoint, **changes):
    return {"resumed_from": checkpoint, "slurm": JOB | changes}


AT_10 = [start("/old/name/checkpoint-10", restart_count=str(count)) for count in range(3)]


def test_three_starts_at_one_checkpoint_are_enough():
    with pytest.raises(
        NoProgressError, match=r"job 42 began 3 times at checkpoint-10 .*--time.*save_steps"
    ) as caught:
        check_progress(AT_10, "/run/checkpoint-10", JOB)
    assert caught.value.exit_code == ExitCode.NO_PROGRESS


def test_starts_without_any_checkpoint_count_too():
    with pytest.raises(NoProgressError, match="at step 0"):
        check_progress([start(None)] * 3, None, JOB)


@pytest.mark.parametrize(
    ("starts", "job"),
    [
        (AT_10[:2], JOB),
        ([*AT_10[:2], start("/run/checkpoint-9")], JOB),
        ([*AT_10[:2], start("/run/checkpoint-10", job_id="41")], JOB),
        ([*AT_10[:2], start("/run/checkpoint-10", cluster="d")], JOB),
        ([*AT_10[:2], {"resumed_from": "/run/checkpoint-10", "slurm": None}], JOB),
        (AT_10, JOB | {"job_id": "43", "restart_count": "0"}),
        (AT_10, JOB | {"job_id": "43", "restart_count": "1"}),
        (AT_10, JOB | {"restart_count": None}),
        (AT_10, None),
    ],
)
def test_others_may_start(starts, job):
    check_progress(starts, "/run/checkpoint-10", job)
