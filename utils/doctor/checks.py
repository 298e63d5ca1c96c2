"""The doctor's checks. Each yields findings; on an unexpected machine it may raise or hang."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from utils.config.errors import ConfigurationError
from utils.host.redaction import load_env_file

ROOT = Path(__file__).resolve().parents[2]
INTERACTIVE = "srun --gpus=1 python -m utils.doctor"
# Optional packages and their use.
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
SHARED = "/dev/shm"  # noqa: S108 - only its size is read
TAKES_JOBS = "Slurm takes jobs"  # begins the finding if partitions run jobs
# sinfo's states of nodes that run jobs. A "*" at the end of a state means that the node does not
# answer, so such a state is not usable.
USABLE = ("idle", "mix", "mixed", "alloc", "comp", "resv", "plnd", "boot", "pow_up")


class Finding(NamedTuple):
    """A line of the output: its level, the fact, and what to type.

    level: ok, option (absent and optional), warning, missing, or unknown (could not be checked).
    """

    level: str
    what: str
    mend: str = ""


def output_of(command: Sequence[str]) -> str:
    """Return the output of a command. Raises OSError if it fails or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, errors="replace", timeout=COMMAND_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]}: no answer within {COMMAND_LIMIT_S:.0f} s") from error
    if done.returncode:
        last = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise OSError(f"{command[0]}: {last.splitlines()[-1]}")
    return done.stdout.strip()


# --- this machine


def check_python() -> Iterator[Finding]:
    """Compare Python and the packages with pyproject.toml."""
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
    """Return the version of a package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_gpus() -> Iterator[Finding]:
    """Check that GPUs, driver and torch's CUDA version fit together."""
    import torch

    cuda, rocm = torch.version.cuda, torch.version.hip
    built = f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else "CPUs"
    build, names, driver = f"torch {torch.__version__}, built for {built}", [], ""
    answered = True
    if shutil.which("nvidia-smi"):
        try:
            query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
            names = [each for each in output_of(query).splitlines() if "No devices" not in each]
            known = r"(?:Driver|CUDA|CUDA UMD) Version: [\d.]+"
            driver = f" ({', '.join(re.findall(known, output_of(['nvidia-smi'])))})"
        except OSError as error:
            answered = False
            yield Finding("unknown", f"the driver could not be asked ({error})", "nvidia-smi")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available():
        yield Finding("ok", f"{build}{driver}")
        yield from map(_gpu, range(torch.cuda.device_count()))
    elif names and hidden is not None and not hidden.strip("- 1"):
        what = f"{build}; CUDA_VISIBLE_DEVICES={hidden!r} hides {len(names)} GPU(s){driver}"
        yield Finding("warning", what, "unset CUDA_VISIBLE_DEVICES")
    elif names:
        found = ", ".join(f"{count} x {name}" for name, count in Counter(names).items())
        yield Finding("missing", f"{build}, cannot use {found}{driver}",
                      "a torch for this CUDA, or a newer driver; "
                      "python -c 'import torch; torch.cuda.init()' says why")  # fmt: skip
    elif answered and shutil.which("srun"):
        yield Finding("warning", f"{build}; no GPU here (a login node?)", INTERACTIVE)
    elif answered:
        yield Finding("warning", f"{build}; no GPU here: training is on the CPU")
    else:
        yield Finding("unknown", f"{build}, cannot use a GPU; whether there is one is not known")


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
    """Check which attention `auto` chooses in bf16, and whether layers can be compiled."""
    import torch

    from utils.kernels.varlen import AttentionNeeds, find_kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    usable, refusals = find_kernels(device, torch.bfloat16, AttentionNeeds(128))
    others = f" ({'; '.join(refusals)})" if refusals else ""
    slow = device == "cuda" and not usable[0].on_cuda_only
    what = f"attention here: auto takes {usable[0].label}{others}"
    yield Finding("warning" if slow else "ok", what, "pip install flash-attn" if slow else "")
    compiler = (os.environ.get("CXX") or os.environ.get("CC") or "g++").split()[0]
    if path := shutil.which(compiler):
        yield Finding("ok", f"torch.compile: C++ compiler {path}")
    else:
        yield Finding("warning", f"torch.compile: no {compiler} here, layers are not compiled",
                      "module load gcc (or apt install g++)")  # fmt: skip


def check_host() -> Iterator[Finding]:
    """Check memory, cores and shared memory."""
    from utils.config.precision import has_fast_bf16
    from utils.host.machine import cpu_fact, memory_room_bytes

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


# --- the cluster, tokens, the Hub and disks


