"""What the user may set for steps whose loss or gradient is not finite."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)  # so that settings without a default may follow in a subclass
class NonFiniteArguments:
    """What becomes of a step whose loss or gradient is not finite; part of `RunArguments`."""

    on_nonfinite: Literal["stop", "skip"] = field(
        default="stop",
        metadata={
            "help": "a step whose loss or gradient is NaN or infinite: stop ends the run with exit "
            "code 78, no checkpoint being written of it; skip leaves weights and optimizer as they "
            "are and goes on (every step then waits for the device). Both name its documents"
        },
    )
    nonfinite_limit: int = field(
        default=3,
        metadata={
            "help": "with on_nonfinite: skip, how many steps of the whole run may be skipped; the "
            "next one ends it with exit code 78"
        },
    )
