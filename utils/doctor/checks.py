"""The checks: each yields findings, and may raise or hang where a machine is not as expected."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from utils.config.errors import ConfigurationError
from utils.support.redaction import load_env_file

ROOT = Path(__file__).resolve().parents[2]
INTERACTIVE = "srun --gpus=1 python -m utils.doctor"
# What for, and what it takes, where nothing in pyproject.toml says so.
OPTIONAL = {
    "deepspeed": "strategies zero1, zero2 and zero3",
    "flash-attn": "FlashAttention 2, about as fast as torch's own kernels",
    "gigatoken": "prepares texts many times faster",
    "bitsandbytes": "load_in_4bit (QLoRA), and optimizers of 8 bits",
    "lm_eval": "benchmarks of a finished model",
}
COMMAND_LIMIT_S = 8.0
REACH_LIMIT_S = 4.0
LEAST_MEMORY_GIB = 4
LEAST_FREE_GIB = 20
SHARED = "/dev/shm"  # noqa: S108 - it is looked at


class Finding(NamedTuple):
    """One line: `level` is ok, option, warning or missing; `mend` is what to type."""

    level: str
    what: str
    mend: str = ""


def output_of(command: Sequence[str]) -> str:
    """Return what a command prints; raises OSError or subprocess.SubprocessError."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
    )
    if done.returncode:
        last = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise OSError(f"{command[0]}: {last.splitlines()[-1]}")
    return done.stdout.strip()


# --- this machine


def check_python() -> Iterator[Finding]:
    """Check the interpreter, and the versions of packages against pyproject.toml."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = sys.version.split()[0]
    fits = sys.version_info >= (3, 11)
    yield Finding("ok" if fits else "missing", f"Python {version} ({sys.prefix})",
                  "" if fits else f"Python {project['requires-python']}")  # fmt: skip
    extras = project["optional-dependencies"]
    lines = {Requirement(line).name: line for extra in extras.values() for line in extra}
    purposes = dict.fromkeys(project["dependencies"], "")
    purposes |= {lines.get(name, name): purpose for name, purpose in OPTIONAL.items()}
    fine = 0
    for line, purpose in purposes.items():
        needed = Requirement(line)
        found = installed(needed.name)
        use, mend = f": {purpose}" if purpose else "", f"pip install '{line}'"
        if found is None:
            what = f"{needed.name} is not installed{use}"
            yield Finding("option" if purpose else "missing", what, mend)
        elif not needed.specifier.contains(found, prereleases=True):
            yield Finding("warning", f"{needed.name} {found} is outside of {needed.specifier}, "
                          "with which the tests run", mend)  # fmt: skip
        elif purpose:
            yield Finding("ok", f"{needed.name} {found}{use}")
        else:
            fine += 1
    yield Finding("ok", f"{fine} of {len(project['dependencies'])} packages are as pyproject.toml "
                  "has them")  # fmt: skip


def installed(package: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_gpus() -> Iterator[Finding]:
    """Check GPUs, their driver and torch's build of CUDA against each other."""
    import torch

    build = f"torch {torch.__version__}, "
    build += f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs"
    driver, names = "", []
    if shutil.which("nvidia-smi"):
        names = output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()
        found = re.findall(r"(?:Driver|CUDA|CUDA UMD) Version: [\d.]+", output_of(["nvidia-smi"]))
        driver = f" ({', '.join(found)})"
    if torch.cuda.is_available():
        yield Finding("ok", f"{build}{driver}")
        yield from map(_gpu, range(torch.cuda.device_count()))
    elif names:
        yield Finding("missing", f"{build}, cannot use {len(names)} x {names[0]}{driver}",
                      "a torch for this CUDA, or a newer driver; "
                      "python -c 'import torch; torch.cuda.init()' says why")  # fmt: skip
    elif shutil.which("srun"):
        yield Finding("warning", f"{build}; no GPU here (a login node?)", INTERACTIVE)
    else:
        yield Finding("warning", f"{build}; no GPU here: training is on the CPU")


def _gpu(index: int) -> Finding:
    import torch

    gpu = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    what = (
        f"GPU {index}: {gpu.name}, {total / 2**30:.0f} GiB, {free / 2**30:.0f} free, "
        f"compute capability {gpu.major}.{gpu.minor}"
    )
    built = [int(found) for found in re.findall(r"sm_(\d+)", " ".join(torch.cuda.get_arch_list()))]
    if min(built, default=0) > 10 * gpu.major + gpu.minor:
        return Finding("missing", f"{what}: too old for this torch", "an older torch")
    if gpu.major < 8:
        return Finding("warning", f"{what}: no bf16", "--fp16 true, and --compile false")
    if free < total / 2:
        return Finding("warning", f"{what}: another process uses it", "nvidia-smi")
    return Finding("ok", f"{what}, bf16")


def check_kernels() -> Iterator[Finding]:
    """Say which attention `auto` takes in bf16, and whether layers can be compiled."""
    import torch

    from utils.kernels.varlen import AttentionNeeds, find_kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    usable, refusals = find_kernels(device, torch.bfloat16, AttentionNeeds(128))
    others = f" ({'; '.join(refusals)})" if refusals else ""
    slow = device == "cuda" and not usable[0].on_cuda_only
    yield Finding("warning" if slow else "ok", f"attention: auto takes {usable[0].label}{others}",
                  "pip install flash-attn" if slow else "")  # fmt: skip
    compiler = (os.environ.get("CXX") or os.environ.get("CC") or "g++").split()[0]
    if path := shutil.which(compiler):
        yield Finding("ok", f"torch.compile: C++ compiler {path}")
    else:
        yield Finding("warning", f"torch.compile: no {compiler} here, layers are not compiled",
                      "module load gcc (or apt install g++)")  # fmt: skip


