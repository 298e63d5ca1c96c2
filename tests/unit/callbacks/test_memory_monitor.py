"""Memory of each rank by phase, the rank with the least left, the micro-batch that would fit."""

import logging
from types import SimpleNamespace

import psutil
import pytest
import torch
from transformers import TrainerControl, TrainerState

from utils.callbacks.memory import GIB, MemoryMonitor, fullest_rank


class Gpu:
    """A stand-in for torch.cuda on a GPU of 80 GiB; numbers are in GiB."""

    def __init__(self, monkeypatch):
        self.peak, self.resident, self.free = 50.0, 20.0, 8.0
        answers = {
            "memory_allocated": lambda _: int(self.resident * GIB),
            "memory_reserved": lambda _: int(70 * GIB),
            "mem_get_info": lambda _: (int(self.free * GIB), 80 * GIB),
            "max_memory_allocated": lambda _: int(self.peak * GIB),
            "reset_peak_memory_stats": self.reset,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    def reset(self, _device):
        self.peak = self.resident

    def use(self, gib: float):
        self.peak = max(self.peak, gib)


def memory_of(device: str, **known: int) -> MemoryMonitor:
    monitor = MemoryMonitor(**known)
    args = SimpleNamespace(device=torch.device(device), per_device_train_batch_size=4)
    monitor.on_train_begin(args, TrainerState(), TrainerControl())
    return monitor


def test_on_a_cpu_there_are_host_figures_only(caplog):
    caplog.set_level(logging.INFO)
    monitor = memory_of("cpu", sequence_bytes=1)
    figures = [monitor.metrics() for _ in range(3)][-1]
    assert set(figures) == {"host_rss_gib", "host_peak_rss_gib"}
    rss = psutil.Process().memory_info().rss / GIB
    assert figures["host_rss_gib"] == pytest.approx(rss, rel=0.2)
    assert figures["host_peak_rss_gib"] >= figures["host_rss_gib"] * 0.99
    assert figures["host_peak_rss_gib"] < 64, "KiB taken for bytes or the other way round"
    assert not caplog.text, "no device, no headroom"


def test_each_line_has_the_peak_of_its_own_phase(monkeypatch):
    gpu = Gpu(monkeypatch)  # loading the model has used 50 GiB
    monitor = memory_of("cuda")
    args, state, nothing = None, TrainerState(global_step=3), TrainerControl()
    saving = TrainerControl(should_save=True, should_evaluate=True)
    peaks = []

    def line():
        (own,) = monitor.by_rank
        peaks.append(own["memory_peak_gib"])

    gpu.use(60)
    monitor.on_step_end(args, state, nothing)
    assert monitor.metrics()["memory_peak_gib"] == 60
    gpu.use(62)
    monitor.on_step_end(args, state, saving)
    gpu.use(30)  # an evaluation without a training log before it
    monitor.measure()
    line()
    monitor.measure()  # another split
    line()
    gpu.use(45)  # a save
    monitor.measure()
    line()
    gpu.use(55)
    monitor.on_step_end(args, state, nothing)
    monitor.metrics()
    line()
    assert peaks == [30, 20, 45, 62]
    assert monitor.metrics()["memory_peak_gib"] == 20


OTHER = {"host_rss_gib": 99, "memory_free_gib": 1, "memory_peak_gib": 69.8,
         "memory_headroom_gib": 1.2}  # fmt: skip


def test_the_log_gets_the_worst_ranks_memory_and_what_fits(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    gpu = Gpu(monkeypatch)
    gathered = "utils.callbacks.memory.gathered"
    monkeypatch.setattr(gathered, lambda own: [own, ("n2", own[1] | OTHER)])
    monitor = memory_of("cuda", sequence_bytes=GIB // 2)
    gpu.use(62)
    figures = monitor.metrics()
    assert [line["memory_free_gib"] for line in monitor.by_rank] == [8, 1]
    assert (monitor.by_rank[1]["rank"], monitor.by_rank[1]["host"]) == (1, "n2")
    del figures["host_peak_rss_gib"]
    assert figures == {
        "host_rss_gib": 99, "memory_allocated_gib": 20, "memory_reserved_gib": 70,
        "memory_peak_gib": 69.8, "memory_free_gib": 1, "memory_headroom_gib": 1.2,
        "memory_total_gib": 80,
    }  # fmt: skip
    assert not caplog.text, "the first line's peak may be of compilation"
    for _ in range(3):
        monitor.metrics()
    # Two more sequences of 0.55 GiB fit into 1.2 GiB, three do not.
    said = "headroom 1.2 GiB of 80.0 on rank 1 (n2): micro-batch 6 would fit, 7 would not"
    assert [record.message for record in caplog.records] == [f"memory: {said} (predicted)"]
    monitor.sequence_bytes = 8 * GIB
    assert monitor.headroom().endswith("(n2): micro-batch 5 would not (predicted)")


@pytest.mark.parametrize(("peaks", "told"), [((50, 54), ""), ((50, 56), " (rank 1 on n1)")])
def test_a_rank_is_named_where_ranks_are_apart(peaks, told):
    ranks = [
        {"rank": rank, "host": f"n{rank}", "memory_peak_gib": gib} for rank, gib in enumerate(peaks)
    ]
    assert fullest_rank({"memory_by_rank": ranks}) == told