def check_slurm() -> Iterator[Finding]:
    """Check slurm/cluster.env and Slurm's partitions."""
    if not shutil.which("sbatch"):
        what = "no Slurm here (no sbatch on PATH): jobs are submitted on a login node"
        yield Finding("option", what)
        return
    if (ROOT / "slurm/cluster.env").is_file():
        what = "slurm/cluster.env; what jobs have: slurm/run_python.sh -m utils.doctor"
        yield Finding("ok", what)
    else:
        yield Finding("warning", "no slurm/cluster.env: jobs take the environment of their shell",
                      "cp slurm/cluster.env.example slurm/cluster.env")  # fmt: skip
    try:
        text = output_of(["sinfo", "--noheader", "--format=%P|%a|%l|%D|%t|%G"])
    except OSError as error:
        yield Finding("unknown", f"Slurm could not be asked ({error}): whether it takes jobs is "
                      "not known", "scontrol ping")  # fmt: skip
        return
    yield _partitions([line.strip().split("|") for line in text.splitlines() if line.strip()])


def _partitions(rows: Sequence[Sequence[str]]) -> Finding:
    """Judge sinfo's rows: partition, availability, time limit, nodes, their state, their GPUs."""
    strange = [row for row in rows if len(row) != 6 or not row[3].isdecimal()]
    if strange:
        what = f"sinfo's answer is not understood ({'|'.join(strange[0])!r:.80})"
        return Finding("unknown", f"{what}: whether Slurm takes jobs is not known", "sinfo")
    if not rows:
        what = "Slurm answers, but shows no partition: none is there, or none is yours"
        return Finding("warning", what, "sinfo --all; ask who runs the cluster")
    taking = [row for row in rows if row[1] == "up" and row[4].rstrip("~#!%$@^-+") in USABLE]
    shown = "; ".join(
        f"{name} {limit} {count} nodes {state} {gpus}"
        for name, _, limit, count, state, gpus in (taking or rows)[:8]
    )
    if taking:
        return Finding("ok", f"{TAKES_JOBS}, partitions: {shown}")
    down = sorted({f"{name} is {up}" for name, up, *_ in rows if up != "up"})
    what = f"no node of Slurm runs jobs now: {'; '.join(down)}{'; ' if down else ''}{shown}"
    return Finding("warning", what, "sinfo -R says why; a job that is submitted waits")


def check_tokens() -> Iterator[Finding]:
    """Check .env and its mode, and which tokens are set, without showing a value."""
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
    """Check the Hub's cache, the connection and the token's user."""
    import requests
    from huggingface_hub import HfApi, constants, get_token

    yield from check_disk(Path(constants.HF_HOME), "HF_HOME")
    if constants.HF_HUB_OFFLINE:
        yield Finding("ok", "the Hub: offline (HF_HUB_OFFLINE), models come from HF_HOME")
        return
    try:
        status = requests.head(constants.ENDPOINT, timeout=REACH_LIMIT_S).status_code
    except requests.RequestException as error:
        yield Finding("warning", f"the Hub ({constants.ENDPOINT}) is not reached "
                      f"({_reason(error)}): what is needed has to be in HF_HOME",
                      "python prepare_data.py --offline_dir DIR, where it is reached")  # fmt: skip
        return
    if status >= 400:
        what = f"{constants.ENDPOINT} answers with {status}: whether it gives models is not known"
        yield Finding("unknown", what)
        return
    if get_token() is None:
        yield Finding("option", f"{constants.ENDPOINT} is reached; no token: gated models need one",
                      "HF_TOKEN in .env, or hf auth login")  # fmt: skip
        return
    try:
        name = HfApi().whoami().get("name")
        yield Finding("ok", f"{constants.ENDPOINT} is reached; the token is {name}'s")
    except Exception as error:  # errors of httpx and of the Hub
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            yield Finding("warning", f"the Hub does not take the token ({_reason(error)})",
                          "hf auth login, or another HF_TOKEN in .env")  # fmt: skip
        else:
            what = f"the Hub did not say whose token it is ({_reason(error)})"
            yield Finding("unknown", f"{what}: whether it is taken is not known")


def _reason(error: Exception) -> str:
    """Return an error's class and status code; its text may contain a URL with a token."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return f"{type(error).__name__}{'' if status is None else f' {status}'}"


def check_disk(directory: Path, name: str) -> Iterator[Finding]:
    """Check free space and write permission for a directory, which need not exist yet."""
    there = next(each for each in (directory, *directory.absolute().parents) if each.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".stoker-doctor-") as file:
            file.write(bytes(2**14))
            file.flush()
            os.fsync(file.fileno())  # some quotas only fail here
    except OSError as error:
        what = f"{name} {directory} cannot be written to ({error.strerror})"
        mend = f"check owner, mode and quota of {there}, or set another {name}"
        yield Finding("missing", what, mend)
        return
    free = shutil.disk_usage(there).free / 2**30
    small = free < LEAST_FREE_GIB
    what = f"{name} {directory}: {free:,.1f} GiB free on its disk (a quota may leave less)"
    yield Finding("warning" if small else "ok", what, f"{name} on a larger disk" * small)
