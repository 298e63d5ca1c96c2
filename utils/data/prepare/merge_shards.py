"""Merges the shards of a preparation, in the last task of the job array to come here.

slurm/prepare_job.sh runs it at the end of each task, with the settings of the shards and --merge N:
python -m utils.data.prepare.merge_shards ARGUMENTS --merge N
"""

import logging
import os
import sys
from collections.abc import Sequence

from utils.config.preparation import parse_preparation
from utils.launch.script import run_script

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Note that this task's shard is complete; merge if all are. Returns the exit code."""
    arguments = parse_preparation(argv, description=__doc__.splitlines()[0])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    assert arguments.merge is not None, "prepare_job.sh gives it"

    # Imported here so that wrong settings are refused at once.
    from utils.data.prepare.pipeline import Preparation
    from utils.data.prepare.workspace import ShardArray

    preparation = Preparation(arguments)
    if preparation.is_finished:
        return 0  # prepare_data.py has said so
    array = ShardArray(
        preparation.workspace.root,
        os.environ["SLURM_ARRAY_JOB_ID"],
        int(os.environ["STOKER_SHARD"]),
        arguments.merge,
    )
    try:
        others = array.finish()
        if others:
            logger.info(
                "%d of %d shards are not complete yet (%s%s); the last one to finish merges",
                *(len(others), arguments.merge, ", ".join(map(str, others[:10]))),
                ", ..." if len(others) > 10 else "",
            )
            return 0
        if not array.claim_merge():
            logger.info("all %d shards are complete; another task merges them", arguments.merge)
            return 0
    except FileNotFoundError:
        logger.info("another task has merged the shards meanwhile")
        return 0
    logger.info("all %d shards are complete: merging", arguments.merge)
    preparation.assemble(preparation.provide_tokenizer())
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
