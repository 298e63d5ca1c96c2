"""Digests of large files that stay as they are: computed once, then kept between starts."""

import logging
from collections.abc import Sequence
from pathlib import Path

from utils.checkpoints.digests import file_digests
from utils.checkpoints.sizes import readable
from utils.cluster.kept import file_states, keep, kept_path, read_kept

logger = logging.getLogger(__name__)


def kept_digests(files: Sequence[Path]) -> dict[str, str]:
    """Return the digest of each file by its name, from an earlier start if one kept it.

    Files count as the same while paths, sizes and modification times are. Raises OSError.
    """
    states = file_states(files)  # before the files are read: what is written meanwhile counts
    path = kept_path("digests", states)
    digests = read_kept(path, lambda content: _checked(content, files), "hashing again")
    if digests is None:
        size_bytes = sum(size for _, size, _ in states)
        where = files[0].parent if files else Path()
        logger.info("%s: hashing its %s of weights once", where, readable(size_bytes))
        found = file_digests(files)
        digests = dict(zip([file.name for file in files], found, strict=True))
        keep(path, digests, "Digests of the weights are not kept; every start hashes them again")
    return digests


def _checked(content: dict[str, str], files: Sequence[Path]) -> dict[str, str]:
    if content.keys() != {file.name for file in files}:
        raise ValueError("it speaks of other files")
    return content
