"""A pretraining run that writes the documents of each micro-batch: DIRECTORY ARGUMENTS."""

import json
import os
import sys
from pathlib import Path

import pretrain
from utils.data.loader import TrainLoader
from utils.launch.script import run_script


def documents_in(batch) -> list:
    """Return [token ids, which are trained on] of each document in a micro-batch."""
    ids, mask = batch["input_ids"].flatten(), batch["loss_mask"].flatten()
    parts = [
        [ids[start:stop].tolist(), mask[start:stop].tolist()]
        for start, stop in zip(batch["cu_seq_lens"], batch["cu_seq_lens"][1:], strict=False)
    ]
    return [part for part in parts if any(part[1])]  # padding has no loss


def iterate_recorded(real, file: Path):
    """Return TrainLoader's `__iter__` that appends a line per micro-batch to a file."""

    def recorded(self):
        for batch in real(self):
            with file.open("a") as lines:
                lines.write(json.dumps(documents_in(batch)) + "\n")
            yield batch

    return recorded


def read_step(folder: Path, step: int, accumulation: int) -> list:
    """Return the sorted documents of step 1, 2, ... of all ranks."""
    found = []
    for file in folder.glob("rank-*.jsonl"):
        lines = file.read_text().splitlines()[(step - 1) * accumulation : step * accumulation]
        assert len(lines) == accumulation
        found += [document for line in lines for document in json.loads(line)]
    return sorted(found)


if __name__ == "__main__":
    file = Path(sys.argv[1]) / f"rank-{os.environ['RANK']}.jsonl"
    TrainLoader.__iter__ = iterate_recorded(TrainLoader.__iter__, file)
    sys.exit(run_script(lambda: pretrain.main(sys.argv[2:])))
