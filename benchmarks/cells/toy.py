"""Cells cut down to toys: the same code at sizes that a CPU does in seconds; measures nothing."""

from dataclasses import replace

from benchmarks.cells.kinds import Cell, ComponentCell, ProbeCell, TrainingCell
from benchmarks.cells.shapes import ModelShape
from benchmarks.workloads.workload import Workload

LENGTH = 64
STEPS, WARMUP_STEPS, MICRO_BATCH_SIZE = 3, 1, 2
LLAMA_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
}
GPT2_SIZES = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256}


def toy(cell: Cell) -> Cell:
    """Return the cell with a toy's model, lengths and steps; all else stays."""
    if isinstance(cell, TrainingCell):
        return _toy_training(cell)
    if isinstance(cell, ComponentCell):
        return replace(cell, sizes=(LENGTH, 2 * LENGTH))
    assert isinstance(cell, ProbeCell)
    return replace(cell, toy=True)


def toy_shape(model: ModelShape) -> ModelShape:
    """Return a model of the same architecture, a few thousand parameters."""
    return model | (GPT2_SIZES if model["model_type"] == "gpt2" else LLAMA_SIZES)


def _toy_training(cell: TrainingCell) -> TrainingCell:
    workload: Workload = replace(
        cell.workload,
        model=toy_shape(cell.workload.model),
        sequence_length=LENGTH,
        # Enough for padded batches of eight.
        documents=8 * (STEPS + 1),
        mean_length=cell.workload.mean_length and 20,
    )
    return replace(
        cell,
        title=f"Toy: {cell.title}",
        workload=workload,
        micro_batch_size=MICRO_BATCH_SIZE,
        steps=STEPS,
        warmup_steps=WARMUP_STEPS,
        learning_rate=1e-4,
    )
