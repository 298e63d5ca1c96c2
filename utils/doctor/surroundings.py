"""Checks of what is around this machine: Slurm, the Hub, wandb, disks, the file of tokens."""

import fcntl
import netrc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from utils.config.errors import ConfigurationError
from utils.doctor.machine import ROOT, Finding, output_of
from utils.support.redaction import load_env_file

LEAST_FREE_GIB = 20
REACH_LIMIT_S = 4.0


def check_slurm() -> Iterator[Finding]:
    """Check Slurm's commands and partitions, and this cluster's settings."""
    found = {name: shutil.which(name) for name in ("sbatch", "srun", "squeue", "scontrol", "sinfo")}
    absent = [name for name, path in found.items() if path is None]
    if len(absent) == len(found):
        yield Finding("option", "no Slurm here: jobs are submitted on a login node")
        return
    if absent:
        yield Finding("warning", f"Slurm lacks {', '.join(absent)}", "module load slurm")
    try:
        lines = output_of(["sinfo", "--noheader", "--format=%P %l %D nodes %G"]).splitlines()
        yield Finding(
            "ok", f"Slurm, partitions: {'; '.join(' '.join(x.split()) for x in lines[:8])}"
        )
    except OSError as error:
        yield Finding("warning", f"Slurm does not answer ({error})", "sinfo")
    if (ROOT / "slurm/cluster.env").is_file():
        output_of(["bash", "-n", str(ROOT / "slurm/cluster.env")])
        yield Finding(
            "ok", "slurm/cluster.env; what jobs have: slurm/run_python.sh -m utils.doctor"
        )
    else:
        yield Finding("warning", "no slurm/cluster.env: jobs take the environment of their shell",
                      "cp slurm/cluster.env.example slurm/cluster.env")  # fmt: skip
    if job := os.environ.get("SLURM_JOB_ID"):
        gpus = os.environ.get("SLURM_GPUS_ON_NODE", "no")
        yield Finding("ok", f"in Slurm job {job}: {gpus} GPU(s) on this node")


def check_tokens() -> Iterator[Finding]:
    """Check .env and its mode, then which tokens are there; no value is shown."""
    path = ROOT / ".env"
    try:
        taken = load_env_file(path)
        there = f".env has {', '.join(taken) or 'no more tokens'}" if path.is_file() else ""
        yield Finding("ok" if there else "option", there or "no .env",
                      "" if there else "cp .env.example .env && chmod 600 .env")  # fmt: skip
    except ConfigurationError as error:
        yield Finding("missing", str(error).removeprefix("- "), f"chmod 600 {path}")
    key = os.environ.get("WANDB_API_KEY") or _netrc_has("api.wandb.ai")
    if key:
        yield Finding("ok", "wandb: a key is there")
    else:
        yield Finding("option", "wandb: no key, it records offline", "wandb login")


def _netrc_has(host: str) -> bool:
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def check_hub() -> Iterator[Finding]:
    """Check the cache of the Hub, whether it is reached, and whose token there is."""
    import requests
    from huggingface_hub import HfApi, constants, get_token

    yield from _disk(Path(constants.HF_HOME), "HF_HOME")
    if constants.HF_HUB_OFFLINE:
        yield Finding("ok", "the Hub: offline (HF_HUB_OFFLINE), models come from HF_HOME")
        return
    token = get_token()
    try:
        requests.head(constants.ENDPOINT, timeout=REACH_LIMIT_S)
    except requests.RequestException as error:
        yield Finding("warning", f"the Hub ({constants.ENDPOINT}) is not reached "
                      f"({type(error).__name__}): what is needed has to be in HF_HOME",
                      "python prepare_data.py --offline_dir DIR, where it is reached")  # fmt: skip
        return
    if token is None:
        yield Finding("option", f"{constants.ENDPOINT} is reached; no token: gated models need one",
                      "HF_TOKEN in .env, or hf auth login")  # fmt: skip
        return
    try:
        name = HfApi().whoami().get("name")
        yield Finding("ok", f"{constants.ENDPOINT} is reached; the token is {name}'s")
    except Exception as error:  # httpx's, and the Hub's own
        yield Finding("warning", f"the Hub does not take the token ({type(error).__name__})",
                      "hf auth login, or another HF_TOKEN in .env")  # fmt: skip


def check_output(output_dir: Path) -> Iterator[Finding]:
    """Check the disk that runs write to."""
    yield from _disk(output_dir, "output_dir")
    for command in (["quota", "-s"], ["lfs", "quota", "-h", "-u", os.environ.get("USER", ""),
                                      str(_existing(output_dir))]):  # fmt: skip
        if shutil.which(command[0]):
            try:
                lines = output_of(command).splitlines()
            except OSError:
                continue  # no quota on this file system
            if shown := [" ".join(line.split()) for line in lines if any(map(str.isdigit, line))]:
                yield Finding("ok", f"quota: {'; '.join(shown[-3:])}")


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.absolute().parents) if each.is_dir())


def _disk(directory: Path, name: str) -> Iterator[Finding]:
    """Check free space, that files can be written, and locks, where a directory is or will be."""
    there = _existing(directory)
    kind = _file_system(there)
    free = shutil.disk_usage(there).free / 2**30
    inodes = os.statvfs(there)
    where = f"{name} {directory} ({kind})"
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".stoker-doctor-") as file:
            file.write(bytes(2**14))
            file.flush()
            os.fsync(file.fileno())  # a quota may show only now
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locks = ""
            except OSError as error:
                locks = error.strerror or str(error)
    except OSError as error:
        yield Finding("missing", f"{where} cannot be written to ({error.strerror})",
                      f"check owner, mode and quota of {there}, or set another {name}")  # fmt: skip
        return
    if free < LEAST_FREE_GIB or (inodes.f_files and inodes.f_favail < 10_000):
        yield Finding("warning", f"{where}: {free:.1f} GiB and {inodes.f_favail:,} files are free",
                      f"{name} on a larger disk")  # fmt: skip
    else:
        yield Finding("ok", f"{where}: {free:,.0f} GiB free")
    if locks and name == "HF_HOME":
        yield Finding("warning", f"{where}: no file locks ({locks}), which the Hub's library needs",
                      "HF_HOME on another disk, or mount it with locks")  # fmt: skip
    elif locks:
        yield Finding("ok", f"{name}: no file locks ({locks}); runs do without")


def _file_system(path: Path) -> str:
    """Return the type of the file system that a path is on."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    on = [(len(point), kind) for point, kind in mounts if path.resolve().is_relative_to(point)]
    return max(on)[1]
