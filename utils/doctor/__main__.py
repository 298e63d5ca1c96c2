"""Check what this machine has for training; say what is missing and what to type.

    python -m utils.doctor [--output_dir runs]

It takes at most half a minute. The exit code is 1 if something that training needs is missing.
"""

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from utils.doctor import checks
from utils.doctor.checks import INTERACTIVE, TAKES_JOBS, Finding
from utils.host.redaction import redact

LIMIT_S = 28.0  # for all checks
CHECK_LIMIT_S = 15.0  # enough to import torch from a cold disk

Check = Callable[[], Iterator[Finding]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m utils.doctor", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--output_dir", type=Path, default=Path("runs"), help="where runs write")
    output_dir = parser.parse_args(argv).output_dir
    named: dict[str, Check] = {
        "Python": checks.check_python, "GPUs": checks.check_gpus, "kernels": checks.check_kernels,
        "host": checks.check_host, "Slurm": checks.check_slurm, "tokens": checks.check_tokens,
        "the Hub": checks.check_hub,
        "output_dir": partial(checks.check_disk, output_dir, "output_dir"),
    }  # fmt: skip
    findings = []
    until = time.monotonic() + LIMIT_S
    for name, check in named.items():
        for finding in found_by(name, check, min(CHECK_LIMIT_S, until - time.monotonic())):
            show(finding)
            findings.append(finding)
    return conclude(findings)


def found_by(name: str, check: Check, limit_s: float) -> list[Finding]:
    """Run a check and return its findings; an error or a time-out becomes a finding."""
    findings: list[Finding] = []

    def run() -> None:
        try:
            findings.extend(check())  # after an error the earlier findings stay
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            findings.append(Finding("unknown", f"{name} could not be checked ({text})"))

    if limit_s <= 0:
        return [Finding("unknown", f"{name} not checked: the checks before took {LIMIT_S:.0f} s")]
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        what = f"{name}: no answer within {limit_s:.0f} s"
        return [*findings, Finding("unknown", what, "a disk, the network or a driver hangs")]
    return findings


def show(finding: Finding) -> None:
    """Print one finding, and below it what to type."""
    lines = [f"{finding.level:<8} {finding.what}"]
    if finding.mend:
        lines.append(f"{'':<8} -> {finding.mend}")
    sys.stdout.write(redact("\n".join(lines)) + "\n")
    sys.stdout.flush()


def conclude(findings: Sequence[Finding]) -> int:
    """Print a summary; return the exit code."""
    missing, warnings, unknown = (
        sum(each.level == level for each in findings) for level in ("missing", "warning", "unknown")
    )
    text = f"{missing} missing, {warnings} warning(s), {unknown} not known"
    if missing:
        text += ": mend what is missing before you train"
    elif unknown:
        text += ": nothing is missing as far as this machine answered"
    elif not any(each.mend == INTERACTIVE for each in findings):
        text += ": this machine can train"
    elif any(each.what.startswith(TAKES_JOBS) for each in findings):
        text += f"; jobs can be submitted. For a look at a GPU node: {INTERACTIVE}"
    else:
        text += "; a login node whose Slurm runs no job now"
    sys.stdout.write(f"\n{text}\n")
    return 1 if missing else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # do not wait for a check that hangs
