"""Checks of this machine: Python and its packages, torch, GPUs and what runs on them."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

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
LEAST_MEMORY_GIB = 4
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


def check_python() -> Iterator[Finding]:
    """Check the interpreter, and the versions of packages against pyproject.toml."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = sys.version.split()[0]
    fits = sys.version_info >= (3, 11)
    yield Finding("ok" if fits else "missing", f"Python {version} ({sys.prefix})",
                  "" if fits else f"Python {project['requires-python']}")  # fmt: skip
    fine = 0
    for line in project["dependencies"]:
        needed = Requirement(line)
        found = installed(needed.name)
        if found is None:
            yield Finding("missing", f"{needed.name} is not installed", f"pip install '{line}'")
        elif not needed.specifier.contains(found, prereleases=True):
            yield Finding("warning", f"{needed.name} {found} is outside of {needed.specifier}, "
                          "with which the tests run", f"pip install '{line}'")  # fmt: skip
        else:
            fine += 1
    yield Finding("ok", f"{fine} of {len(project['dependencies'])} packages are as pyproject.toml "
                  "has them")  # fmt: skip
    extras = project["optional-dependencies"]
    lines = {Requirement(line).name: line for extra in extras.values() for line in extra}
    for name, purpose in OPTIONAL.items():
        line, found = lines.get(name, name), installed(name)
        if found and not Requirement(line).specifier.contains(found, prereleases=True):
            yield Finding("warning", f"{name} {found} is not {line}", f"pip install '{line}'")
        elif found:
            yield Finding("ok", f"{name} {found}: {purpose}")
        else:
            yield Finding("option", f"{name} is not installed: {purpose}", f"pip install '{line}'")


def installed(package: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_gpus() -> Iterator[Finding]:
    """Check GPUs, their driver and torch's build of CUDA against each other."""
    import torch

    built = torch.version.cuda
    names, driver = [], ""
    if shutil.which("nvidia-smi"):
        fields = "name,memory.total,driver_version"
        lines = output_of(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"])
        rows = [line.split(", ") for line in lines.splitlines() if line.count(", ") == 2]
        names, driver = [row[0] for row in rows], rows[0][2] if rows else ""
    if names and built is None:
        yield Finding("missing", f"torch {torch.__version__} is built for CPUs, and {len(names)} x "
                      f"{names[0]} are here", "pip install --force-reinstall torch")  # fmt: skip
        return
    if names:
        header = re.search(r"CUDA (?:UMD )?Version: (\d+)\.(\d+)", output_of(["nvidia-smi"]))
        if header and built and int(header[1]) < int(built.split(".")[0]):
            yield Finding("missing", f"driver {driver} knows CUDA {header[1]}.{header[2]}, torch "
                          f"{torch.__version__} needs {built}",
                          f"a newer driver, or a torch for CUDA {header[1]}")  # fmt: skip
    if not torch.cuda.is_available():
        yield from _without_gpu(torch.__version__, names)
        return
    yield Finding("ok", f"torch {torch.__version__}, CUDA {built}, driver {driver or 'unknown'}")
    for index in range(torch.cuda.device_count()):
        yield _gpu(index)
    if shutil.which("nvidia-smi") and len(names) > torch.cuda.device_count():
        yield Finding("warning", f"{len(names)} GPUs are here, torch sees "
                      f"{torch.cuda.device_count()}: CUDA_VISIBLE_DEVICES="
                      f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}")  # fmt: skip


def _without_gpu(version: str, names: Sequence[str]) -> Iterator[Finding]:
    if names:
        yield Finding("missing", f"torch {version} cannot use {len(names)} x {names[0]}",
                      "python -c 'import torch; torch.cuda.init()' says why")  # fmt: skip
    elif shutil.which("srun"):
        yield Finding("warning", f"torch {version}; no GPU here (a login node?)", INTERACTIVE)
    else:
        yield Finding("warning", f"torch {version}; no GPU here: training is on the CPU")


def _gpu(index: int) -> Finding:
    import torch

    properties = torch.cuda.get_device_properties(index)
    capability = f"{properties.major}.{properties.minor}"
    free, total = torch.cuda.mem_get_info(index)
    what = (
        f"GPU {index}: {properties.name}, {total / 2**30:.0f} GiB, {free / 2**30:.0f} free, "
        f"compute capability {capability}"
    )
    built = [name.removeprefix("sm_") for name in torch.cuda.get_arch_list() if "sm_" in name]
    if built and min(map(_number, built)) > _number(capability.replace(".", "")):
        return Finding("missing", f"{what}: too old for this torch", "an older torch")
    if properties.major < 8:
        return Finding("warning", f"{what}: no bf16", "--fp16 true, and --compile false")
    if free < total / 2:
        return Finding("warning", f"{what}: another process uses it", "nvidia-smi")
    return Finding("ok", f"{what}, bf16")


def _number(text: str) -> int:
    return int(re.sub(r"\D", "", text))


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
    if device == "cuda":
        version = ".".join(map(str, torch.cuda.nccl.version()))
        yield Finding("ok", f"NCCL {version}; --all_reduce tries it on two GPUs")


def check_host() -> Iterator[Finding]:
    """Check memory, cores and shared memory."""
    from utils.config.precision import has_fast_bf16
    from utils.support.host import cpu_fact, memory_room_bytes

    room = memory_room_bytes() / 2**30
    level = "ok" if room >= LEAST_MEMORY_GIB else "warning"
    bf16 = "fast bf16" if has_fast_bf16() else "no fast bf16"
    cores = len(os.sched_getaffinity(0))
    yield Finding(level, f"{cores} core(s) of {cpu_fact('model name')}, {bf16}; {room:.0f} GiB of "
                  "memory for this job")  # fmt: skip
    shared = shutil.disk_usage(SHARED)
    if shared.total < 2**30:
        what = f"{SHARED} has {shared.total / 2**20:.0f} MiB: NCCL and data workers need more"
        yield Finding("warning", what, "docker run --ipc=host, or --shm-size=16g")
    else:
        yield Finding("ok", f"{SHARED}: {shared.free / 2**30:.0f} GiB free")
