"""Counts the bytes of tensors that are alive while a program runs on tensors without data."""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Stretch:
    """A part of a program: what is alive at its end, by the stretch that made it, and the most.

    `change` counts bytes made and given back within it; `peak` is the most that was alive beyond
    what was alive when it began.
    """

    name: str
    change: Counter[str] = field(default_factory=Counter)
    peak: int = 0

    @property
    def live(self) -> int:
        """Return by how much what is alive has grown since the stretch began."""
        return self.change.total()


class LiveBytes(TorchDispatchMode):
    """While it is active, counts every storage that an operator makes until nothing holds it.

    `begin(name)` closes one stretch and opens the next. Enter it inside a FakeTensorMode: only
    tensors without data are counted in no time. What was there before is given as `known`: it is
    not counted, nor are views of it.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.stretches = [Stretch("begin")]
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._makers: dict[int, tuple[str, int]] = {}

    def begin(self, name: str) -> None:
        """Open a stretch."""
        self.stretches.append(Stretch(name))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator and count what it made."""
        outcome = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outcome):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return outcome

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._makers or key in self._known:
            return
        stretch, size = self.stretches[-1], storage.nbytes()
        self._makers[key] = (stretch.name, size)
        stretch.change[stretch.name] += size
        stretch.peak = max(stretch.peak, stretch.live)
        weakref.finalize(storage, self._give_back, key)

    def _give_back(self, key: int) -> None:
        maker, size = self._makers.pop(key)
        self.stretches[-1].change[maker] -= size
