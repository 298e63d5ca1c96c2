"""litgpt's own pretraining, `litgpt.pretrain.setup`, which compiles the whole model.

Tuned: AdamW as one kernel on a CPU too, where litgpt takes torch's default, and float32 products
there by the faster library.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import load_from_disk
from litgpt import Config, pretrain
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from benchmarks.baselines.settings import use_fastest_products
from benchmarks.recording.job import Job, Outcome, run_baseline
from benchmarks.recording.steps import StepRecorder
from benchmarks.workloads.workload import SEED

NO_TARGET = -100


class FusedAdamW(torch.optim.AdamW):
    """torch's AdamW with `fused`, which litgpt sets to False on a CPU where it is an argument."""

    def __init__(self, params: Any, lr: float, weight_decay: float):
        super().__init__(params, lr=lr, weight_decay=weight_decay, fused=True)


class Rows(DataModule):
    """The workload's rows in Stoker's order, with a last target that bears no loss.

    litgpt takes T + 1 tokens as T inputs and T targets: so its inputs and losses are the others'.
    """

    def __init__(self, job: Job):
        super().__init__()
        documents = load_from_disk(str(job.files / "documents")).with_format("numpy")
        rows = np.stack(documents[np.load(job.files / "order.npy")]["input_ids"])
        ended = np.pad(rows, ((0, 0), (0, 1)), constant_values=NO_TARGET)
        self.rows, self.rows_per_batch = torch.from_numpy(ended), job.micro_batch_size

    def connect(self, *args: Any, **kwargs: Any) -> None:
        """Ignore litgpt's arguments: the rows are already tokenized and cut."""

    def train_dataloader(self) -> DataLoader:
        """Return the rows in order."""
        return DataLoader(self.rows, self.rows_per_batch)  # type: ignore[arg-type] # has a length

    val_dataloader = train_dataloader


def train(job: Job) -> Outcome:
    """Train on rows in Stoker's order."""
    scratch = Path(job.scratch)
    config = litgpt_config(json.loads((job.files / "weights" / "config.json").read_text()))
    save_weights(job.files / "weights", config, scratch / "initial")
    recorder = StepRecorder(job)
    watch_litgpt(recorder)
    if job.tuned:
        use_fastest_products()
    optimizer = f"{__name__}.FusedAdamW" if job.tuned else "torch.optim.AdamW"
    settings = {"lr": job.learning_rate, "weight_decay": 0.0}
    # litgpt records the command line that it was called by with its last checkpoint.
    sys.argv[1:] = ["pretrain", config.name]
    pretrain.setup(
        model_name=config.name,
        model_config=config,
        out_dir=scratch / "out",
        precision="bf16-mixed" if job.numbers.mixed else "32-true",
        initial_checkpoint_dir=scratch / "initial",
        data=Rows(job),
        train=TrainArgs(
            save_interval=None,
            global_batch_size=job.micro_batch_size,
            micro_batch_size=job.micro_batch_size,
            lr_warmup_steps=None,
            min_lr=job.learning_rate,  # where its schedule ends: constant
            max_tokens=job.all_steps * job.micro_batch_size * job.sequence_length,
            max_seq_length=job.sequence_length,
            max_norm=1.0,
            tie_embeddings=True,
        ),
        eval=EvalArgs(final_validation=False),
        optimizer={"class_path": optimizer, "init_args": settings},
        devices=1,
        logger_name="csv",
        seed=SEED,
    )
    return recorder.outcome(attention="sdpa")


def litgpt_config(config: dict[str, Any]) -> Config:
    """Return litgpt's configuration of a Llama of transformers with tied embeddings."""
    assert config["tie_word_embeddings"]
    return Config(
        name="benchmark",
        block_size=config["max_position_embeddings"],
        n_layer=config["num_hidden_layers"],
        n_embd=config["hidden_size"],
        vocab_size=config["vocab_size"],
        padded_vocab_size=config["vocab_size"],
        n_head=config["num_attention_heads"],
        n_query_groups=config["num_key_value_heads"],
        norm_class_name="RMSNorm",
        norm_eps=config["rms_norm_eps"],
        rope_base=int(config["rope_parameters"]["rope_theta"]),
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        mlp_class_name="LLaMAMLP",
        intermediate_size=config["intermediate_size"],
    )


def save_weights(weights: Path, config: Config, directory: Path) -> None:
    """Convert transformers' weights as litgpt's own converter does."""
    converted: dict[str, torch.Tensor] = {}
    copy_weights_hf_llama(config, {}, converted, load_file(weights / "model.safetensors"))
    directory.mkdir()
    torch.save(converted, directory / "lit_model.pth")


def watch_litgpt(recorder: StepRecorder) -> None:
    """Let litgpt's loop tell the recorder of each training step; its sanity check is left out."""
    cross_entropy = pretrain.chunked_cross_entropy

    def watched(logits: torch.Tensor, targets: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        loss = cross_entropy(logits, targets, **kwargs)
        if torch.is_grad_enabled() and logits.device.type != "meta":
            recorder.saw_batch(targets)  # as many as there are inputs
            recorder.saw_loss(loss)
        return loss

    pretrain.chunked_cross_entropy = watched
    register_optimizer_step_post_hook(lambda *_: recorder.ended_step())


if __name__ == "__main__":
    run_baseline(train)
