"""Memory of each rank by phase, what fits, and the page of a run that is out of memory."""

import logging
import os
import signal
import sys
from multiprocessing.connection import Client, Listener
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch
from transformers import Trainer, TrainerControl, TrainerState

from utils.callbacks import memory
from utils.callbacks.memory import GIB, MemoryMonitor, fullest_rank, memory_page
from utils.callbacks.progress import Phase, Progress
from utils.host import run_lock
from utils.launch import script
from utils.launch.script import run_script
from utils.launch.verdict import read_notes


class Gpu:
    """A stand-in for torch.cuda on a GPU of 80 GiB; numbers are in GiB."""

    def __init__(self, monkeypatch):
        self.peak, self.resident, self.free, self.asked = 50.0, 20.0, 8.0, 0
        answers = {
            "memory_allocated": lambda _: int(self.resident * GIB),
            "memory_reserved": lambda _: int(70 * GIB),
            "mem_get_info": lambda _: (int(self.free * GIB), 80 * GIB),
            "max_memory_allocated": lambda _: int(self.peak * GIB),
            "reset_peak_memory_stats": self.reset,
            "utilization": self.utilization,
            "power_draw": lambda _: 640_000,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    def reset(self, _device):
        self.peak = self.resident

    def utilization(self, _device):
        self.asked += 1
        return 90

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
    assert figures["host_rss_gib"] * 0.99 <= figures["host_peak_rss_gib"] < 64, "not in KiB"
    assert not caplog.text, "no device, no headroom"


def test_each_line_has_the_peak_of_its_own_phase(monkeypatch):
    gpu = Gpu(monkeypatch)  # loading the model has used 50 GiB
    monitor = memory_of("cuda")
    state, nothing = TrainerState(global_step=3), TrainerControl()
    gpu.use(60)
    monitor.on_step_end(None, state, nothing)
    assert monitor.metrics()["memory_peak_gib"] == 60
    gpu.use(62)
    monitor.on_step_end(None, state, TrainerControl(should_save=True, should_evaluate=True))
    # An evaluation of two splits without a training log before it, and a save.
    for used, peak in ((30, 30), (0, 20), (45, 45)):
        gpu.use(used)
        assert monitor.measure()[0]["memory_peak_gib"] == peak
    gpu.use(55)
    monitor.on_step_end(None, state, nothing)
    assert monitor.metrics()["memory_peak_gib"] == 62
    assert monitor.metrics()["memory_peak_gib"] == 20


@pytest.mark.parametrize(("own", "other"), [(True, False), (False, True)])
def test_without_nvml_on_one_rank_memory_is_still_logged(monkeypatch, caplog, own, other):
    """NVML is asked once. Its figures are those of all ranks, or absent."""
    caplog.set_level(logging.INFO)
    gpu = Gpu(monkeypatch)

    def missing(_device):
        gpu.asked += 1
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    if not own:
        monkeypatch.setattr(torch.cuda, "utilization", missing)
    lacking = {name: value for name, value in OTHER.items() if other or "gpu" not in name}
    absent = {} if other else {"gpu_utilization", "gpu_power_w"}
    monkeypatch.setattr(
        memory, "gathered",
        lambda own: [own, ("n2", {k: v for k, v in own[1].items() if k not in absent} | lacking)],
    )  # fmt: skip
    monitor = memory_of("cuda")
    figures = [monitor.metrics() for _ in range(3)][-1]
    assert figures["memory_peak_gib"] == 69.8
    assert not any("gpu" in name for name in figures)
    assert gpu.asked == (3 if own else 1)
    assert ("GPU utilization and power are not recorded: nvidia-ml-py" in caplog.text) == (not own)


class Nvml(SimpleNamespace):
    """A stand-in for the package pynvml, with a counter of millijoules for each GPU."""

    def __init__(self, **millijoules: float):
        super().__init__(counters=millijoules, nvmlInit=lambda: None)
        self.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
        self.nvmlDeviceGetTotalEnergyConsumption = self.counters.__getitem__


def test_energy_is_counted_from_the_begin_of_training_and_summed_over_ranks(monkeypatch, tmp_path):
    Gpu(monkeypatch)
    nvml = Nvml(**{"GPU-12ab": 7_200_000_000})
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    known = SimpleNamespace(uuid="12ab")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: known)
    other = {"energy_kwh": 0.75}
    monkeypatch.setattr(memory, "gathered", lambda own: [own, ("n2", own[1] | other)])
    run_lock.take_run_lock(tmp_path)
    try:
        monitor = memory_of("cuda")
        assert monitor.metrics()["energy_kwh"] == 0.75, "0 on this rank"
        nvml.counters["GPU-12ab"] += 1_800_000_000
        figures = monitor.metrics()
        assert figures["energy_kwh"] == 1.25
        assert [line["energy_kwh"] for line in monitor.by_rank] == [0.5, 0.75]
    finally:
        run_lock.leave_run_lock(tmp_path)
    assert next(run_lock.run_owners(tmp_path)).kwh == 1.25, "for status.py"


