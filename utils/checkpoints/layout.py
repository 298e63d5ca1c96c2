"""Which strategies can load which checkpoints."""

from pathlib import Path

from utils.checkpoints.manifest import read_manifest
from utils.config.errors import ConfigurationError

# Strategies that write the same: one process and DDP whole weights and a whole optimizer state,
# ZeRO-1 and ZeRO-2 whole weights and the same parts of the optimizer's state. The others write
# shards of their own.
ALIKE = [{"single", "ddp"}, {"zero1", "zero2"}]


def check_layout(checkpoint: Path, strategy: str) -> None:
    """Refuse a checkpoint that `strategy` (LaunchFacts) cannot go on from.

    The number of ranks never matters. Left to themselves the libraries end in a traceback about
    files that are missing, after the model was built on all ranks. Raises ConfigurationError.
    """
    written = read_manifest(checkpoint).strategy
    if written == strategy or {written, strategy} in ALIKE:
        return
    raise ConfigurationError(
        f"{checkpoint} was written under {written} and cannot be loaded under {strategy}: go on "
        f"with the accelerate config of {written} (any number of ranks will do), or start a new "
        "run from its weights: --init_from with another --output_dir."
    )
