"""The expected first loss of a fine-tuning run: plain transformers' loss on the same documents.

`python -m benchmarks.workloads.first_loss asked.json answered.json`: asked are a workload's
directory, a precision and, by baseline, documents; answered is a loss for each.
"""

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.recording.precision import PRECISIONS


@torch.no_grad()
def first_loss(model: Any, documents: Any, numbers: Sequence[int], autocast: bool) -> float:
    """Return the mean loss of all loss tokens, in nats; each document stands alone.

    documents: input_ids and completion_mask by number. autocast: mixed precision bf16.
    """
    device = model.device
    mixed = torch.autocast(device.type, torch.bfloat16) if autocast else contextlib.nullcontext()
    losses, count = 0.0, 0
    for number in numbers:
        document = documents[number]
        tokens = torch.as_tensor(document["input_ids"], dtype=torch.int64, device=device)
        loss_mask = torch.as_tensor(document["completion_mask"], device=device)[1:] != 0
        with mixed:
            logits = model(input_ids=tokens[None]).logits[0, :-1]
        targets = tokens[1:][loss_mask]
        losses += float(
            torch.nn.functional.cross_entropy(logits[loss_mask].float(), targets, reduction="sum")
        )
        count += len(targets)
    return losses / count


def first_losses(
    workload: Path, precision: str, documents: Mapping[str, Sequence[int]]
) -> dict[str, float]:
    """Return the first loss by baseline; `documents` are those of its first batch."""
    from datasets import load_from_disk
    from transformers import AutoModelForCausalLM

    numbers = PRECISIONS[precision]
    model: Any = AutoModelForCausalLM.from_pretrained(workload / "weights", dtype=numbers.weights)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    saved = load_from_disk(str(workload / "documents")).with_format("numpy")
    return {
        name: first_loss(model, saved, its_documents, autocast=numbers.mixed)
        for name, its_documents in documents.items()
    }


def main(asked_file: str, answered_file: str) -> None:
    """Answer what a file asks."""
    asked = json.loads(Path(asked_file).read_text())
    answered = first_losses(Path(asked["workload"]), asked["precision"], asked["documents"])
    Path(answered_file).write_text(json.dumps(answered))


if __name__ == "__main__":
    main(*sys.argv[1:])
