import json
import os
import socket
from types import SimpleNamespace

import psutil
import pytest
import torch
from transformers import TrainerControl, TrainerState

from utils.callbacks.memory import GIB, MemoryMonitor
from utils.callbacks.metrics import gather_over_ranks


def begin(monitor, device="cpu"):
    args = SimpleNamespace(device=torch.device(device))
    monitor.on_train_begin(args, TrainerState(), TrainerControl())
    return monitor


def test_on_a_cpu_there_are_host_figures_only():
    monitor = begin(MemoryMonitor())
    figures = monitor.metrics()
    assert set(figures) == {"host_rss_gib", "host_peak_rss_gib"}
    rss = psutil.Process().memory_info().rss / GIB
    assert figures["host_rss_gib"] == pytest.approx(rss, rel=0.2)
    assert figures["host_peak_rss_gib"] >= figures["host_rss_gib"] * 0.99
    assert figures["host_peak_rss_gib"] < 64, "KiB taken for bytes or the other way round"


def test_a_row_per_rank_names_rank_and_host():
    monitor = begin(MemoryMonitor())
    monitor.metrics()
    (row,) = monitor.by_rank()
    assert (row["rank"], row["host"]) == (0, socket.gethostname())
    assert json.loads(json.dumps(monitor.details())) == {"memory_by_rank": [row]}


def test_a_line_comes_only_when_a_peak_grew():
    monitor = begin(MemoryMonitor())
    monitor.metrics()
    line = monitor.report()
    assert line.startswith(f"memory (rank 0 on {socket.gethostname()}): host ")
    assert monitor.report() is None
    monitor.figures = monitor.figures * 1.1
    assert monitor.report() is not None


class FakeDevice:
    """torch.cuda's memory counters over a list of phases, for machines without a GPU."""

    def __init__(self, monkeypatch):
        self.allocated, self.peak = 1 * GIB, 1 * GIB
        answers = {
            "memory_allocated": lambda _device: self.allocated,
            "memory_reserved": lambda _device: 8 * GIB,
            "max_memory_allocated": lambda _device: self.peak,
            "mem_get_info": lambda _device: (70 * GIB, 80 * GIB),
            "reset_peak_memory_stats": self.reset,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(
            "utils.callbacks.memory.gather_over_ranks",
            lambda values, _device: gather_over_ranks(values, torch.device("cpu")),
        )

    def reset(self, _device):
        self.peak = self.allocated

    def use(self, gib):
        self.peak = max(self.peak, gib * GIB)


def test_peaks_belong_to_the_phase_they_happened_in(monkeypatch):
    device = FakeDevice(monkeypatch)
    device.use(50)  # loading the model: no phase
    monitor = begin(MemoryMonitor(), "cuda")
    state, control = TrainerState(), TrainerControl()
    device.use(5)
    control.should_evaluate = True
    monitor.on_step_end(None, state, control)
    device.use(7)
    monitor.on_evaluate(None, state, control)  # first split
    device.use(6)
    monitor.on_evaluate(None, state, control)  # second split
    device.use(3)
    monitor.on_save(None, state, control)
    control.should_evaluate = False
    device.use(4)
    monitor.on_step_end(None, state, control)
    figures = monitor.metrics()
    device_figures = {name: value for name, value in figures.items() if name.startswith("mem")}
    assert device_figures == {
        "memory_allocated_gib": 1.0,
        "memory_reserved_gib": 8.0,
        "memory_free_gib": 70.0,
        "memory_peak_train_gib": 5.0,
        "memory_peak_eval_gib": 7.0,
        "memory_peak_save_gib": 3.0,
    }
    assert "peaks train 5.00  eval 7.00  save 3.00" in monitor.report()


def test_phases_that_did_not_happen_have_no_figure(monkeypatch):
    FakeDevice(monkeypatch)
    figures = begin(MemoryMonitor(), "cuda").metrics()
    assert "memory_peak_train_gib" in figures
    assert "memory_peak_eval_gib" not in figures


def _two_ranks(rank, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    monitor = begin(MemoryMonitor())
    ballast = bytearray(os.urandom(1)) * (rank * 300 * 1024**2)
    figures = monitor.metrics()
    gathered = gather_over_ranks([float(rank), 2.0], torch.device("cpu")).tolist()
    result = {"figures": figures, "rows": monitor.by_rank(), "gathered": gathered}
    (folder / f"{rank}.json").write_text(json.dumps(result))
    assert len(ballast) == rank * 300 * 1024**2
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_agree_on_the_worst_and_on_every_row(tmp_path):
    torch.multiprocessing.spawn(_two_ranks, (tmp_path,), nprocs=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["gathered"] == [[0.0, 2.0], [1.0, 2.0]]
    rows = first["rows"]
    assert [row["rank"] for row in rows] == [0, 1]
    assert rows[1]["host_rss_gib"] > rows[0]["host_rss_gib"] + 0.2
    assert first["figures"]["host_rss_gib"] == pytest.approx(rows[1]["host_rss_gib"], abs=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_peaks_follow_real_allocations():
    monitor = begin(MemoryMonitor(), "cuda:0")
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
