"""What a process keeps of the host's memory besides its tensors: freed pieces and oneDNN's code.

Each step on a CPU takes and frees hundreds of megabytes. glibc's malloc gives large pieces back to
the kernel, which clears them page by page when they are wanted again: a tenth of a step. There are
two ways out, and which is faster depends on the machine (docs/experiments.md): large tensors in
huge pages, or a heap that keeps what was freed.
"""

import ctypes
from collections.abc import Mapping, MutableMapping

from utils.cluster.processor import multiplies_in_tiles

_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # read by torch's allocator for CPUs

# glibc's variables by which a user decides about the heap, and its numbers for the same in mallopt.
_HEAP = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER, _NONE = -1, 0


def limit_host_memory(environment: MutableMapping[str, str]) -> None:
    """Set what torch's libraries read once, when they are loaded; what the user set stays."""
    if multiplies_in_tiles():  # measured on one such machine: Intel's with AMX
        environment.setdefault(_HUGE_PAGES, "1")
    # oneDNN keeps the code of each shape that it multiplied, half a megabyte or more, of a thousand
    # shapes if it is let. Chats of all lengths multiply some hundreds, few of them often.
    environment.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    # So does the layer between torch and oneDNN, another thousand: looking there first saves two
    # microseconds a product.
    environment.setdefault("LRU_CACHE_CAPACITY", "1")


def keep_freed_memory(environment: Mapping[str, str]) -> bool:
    """Let malloc keep what is freed from here on, for a process that trains on a CPU.

    False where nothing changes: with huge pages, where the user told malloc something, and without
    glibc. The peak stays as it was (docs/memory.md); after it less goes back to the system.
    """
    told = any(name in environment for name in _HEAP)
    told = told or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if told or environment.get(_HUGE_PAGES) == "1" or mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, _NONE) and mallopt(_TRIM_THRESHOLD, _NEVER))
