"""Peers get the sequences that Stoker trains on, in its order."""

import numpy as np

from benchmarks.workloads.workload import (
    LLAMA_11M,
    SEED,
    Workload,
    make_documents,
    sample_order,
    save_documents,
)

WORKLOAD = Workload(LLAMA_11M, sequence_length=16, documents=12)


def test_the_order_is_that_of_the_loader(tmp_path):
    """What the peers are given are the rows that Stoker trains on, in its order."""
    from utils.data.loader import PackedDataset
    from utils.data.order import GlobalBatchSampler, SampleOrder
    from utils.data.packing import plan_packing
    from utils.data.token_dataset import open_token_dataset

    documents = make_documents(WORKLOAD)
    save_documents(documents, "pretrain", tmp_path / "documents")
    dataset = open_token_dataset(tmp_path / "documents")
    plan = plan_packing(dataset.lengths, 16)
    rows = PackedDataset([dataset], [plan])
    sampler = GlobalBatchSampler(SampleOrder([plan.sequences], SEED), 4, 4, 0, 1, total_steps=3)
    order = sample_order(WORKLOAD)
    assert sorted(order) == list(range(12))
    for step, numbers in enumerate(sampler):
        expected = np.stack([documents[row] for row in order[4 * step : 4 * step + 4]])
        np.testing.assert_array_equal(rows.__getitems__(numbers)["input_ids"], expected)
