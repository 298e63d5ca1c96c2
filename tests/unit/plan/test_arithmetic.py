"""The global batch divides over ranks and micro-batches, or is refused."""

import pytest

from utils.config.errors import ConfigurationError
from utils.plan.arithmetic import accumulation_steps


def test_what_does_not_divide_is_refused_with_the_nearest_sizes_that_work():
    assert accumulation_steps(24, 3, 4) == 2
    for size, advice in {
        20: "over 4 ranks .* makes 12 at once: use global_batch_size 12 or 24, or per_dev.* 1$",
        5: "use global_batch_size 12$",
        0: "use global_batch_size 12$",
        -1: "use global_batch_size 12$",
        32: "use global_batch_size 24 or 36, or per_device_train_batch_size 2$",
    }.items():
        with pytest.raises(ConfigurationError, match=advice):
            accumulation_steps(size, 3, 4)
