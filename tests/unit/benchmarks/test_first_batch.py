"""The documents of a first batch are found in each toolkit's layout."""

import datasets
import numpy as np
import pytest
import torch

from benchmarks.recording.first_batch import document_numbers, pieces
from benchmarks.workloads.workload import PAD_TOKEN_ID as PAD

DOCUMENTS = [[5, 6, 7], [8, 9], [5, 6, 7, 8]]


def in_each_layout() -> dict[str, dict[str, torch.Tensor]]:
    """Documents 2, 0 and 1 as padded rows, in one row as TRL packs, in rows as Stoker packs."""
    padded = torch.tensor([[5, 6, 7, 8], [5, 6, 7, PAD], [8, 9, PAD, PAD]])
    packed = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 9]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])
    rows = torch.tensor([[5, 6, 7, 8, PAD], [5, 6, 7, 8, 9]], dtype=torch.int32)
    begins = torch.tensor([0, 4, 5, 8, 10], dtype=torch.int32)
    return {
        "padded": {"input_ids": padded, "attention_mask": padded.ne(PAD)},
        "TRL": {"input_ids": packed, "position_ids": positions},
        "Stoker": {"input_ids": rows, "cu_seq_lens": begins},
    }


@pytest.fixture
def saved(tmp_path):
    datasets.Dataset.from_dict({"input_ids": DOCUMENTS}).save_to_disk(tmp_path)
    return tmp_path


@pytest.mark.parametrize("layout", in_each_layout())
def test_documents_are_found(layout, saved):
    assert document_numbers(pieces(in_each_layout()[layout]), saved) == [2, 0, 1]


def test_a_document_that_was_cut_is_an_error(saved):
    with pytest.raises(ValueError, match="none of the workload's"):
        document_numbers([np.array([5, 6], dtype=np.int32)], saved)
