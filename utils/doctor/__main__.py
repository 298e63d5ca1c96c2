"""Check what this machine has for training; say what is missing and what to type.

    python -m utils.doctor [--output_dir runs]

All checks run at once. Importing torch takes the longest. The exit code is 1 if something that
training needs is missing.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from utils.config.errors import ConfigurationError
from utils.host.hub import hub_fault
from utils.host.redaction import load_env_file, redact

ROOT = Path(__file__).resolve().parents[2]
INTERACTIVE = "srun --gpus=1 python -m utils.doctor"
# Optional packages and their use.
OPTIONAL_PACKAGES = {
    "deepspeed": "strategies zero1, zero2 and zero3",
    "flash-attn": "FlashAttention 2, about as fast as torch's own kernels",
    "gigatoken": "prepares texts many times faster",
    "bitsandbytes": "load_in_4bit (QLoRA), and optimizers of 8 bits",
    "torchao": "fp8",
    "lm_eval": "benchmarks of a finished model",
}
LIMIT_S = 180.0  # for all checks together; even a slow, busy machine needs less
WAIT_LINE_AFTER_S = 10.0
LEAST_FREE_GIB = 20
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - only its size is read
# A line of sinfo about nodes that can run jobs. "*" after a state marks nodes that do not answer.
USABLE_NODES = re.compile(
    r"\S+ up \S+ \S+ (idle|mix|mixed|alloc|comp|resv|plnd|boot|pow_up)[^\w* ]* "
)


class CheckResult(NamedTuple):
    """A result of a check.

    level  ok, option (absent and optional), warning, missing, or unknown (could not be checked)
    what   the result as text
    mend   what the user can type to fix a fault
    """

    level: str
    what: str
    mend: str = ""


DoctorCheck = Callable[[], Iterator[CheckResult]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks and print their findings; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m utils.doctor", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--output_dir", type=Path, default=Path("runs"), help="where runs write")
    output_dir = parser.parse_args(argv).output_dir
    named: dict[str, DoctorCheck] = {
        "Python": check_python, "GPUs": check_gpus, "kernels": check_kernels, "host": check_host,
        "Slurm": check_slurm, "tokens and the Hub": lambda: chain(check_tokens(), check_hub()),
        "output_dir": partial(check_disk, output_dir, "output_dir"),
    }  # fmt: skip
    count = Counter[str]()
    until = time.monotonic() + LIMIT_S
    running = [RunningCheck(name, check) for name, check in named.items()]
    for check in running:
        for finding in check.wait(max(until - time.monotonic(), 0.1)):
            count[finding.level] += 1
            mend = f"\n{'':<8} -> {finding.mend}" if finding.mend else ""
            print(redact(f"{finding.level:<8} {finding.what}{mend}"), flush=True)  # noqa: T201
    missing, warnings, unknown = (count[each] for each in ("missing", "warning", "unknown"))
    advice = ": mend what is missing before you train" * (missing > 0)
    text = f"{missing} missing, {warnings} warning(s), {unknown} not known{advice}"
    print(f"\n{text}")  # noqa: T201 - the output of this command
    return int(missing > 0)


class RunningCheck:
    """A check that runs in its own thread, with its findings so far.

    If the check raises an error, the error becomes a finding of level "unknown".
    """

    def __init__(self, name: str, check: DoctorCheck):
        self.name, self.findings = name, list[CheckResult]()
        self.thread = threading.Thread(target=self._run, args=(check,), name=name, daemon=True)
        self.thread.start()

    def _run(self, check: DoctorCheck) -> None:
        try:
            self.findings.extend(check())  # keeps the findings before an error
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self.findings.append(
                CheckResult("unknown", f"{self.name} could not be checked ({text})")
            )

    def wait(self, limit_s: float) -> list[CheckResult]:
        """Wait for the end of the check and return its findings.

        If the check runs longer than `limit_s` seconds, return the findings so far and a finding
        that says "still running".
        """
        self.thread.join(min(WAIT_LINE_AFTER_S, limit_s))
        if self.thread.is_alive():
            text = f"{'wait':<8} {self.name}: still running"
            print(text, flush=True)  # noqa: T201 - the output of this command
            self.thread.join(limit_s)
        if not self.thread.is_alive():
            return self.findings
        what = f"{self.name}: still running"
        return [
            *self.findings,
            CheckResult("unknown", what, "a disk, the network or a driver hangs"),
        ]


def stdout_of(*command: str) -> str:
    """Return a command's stdout as text. Raises CalledProcessError if the command fails."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=True)
    return done.stdout.strip()


