"""The launchers of all nodes meet before they start anything, and tell each other what they are.

The first node listens at the port after rank 0's. All waiting is done here in Python, so that a
signal ends it: torch's own waiting does not return before its time-out.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any

from utils.cluster.slurm_tasks import (
    MAIN_ADDRESS,
    MAIN_PORT,
    can_listen,
    listen,
    taken_port_message,
)
from utils.config.errors import ConfigurationError, UnfitClusterError
from utils.jobs.allocation import Allocation

TIMEOUT = "STOKER_MEET_TIMEOUT_S"
_CONNECT_TIMEOUT_S = 5.0
_POLL_S = 0.05


def with_free_port(allocation: Allocation) -> Allocation:
    """Return the allocation with a port that is free, if this node alone may choose one.

    Raises UnfitClusterError for a taken port that the user or other nodes count on.
    """
    if allocation.node > 0 or can_listen(allocation.port):
        return allocation
    if len(allocation.hosts) > 1 or os.environ.get(MAIN_PORT):
        raise UnfitClusterError(taken_port_message(allocation.host, allocation.port, os.environ))
    with listen(0) as listener:
        return replace(allocation, port=listener.getsockname()[1])


class Meeting:
    """All nodes of a job, each in its own process; made on all of them, used in the same order.

    Making it waits for the first node. Raises UnfitClusterError where host names, addresses or
    ports keep the nodes apart.
    """

    def __init__(self, allocation: Allocation):
        self.allocation = allocation
        self.timeout_s = _timeout_s()
        self.where = f"{allocation.address}:{allocation.port + 1}"
        self._listener = self._listen() if allocation.node == 0 else None
        self._store: Any = None
        try:
            self._see_address()
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> "Meeting":
        """Use it in a `with`, which frees the port for the next job."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        """Close the port, once all nodes have read what they came for."""
        if kind is None and self._store is not None:
            self._store.set(f"left/{self.allocation.node}", "")
            if self.allocation.node == 0:
                self._wait_for("left")
        self._close()

    def _close(self) -> None:
        self._store = None
        if self._listener is not None:
            self._listener.close()

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Say something to all nodes and return what each said, in the order of the nodes.

        It travels as JSON: nothing in it can run. Raises UnfitClusterError for nodes that do not
        come.
        """
        try:
            store = self._open_store()
            store.set(f"{name}/{self.allocation.node}", json.dumps(value))
            keys = self._wait_for(name)
            return [json.loads(text) for text in store.multi_get(keys)]
        except RuntimeError as error:  # all of torch's network errors are some
            message = (str(error).splitlines() or [type(error).__name__])[0][:300]
            raise UnfitClusterError(
                f"{self.allocation.host} lost {self.where}, where the nodes meet ({message}). "
                f"{self._remedy()}"
            ) from error

    def _open_store(self) -> Any:
        if self._store is None:
            import torch.distributed as dist

            listener, self._listener = self._listener, None
            self._store = dist.TCPStore(
                self.allocation.address,
                self.allocation.port + 1,
                is_master=listener is not None,
                timeout=timedelta(seconds=self.timeout_s),
                wait_for_workers=False,
                master_listen_fd=listener.detach() if listener is not None else None,
            )
        return self._store

    def _wait_for(self, name: str) -> list[str]:
        keys = [f"{name}/{node}" for node in range(len(self.allocation.hosts))]
        if not _wait_until(lambda: self._store.check(keys), self.timeout_s):
            pairs = zip(keys, self.allocation.hosts, strict=True)
            missing = [host for key, host in pairs if not self._store.check([key])]
            raise UnfitClusterError(
                f"{', '.join(missing)} did not come to {self.where} within {self.timeout_s:g} s, "
                f"where {self.allocation.host} waited. Is the node slow to start (a cold file "
                f"system)? {TIMEOUT}=120 waits longer. {self._remedy()}"
            )
        return keys

    def _listen(self) -> socket.socket:
        port = self.allocation.port + 1
        try:
            return listen(port)
        except OSError as error:
            message = taken_port_message(self.allocation.host, port, os.environ)
            raise UnfitClusterError(message) from error

    def _see_address(self) -> None:
        """Wait until the first node answers; on the first node see that it reaches itself."""
        first = self.allocation.node == 0
        problem: list[OSError] = []

        def answers() -> bool:
            where = (self.allocation.address, self.allocation.port + 1)
            try:
                socket.create_connection(where, timeout=_CONNECT_TIMEOUT_S).close()
            except OSError as error:
                problem[:] = [error]
                return False
            return True

        # The first node listens already: there is nothing to wait for.
        if _wait_until(answers, 0.0 if first else self.timeout_s):
            return
        if isinstance(problem[0], socket.gaierror):
            what = "is no name or address that it knows"
        else:
            what = "does not lead back to it" if first else "did not answer"
            what += "" if first else f" within {self.timeout_s:g} s"
        raise UnfitClusterError(
            f"{self.allocation.host}: {self.where}, the address of {self.allocation.hosts[0]} "
            f"where the nodes meet, {what} ({problem[0].strerror or problem[0]}). {self._remedy()}"
        ) from problem[0]

    def _remedy(self) -> str:
        return (
            f"Set {MAIN_ADDRESS} (slurm/cluster.env) to an address of {self.allocation.hosts[0]} "
            "that all nodes reach, on the interface that NCCL_SOCKET_IFNAME names; "
            f"{MAIN_PORT} chooses another port."
        )


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _timeout_s() -> float:
    text = os.environ.get(TIMEOUT, "30")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 3600:
        raise ConfigurationError(f"{TIMEOUT}={text!r}: give seconds from 1 to 3600.")
    return seconds
