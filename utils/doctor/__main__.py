"""Says what is there for training, what is missing, and what to type; starts nothing.

    python -m utils.doctor [--output_dir runs] [--all_reduce]

Ends within half a minute, with 0 where nothing is missing that training needs, else 1.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from utils.doctor.machine import (
    INTERACTIVE,
    ROOT,
    Finding,
    check_gpus,
    check_host,
    check_kernels,
    check_python,
)
from utils.doctor.surroundings import check_hub, check_output, check_slurm, check_tokens
from utils.support.redaction import redact

LIMIT_S = 28.0  # of all checks
CHECK_LIMIT_S = 15.0  # torch is imported from a cold disk
ALL_REDUCE_LIMIT_S = 90.0
ALL_REDUCE_BYTES = 2**26

Check = Callable[[], Iterator[Finding]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m utils.doctor", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--output_dir", type=Path, default=Path("runs"), help="where runs write")
    words = "also add numbers up over two local GPUs, or CPU processes"
    parser.add_argument("--all_reduce", action="store_true", help=words)
    given = parser.parse_args(argv)
    checks: dict[str, Check] = {
        "Python": check_python, "GPUs": check_gpus, "kernels": check_kernels, "host": check_host,
        "Slurm": check_slurm, "tokens": check_tokens, "the Hub": check_hub,
        "output_dir": partial(check_output, given.output_dir),
    }  # fmt: skip
    findings = []
    until = time.monotonic() + LIMIT_S
    for name, check in checks.items():
        for finding in found_by(name, check, min(CHECK_LIMIT_S, until - time.monotonic())):
            show(finding)
            findings.append(finding)
    if given.all_reduce:
        findings += found_by("all_reduce", check_all_reduce, ALL_REDUCE_LIMIT_S)
        show(findings[-1])
    return conclude(findings)


def found_by(name: str, check: Check, limit_s: float) -> list[Finding]:
    """Return what a check finds; one that fails, or hangs on a dead disk, is a finding itself."""
    findings: list[Finding] = []

    def run() -> None:
        try:
            findings.extend(check())  # an error leaves those before it
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            findings.append(Finding("warning", f"{name} could not be checked ({text})"))

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(max(limit_s, 0.1))
    if thread.is_alive():
        what = f"{name}: no answer within {limit_s:.0f} s"
        return [*findings, Finding("warning", what, "look at the network and at the disks")]
    return findings


def show(finding: Finding) -> None:
    """Print one finding, and below it what mends it."""
    lines = [f"{finding.level:<8} {finding.what}"]
    if finding.mend:
        lines.append(f"{'':<8} -> {finding.mend}")
    sys.stdout.write(redact("\n".join(lines)) + "\n")
    sys.stdout.flush()


def conclude(findings: Sequence[Finding]) -> int:
    """Print the sum of it; return the exit code."""
    count = {
        level: sum(each.level == level for each in findings) for level in ("missing", "warning")
    }
    text = f"{count['missing']} missing, {count['warning']} warning(s)"
    if count["missing"]:
        text += ": mend what is missing before you train"
    elif any(each.mend == INTERACTIVE for each in findings):
        text += f"; jobs can be submitted. For a look at a GPU node: {INTERACTIVE}"
    else:
        text += ": this machine can train"
    sys.stdout.write(f"\n{text}\n")
    return 1 if count["missing"] else 0


def check_all_reduce() -> Iterator[Finding]:
    """Add numbers up over two processes, with NCCL where there are two GPUs, else with gloo."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               "--module", "utils.doctor.__main__"]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=ALL_REDUCE_LIMIT_S - 5, check=False,
        cwd=ROOT, env={**os.environ, "STOKER_DOCTOR_RANK": "1"},
    )  # fmt: skip
    if done.returncode == 0:
        yield Finding("ok", done.stdout.strip().splitlines()[-1])
        return
    errors = [line for line in done.stderr.splitlines() if "Error" in line]
    yield Finding("missing", f"two processes cannot talk: {(errors or ['no answer'])[0].strip()}",
                  "NCCL_DEBUG=INFO python -m utils.doctor --all_reduce")  # fmt: skip


def add_up() -> None:
    """Be one rank of `check_all_reduce`; rank 0 prints the speed."""
    import torch
    from torch import distributed

    rank = int(os.environ["RANK"])
    on_gpus = torch.cuda.device_count() >= 2
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    distributed.init_process_group("nccl" if on_gpus else "gloo")
    numbers = torch.ones(ALL_REDUCE_BYTES // 4, device=device)
    distributed.all_reduce(numbers)
    start = time.monotonic()
    distributed.all_reduce(numbers)
    assert numbers.min() == numbers.max() == 4, "wrong sum"  # .min() waits for the device
    speed = ALL_REDUCE_BYTES / 2**30 / (time.monotonic() - start)
    if rank == 0:
        kind = "NCCL on two GPUs" if on_gpus else "gloo on two CPU processes"
        sys.stdout.write(f"all_reduce: {kind}, {speed:.1f} GiB/s\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    if "STOKER_DOCTOR_RANK" in os.environ:
        add_up()
        sys.exit(0)
    code = main()
    sys.stdout.flush()
    os._exit(code)  # not waiting for a check that hangs
