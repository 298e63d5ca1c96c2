"""Requests that Slurm can never satisfy. A job with such a request would wait for ever."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from utils.config.errors import UnfitClusterError
from utils.launch.slurm import time_limit_s

_NEVER = "Requested node configuration is not available"
_COLUMNS = "cores", "memory_mb", "gres", "features"
_QOS_COLUMNS = "flags", "MaxWall", "MaxTRES", "MaxTRESPU", "GrpTRES"
_NOT_SET = 65534  # NO_VAL16 of slurm.h, which older versions of squeue print
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


@dataclass(frozen=True)
class SlurmAnswers:
    """Output of Slurm's commands about a job. The output of a command that failed is empty.

    refusal     sbatch's messages for the same job without --hold; empty if sbatch accepts the job
    partitions  scontrol --oneliner show partition
    nodes       sinfo, with the columns partition|cores|memory|gres|features
    qos         sacctmgr show qos, with the columns name|flags|MaxWall|MaxTRES|MaxTRESPU|GrpTRES;
                only name|flags if Slurm does not enforce the limits
    """

    refusal: str
    partitions: str
    nodes: str
    qos: str


def check_request(job: Mapping[str, str], gpus: int, answers: SlurmAnswers) -> list[str]:
    """Raise UnfitClusterError if none of the job's partitions can ever start the job.

    Return notes for the user, such as on limits that could not be checked. gpus: GPUs per node.
    """
    partitions = {}
    for line in answers.partitions.splitlines():
        found = dict(re.findall(r"(\S+?)=(\S*)", line))
        partitions[found.get("PartitionName")] = found
    names, faults, notes = job["Partition"].split(","), [], []
    for name in names:
        if name not in partitions:
            notes.append(f"Slurm does not show the limits of partition {name}: not checked")
            continue
        qos = _qos_limits(job, partitions[name], answers.qos)
        if qos is None:
            notes.append(
                f"sacctmgr does not show QOS {job['QOS']}, so the limits of partition {name} (time "
                f"{partitions[name].get('MaxTime')}) are not checked"
            )
        elif fault := next(_limit_violations(job, gpus, partitions[name], qos), None):
            faults.append(fault)
    if len(faults) == len(names):
        raise UnfitClusterError(faults)
    if answers.refusal:
        _check_nodes(job, gpus, names, answers)
        notes.append(f"Slurm cannot start this job now: {answers.refusal.strip()}")
    return notes


def _qos_limits(
    job: Mapping[str, str], partition: Mapping[str, str], table: str
) -> dict[str, str] | None:
    """Return {limit: value} from the job's and the partition's QOS; None if `table` lacks a QOS.

    table: sacctmgr's output
    """
    rows = {}
    for line in table.splitlines():
        name, *values = line.split("|")
        rows[name] = dict(zip(_QOS_COLUMNS, values, strict=False))
    names = [job["QOS"], partition.get("QoS", "")]
    names = [name for name in names if name not in ("", "N/A", "(null)")]
    if any(name not in rows for name in names):
        return None
    given = [rows[name] for name in names]
    if given and "OverPartQOS" in given[0]["flags"]:
        given.reverse()  # otherwise the limits of the partition's QOS count first
    limits = {key: value for row in given for key, value in row.items() if value}
    return limits | {"flags": ",".join(row["flags"] for row in given), "names": " or ".join(names)}


def _limit_violations(
    job: Mapping[str, str], gpus: int, partition: Mapping[str, str], qos: Mapping[str, str]
) -> Iterator[str]:
    """Yield messages that say why a partition can never start a job, and what to request."""
    place, nodes = f"partition {partition['PartitionName']}", int(job["NumNodes"])
    limits = [(f"QOS {qos['names']}", qos.get("MaxWall", ""))]
    if "PartitionTimeLimit" not in qos["flags"]:
        limits.append((place, partition.get("MaxTime", "")))
    asked_s = time_limit_s(job["MinTime"]) or time_limit_s(job["TimeLimit"]) or math.inf
    for owner, limit in limits:
        if asked_s > (time_limit_s(limit) or math.inf):
            yield (
                f"the time limit is {job['TimeLimit']}, but {owner} allows {limit}: the job would "
                f"wait for ever. Give --time={limit}: a job that needs longer requeues itself"
            )
    most = [partition.get("TotalNodes", "")]
    if "PartitionMaxNodes" not in qos["flags"]:
        most.append(partition.get("MaxNodes", ""))
    for text in most:
        if text.isdecimal() and nodes > int(text):
            yield f"{nodes} nodes, but {place} allows {text}: give --nodes={text}"
    asked = {"gres/gpu": nodes * gpus, "node": nodes, "cpu": int(_parse_number(job["NumCPUs"]))}
    for name in ("MaxTRES", "MaxTRESPU", "GrpTRES"):
        for kind, limit in re.findall(r"(?<![^,])(gres/gpu|node|cpu)=([\w.]+)", qos.get(name, "")):
            if asked[kind] > _parse_number(limit):
                yield (
                    f"the job has {kind}={asked[kind]}, but QOS {qos['names']} allows {limit} "
                    f"({name}): ask for less, or name another --qos (sacctmgr show qos)"
                )


def _check_nodes(
    job: Mapping[str, str], gpus: int, names: list[str], answers: SlurmAnswers
) -> None:
    """Raise UnfitClusterError if no node in the partitions `names` has the job's resources.

    Nodes that are down count as well.
    """
    rows = [line.split("|") for line in answers.nodes.splitlines()]
    nodes = [dict(zip(_COLUMNS, row[1:], strict=False)) for row in rows if row[0] in names]
    options = []
    if nodes:
        most_gpus = max(sum(map(count_gpus, node["gres"].split(","))) for node in nodes)
        cores, memory = (
            max(int(_parse_number(node[key])) for node in nodes) for key in ("cores", "memory_mb")
        )
        options += [f"--gpus-per-node={most_gpus}"] * (gpus > most_gpus)
        options += [f"--mem={memory}M"] * (_parse_number(job["MinMemory"]) > memory * _UNITS["M"])
        asked_cores = _parse_number(job["cpus-per-task"])
        options += [f"--cpus-per-task={cores}"] * (cores < asked_cores < _NOT_SET)
    has = "; ".join(
        f"{node['cores']} cores, {node['memory_mb']} MB, {node['gres']}, features "
        f"{node['features']}"
        for node in nodes
    )
    if not options and _NEVER not in answers.refusal:
        return
    what = f"at most {' '.join(options)}" if options else "less, or another --partition"
    raise UnfitClusterError(
        f"no node of partition {','.join(names)} has what the job asks for, so the job would wait "
        f"for ever ({_NEVER}). Ask for {what}. A node has: {has or 'sinfo does not tell'}"
    )


def _parse_number(text: str) -> float:
    """Return a number that Slurm printed: 1536 for 1.50K, 64 for 64+, 0 for N/A."""
    number = re.match(r"([\d.]+)([KMGT]?)", text)
    return float(number[1]) * _UNITS[number[2]] if number else 0.0


def count_gpus(tres: str) -> int:
    """Return the number of GPUs in a TRES text: 4 for gres:gpu:h100:4 and gres/gpu=4, 1 for gpu."""
    entries = [entry for entry in tres.split(",") if "gpu" in entry]  # Slurm uses the last one
    number = re.search(r"[:=](\d+)(?:\(|$)", entries[-1]) if entries else None
    return int(number[1]) if number else len(entries[:1])