def check_host() -> Iterator[Finding]:
    """Check memory, cores and shared memory."""
    from utils.config.precision import has_fast_bf16
    from utils.support.host import cpu_fact, memory_room_bytes

    room = memory_room_bytes() / 2**30
    bf16 = "fast bf16" if has_fast_bf16() else "no fast bf16"
    cores = len(os.sched_getaffinity(0))
    level = "ok" if room >= LEAST_MEMORY_GIB else "warning"
    yield Finding(level, f"{cores} core(s) of {cpu_fact('model name')}, {bf16}; {room:.0f} GiB of "
                  "memory for this job")  # fmt: skip
    shared = shutil.disk_usage(SHARED)
    if shared.total < 2**30:
        what = f"{SHARED} has {shared.total / 2**20:.0f} MiB: NCCL and data workers need more"
        yield Finding("warning", what, "docker run --ipc=host, or --shm-size=16g")
    else:
        yield Finding("ok", f"{SHARED}: {shared.free / 2**30:.0f} GiB free")


# --- what is around it


def check_slurm() -> Iterator[Finding]:
    """Check this cluster's settings, and Slurm's partitions."""
    if not shutil.which("sbatch"):
        yield Finding("option", "no Slurm here: jobs are submitted on a login node")
        return
    if (ROOT / "slurm/cluster.env").is_file():
        what = "slurm/cluster.env; what jobs have: slurm/run_python.sh -m utils.doctor"
        yield Finding("ok", what)
    else:
        yield Finding("warning", "no slurm/cluster.env: jobs take the environment of their shell",
                      "cp slurm/cluster.env.example slurm/cluster.env")  # fmt: skip
    lines = output_of(["sinfo", "--noheader", "--format=%P %l %D nodes %G"]).splitlines()
    yield Finding("ok", f"Slurm, partitions: {'; '.join(' '.join(x.split()) for x in lines[:8])}")


def check_tokens() -> Iterator[Finding]:
    """Check .env and its mode, then which tokens are there; no value is shown."""
    from requests.utils import get_netrc_auth

    path = ROOT / ".env"
    try:
        taken = load_env_file(path)
        there = f".env has {', '.join(taken) or 'no more tokens'}" if path.is_file() else ""
        yield Finding("ok" if there else "option", there or "no .env",
                      "" if there else "cp .env.example .env && chmod 600 .env")  # fmt: skip
    except ConfigurationError as error:
        yield Finding("missing", str(error).removeprefix("- "), f"chmod 600 {path}")
    if os.environ.get("WANDB_API_KEY") or get_netrc_auth("https://api.wandb.ai"):
        yield Finding("ok", "wandb: a key is there")
    else:
        yield Finding("option", "wandb: no key, it records offline", "wandb login")


def check_hub() -> Iterator[Finding]:
    """Check the cache of the Hub, whether it is reached, and whose token there is."""
    import requests
    from huggingface_hub import HfApi, constants, get_token

    yield from check_disk(Path(constants.HF_HOME), "HF_HOME")
    if constants.HF_HUB_OFFLINE:
        yield Finding("ok", "the Hub: offline (HF_HUB_OFFLINE), models come from HF_HOME")
        return
    try:
        requests.head(constants.ENDPOINT, timeout=REACH_LIMIT_S)
    except requests.RequestException as error:
        yield Finding("warning", f"the Hub ({constants.ENDPOINT}) is not reached "
                      f"({type(error).__name__}): what is needed has to be in HF_HOME",
                      "python prepare_data.py --offline_dir DIR, where it is reached")  # fmt: skip
        return
    if get_token() is None:
        yield Finding("option", f"{constants.ENDPOINT} is reached; no token: gated models need one",
                      "HF_TOKEN in .env, or hf auth login")  # fmt: skip
        return
    try:
        name = HfApi().whoami().get("name")
        yield Finding("ok", f"{constants.ENDPOINT} is reached; the token is {name}'s")
    except Exception as error:  # httpx's, and the Hub's own
        yield Finding("warning", f"the Hub does not take the token ({type(error).__name__})",
                      "hf auth login, or another HF_TOKEN in .env")  # fmt: skip


def check_disk(directory: Path, name: str) -> Iterator[Finding]:
    """Check free space, and that files can be written, where a directory is or will be."""
    there = next(each for each in (directory, *directory.absolute().parents) if each.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".stoker-doctor-") as file:
            file.write(bytes(2**14))
            file.flush()
            os.fsync(file.fileno())  # a quota may show only now
    except OSError as error:
        what = f"{name} {directory} cannot be written to ({error.strerror})"
        mend = f"check owner, mode and quota of {there}, or set another {name}"
        yield Finding("missing", what, mend)
        return
    free = shutil.disk_usage(there).free / 2**30
    small = free < LEAST_FREE_GIB
    yield Finding("warning" if small else "ok", f"{name} {directory}: {free:,.1f} GiB free",
                  f"{name} on a larger disk" if small else "")  # fmt: skip
