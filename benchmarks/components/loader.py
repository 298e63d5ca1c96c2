"""Micro-batches of 8 rows of 2,048 tokens from datasets of growing size, on one core."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads.workload import LLAMA_11M, Workload, document_lengths, save_documents

TITLE = (
    "Loader: micro-batches of 8 x 2,048 tokens from packed chats of 300 tokens, one core, by "
    "number of chats"
)
UNIT = "tokens"
SIZES = (5_000, 50_000)
ROW, ROWS = 2048, 8
BATCHES = 20


def saved_chats(documents: int) -> Path:
    """Save chats with a loss mask, as prepare_data.py does, and return where."""
    directory = Path(tempfile.mkdtemp(prefix="stoker-benchmark-"))
    random = np.random.default_rng(0)
    lengths = document_lengths(Workload(LLAMA_11M, ROW, documents, mean_length=300), random)
    tokens = random.integers(2, 32_000, size=int(lengths.sum()), dtype=np.uint16)
    chats = np.split(tokens, np.cumsum(lengths)[:-1])
    save_documents(chats, "sft", directory)
    return directory


def stoker(documents: int) -> tuple[Callable[[], object], int]:
    """Assemble shuffled micro-batches from the mapped files."""
    from utils.data.loader import PackedDataset
    from utils.data.order import SampleOrder
    from utils.data.packing import plan_packing
    from utils.data.token_dataset import open_token_dataset

    tokens = open_token_dataset(saved_chats(documents))
    plan = plan_packing(tokens.lengths, ROW)
    rows = PackedDataset([tokens], [plan])
    order = SampleOrder([plan.sequences], seed=0)
    numbers = order.sequences(np.arange(BATCHES * ROWS)).reshape(BATCHES, ROWS)
    counted = int(rows.tokens_by_source(numbers.reshape(-1)).sum())

    def call() -> None:
        for batch in numbers.tolist():
            rows.__getitems__(batch)

    return call, counted


def trl(documents: int, *, numpy_format: bool = False) -> tuple[Callable[[], object], int]:
    """Take rows of TRL's packed dataset through its collator, as SFTTrainer's loader does."""
    import datasets
    from torch.utils.data import DataLoader
    from trl import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    datasets.disable_caching()
    datasets.disable_progress_bars()
    packed: Any = pack_dataset(datasets.load_from_disk(str(saved_chats(documents))), ROW, "bfd")
    if numpy_format:
        packed = packed.with_format("numpy")
    collator = DataCollatorForLanguageModeling(pad_token_id=1, padding_free=True)
    random = np.random.default_rng(0)
    rows = random.permutation(len(packed))[: BATCHES * ROWS]
    counted = sum(len(row) for row in packed.select(rows)["input_ids"])
    batches = rows.reshape(BATCHES, ROWS).tolist()
    loader = DataLoader(packed, batch_sampler=batches, collate_fn=collator)

    def call() -> None:
        for _ in loader:
            pass

    return call, counted


BASELINES = {
    "Stoker": stoker,
    "datasets and TRL's collator": trl,
    "datasets (numpy) and TRL's collator": partial(trl, numpy_format=True),
}
