"""torchtitan's Trainer with the workload's rows and weights, and a watch on its steps."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import load_from_disk
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer

from benchmarks.contestants.torchtitan_model import model_spec
from benchmarks.recording.job import Job
from benchmarks.recording.steps import StepRecorder
from benchmarks.workloads.workload import SEED

NEVER = 10**9  # steps


class Rows(BaseDataLoader):
    """The workload's rows in Stoker's order; the last target of a row bears no loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """`dataset_path` is the workload's directory."""

    def __init__(self, config: Any, *, local_batch_size: int, **_: Any):
        workload = Path(config.dataset_path)
        documents = load_from_disk(str(workload / "documents")).with_format("numpy")
        rows = np.stack(documents[np.load(workload / "order.npy")]["input_ids"])
        tokens = torch.from_numpy(rows).long()
        labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORE_INDEX)
        self.batches = [
            ({"input": inputs}, targets)
            for inputs, targets in zip(
                tokens.split(local_batch_size), labels.split(local_batch_size), strict=True
            )
        ]

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield tokens and labels, both int64 (batch, sequence)."""
        for inputs, labels in self.batches:
            yield dict(inputs), labels  # the Trainer puts tensors of the device into it

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: no run here goes on from another."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing."""


class WatchedTrainer(Trainer):
    """torchtitan's Trainer, which tells a recorder of its batches, losses and steps."""

    recorder: StepRecorder

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """The Trainer's own."""

    def forward_backward_step(self, *, input_dict: Any, **given: Any) -> torch.Tensor:
        """Do the Trainer's."""
        self.recorder.saw_batch(input_dict["input"])
        loss = super().forward_backward_step(input_dict=input_dict, **given)
        self.recorder.saw_loss(loss.clone())  # a CUDA graph writes the next one over it
        return loss

    def train_step(self, data_iterator: Any) -> None:
        """Do the Trainer's, which ends with the optimizer's."""
        super().train_step(data_iterator)
        self.recorder.ended_step()

    def load_weights(self) -> None:
        """Load the initial weights, then save nothing and let go of what saves would need."""
        self.checkpointer.load()
        self.checkpointer.enable = False
        self.checkpointer.states.clear()


def trainer_config(job: Job, cuda_graphs: bool) -> WatchedTrainer.Config:
    """Return what the Trainer is told of the job."""
    assert job.kind == "pretrain"
    weights = job.files / "weights"
    config = json.loads((weights / "config.json").read_text())
    return WatchedTrainer.Config(
        model_spec=model_spec(config, job.sequence_length),
        hf_assets_path=str(job.files / "tokenizer"),
        dump_folder=job.scratch,
        loss=CrossEntropyLoss.Config(global_vocab_size=config["vocab_size"]),
        optimizer=default_adamw(job.learning_rate, betas=(0.9, 0.999), weight_decay=0.0),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=job.micro_batch_size,
            seq_len=job.sequence_length,
            steps=job.all_steps,
            max_norm=1.0,
            mixed_precision_param="bfloat16" if job.numbers.mixed else "float32",
            disable_cuda_graphs=not cuda_graphs,
        ),
        parallelism=ParallelismConfig(fsdp_reshard_after_forward="never"),
        activation_checkpoint=None,
        compile=CompileConfig(enable=True),  # layers one by one, and the loss
        dataloader=Rows.Config(dataset_path=str(job.files)),
        checkpoint=CheckpointManager.Config(
            enable=True,
            initial_load_path=str(weights.resolve()),
            initial_load_in_hf=True,
            load_only=True,
            keep_latest_k=0,
        ),
        metrics=MetricsProcessor.Config(log_freq=NEVER),  # each would wait for the device
        debug=DebugConfig(seed=SEED),
    )
