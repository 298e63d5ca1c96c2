"""Memory of every rank, with peaks by phase, on counters of our own where there is no GPU."""

import json
import socket
from types import SimpleNamespace

import psutil
import pytest
import torch
from transformers import TrainerControl, TrainerState

from utils.callbacks.metrics import GIB, MemoryMonitor


def begin(device="cpu") -> MemoryMonitor:
    monitor, args = MemoryMonitor(), SimpleNamespace(device=torch.device(device))
    monitor.on_train_begin(args, TrainerState(), TrainerControl())
    return monitor


def test_on_a_cpu_there_are_host_figures_only():
    monitor = begin()
    figures = monitor.metrics()
    assert set(figures) == {"host_rss_gib", "host_peak_rss_gib"}
    rss = psutil.Process().memory_info().rss / GIB
    assert figures["host_rss_gib"] == pytest.approx(rss, rel=0.2)
    assert figures["host_peak_rss_gib"] >= figures["host_rss_gib"] * 0.99
    assert figures["host_peak_rss_gib"] < 64, "KiB taken for bytes or the other way round"
    [own] = json.loads(json.dumps(monitor.details()))["memory_by_rank"]
    assert (own["rank"], own["host"]) == (0, socket.gethostname())


class FakeDevice:
    """torch.cuda's memory counters, for machines without a GPU."""

    def __init__(self, monkeypatch):
        self.allocated, self.peak = 1 * GIB, 1 * GIB
        answers = {
            "memory_allocated": lambda _device: self.allocated,
            "memory_reserved": lambda _device: 8 * GIB,
            "max_memory_allocated": lambda _device: self.peak,
            "mem_get_info": lambda _device: (70 * GIB, 80 * GIB),
            "reset_peak_memory_stats": lambda _device: setattr(self, "peak", self.allocated),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    def use(self, gib):
        self.peak = max(self.peak, gib * GIB)


def test_peaks_belong_to_the_phase_they_happened_in(monkeypatch):
    device = FakeDevice(monkeypatch)
    device.use(50)  # loading the model: no phase
    monitor = begin("cuda")
    assert "memory_peak_eval_gib" not in monitor.metrics()
    state, control = TrainerState(), TrainerControl()
    control.should_evaluate = True
    for gib, event in (
        (5, monitor.on_step_end),
        (7, monitor.on_evaluate),  # first split
        (6, monitor.on_evaluate),  # second split
        (3, monitor.on_save),
    ):
        device.use(gib)
        event(None, state, control)
    control.should_evaluate = False
    device.use(4)
    monitor.on_step_end(None, state, control)
    figures = monitor.metrics()
    assert {name: value for name, value in figures.items() if name.startswith("mem")} == {
        "memory_allocated_gib": 1.0,
        "memory_reserved_gib": 8.0,
        "memory_free_gib": 70.0,
        "memory_peak_train_gib": 5.0,
        "memory_peak_eval_gib": 7.0,
        "memory_peak_save_gib": 3.0,
    }


def test_the_log_gets_the_worst_rank_and_the_journal_each(monkeypatch):
    FakeDevice(monkeypatch)
    monitor = begin("cuda")
    other = {"host_rss_gib": 99.0, "memory_free_gib": 1.0}
    monkeypatch.setattr(
        "utils.callbacks.metrics.gathered", lambda own: [own, ("n2", {**own[1], **other})]
    )
    figures = monitor.metrics()
    assert (figures["host_rss_gib"], figures["memory_free_gib"]) == (99.0, 1.0)
    first, second = monitor.details()["memory_by_rank"]
    assert (second["rank"], second["host"], second["host_rss_gib"]) == (1, "n2", 99.0)
    assert first["memory_free_gib"] == 70.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_peaks_follow_real_allocations():
    monitor = begin("cuda:0")
    state, control = TrainerState(), TrainerControl()
    control.should_evaluate = True
    base = torch.cuda.memory_allocated(0) / GIB
    torch.empty(2 * GIB, dtype=torch.uint8, device="cuda:0")
    monitor.on_step_end(None, state, control)
    torch.empty(GIB, dtype=torch.uint8, device="cuda:0")
    monitor.on_evaluate(None, state, control)
    figures = monitor.metrics()
    assert figures["memory_peak_train_gib"] == pytest.approx(base + 2, abs=0.01)
    assert figures["memory_peak_eval_gib"] == pytest.approx(base + 1, abs=0.01)
    assert figures["memory_reserved_gib"] >= 2
    assert 0 < figures["memory_free_gib"] < 1000