def test_a_gpu_whose_energy_nvml_does_not_count_is_named_once(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    Gpu(monkeypatch)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1"))
    monitor = memory_of("cuda")
    assert "energy_kwh" not in monitor.metrics() | monitor.metrics()
    assert caplog.text.count("the energy of this GPU is not recorded: 'GPU-1'") == 1


OTHER = {"host_rss_gib": 99, "memory_free_gib": 1, "memory_peak_gib": 69.8,
         "memory_headroom_gib": 1.2, "gpu_utilization": 0.5, "gpu_power_w": 240}  # fmt: skip


def test_the_log_gets_the_worst_ranks_memory_and_what_fits(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    gpu = Gpu(monkeypatch)
    monkeypatch.setattr(memory, "gathered", lambda own: [own, ("n2", own[1] | OTHER)])
    monitor = memory_of("cuda", sequence_bytes=GIB // 2)
    gpu.use(62)
    figures = monitor.metrics()
    assert [line["memory_free_gib"] for line in monitor.by_rank] == [8, 1]
    assert (monitor.by_rank[1]["rank"], monitor.by_rank[1]["host"]) == (1, "n2")
    del figures["host_peak_rss_gib"]
    assert figures == {
        "host_rss_gib": 99, "memory_allocated_gib": 20, "memory_reserved_gib": 70,
        "memory_peak_gib": 69.8, "memory_free_gib": 1, "memory_headroom_gib": 1.2,
        "memory_total_gib": 80, "gpu_utilization": 0.7, "gpu_power_w": 440,
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


MIB = 2**20
BATCH = {"input_ids": torch.zeros((4, 8192)), "sequence_tokens": torch.tensor([8000, 8192, 5, 0])}
CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"


@pytest.fixture
def trainer(monkeypatch, tmp_path):
    """Return a stand-in for Trainer with all values that the page reads, and pretend a GPU."""
    blocks = [
        {"address": 16, "size": 300 * MIB, "state": "active_allocated"},
        {"address": 17, "size": 500 * MIB, "state": "active_allocated"},
        {"address": 18, "size": 900 * MIB, "state": "inactive"},
    ]
    answers = {
        "memory_snapshot": [{"blocks": blocks[:1]}, {"blocks": blocks[1:]}],
        "mem_get_info": (100 * MIB, 4000 * MIB), "memory_reserved": 3000 * MIB,
        "memory_allocated": 800 * MIB,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)

    def dump(file: str) -> None:
        Path(file).write_bytes(b"blocks")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    made = Trainer.__new__(Trainer)
    made.args = SimpleNamespace(
        device=torch.device("cuda"), world_size=8, dataloader_num_workers=0,
        per_device_eval_batch_size=8, per_device_train_batch_size=4,
    )  # fmt: skip
    made.events, made.is_fsdp_enabled = [], False
    made.model = torch.nn.Linear(2, 2)
    made.optimizer = torch.optim.AdamW(made.model.parameters())
    made.checkpoints = SimpleNamespace(output_dir=tmp_path, background=None)
    made.callbacks = SimpleNamespace(
        journal=SimpleNamespace(write=made.events.append), progress=Progress(Phase.TRAIN, step=7)
    )
    made.callbacks.progress.begin_batch(BATCH)
    made.memory = SimpleNamespace(
        choice="selective", sequence_bytes=500 * MIB, sharded_bytes=2500 * MIB,
        predicted_bytes={"none": 4000 * MIB, "selective": 3000 * MIB, "full": 2800 * MIB},
        context_bytes={},
    )  # fmt: skip
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    monkeypatch.setenv("STOKER_NOTES_DIR", str(tmp_path))
    return made


def fail(trainer, error: Exception, cause: Exception | None = None) -> int:
    def main():
        with memory_page(trainer):
            if cause is None:
                raise error
            raise error from cause

    return run_script(main)


def test_the_page_tells_what_took_the_gpu_and_what_would_help(trainer, tmp_path, capsys):
    assert fail(trainer, torch.OutOfMemoryError(CUDA)) == 79
    page = tmp_path / "out-of-memory-rank0.txt"
    head = "n2: out of memory (GPU), train, step 7: cannot allocate 2.00 GiB in tests/unit/"
    best = "--per_device_train_batch_size 1: 1.5 GiB (predicted; now 2.9 GiB)"
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "out of memory:"
    assert shown[1].startswith(f"  - {head}")
    assert shown[2:] == [f"    what would help most: {best}", f"    what took it: {page}"]
    text = page.read_text()
    assert text.startswith(head)
    assert "Linear on 8 rank(s), 4 sequences x 8,192 tokens, 16,197 of them" in text
    assert "pytorch.org/memory_viz draws all blocks: out-of-memory-rank0.pickle" in text
    assert (tmp_path / "out-of-memory-rank0.pickle").read_bytes() == b"blocks"
    for line in (
        "   800.0 MiB  other tensors", "     2.1 GiB  reserved by torch, not in use",
        "   900.0 MiB  other processes, CUDA itself", "   100.0 MiB  free",
        "   500.0 MiB  kept for the backward pass, or by a library",
    ):  # fmt: skip
        assert f"\n{line}\n" in text, text
    helps = [best, "--per_device_train_batch_size 2: 2.0 GiB", "strategy: fsdp2 (a new run): 2.4"]
    listed = text.partition("what would help most\n")[2].splitlines()[:4]
    assert all(line.strip().startswith(each) for line, each in zip(listed, helps, strict=False))
    assert listed[3] == ""
    assert text.endswith(f"torch.OutOfMemoryError: {CUDA}\n")
    (event,) = trainer.events
    assert event["page"] == page.name
    assert read_notes(tmp_path)[0].exit_code == 79


def test_ranks_that_could_share_a_sequence_are_named(trainer, tmp_path):
    trainer.args.per_device_train_batch_size, trainer.memory.context_bytes = 1, {2: 1700 * MIB}
    assert fail(trainer, torch.OutOfMemoryError(CUDA)) == 79
    text = (tmp_path / "out-of-memory-rank0.txt").read_text()
    assert "what would help most\n  --context_parallel 2: 1.7 GiB (predicted" in text


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("sharded", [False, True])
def test_fsdp2_is_named_only_where_it_is_not_on(trainer, tmp_path, ranks, sharded):
    """With one GPU, sharding also needs more GPUs, and the advice says so."""
    trainer.is_fsdp_enabled, trainer.args.world_size = sharded, ranks
    trainer.args.per_device_train_batch_size = 1
    assert fail(trainer, torch.OutOfMemoryError(CUDA)) == 79
    text = (tmp_path / "out-of-memory-rank0.txt").read_text()
    assert ("strategy: fsdp2 (a new run)" in text) == (ranks > 1 and not sharded)
    assert ("more GPUs with strategy: fsdp2, a shorter" in text) == (not sharded)
    assert ("more GPUs, a shorter" in text) == sharded


@pytest.mark.parametrize(
    ("error", "whose"),
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "GPU"),
        (OSError(12, "Cannot allocate memory"), "host"),
        (MemoryError(), "host"),
    ],
)
def test_memory_has_many_words(trainer, tmp_path, error, whose, capsys):
    """Errors of GPU or host memory are recognized, also as the cause of another error.

    For host memory in a GPU run the advice names no smaller batch.
    """
    assert fail(trainer, ValueError("half a file"), error) == 79
    assert f"n2: out of memory ({whose}), train, step 7" in capsys.readouterr().err
    text = (tmp_path / "out-of-memory-rank0.txt").read_text()
    assert ("\n  more memory for the job" in text) == (whose == "host")
    assert ("--per_device_train" in text) == (whose == "GPU")
    assert text.rstrip().endswith("ValueError: half a file")


def test_without_a_trainer_or_a_disk_there_are_words_still(trainer, tmp_path, capsys):
    assert run_script(Mock(side_effect=torch.OutOfMemoryError(CUDA))) == 79
    assert f"n2 (GPU): torch.OutOfMemoryError: {CUDA}" in capsys.readouterr().err
    trainer.checkpoints.output_dir = tmp_path / "gone"
    assert fail(trainer, torch.OutOfMemoryError(CUDA)) == 79
    assert "n2: out of memory (GPU), train, step 7" in capsys.readouterr().err


WORKER = "DataLoader worker (pid 7) is killed by signal: Killed. "
HIDDEN = ValueError("another fault")
HIDDEN.__suppress_context__, HIDDEN.__context__ = True, MemoryError()


@pytest.mark.parametrize(
    ("error", "kills", "code"),
    [
        (RuntimeError(WORKER), (3, 3), 76),
        (RuntimeError(WORKER), (3, 4), 79),
        (RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), (0, 0), 76),
        (RuntimeError("DataLoader worker (pid 7) exited unexpectedly with exit code"), (0, 0), 1),
        (RuntimeError("One of the subprocesses has abruptly died during map"), (0, 0), 76),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible "
                      "that dataloader's workers are out of shared memory."), (0, 0), 76),
        (ValueError("document 5, 'CUDA out of memory', has no text"), (0, 1), 1),
        (KeyError(WORKER), (0, 1), 1),
        (HIDDEN, (0, 0), 1),
    ],
)  # fmt: skip
def test_a_killed_process_lacked_memory_only_if_the_kernel_says_so(
    trainer, monkeypatch, capsys, error, kills, code
):
    """Exit codes: 79 out of memory, 76 a killed process (may work next time), 1 any other error.

    Another error that quotes these words does not count as one of these.
    """
    for module in (script, memory):
        monkeypatch.setattr(module, "memory_kills", Mock(side_effect=kills))
    assert fail(trainer, error) == code
    said = capsys.readouterr().err
    assert ("lost process:\n" in said) == (code == 76), said
    assert ("out of memory:\n" in said) == (code == 79), said


def test_a_worker_whose_end_torch_has_not_seen_yet_is_lost(tmp_path, capsys):
    """The worker's sockets close first, so fetching a batch raises one of these errors."""

    def fetch(path: Path) -> None:
        Client(str(path)).recv()

    assert run_script(lambda: fetch(tmp_path / "gone")) == 76
    with Listener(str(tmp_path / "socket")) as listener:
        Thread(target=lambda: listener.accept().close()).start()
        assert run_script(lambda: fetch(tmp_path / "socket")) == 76
    assert "a data worker was lost: EOFError" in capsys.readouterr().err
    assert run_script((tmp_path / "x").read_text) == 1


def test_a_worker_that_ends_while_an_error_is_shown_changes_nothing(monkeypatch):
    def main() -> None:
        signal.signal(signal.SIGCHLD, Mock(side_effect=RuntimeError(WORKER)))
        raise KeyError("the cause")

    def show(_error: Exception) -> int:
        os.kill(os.getpid(), signal.SIGCHLD)
        return 5

    monkeypatch.setattr(script, "_end_failed", show)
    assert run_script(main) == 5
