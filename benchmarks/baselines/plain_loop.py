"""A plain training loop in the manner of nanoGPT: the reference.

No Trainer, no callbacks, rows from one array. Tuned: layers compiled one by one; on a Hopper GPU
cuDNN's attention; on a CPU float32 products by the faster library.
"""

import contextlib

import numpy as np
import torch
from datasets import load_from_disk
from torch import nn

from benchmarks.baselines.plain_models import layers_of, load_plain_model
from benchmarks.baselines.settings import fastest_sdpa, use_fastest_products
from benchmarks.recording.job import Job, Outcome, run_baseline
from benchmarks.recording.steps import StepRecorder


def train(job: Job) -> Outcome:
    """Train on rows in Stoker's order."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_plain_model(job.files / "weights", job.sequence_length, device)
    if job.tuned:
        use_fastest_products()
        for layer in layers_of(model):
            layer.compile(dynamic=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=job.learning_rate, fused=True, weight_decay=0.0
    )
    documents = load_from_disk(str(job.files / "documents")).with_format("numpy")
    order = np.load(job.files / "order.npy")
    mixed: contextlib.AbstractContextManager = (
        torch.autocast(device, torch.bfloat16) if job.numbers.mixed else contextlib.nullcontext()
    )
    recorder = StepRecorder(job)
    for step in range(job.all_steps):
        rows = order[step * job.micro_batch_size :][: job.micro_batch_size]
        tokens = torch.from_numpy(np.stack(documents[rows]["input_ids"])).to(device).long()
        recorder.saw_batch(tokens)
        with mixed, fastest_sdpa(job):
            loss = model(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recorder.saw_loss(loss)
        recorder.ended_step()
    return recorder.outcome(attention="sdpa")


if __name__ == "__main__":
    run_baseline(train)
