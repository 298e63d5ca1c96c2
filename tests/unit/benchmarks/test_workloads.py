"""The documents that baselines train on."""

import dataclasses

import numpy as np

from benchmarks.workloads.workload import (
    FIRST_WORD,
    LLAMA_11M,
    PAD_TOKEN_ID,
    SEED,
    Workload,
    document_lengths,
    make_documents,
    sample_order,
    save_documents,
)

ROWS = Workload(LLAMA_11M, sequence_length=16, documents=12)
CHATS = dataclasses.replace(ROWS, sequence_length=512, documents=3000, mean_length=100)


def test_documents_of_pretraining_fill_rows():
    documents = make_documents(ROWS)
    assert {len(document) for document in documents} == {16}
    tokens = np.concatenate(documents)
    assert tokens.min() >= FIRST_WORD > PAD_TOKEN_ID
    assert tokens.max() < LLAMA_11M["vocab_size"]


def test_chats_have_the_mean_length_that_was_asked_for():
    lengths = document_lengths(CHATS, np.random.default_rng(SEED))
    assert 90 < lengths.mean() < 110
    assert lengths.max() <= 512


def test_the_order_is_that_of_the_loader(tmp_path):
    """What the peers are given are the rows that Stoker trains on, in its order."""
    from utils.data.loader import PackedDataset
    from utils.data.order import GlobalBatchSampler, SampleOrder
    from utils.data.packing import plan_packing
    from utils.data.token_dataset import open_token_dataset

    documents = make_documents(ROWS)
    save_documents(documents, "pretrain", tmp_path / "documents")
    dataset = open_token_dataset(tmp_path / "documents")
    plan = plan_packing(dataset.lengths, 16)
    rows = PackedDataset([dataset], [plan])
    sampler = GlobalBatchSampler(SampleOrder([plan.sequences], SEED), 4, 4, 0, 1, total_steps=3)
    order = sample_order(ROWS)
    assert sorted(order) == list(range(12))
    for step, numbers in enumerate(sampler):
        expected = np.stack([documents[row] for row in order[4 * step : 4 * step + 4]])
        np.testing.assert_array_equal(rows.__getitems__(numbers)["input_ids"], expected)
