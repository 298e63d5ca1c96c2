"""Which strategies can load which checkpoints."""

from pathlib import Path

from utils.checkpoints.manifest import Manifest

# One process and DDP write whole weights and a whole optimizer state; every other strategy writes
# shards of its own that no other one reads.
WHOLE = {"single", "ddp"}


def layout_problem(checkpoint: Path, manifest: Manifest, strategy: str) -> str | None:
    """Say why `strategy` (LaunchFacts) cannot go on from a checkpoint; None when it can.

    The number of ranks never matters. Left to themselves the libraries fail with errors about
    missing files, or load the weights without the optimizer's state.
    """
    if manifest.strategy == strategy or {manifest.strategy, strategy} <= WHOLE:
        return None
    return (
        f"{checkpoint} was written under {manifest.strategy} and cannot be loaded under {strategy}:"
        f" go on with the accelerate config of {manifest.strategy} (any number of ranks will do), "
        "or start a new run from its weights: --init_from with another --output_dir."
    )
