"""A GPU that is out of memory according to torch: the page, the last lines, the exit code."""

import os
import signal
from multiprocessing.connection import Client, Listener
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from launching import wait_until
from transformers import Trainer

from utils.callbacks import out_of_memory
from utils.callbacks.out_of_memory import memory_page
from utils.callbacks.progress import Phase, Progress
from utils.launch import script
from utils.launch.script import run_script
from utils.launch.verdict import read_notes

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
    )  # fmt: skip
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    monkeypatch.setenv("STOKER_NOTES_DIR", str(tmp_path))
    return made


def training_step(trainer, inputs, error):
    raise error


def fail(trainer, error):
    def main():
        with memory_page(trainer):
            training_step(trainer, BATCH, error)

    return run_script(main)


def test_the_page_tells_what_took_the_gpu_and_what_would_help(trainer, tmp_path, capsys):
    assert fail(trainer, torch.OutOfMemoryError(CUDA)) == 79
    page = tmp_path / "out-of-memory-rank0.txt"
    head = "n2: out of memory (GPU), train, step 7: cannot allocate 2.00 GiB in tests/unit/"
    best = "--per_device_train_batch_size 1: 1.5 GiB (predicted; now 2.9 GiB)"
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "out of memory (1 problem):"
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


@pytest.mark.parametrize(
    ("phase", "word", "help_first"),
    [
        (Phase.LOAD, "load", "more GPUs"),
        (Phase.FIRST_STEP, "train", "--per_device_train_batch_size 1"),
        (Phase.EVALUATE, "eval", "--per_device_eval_batch_size 4"),
        (Phase.SAVE, "save", "more GPUs"),
        (Phase.FINISH, "save", "more GPUs"),
    ],
)
def test_the_page_tells_phase_step_and_shape(trainer, tmp_path, phase, word, help_first):
    """Forward pass, backward pass and the optimizer's step all count as training."""
    trainer.callbacks.progress.begin(phase, 5)
    assert fail(trainer, torch.OutOfMemoryError(CUDA)) == 79
    text = (tmp_path / "out-of-memory-rank0.txt").read_text()
    assert text.startswith(f"n2: out of memory (GPU), {word}, step 5: cannot allocate")
    assert "4 sequences x 8,192 tokens" in text
    assert f"what would help most\n  {help_first}" in text
    (event,) = trainer.events
    assert (event["phase"], event["step"]) == (word, 5)


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

    def main():
        with memory_page(trainer):
            try:
                training_step(trainer, BATCH, error)
            except Exception as cause:
                raise ValueError("half a file") from cause

    assert run_script(main) == 79
    assert f"n2: out of memory ({whose}), train, step 7" in capsys.readouterr().err
    text = (tmp_path / "out-of-memory-rank0.txt").read_text()
    assert ("\n  more memory for the job" in text) == (whose == "host")
    assert ("--per_device_train" in text) == (whose == "GPU")
    assert text.rstrip().endswith("ValueError: half a file")


def test_without_a_trainer_or_a_disk_there_are_words_still(trainer, tmp_path, capsys):
    def load(error):
        raise error

    assert run_script(lambda: load(torch.OutOfMemoryError(CUDA))) == 79
    assert f"n2 (GPU): torch.OutOfMemoryError: {CUDA}" in capsys.readouterr().err
    trainer.checkpoints.output_dir = tmp_path / "gone"
    assert fail(trainer, torch.OutOfMemoryError(CUDA)) == 79
    assert "n2: out of memory (GPU), train, step 7" in capsys.readouterr().err
    assert run_script(lambda: load(RuntimeError("not of memory"))) == 1


WORKER = "DataLoader worker (pid 7) is killed by signal: Killed. "


@pytest.mark.parametrize(
    ("error", "kills", "code"),
    [
        (RuntimeError(WORKER), (0, 0), 76),
        (RuntimeError(WORKER), (3, 3), 76),
        (RuntimeError(WORKER), (3, 4), 79),
        (RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), (0, 0), 76),
        (RuntimeError("DataLoader worker (pid 7) exited unexpectedly with exit code"), (0, 0), 1),
        (RuntimeError("One of the subprocesses has abruptly died during map"), (0, 0), 76),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible "
                      "that dataloader's workers are out of shared memory."), (0, 0), 76),
        (ValueError("document 5, 'CUDA out of memory', has no text"), (0, 1), 1),
        (KeyError(WORKER), (0, 1), 1),
    ],
)  # fmt: skip
def test_a_killed_process_lacked_memory_only_if_the_kernel_says_so(
    trainer, monkeypatch, capsys, error, kills, code
):
    """Exit codes: 79 out of memory, 76 a killed process (may work next time), 1 any other error.

    Another error that quotes these words does not count as one of these.
    """
    for module in (script, out_of_memory):
        monkeypatch.setattr(module, "memory_kills", Mock(side_effect=kills))
    assert fail(trainer, error) == code
    said = capsys.readouterr().err
    assert ("lost process (1 problem)" in said) == (code == 76), said
    assert ("out of memory (1 problem)" in said) == (code == 79), said


def answer(path: str) -> None:
    """Answer at the other end of the pipe, then close it."""
    with Listener(path) as listener:
        listener.accept().close()


def test_a_worker_whose_end_torch_has_not_seen_yet_is_lost(tmp_path, capsys):
    """The worker's sockets close first, so fetching a batch raises one of these errors."""

    def main(path: Path) -> None:
        Client(str(path)).recv()

    assert run_script(lambda: main(tmp_path / "gone")) == 76
    Thread(target=answer, args=(str(tmp_path / "socket"),)).start()
    wait_until((tmp_path / "socket").exists, "nobody listens")
    assert run_script(lambda: main(tmp_path / "socket")) == 76
    assert "a data worker was lost: EOFError" in capsys.readouterr().err
    assert run_script((tmp_path / "x").read_text) == 1


def test_a_worker_that_ends_while_an_error_is_shown_changes_nothing(monkeypatch):
    def main() -> None:
        signal.signal(signal.SIGCHLD, handler)
        raise KeyError("the cause")

    def handler(*_: object) -> None:
        raise RuntimeError(WORKER)

    def show(_error: Exception) -> int:
        os.kill(os.getpid(), signal.SIGCHLD)
        return 5

    monkeypatch.setattr(script, "_fail", show)
    assert run_script(main) == 5


def test_what_is_raised_from_nothing_is_not_out_of_memory(trainer):
    def main():
        with memory_page(trainer):
            try:
                training_step(trainer, BATCH, MemoryError())
            except MemoryError:
                raise ValueError("another fault") from None

    assert run_script(main) == 1
