"""Packing plans kept between starts: packing takes seconds for ten million documents.

They lie beside the statistics under $XDG_CACHE_HOME/stoker, by the content they are of and the
code that made them. zip's checksums tell a damaged file; it is made anew.
"""

import contextlib
import hashlib
import json
import logging
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from utils.cluster.kept import cache_root
from utils.data import packing, row_filling
from utils.data.packing import PackPlan, Segments

FORMAT = 1
FEWEST_DOCUMENTS = 100_000  # below, packing is as fast as reading what it made
LIMIT_BYTES = 4 << 30  # of all plans together: caches lie in home directories
_COUNTS = [field.name for field in fields(PackPlan) if field.type in (int, "int")]

logger = logging.getLogger(__name__)


def kept_plan(facts: Mapping[str, Any], documents: int, make: Callable[[], PackPlan]) -> PackPlan:
    """Return the plan that `make` makes, from an earlier start if one kept it.

    facts: all that the plan follows from, JSON values. What keeps it from being kept is said.
    """
    if documents < FEWEST_DOCUMENTS:
        return make()
    path = plan_path(facts)
    plan = read_plan(path)
    if plan is None:
        plan = make()
        keep_plan(path, plan)
    return plan


def plan_path(facts: Mapping[str, Any]) -> Path:
    """Return where a plan is kept; its name depends on the facts and on the code that packs."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([FORMAT, facts], sort_keys=True).encode())
    for module in (packing, row_filling):
        digest.update(Path(str(module.__file__)).read_bytes())
    return cache_root().expanduser() / "plans" / f"{digest.hexdigest()}.npz"


def read_plan(path: Path) -> PackPlan | None:
    """Return a kept plan; None when there is none that can be read."""
    try:
        with np.load(path, allow_pickle=False) as kept:
            counts = dict(zip(_COUNTS, kept["counts"].tolist(), strict=True))
            segments = Segments(*(kept[name] for name in Segments._fields))
            return PackPlan(row_offsets=kept["row_offsets"], segments=segments, **counts)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        logger.warning("%s: cannot be used (%r); packing again.", path, error)
        return None


def keep_plan(path: Path, plan: PackPlan) -> None:
    """Keep a plan for the next start, the oldest ones making room; what prevents it is said."""
    arrays = {**plan.segments._asdict(), "row_offsets": plan.row_offsets}
    arrays["counts"] = np.array([getattr(plan, name) for name in _COUNTS], dtype=np.int64)
    needed = sum(array.nbytes for array in arrays.values())
    if needed > LIMIT_BYTES:
        logger.info(
            "the packing plan is not kept: %.1f GiB; each start packs again", needed / 2**30
        )
        return
    # The process id keeps ranks that pack at the same time out of each other's file.
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _make_room(path.parent, LIMIT_BYTES - needed)
        np.savez(partial, **arrays)
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        logger.warning("the packing plan is not kept (%s); each start packs again", error)


def _make_room(directory: Path, limit: int) -> None:
    """Remove the oldest files until those that stay have at most `limit` bytes."""
    found = [(path.stat(), path) for path in directory.glob("*.npz")]
    total = sum(stat.st_size for stat, _ in found)
    for stat, path in sorted(found, key=lambda one: one[0].st_mtime_ns):
        if total <= limit:
            break
        path.unlink(missing_ok=True)
        total -= stat.st_size
