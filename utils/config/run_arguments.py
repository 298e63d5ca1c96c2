"""What the user may set of a run as a whole: `RunArguments`."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class RunArguments:
    """How the run as a whole is done."""

    _argument_group_name = "run"

    global_batch_size: int = field(
        metadata={
            "help": "sequences per optimizer step over all ranks; gradient accumulation follows "
            "from it, per_device_train_batch_size and the number of ranks"
        }
    )
    dry_run: bool = field(
        default=False,
        metadata={
            "help": "resolve and check the settings, print the arithmetic and the memory "
            "estimate, and stop before weights are loaded"
        },
    )
    hang_timeout_s: float = field(
        default=600,
        metadata={
            "help": "seconds without any progress after which the run ends with exit code 76 and "
            "says which rank stands where; three times that while saving and in the first step; "
            "0: never"
        },
    )
    save_minutes: float | None = field(
        default=30,
        metadata={
            "help": "write a checkpoint also when the last one is that many minutes old; no "
            "candidate for the best one; null or 0: never, as with save_strategy: no"
        },
    )
    save_best: bool = field(
        default=False,
        metadata={
            "help": "write a checkpoint also whenever an evaluation gives a new best of "
            "metric_for_best_model"
        },
    )
    accept_changes: list[str] = field(
        default_factory=list,
        metadata={
            "help": "settings whose other value this run shall go on with, though it makes another "
            "run of it; train_data stands for changed contents too"
        },
    )
    async_save: bool = field(
        default=False,
        metadata={
            "help": "write checkpoints in the background: training waits for the copy to the "
            "node's memory (/dev/shm), not for the storage"
        },
    )
    optim_states: Literal["float32", "bfloat16", "int8"] | None = field(
        default=None,
        metadata={
            "help": "what AdamW keeps its two moments as: 8, 4 or about 2 bytes a parameter, "
            "rounded so that nothing is lost on average; null: as the weights are"
        },
    )
    stochastic_rounding: bool = field(
        default=False,
        metadata={
            "help": "with dtype: bfloat16, round the weights up or down at random after each step: "
            "to the nearest, small updates are lost"
        },
    )
