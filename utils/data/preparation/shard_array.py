"""The tasks of a job array over shards: which of them have ended, and which one merges.

Kept as files in the workspace, named by the array. One that is started anew counts anew, so a task
that died never blocks a later array.
"""

import os
from pathlib import Path


class ShardArray:
    """The tasks of one array; `task` is this one's shard, of `tasks` in all."""

    def __init__(self, workspace: Path, array: str, task: int, tasks: int):
        self.task = task
        self.tasks = tasks
        self._root = workspace
        self._prefix = f"array-{array}-"

    def finish(self) -> list[int]:
        """Note that this task's shard is complete; return the tasks that are not there yet.

        Whatever the order in which two tasks end, the later one sees both: it looks after it has
        noted itself. Raises FileNotFoundError when another task has merged already.
        """
        self._named(f"finished-{self.task}").touch()
        # Listing a folder asks the server; looking for one file may be answered from a cache that
        # NFS keeps for a minute.
        present = set(os.listdir(self._root))  # noqa: PTH208 - names are compared
        return [
            task
            for task in range(self.tasks)
            if self._named(f"finished-{task}").name not in present
        ]

    def claim_merge(self) -> bool:
        """Return whether this task is the one that merges: the first one to ask.

        It asks again when it was requeued in the middle of the merge, and merges on. Raises
        FileNotFoundError when another task has merged already.
        """
        claim = self._named("merged-by")
        draft = self._named(f"claim-of-{self.task}")
        draft.write_text(str(self.task), encoding="utf-8")
        try:
            # A link is made by one of them only, on network file systems too, and is whole at once.
            os.link(draft, claim)
        except FileExistsError:
            return claim.read_text(encoding="utf-8") == str(self.task)
        return True

    def _named(self, what: str) -> Path:
        return self._root / f"{self._prefix}{what}"
