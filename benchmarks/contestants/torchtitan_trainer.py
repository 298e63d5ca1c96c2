"""torchtitan's own Trainer (0.3) on one GPU, which compiles the layers and the loss.

Its mixed precision is that of FSDP, which it has on one GPU too: for each step weights in float32
are cast to bf16, and the states between layers, float32 under autocast, are bf16 as well. Tuned:
SDPA, cuDNN's kernel first, in the place of FlexAttention; weights stay cast from the forward to the
backward; nothing is logged. The loss is that of all tokens at once, not of torchtitan's eight
chunks: with those torch 2.11's FSDP frees the last norm's weight before its backward.

The variant `cuda graphs`: forward and backward are replayed as one CUDA graph, as by default.
"""

import torch

from benchmarks.contestants.torchtitan_process import group_of_one, supply_what_is_missing
from benchmarks.recording.job import CannotRunError, Job, Outcome, run_contestant
from benchmarks.recording.steps import StepRecorder

CUDA_GRAPHS = "cuda graphs"


def train(job: Job) -> Outcome:
    """Train on rows in Stoker's order."""
    cuda_graphs = job.variant == CUDA_GRAPHS
    if cuda_graphs and not torch.cuda.is_available():
        raise CannotRunError("CUDA graphs need a GPU")  # torchtitan would do without
    supply_what_is_missing()
    from benchmarks.contestants.torchtitan_training import WatchedTrainer, trainer_config

    recorder = StepRecorder(job)
    with group_of_one():
        trainer = WatchedTrainer(trainer_config(job, cuda_graphs))
        trainer.recorder = recorder
        trainer.load_weights()
        trainer.train()
        trainer.close()
    return recorder.outcome(attention="sdpa", variant=job.variant)


if __name__ == "__main__":
    run_contestant(train)
