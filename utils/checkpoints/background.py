"""Writes a staged checkpoint to storage while training goes on, one at a time."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from utils.checkpoints.files import list_files, owner
from utils.checkpoints.sizes import MARGIN, readable
from utils.checkpoints.staging import MEMORY, Staging, free_bytes
from utils.cluster.decisions import cpu_group, on_every_rank
from utils.cluster.host import host_name

logger = logging.getLogger(__name__)

# A rank may wait for the largest file of another; one that died breaks the connection at once.
GROUP_TIMEOUT_S = 24 * 3600


class BackgroundWriter:
    """A thread of each rank that copies what it staged, and meets the other ranks' threads.

    Its group is its own, so that what the threads say to each other never mixes with what the
    ranks do meanwhile. All methods are for the main thread, but `own_files`.
    """

    def __init__(self, run_id: str, rank: int):
        """Make the group; collective over ranks. Raises UnfitClusterError."""
        self.rank = rank
        self.staging = Staging(run_id, rank)
        self.group = cpu_group(GROUP_TIMEOUT_S)
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is on its way."""
        return self.thread is not None and self.thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether the last one did not get there on this rank; `wait` raises why."""
        return self.error is not None

    def place(self, step: int, own_bytes: int | None, all_bytes: int) -> Path | None:
        """Return where this rank is to write a checkpoint, its memory; None where it has no room.

        Collective over ranks, which all get a place or none. `own_bytes` is what this rank wrote
        the last time (None: not known, a node has to have room for all).
        """
        rooms = on_every_rank(lambda: (host_name(), own_bytes, free_bytes()))
        for host in dict.fromkeys(host for host, _, _ in rooms):
            here = [(own, free) for name, own, free in rooms if name == host]
            free = min(free for _, free in here)
            parts = [own for own, _ in here if own is not None]
            needed = int(MARGIN * sum(parts)) if len(parts) == len(here) else all_bytes
            if free < needed:
                logger.warning(
                    "the checkpoint of step %d is written before training goes on: %s has %s "
                    "free in %s, the part that is written there takes %s",
                    step, host, readable(free), MEMORY, readable(needed),
                )  # fmt: skip
                return None
        return on_every_rank(self.staging.open)[self.rank]

    def start(self, work: Callable[[], None]) -> None:
        """Let `work` be done; the one before must have been waited for."""
        assert self.thread is None, "one at a time"
        self.thread = threading.Thread(
            target=self._do, args=[work], name="checkpoint writer", daemon=True
        )
        self.thread.start()

    def wait(self) -> None:
        """Wait for the work under way, if any; raise what it raised."""
        if self.thread is None:
            return
        self.thread.join()
        self.thread = None
        error, self.error = self.error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Give memory and group up; nothing may be under way. All ranks call it."""
        self.staging.close()
        if self.group is not None:
            torch.distributed.destroy_process_group(self.group)
            self.group = None

    def own_files(self, staged: Path) -> list[str]:
        """Return which of the files that it staged this rank has to copy.

        Collective over the threads of the ranks; raises StorageError.
        """
        return own_share(on_every_rank(lambda: list_files(staged), self.group), self.rank)

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.error = error


def own_share(names_by_rank: Sequence[Sequence[str]], rank: int) -> list[str]:
    """Return the files that a rank has to copy of those that each rank staged.

    A file that several staged is its owner's; any other one is whose that has it.
    """
    writers: dict[str, int] = {}
    for writer, names in enumerate(names_by_rank):
        for name in names:
            if name not in writers or owner(name) == writer:
                writers[name] = writer
    return [name for name, writer in writers.items() if writer == rank]