# --- checks, each of which may raise or hang on an unexpected machine


def check_python() -> Iterator[CheckResult]:
    """Yield findings about Python and the packages that pyproject.toml requires."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = f"Python {sys.version.split()[0]} ({sys.prefix})"
    extras = project["optional-dependencies"]
    lines = {Requirement(line).name: line for extra in extras.values() for line in extra}
    purposes = dict.fromkeys(project["dependencies"], "")
    purposes |= {lines.get(name, name): f": {use}" for name, use in OPTIONAL_PACKAGES.items()}
    fine = []
    for line, use in purposes.items():
        needed = Requirement(line)
        mend = f"pip install '{line}'"
        try:
            found = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            what = f"{needed.name} is not installed{use}"
            yield CheckResult("option" if use else "missing", what, mend)
            continue
        if not needed.specifier.contains(found, prereleases=True):
            what = f"{needed.name} {found} is outside of {needed.specifier}"
            yield CheckResult("warning", f"{what}, with which the tests run", mend)
        else:
            fine.append(needed.name)
    yield CheckResult("ok", f"{version}; {len(fine)} packages are as pyproject.toml has them")


def check_gpus() -> Iterator[CheckResult]:
    """Yield findings about the GPUs, their driver and torch's CUDA version."""
    import torch

    cuda, rocm = torch.version.cuda, torch.version.hip
    built = f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else "CPUs"
    build = f"torch {torch.__version__}, built for {built}"
    if torch.cuda.is_available():
        yield CheckResult("ok", build)
        yield from map(_gpu_finding, range(torch.cuda.device_count()))
        return
    names: list[str] = []
    if shutil.which("nvidia-smi"):
        names = stdout_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    if names and "No devices" not in names[0]:
        mend = "python -c 'import torch; torch.cuda.init()' says why: a driver older than torch's "
        mend += "CUDA, or CUDA_VISIBLE_DEVICES"
        yield CheckResult("missing", f"{build}, cannot use {', '.join(names)}", mend)
    elif shutil.which("srun"):
        yield CheckResult("warning", f"{build}; no GPU here (a login node?)", INTERACTIVE)
    else:
        yield CheckResult("warning", f"{build}; no GPU here: training is on the CPU")


def _gpu_finding(index: int) -> CheckResult:
    import torch

    gpu = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    what = (
        f"GPU {index}: {gpu.name}, {total / 2**30:.0f} GiB, {free / 2**30:.0f} free, "
        f"compute capability {gpu.major}.{gpu.minor}"
    )
    built = [int(found) for found in re.findall(r"sm_(\d+)", " ".join(torch.cuda.get_arch_list()))]
    if min(built, default=0) > 10 * gpu.major + gpu.minor:
        return CheckResult("missing", f"{what}: too old for this torch", "an older torch")
    if gpu.major < 8:
        return CheckResult("warning", f"{what}: no bf16", "--fp16 true, and --compile false")
    if free < total / 2:
        return CheckResult("warning", f"{what}: another process uses it", "nvidia-smi")
    return CheckResult("ok", f"{what}, bf16")


def check_kernels() -> Iterator[CheckResult]:
    """Yield findings about torch.compile and the attention kernel that Stoker selects in bf16."""
    import torch

    from utils.kernels.varlen import AttentionNeeds, find_kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    usable, refusals = find_kernels(device, torch.bfloat16, AttentionNeeds(128))
    others = f" ({'; '.join(refusals)})" if refusals else ""
    slow = device == "cuda" and not usable[0].on_cuda_only
    what = f"attention here: auto takes {usable[0].label}{others}"
    yield CheckResult("warning" if slow else "ok", what, "pip install flash-attn" if slow else "")
    compiler = (os.environ.get("CXX") or os.environ.get("CC") or "g++").split()[0]
    if not shutil.which(compiler):
        what = f"torch.compile: no {compiler} here, layers are not compiled"
        yield CheckResult("warning", what, "module load gcc (or apt install g++)")


def check_host() -> Iterator[CheckResult]:
    """Yield findings about cores, memory and shared memory (/dev/shm)."""
    from utils.host.machine import memory_room_bytes

    cores, room = len(os.sched_getaffinity(0)), memory_room_bytes() / 2**30
    yield CheckResult("ok", f"{cores} core(s) and {room:.0f} GiB of memory for this job")
    shared = shutil.disk_usage(SHARED_MEMORY)
    if shared.total < 2**30:
        size = f"{shared.total / 2**20:.0f} MiB"
        what = f"{SHARED_MEMORY} has {size}: NCCL and data workers need more"
        yield CheckResult("warning", what, "docker run --ipc=host, or --shm-size=16g")


