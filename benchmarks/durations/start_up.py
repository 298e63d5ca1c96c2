"""From the start of a process to its first optimizer step, with datasets of growing size."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.comparisons.turns import run_process
from benchmarks.recording.job import Job, Outcome
from benchmarks.workloads.workload import LLAMA_11M, Workload, document_lengths, make_workload

TITLE = "Time to the first optimizer step of a model with 11 M parameters, by number of documents"
SIZES = (10_000, 1_000_000)
ROW, ROWS = 64, 8
VOCABULARY = 32_000
CACHE = "XDG_CACHE_HOME"
WORKLOAD = Workload(LLAMA_11M | {"vocab_size": VOCABULARY}, ROW, documents=4)


def prepare(directory: Path, sizes: Sequence[int]) -> None:
    """Write a model, a tokenizer, and a dataset a size, described as prepare_data.py does."""
    from utils.data.token_dataset import describe_split

    make_workload(WORKLOAD, directory)
    for size in sizes:
        save_short_documents(size, directory / str(size) / "documents")
        describe_split(directory / str(size) / "documents")
        for name in ("tokenizer", "weights"):
            (directory / str(size) / name).symlink_to(directory / name)


def save_short_documents(documents: int, directory: Path) -> None:
    """Save documents of 40 tokens on average, at most a row."""
    import datasets
    import pyarrow as pa

    random = np.random.default_rng(0)
    lengths = document_lengths(Workload(LLAMA_11M, ROW, documents, mean_length=40), random)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = random.integers(2, VOCABULARY, size=int(offsets[-1]), dtype=np.uint16)
    rows = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))
    datasets.disable_progress_bars()
    datasets.Dataset(pa.table({"input_ids": rows})).save_to_disk(directory)


def first_step(module: str, kind: str, workload: Path, scratch: Path, cache: Path) -> float:
    """Run a baseline for one step and return the seconds from its start to that step's end."""
    scratch.mkdir(parents=True)
    job = Job(str(workload), str(scratch), kind, "fp32", ROW, ROWS, 1, 1, tuned=False)
    job_file, outcome_file = scratch / "job.json", scratch / "outcome.json"
    job_file.write_text(json.dumps(asdict(job)))
    arguments = [str(job_file), str(outcome_file)]
    run_process(f"benchmarks.baselines.{module}", arguments, scratch, {CACHE: str(cache)})
    return Outcome(**json.loads(outcome_file.read_text())).first_step_s


def stoker(sizes: Sequence[int], prepared: Path, scratch: Path) -> dict[int, float]:
    """Start for the first time on each dataset."""
    return {
        size: first_step(
            "stoker", "pretrain", prepared / str(size), scratch / str(size), scratch / "cache"
        )
        for size in sizes
    }


def stoker_unknown(sizes: Sequence[int], prepared: Path, scratch: Path) -> dict[int, float]:
    """Start on the largest dataset as another program left it: its tokens are read once."""
    largest = prepared / str(sizes[-1])
    unknown = scratch / "unknown"
    (unknown / "documents").mkdir(parents=True)
    for name in ("tokenizer", "weights"):
        (unknown / name).symlink_to(largest / name)
    for file in (largest / "documents").iterdir():
        if file.name != "stoker.json":
            (unknown / "documents" / file.name).symlink_to(file)
    run = first_step("stoker", "pretrain", unknown, scratch / "run", scratch / "cache")
    return {sizes[-1]: run}


def stoker_command(
    sizes: Sequence[int], prepared: Path, scratch: Path, *, flag: str
) -> dict[int, float]:
    """Run pretrain.py to its end with a flag that ends it early."""
    data = prepared / str(sizes[0])
    settings = {
        "output_dir": scratch / "run",
        "model_name_or_path": data / "weights",
        "tokenizer_name_or_path": data / "tokenizer",
        "train_data": data / "documents",
        "sequence_length": ROW,
        "global_batch_size": ROWS,
        "max_steps": 1,
    }
    begin = time.perf_counter()
    run_process(
        "pretrain",
        [*(word for name, value in settings.items() for word in (f"--{name}", str(value))), flag],
        scratch,
        {CACHE: str(scratch / "cache")},
    )
    return {sizes[0]: time.perf_counter() - begin}


def trainer(sizes: Sequence[int], prepared: Path, scratch: Path) -> dict[int, float]:
    """Start Trainer on each dataset, in an order of its own."""
    return {
        size: first_step(
            "hf_trainer", "sft", prepared / str(size), scratch / str(size), scratch / "cache"
        )
        for size in sizes
    }


Baseline = Callable[[Sequence[int], Path, Path], dict[int, float]]
BASELINES: dict[str, Baseline] = {
    "Stoker": stoker,
    "Stoker, data of unknown origin": stoker_unknown,
    "Stoker --dry_run": partial(stoker_command, flag="--dry_run=true"),
    "Stoker --help": partial(stoker_command, flag="--help"),
    "Trainer": trainer,
}
