"""System calls on shared folders in a start of two ranks, with and without copies on the disk.

    python -m benchmarks.durations.shared_calls

strace counts the calls that name, read or map a file of the dataset, of the environment's packages
or of the Python that the environment is made from. Pages of mapped files are read without a call.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.durations.start_up import prepare
from benchmarks.hardware.circumstances import ROOT, circumstances
from benchmarks.progress import say

RESULT = ROOT / "benchmarks" / "results" / "shared_calls.json"
DOCUMENTS, RANKS = 200_000, 2
CALLS = "%file,read,pread64,readv,preadv,getdents64,fstat,mmap"
PACKED = "environment.tar"
# The settings of each start; the second and third start find the copies of the one before.
STARTS = {
    "without": {},
    "data copied": {"STOKER_STAGE_DIR": "disk"},
    "data found": {"STOKER_STAGE_DIR": "disk"},
    "environment unpacked": {"STOKER_STAGE_DIR": "disk", "STOKER_STAGE_ENV": PACKED},
    "environment found": {"STOKER_STAGE_DIR": "disk", "STOKER_STAGE_ENV": PACKED},
}


def main() -> int:
    """Start two ranks in each way, and write the result file."""
    environment = Path(sys.prefix).resolve()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder).resolve()
        prepare(scratch / "shared", [DOCUMENTS])
        (scratch / "disk").mkdir()
        say(f"packing {environment}")
        subprocess.run(["tar", "-cf", scratch / PACKED, "-C", environment, "."], check=True)
        folders = {
            "data": scratch / "shared" / str(DOCUMENTS) / "documents",
            "environment": environment,
            "base Python": Path(sys.base_prefix).resolve(),
        }
        starts = {}
        for name, settings in STARTS.items():
            given = {key: str(scratch / value) for key, value in settings.items()}
            starts[name] = start(scratch, folders, given)
            say(f"{name}: {starts[name]}")
    result = circumstances("python -m benchmarks.durations.shared_calls") | {
        "title": f"System calls on shared folders in a start of {RANKS} ranks, to its first step",
        "calls": CALLS,
        "starts": starts,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def start(scratch: Path, folders: Mapping[str, Path], given: Mapping[str, str]) -> dict[str, int]:
    """Train one step under strace; return the number of calls by folder."""
    data, trace, run = scratch / "shared" / str(DOCUMENTS), scratch / "trace", scratch / "run"
    settings = {
        "output_dir": run, "model_name_or_path": data / "weights",
        "tokenizer_name_or_path": data / "tokenizer", "train_data": data / "documents",
        "sequence_length": 64, "global_batch_size": 8, "max_steps": 1, "save_strategy": "no",
        "dataloader_num_workers": 1, "stage_data": bool(given), "bf16": "false",
    }  # fmt: skip
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    here = {
        "PATH": f"{folders['environment'] / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "STOKER_PROCESSES_PER_NODE": str(RANKS), "TMPDIR": str(scratch / "disk"),
        "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(scratch / "cache"),
    }  # fmt: skip
    command = ["strace", "-f", "-qq", "-y", "-s", "300", f"--trace={CALLS}", "-o", str(trace)]
    done = subprocess.run(
        [*command, "slurm/launch_node.sh", "pretrain.py", *flags],
        cwd=ROOT, env={**os.environ, **here, **given}, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{done.stdout}\n{done.stderr}")
    shutil.rmtree(run)
    with trace.open(encoding="utf-8", errors="replace") as lines:
        return counted(lines, folders)


def counted(lines: Iterable[str], folders: Mapping[str, Path]) -> dict[str, int]:
    """Return the number of calls in strace's output that name or have open a file in each folder.

    Calls on the folder itself do not count. A call that another thread interrupts has a second
    line, which is not counted.

    >>> lines = ['1 openat(AT_FDCWD</>, "/data/a", O_RDONLY) = 3</data/a>',
    ...          '1 read(3</data/a>, "", 9) = 0', '1 stat("/data", {}) = 0',
    ...          '1 <... read resumed> "/data/a") = 9']
    >>> counted(lines, {"data": Path("/data")})
    {'data': 2}
    """
    patterns = {
        name: re.compile(rf'["<]{re.escape(str(folder))}/') for name, folder in folders.items()
    }
    found = Counter(
        name
        for line in lines
        if " resumed>" not in line
        for name, pattern in patterns.items()
        if pattern.search(line)
    )
    return {name: found[name] for name in folders}


if __name__ == "__main__":
    sys.exit(main())
