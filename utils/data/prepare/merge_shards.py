"""Merges the shards of a preparation, in the last task of the job array to come here.

slurm/prepare_job.sh runs it at the end of each task, with the settings of the shards and --merge N:
python -m utils.data.prepare.merge_shards ARGUMENTS --merge N
"""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from utils.config.preparation import parse_preparation
from utils.launch.script import run_script

logger = logging.getLogger(__name__)


class ShardArray:
    """The tasks of a job array over shards: which of them have ended, and which one merges.

    `task` is this one's shard, of `tasks` in all. The state is in files of the workspace named by
    the array, so a task that died never blocks a later array. Methods raise FileNotFoundError when
    another task has merged already.
    """

    def __init__(self, workspace: Path, array: str, task: int, tasks: int):
        self.task = task
        self.tasks = tasks
        self._root = workspace
        self._prefix = f"array-{array}-"

    def finish(self) -> list[int]:
        """Note that this task's shard is complete; return the tasks that are not there yet.

        Whatever the order in which two tasks end, the later one sees both: it looks after it has
        noted itself.
        """
        (self._root / f"{self._prefix}finished-{self.task}").touch()
        # Listing a folder asks the server; looking for one file may be answered from a cache that
        # NFS keeps for a minute.
        present = set(os.listdir(self._root))  # noqa: PTH208 - names are compared
        return [t for t in range(self.tasks) if f"{self._prefix}finished-{t}" not in present]

    def claim_merge(self) -> bool:
        """Return whether this task merges: the first one to ask, also after it was requeued."""
        claim = self._root / f"{self._prefix}merged-by"
        draft = self._root / f"{self._prefix}claim-of-{self.task}"
        draft.write_text(str(self.task), encoding="utf-8")
        try:
            # A link is made by one of them only, on network file systems too, and is whole at once.
            os.link(draft, claim)
        except FileExistsError:
            return claim.read_text(encoding="utf-8") == str(self.task)
        return True


def main(argv: Sequence[str] | None = None) -> int:
    """Note that this task's shard is complete; merge if all are. Returns the exit code."""
    arguments = parse_preparation(argv, description=__doc__.splitlines()[0])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    assert arguments.merge is not None, "prepare_job.sh gives it"

    # Imported here so that wrong settings are refused at once.
    from utils.data.prepare.pipeline import Preparation

    preparation = Preparation(arguments)
    if preparation.is_finished:
        return 0  # prepare_data.py has logged it
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
