"""What a process keeps of the host's memory: set for torch's libraries, told to malloc."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from utils.support import host as host_memory
from utils.support import host as processor
from utils.support.host import keep_freed_memory, limit_host_memory

ROOT = Path(__file__).parents[3]

# Page faults of ten rounds that take 64 MiB, write to them and free them, after a first one.
_FAULTS = """
import os, resource
from utils.support.host import keep_freed_memory
print(keep_freed_memory(os.environ))
before = None
for _ in range(11):
    bytearray(64 << 20)
    before = before or resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.fixture
def tiles(monkeypatch):
    """Say whether the processor multiplies in tiles."""

    def say(answer):
        monkeypatch.setattr(host_memory, "multiplies_in_tiles", lambda: answer)

    return say


def faults(**environment):
    """Return what keep_freed_memory says in a fresh process, and its page faults after that."""
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(("MALLOC_", "THP_"))}
    done = subprocess.run(
        [sys.executable, "-c", _FAULTS],
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    said, count = done.stdout.split()
    return said == "True", int(count)


def test_what_was_freed_is_not_cleared_again():
    pages = 10 * (64 << 20) // os.sysconf("SC_PAGE_SIZE")
    kept, few = faults()
    left, many = faults(MALLOC_MMAP_MAX_="65536")  # glibc's own, said by the user
    assert (kept, left) == (True, False)
    assert few < pages / 100
    assert many > pages / 2, "malloc gives it back of its own accord: this test shows nothing"


@pytest.mark.parametrize(
    "told",
    [
        {"MALLOC_TRIM_THRESHOLD_": "1000000"},
        {"MALLOC_MMAP_THRESHOLD_": "1000000"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=4"},
        {"THP_MEM_ALLOC_ENABLE": "1"},
    ],
    ids=lambda told: next(iter(told)),
)
def test_what_the_user_told_malloc_stays(told):
    assert not keep_freed_memory(told)


def test_large_tensors_lie_in_huge_pages_where_that_was_measured_to_help(tiles):
    environment = {}
    tiles(False)
    limit_host_memory(environment)
    assert "THP_MEM_ALLOC_ENABLE" not in environment
    tiles(True)
    limit_host_memory(environment)
    assert environment["THP_MEM_ALLOC_ENABLE"] == "1"


def test_what_the_user_set_stays(tiles):
    tiles(True)
    own = dict.fromkeys(
        ("THP_MEM_ALLOC_ENABLE", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), "0"
    )
    environment = dict(own)
    limit_host_memory(environment)
    assert environment == own


def test_the_processor_says_its_maker_and_its_tiles(tmp_path, monkeypatch):
    facts = tmp_path / "cpuinfo"
    facts.write_text(
        "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel\t\t: 143\n"
        "model name\t: Xeon: a name\nflags\t\t: fpu amx_tile\n\n"
    )
    monkeypatch.setattr(processor, "_FACTS", facts)
    assert (processor.vendor(), processor.multiplies_in_tiles()) == ("GenuineIntel", True)
    assert processor.model() == "Xeon: a name"
    facts.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu avx512f\n\n")
    assert (processor.vendor(), processor.multiplies_in_tiles()) == ("AuthenticAMD", False)
    facts.unlink()
    assert (processor.vendor(), processor.multiplies_in_tiles()) == ("", False)
