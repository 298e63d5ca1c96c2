"""The ledger of bad nodes: which node is at fault, which nodes a requeued job leaves out."""

import json
import os
import threading
from collections import Counter

import pytest

from utils.launch import ledger
from utils.launch.ledger import Fault, bad_nodes, plan_to_leave_out, read_ledger, record_faults
from utils.launch.verdict import Note, hang_verdict, likeliest_cause

HOSTS = ["n1", "n2"]
ECC = "AcceleratorError: CUDA error: uncorrectable ECC error encountered (trainer.py:1 in step)"
LOCAL = (
    "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1691, unhandled system error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.21.5"
)
REMOTE = "DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a network e"
CLUSTER = "cluster error on n1:\n- "


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Let this process be a job with a ledger."""
    monkeypatch.setenv("STOKER_LEDGER", str(tmp_path / "shared/nodes.jsonl"))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return tmp_path / "shared/nodes.jsonl"


def failed(rank: int, text: str, code: int = 1) -> Note:
    return Note("failed", code, text, rank, HOSTS[rank // 2], float(rank))


def hung(rank: int, beats: int, waiting: bool = True) -> Note:
    text = f"made no progress for 9 s after step 3 (beat {beats}), in trainer.py:1 in step"
    return Note("hung", 76, text, rank, HOSTS[rank // 2], 1.0, beats, waiting)


def found(verdict: str, *notes: Note, hosts=HOSTS) -> list[tuple[str, str, str]]:
    """Return node, kind and GPU of the faults; rank 3 has GPU-3."""
    gpus = {rank: f"GPU-{rank}" for rank in range(4)}
    faults = ledger.find_faults(verdict, notes, hosts, gpus)
    return [(fault.node, fault.kind, fault.gpu) for fault in faults]


def test_a_hang_blames_the_ranks_that_the_others_waited_for():
    of_ranks = ["n1", "n1", "n2", "n2"]

    def judged(*notes: Note) -> list[tuple[str, str, str]]:
        return found(hang_verdict(notes, of_ranks), *notes)

    assert judged(*(hung(rank, 5) for rank in range(3))) == [("n2", "hang", "GPU-3")]
    behind = [hung(0, 5), hung(1, 5), hung(2, 4, waiting=False), hung(3, 5)]
    assert judged(*behind) == [("n2", "hang", "GPU-2")]
    assert judged(*(hung(rank, 5) for rank in range(4))) == [], "none behind the others"
    assert judged(hung(0, 5), hung(2, 5)) == [], "ranks of both nodes"
    ended = Note("killed", 76, "SIGKILL", 3, "n2", 0.5)
    assert judged(hung(0, 5), ended) == [], "somebody killed it"
    alone = hang_verdict([hung(0, 5)], ["n1"])
    assert found(alone, hung(0, 5), hosts=["n1"]) == [("n1", "hang", "GPU-0")]


def test_errors_of_hardware_blame_their_node_and_errors_that_follow_blame_none():
    lost = "rank 0 on n1 lost another rank, which left no word: x"
    everyone = [failed(0, REMOTE), failed(1, REMOTE), failed(3, ECC)]
    assert found(likeliest_cause(everyone).text, *everyone) == [("n2", "hardware", "GPU-3")]
    assert found(lost, failed(0, REMOTE), failed(2, REMOTE)) == []
    assert found(lost, failed(0, REMOTE), failed(2, LOCAL)) == [("n2", "nccl", "")]
    assert found(lost, failed(0, LOCAL)) == [], "n2 left no word: it may be the cause"
    assert found(lost, failed(0, LOCAL), failed(2, LOCAL)) == [], "both nodes"
    killed = Note("killed", 76, "SIGKILL", 3, "n2", 0.5)
    assert found(lost, failed(0, LOCAL), failed(2, REMOTE), killed) == []
    for text in (
        "KeyError: 'xid'",
        "ValueError: no ECC error column",
        "RuntimeError: out of memory",
        "ValueError: ECCerror",
    ):
        assert found(f"rank 0 on n1 failed: {text}", failed(0, text)) == [], text


@pytest.mark.parametrize(
    ("verdict", "hosts", "blamed"),
    [
        (CLUSTER + "n2: the job has 8 GPUs on this node, one process each, but torch sees 0. C",
         HOSTS, ["n2"]),
        (CLUSTER + "n1: the job has 8 GPUs on this node, one process each, but torch sees 0. C",
         ["n1"], []),  # torch may be built without CUDA
        (CLUSTER + "n1: the job has 8 GPUs on this node, one process each, but torch sees 7. C",
         ["n1"], ["n1"]),
        (CLUSTER + "n1: the job has 8 GPUs on this node, one process each, but torch sees 1. C",
         ["n1"], []),  # the user's CUDA_VISIBLE_DEVICES
        ("n2: there is no python on PATH: activate the environment", HOSTS, ["n2"]),
        ("n2: slurm/cluster.env failed, see above: bash", HOSTS, ["n2"]),
        ("n2: apptainer exec a.sif python cannot start the launcher (no)", HOSTS, ["n2"]),
        ("n2 does not see /shared/stoker", HOSTS, ["n2"]),
        ("n1 does not see /home/me\nn2 does not see /home/me", HOSTS, []),
        (CLUSTER + "torch: 2.9 on n1, but 2.8 on n2. All nodes need one repository", HOSTS, []),
        (CLUSTER + "n2 did not come to n1:2 within 60 s", HOSTS, []),  # n1 may be the cause
        ("rank 0 on n1 ended: cluster error: n1 rank 0: the first collective of all", HOSTS, []),
        ("rank 0 on n1 was killed by SIGKILL", HOSTS, []),
        ("rank 0 on n1 failed: KeyError: 'a'", HOSTS, []),
        ("srun ended with exit code 1, see its lines above", HOSTS, []),
    ],
)  # fmt: skip
def test_a_refused_check_blames_a_node_only_if_another_passed_it(verdict, hosts, blamed):
    assert found(verdict, hosts=hosts) == [(host, "refused", "") for host in blamed]


def test_a_step_is_noted_with_job_gpu_and_cause(file, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "s3cret" * 5)
    (tmp_path / "gpus.json").write_text(json.dumps(["GPU-a", "GPU-b", "GPU-c", "GPU-d"]))
    for text in (ECC, f"{ECC} {os.environ['HF_TOKEN']}\n\x1b[1m{'x' * 999}"):
        note = {**vars(failed(3, text)), "exit_code": 1}
        (tmp_path / "rank-3.json").write_text(json.dumps(note))
        said = ledger.note_faults(HOSTS, str(tmp_path), "1", "", "rank 3 on n2 failed: it")
        assert said == [f"noted in {file}: n2 (hardware)"]
    (one, other), damaged = read_ledger()
    assert (one.node, one.kind, one.gpu, one.job, one.cause) == (
        "n2",
        "hardware",
        "GPU-d",
        "7",
        ECC,
    )
    assert "hf_s3cret" not in file.read_text()
    assert len(other.cause) == 300
    assert damaged == 0
    for code, down, kinds in (
        ("76", "n2", ["lost"]),
        ("79", "", []),
        ("79", "n[1-2]", ["lost"] * 2),
    ):
        file.unlink(missing_ok=True)
        ledger.note_faults(HOSTS, str(tmp_path), code, down, "node n2 failed: x")
        assert [fault.kind for fault in read_ledger()[0]] == kinds, "host memory is the user's"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    record_faults([Fault("n1", "hang", "x")])
    assert read_ledger()[0][-1].job == "5_3"


def test_damaged_lines_are_counted_and_writers_do_not_mix(file):
    file.parent.mkdir()
    file.write_bytes(b'{"node": "n1", "kind": "hang", "cau')  # a node died
    threads = [
        threading.Thread(target=lambda n=n: record_faults([Fault(f"n{n}", "hang", "x" * 280)] * 50))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with file.open("ab") as opened:
        opened.write(b'\n\xff\n[]\n7\nnull\n{"node": 5, "kind": "hang", "cause": ""}\n')
        opened.write(b'{"node": "a", "kind": "hang", "cause": 1}\n{"node": "n1"}\n')
        opened.write(b'{"node": "n1", "kind": "hang", "cause": "", "time": "x"}\n')
        opened.write(b'{"node": "n1", "kind": "hang", "cause": "\\u001b", "time": 1}\n')
        opened.write(b"[" * 100_000 + b"\n")
    faults, damaged = read_ledger()
    assert Counter(fault.node for fault in faults) == {f"n{n}": 50 for n in range(8)}
    assert damaged == 11


def test_a_ledger_that_cannot_be_written_or_is_not_wanted(tmp_path, monkeypatch):
    blocked = tmp_path / "a"
    blocked.write_text("a file")
    monkeypatch.setenv("STOKER_LEDGER", str(blocked / "nodes.jsonl"))
    assert "cannot be written" in record_faults([Fault("n1", "hang", "x")])
    monkeypatch.delenv("STOKER_LEDGER")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(ledger, "_ROOT", tmp_path)
    assert record_faults([Fault("n1", "hang", "x")]) == ""
    assert read_ledger() == ([], 0)
    assert not (tmp_path / ".stoker").exists(), "no job, no ledger"


def test_two_faults_in_a_week_make_a_bad_node(monkeypatch):
    """A mismatch does not count: one of its nodes is healthy."""
    now, day = 1e9, 86400.0
    monkeypatch.setattr(ledger.time, "time", lambda: now)
    ages = {"n1": [1, 2], "n2": [1, 8], "n3": [1], "n4": [1, -400], "n5": [0, 0, 7]}
    faults = [
        Fault(node, "hang", "", job=node, time=now - age * day)
        for node, days in ages.items()
        for age in days
    ]
    faults += [Fault("n6", "mismatch", "", time=now)] * 2
    assert bad_nodes(faults) == {"n1": 2, "n5": 3}

    def of_job(node: str, rank: int, kind: str = "hang") -> list[Fault]:
        return [Fault(node, kind, f"rank {rank} on {node} hangs", job="8", time=now)] * 2

    assert bad_nodes([*of_job("n7", 0), *of_job("n8", 0)]) == {}, "a deadlock in the job's code"
    assert bad_nodes([*of_job("n7", 0), *of_job("n8", 9)]) == {"n7": 2, "n8": 2}
    assert bad_nodes(of_job("n7", 0, "hardware") + of_job("n8", 0, "hardware")).total() == 4
    for after, nodes in (("0", set()), ("3", {"n5"}), ("1", {*ages}), ("x", {"n1", "n5"})):
        monkeypatch.setenv("STOKER_LEAVE_OUT_AFTER", after)
        assert bad_nodes(faults).keys() == nodes, after


def rows(**nodes: str) -> str:
    """Return sinfo's lines; a value is a state, and perhaps another shape."""
    lines = []
    for name, text in nodes.items():
        state, _, shape = text.partition(" ")
        lines.append(f"{name}|{state}|{shape or '64|500000|gpu:h100:8|ib'}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("own", "nodes", "asked", "excluded"),
    [
        (["n1"], rows(n1="comp", n2="idle"), "(null)|(null)|(null)", "n1"),
        (["n1"], rows(n1="mix"), "(null)|(null)|(null)", ""),  # no other node
        (["n1"], rows(n1="mix", n2="down*"), "||", ""),
        (["n1"], rows(n1="mix", n2="idle*"), "||", ""),
        (["n1"], rows(n1="mix", n2="drain", n3="maint"), "||", "n3"),
        (["n1"], rows(n1="mix", n2="idle~", n3="idle"), "||", "n1,n3"),
        (["n1"], rows(n1="mix", n2="idle 64|500000|gpu:h100:8|"), "||", ""),  # without its feature
        (["n1"], rows(n1="mix", n2="idle 64|9|gpu:h100:8|ib"), "||", ""),
        (["n1"], rows(n1="mix", n2="idle"), "n2||", ""),  # the user excludes it
        (["n1"], rows(n1="mix", n2="idle", n4="alloc"), "n[4-5]||", "n[4-5],n1"),
        (["n1"], rows(n1="mix", n2="idle"), "n1||", ""),  # it is left out already
        (["n1"], rows(n1="mix", n2="idle"), "|n1|", ""),  # the user wants it
        (["n1"], rows(n1="mix", n2="idle"), "||mine", ""),  # the nodes of a reservation
        (["n1", "n2"], rows(n1="mix", n2="mix", n4="idle"), "||", "n1"),
        (["n1", "n3"], rows(n1="mix", n2="idle", n3="mix"), "||", "n1"),  # only the worst
        (["n1", "n3"], rows(n1="mix", n2="idle", n3="mix", n4="plnd"), "||", "n1,n3"),
        (["n2"], rows(n2="mix", n4="idle"), "||", ""),  # no bad node in this partition
        (["n1"], "", "||", ""),
        (["n1"], "sinfo: error", "||", ""),
    ],
)
def test_bad_nodes_are_left_out_as_long_as_the_job_can_start(file, own, nodes, asked, excluded):
    nodes_of_ranks = ("n3", "n1", "n1", "n3", "n1", "n2")
    record_faults([Fault(node, "hang", f"rank {node} on it") for node in nodes_of_ranks])
    chosen, words = plan_to_leave_out(own, asked, nodes)
    assert chosen == excluded
    assert ("leaves out n1 (3 faults in 7 days)" in words) == ("n1" in excluded.split(","))
