"""The page of a hang: torch's NCCL traces, many ranks on one page, no secrets."""

import json

import pytest
import torch

from utils.callbacks import hang_page
from utils.launch.verdict import Note

HOSTS = [f"n{rank // 8}" for rank in range(64)]


def entry(number, operation, size, state, **others):
    """Return a trace entry of version 2.10, as ProcessGroupNCCL writes it."""
    return {
        "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number, "record_id": number,
        "pg_id": 0, "process_group": ["0", "default_pg"], "profiling_name": f"nccl:{operation}",
        "input_sizes": [[size]], "input_dtypes": ["BFloat16"], "output_sizes": [[size]],
        "output_dtypes": ["BFloat16"], "state": state, "retired": state == "completed",
        "is_p2p": False, "time_created_ns": 10**18 + number, "timeout_ms": 600000,
    } | others  # fmt: skip


def nccl_trace(*entries):
    return json.dumps({"version": "2.10", "entries": entries, "nccl_comm_state": {}}).encode()


def leave(monkeypatch, output_dir, rank, entries, beats=7, waiting=True, time=100.0):
    """Write the record of a rank with these entries in torch's recorder."""
    for name in hang_page._DUMPS:  # in some versions of torch both return NCCL's entries
        dump = lambda *_: nccl_trace(*entries)  # noqa: E731
        monkeypatch.setattr(torch._C._distributed_c10d, name, dump, raising=False)
    note = Note("hung", 76, "stands in f", rank, HOSTS[rank], time, beats, waiting)
    hang_page.leave_record(output_dir, note, "training")


def test_64_ranks_are_one_page(monkeypatch, tmp_path):
    monkeypatch.setenv("MY_TOKEN", "unmentionable")
    done = entry(41, "all_reduce", 4096, "completed")
    scheduled = [entry(n, "_allgather_base", 512, "scheduled") for n in (43, 44)]
    started = entry(42, "_allgather_base", 512, "started")
    sent = entry(9, "send", 3, "started", is_p2p=True)
    for rank in range(64):
        if rank == 3:
            leave(monkeypatch, tmp_path, rank, [done], beats=6, waiting=False)
        elif rank != 12:
            leave(monkeypatch, tmp_path, rank, [sent, done, started, *scheduled])
    leave(monkeypatch, tmp_path, 12, [started], time=50.0)  # from an earlier hang
    records = hang_page.read_records(tmp_path, since=60.0)
    assert len(records) == 63
    hang_page.write_page(tmp_path, "rank 12 is unmentionable", 812, HOSTS, records)
    page = (tmp_path / "hang.txt").read_text()
    head, under_way, silent, waiting, third = page.split("\n\n")
    assert head.endswith("UTC: the run hung after step 812.\nrank 12 is ***")
    alike = "ranks 0-2, 4-7 on n0; ranks 8-11, 13-15 on n1; ranks 16-23 on n2; "
    assert under_way.splitlines()[1] == "  nccl group 0 default_pg"
    line = next(line for line in under_way.splitlines() if "4-7" in line)
    assert line.startswith(f"    {alike}"), line
    assert line.endswith(
        ": in #42 _allgather_base of BFloat16 [512]; completed #41 all_reduce of BFloat16 [4096]"
    )
    assert "    rank 3 on n0: in none; completed #41 all_reduce" in under_way
    assert "MISMATCH" not in under_way
    assert silent == "rank 12 on n1: no record (stopped, frozen or gone)"
    assert waiting.startswith(alike)
    assert "training, beat 7, waits for other ranks\n  MainThread\n    " in waiting
    assert third.startswith("rank 3 on n0: training, beat 6, waits for no other rank\n")
    record = json.loads((tmp_path / "hang" / "rank-0.json").read_text())
    assert [each["collective_seq_id"] for each in record["collectives"]] == [41, 42, 43, 44]


@pytest.mark.parametrize(
    ("second", "parted"),
    [
        (entry(42, "all_reduce", 512, "started"), True),
        (entry(42, "_allgather_base", 511, "started"), True),
        (entry(41, "all_reduce", 512, "started"), False),  # this rank is behind
    ],
)
def test_other_operations_or_sizes_under_one_number_are_a_mismatch(second, parted):
    traces = {0: [entry(42, "_allgather_base", 512, "started")], 1: [second]}
    records = {r: {"groups": hang_page.last_and_pending(trace)} for r, trace in traces.items()}
    lines = hang_page.compare(records, ["n0", "n1"])
    assert (
        lines[0] == "  nccl group 0 default_pg" + ": MISMATCH, ranks do different things" * parted
    )
    assert len(lines) == 3


def test_a_run_without_collectives_says_so(tmp_path):
    hang_page.leave_record(tmp_path, Note("hung", 76, "", 0, "n0", 1.0, 3), "saving")
    hang_page.write_page(tmp_path, "rank 0", 1, ["n0"], hang_page.read_records(tmp_path, 0.0))
    assert (
        "\n  none that torch recorded\n\nrank 0 on n0: saving, beat 3, "
        in (tmp_path / "hang.txt").read_text()
    )