def check_slurm() -> Iterator[CheckResult]:
    """Yield findings about slurm/cluster.env and about Slurm's partitions."""
    if not shutil.which("sbatch"):
        what = "no Slurm here (no sbatch on PATH): jobs are submitted on a login node"
        yield CheckResult("option", what)
        return
    if (ROOT / "slurm/cluster.env").is_file():
        what = "slurm/cluster.env; what jobs have: slurm/run_python.sh -m utils.doctor"
        yield CheckResult("ok", what)
    else:
        what = "no slurm/cluster.env: jobs take the environment of their shell"
        yield CheckResult("warning", what, "cp slurm/cluster.env.example slurm/cluster.env")
    lines = stdout_of("sinfo", "--noheader", "--format=%P %a %l %D %t %G").splitlines()
    usable = [line for line in lines if USABLE_NODES.match(line)]
    shown = "; ".join((usable or lines)[:8])
    if usable:
        yield CheckResult("ok", f"Slurm's partitions (limit, nodes, state, GPUs): {shown}")
    else:
        what = f"no partition of Slurm runs jobs now: {shown or 'sinfo shows none'}"
        yield CheckResult("warning", what, "sinfo -R says why; a job that is submitted waits")


def check_tokens() -> Iterator[CheckResult]:
    """Yield a finding about .env: its tokens' names, or that other users can read the file."""
    path = ROOT / ".env"
    try:
        names = load_env_file(path)
        if path.is_file():
            yield CheckResult("ok", f".env has {', '.join(names) or 'no more tokens'}")
        else:
            yield CheckResult("option", "no .env", "cp .env.example .env && chmod 600 .env")
    except ConfigurationError as error:
        yield CheckResult("missing", str(error).removeprefix("- "), f"chmod 600 {path}")


def check_hub() -> Iterator[CheckResult]:
    """Yield findings about the Hub's cache, the connection to the Hub and the token."""
    from huggingface_hub import HfApi, constants, get_token

    yield from check_disk(Path(constants.HF_HOME), "HF_HOME")
    if constants.HF_HUB_OFFLINE:
        yield CheckResult("ok", "the Hub: offline (HF_HUB_OFFLINE), models come from HF_HOME")
    elif fault := hub_fault():
        mend = "python prepare_data.py --offline_dir DIR, where it is reached"
        yield CheckResult("warning", f"the Hub: {fault}: what is needed has to be in HF_HOME", mend)
    elif get_token() is None:
        what = f"{constants.ENDPOINT} is reached; no token: gated models need one"
        yield CheckResult("option", what, "HF_TOKEN in .env, or hf auth login")
    else:
        yield CheckResult("ok", f"{constants.ENDPOINT} is reached")
        try:
            HfApi().whoami()
        except Exception as error:  # errors of httpx and of the Hub; their texts may hold a token
            code = getattr(getattr(error, "response", None), "status_code", None)
            level = "warning" if code in (401, 403) else "unknown"
            what = f"the Hub does not take the token ({type(error).__name__} {code})"
            yield CheckResult(level, what, "hf auth login, or another HF_TOKEN in .env")


def check_disk(directory: Path, name: str) -> Iterator[CheckResult]:
    """Yield a finding: whether a directory is writable, and the free space on its disk in GiB.

    name: the setting that names the directory. If the directory is missing, check the nearest
    existing parent.
    """
    existing = next(each for each in (directory, *directory.absolute().parents) if each.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".stoker-doctor-") as file:
            file.write(bytes(2**14))
            file.flush()
            os.fsync(file.fileno())  # some quotas only fail here
    except OSError as error:
        what = f"{name} {directory} cannot be written to ({error.strerror})"
        mend = f"check owner, mode and quota of {existing}, or set another {name}"
        yield CheckResult("missing", what, mend)
        return
    free = shutil.disk_usage(existing).free / 2**30
    small = free < LEAST_FREE_GIB
    what = f"{name} {directory}: {free:,.1f} GiB free on its disk (a quota may leave less)"
    yield CheckResult("warning" if small else "ok", what, f"{name} on a larger disk" * small)


if __name__ == "__main__":
    try:
        exit_code = main()
    except KeyboardInterrupt:
        exit_code = 128 + signal.SIGINT
    os._exit(exit_code)  # do not wait for a check that hangs
