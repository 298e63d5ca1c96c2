"""The cells for a GPU at their real sizes, as far as arithmetic goes."""

import numpy as np
import pytest
from transformers import AutoConfig

from benchmarks.cells.gpu import GPU_CELLS
from benchmarks.cells.kinds import OURS, ComponentCell, ProbeCell, SweepCell, TrainingCell
from benchmarks.contestants.hf_trainer import CHATS_PER_BATCH
from benchmarks.contests.sweep import grown
from benchmarks.contests.training import job_of
from benchmarks.hardware.efficiency import Device, reason_not_to_fit
from benchmarks.recording.job import Job
from benchmarks.workloads.workload import SEED, document_lengths, make_documents

TRAINED = [cell for cell in GPU_CELLS if isinstance(cell, TrainingCell)]
SWEPT = [
    grown(cell, size) for cell in GPU_CELLS if isinstance(cell, SweepCell) for size in cell.sizes
]
H200 = Device("NVIDIA H200", memory_bytes=143_771 * 2**20)


def job(cell: TrainingCell, tmp_path) -> Job:
    return job_of(cell, cell.contestants[0], tmp_path, tmp_path)


def test_the_group_has_what_was_promised():
    assert isinstance(GPU_CELLS[0], ProbeCell)
    assert [cell.name for cell in GPU_CELLS] == [
        "probes", "gpt2_124m", "qwen3_600m_pretrain", "qwen3_600m_sft", "llama_1b_pretrain",
        "llama_8b_sft", "llama_8b_lora", "gpu_loss_head", "gpu_packed_attention",
        "gpu_row_attention", "gpu_optimizer", "longest_sequence", "largest_model",
    ]  # fmt: skip
    assert sum(isinstance(cell, ComponentCell) for cell in GPU_CELLS) == 4


@pytest.mark.parametrize("cell", [*TRAINED, *SWEPT], ids=lambda cell: cell.name)
def test_models_have_positions_for_their_rows(cell):
    config = AutoConfig.for_model(**cell.workload.model)
    assert cell.workload.sequence_length <= config.max_position_embeddings
    assert cell.contestants[0].name == OURS
    assert 0 < cell.warmup_steps < cell.steps


@pytest.mark.parametrize("cell", TRAINED, ids=lambda cell: cell.name)
def test_there_are_documents_for_all_steps(cell, tmp_path):
    lengths = document_lengths(cell.workload, np.random.default_rng(SEED))
    steps = job(cell, tmp_path).all_steps
    assert len(lengths) >= steps * cell.micro_batch_size
    assert lengths.sum() >= steps * cell.micro_batch_size * cell.workload.sequence_length
    if cell.workload.kind == "sft":
        assert len(lengths) >= steps * CHATS_PER_BATCH
        assert 500 < lengths.mean() < 700


@pytest.mark.parametrize("cell", TRAINED, ids=lambda cell: cell.name)
def test_cells_fit_an_h200_by_their_states(cell):
    assert reason_not_to_fit(cell, H200) is None


def test_the_largest_size_of_a_sweep_does_not():
    assert "GiB" in str(reason_not_to_fit(SWEPT[-1], H200))


def test_documents_are_made_at_once(tmp_path):
    cell = next(cell for cell in TRAINED if cell.name == "qwen3_600m_sft")
    documents = make_documents(cell.workload)
    assert max(document.max() for document in documents) < cell.workload.model["vocab_size"]
