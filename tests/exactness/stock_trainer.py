"""Plain transformers.Trainer, cut and resumed by its own means, to hold our figures against."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

METRICS = ("loss", "grad_norm")


def rows(workspace: Path) -> datasets.Dataset:
    """The workspace's documents, one after the other, in rows of the runs' sequence length."""
    documents = datasets.load_from_disk(str(workspace / "documents"))["input_ids"]
    tokens = [token for document in documents for token in document]
    length = int(str(tiny.RUN["sequence_length"]))
    whole = [tokens[at : at + length] for at in range(0, len(tokens) - length + 1, length)]
    return datasets.Dataset.from_dict({"input_ids": whole, "labels": whole}).with_format("torch")


def make_trainer(
    workspace: Path, directory: Path, dropout: float = 0.0, **settings: Any
) -> Trainer:
    """A trainer of the workspace's model and rows that logs and saves at every step."""
    torch.manual_seed(42)
    config = AutoConfig.from_pretrained(workspace / f"dropout_{dropout}")
    args = TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=2,
        learning_rate=tiny.RUN["learning_rate"],
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    model = AutoModelForCausalLM.from_config(config)
    return Trainer(model=model, args=args, train_dataset=rows(workspace))


def differences(
    workspace: Path,
    root: Path,
    cuts: Iterable[int],
    steps: int,
    dropout: float,
    accumulation: int,
    workers: int,
) -> list[dict[str, float]]:
    """The largest |difference| of each metric over the steps after each cut."""
    settings = {
        "max_steps": steps,
        "gradient_accumulation_steps": accumulation,
        "dataloader_num_workers": workers,
    }

    def train(directory: Path, checkpoint: Path | None = None) -> dict[int, dict[str, Any]]:
        trainer = make_trainer(workspace, directory, dropout, **settings)
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        return {line["step"]: line for line in trainer.state.log_history if "loss" in line}

    whole = train(root / "whole")
    found = []
    for step in cuts:
        run = root / f"cut-{step}"
        shutil.copytree(root / "whole" / f"checkpoint-{step}", run / f"checkpoint-{step}")
        resumed = train(run, run / f"checkpoint-{step}")
        found.append(
            {
                metric: max(abs(resumed[k][metric] - whole[k][metric]) for k in whole if k > step)
                for metric in METRICS
            }
        )
        shutil.rmtree(run)
    return found
