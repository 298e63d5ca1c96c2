"""Packing documents into rows: which document goes where."""

import tempfile
from collections.abc import Callable
from functools import partial

import numpy as np

TITLE = (
    "Packing documents of log-normal lengths (mean 600 tokens) into sequences of 4,096 tokens, by "
    "number of documents"
)
UNIT = "documents"
SIZES = (100_000, 1_000_000, 10_000_000)
LARGEST_FOR_TRL = 100_000  # it copies every token; growth is shown by ours alone
ROW = 4096
MEAN, SIGMA = 600, 0.8


def lengths(documents: int) -> np.ndarray:
    """Return the tokens of each document."""
    random = np.random.default_rng(0)
    drawn = random.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, size=documents)
    return np.clip(drawn, 8, ROW).astype(np.int64)


def stoker(documents: int) -> tuple[Callable[[], object], int]:
    """Plan rows; tokens stay where they are until a batch is made."""
    from utils.data.packing import plan_packing

    return partial(plan_packing, lengths(documents), ROW), documents


def trl(documents: int) -> tuple[Callable[[], object], int] | None:
    """Pack a dataset of tokens (best-fit decreasing), with its cache off."""
    import datasets
    import pyarrow as pa
    from trl import pack_dataset

    if documents > LARGEST_FOR_TRL:
        return None
    datasets.disable_caching()
    datasets.disable_progress_bars()
    offsets = np.concatenate([[0], np.cumsum(lengths(documents))]).astype(np.int32)
    tokens = pa.array(np.arange(int(offsets[-1]), dtype=np.int32) % 1000)
    rows = pa.ListArray.from_arrays(pa.array(offsets), tokens)
    # On disk, as a prepared dataset is.
    directory = tempfile.mkdtemp(prefix="stoker-benchmark-")
    datasets.Dataset(pa.table({"input_ids": rows})).save_to_disk(directory)
    dataset = datasets.load_from_disk(directory)
    return partial(pack_dataset, dataset, ROW, "bfd"), documents


BASELINES = {"Stoker": stoker, "TRL pack_dataset, bfd": trl}
