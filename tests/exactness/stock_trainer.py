"""Plain transformers.Trainer with its own resume, as the baseline of our figures."""

from pathlib import Path
from typing import Any

import datasets
import tiny
import torch
from peft import LoraConfig, get_peft_model
from resumed_runs import digest
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

METRICS = ("loss", "grad_norm")
LENGTH = int(str(tiny.RUN["sequence_length"]))


def rows(workspace: Path) -> datasets.Dataset:
    """Return the workspace's documents, concatenated and cut to the runs' sequence length."""
    documents = datasets.load_from_disk(str(workspace / "documents"))["input_ids"]
    tokens = [token for document in documents for token in document]
    whole = [tokens[at : at + LENGTH] for at in range(0, len(tokens) - LENGTH + 1, LENGTH)]
    return datasets.Dataset.from_dict({"input_ids": whole, "labels": whole}).with_format("torch")


def masked_rows(workspace: Path) -> datasets.Dataset:
    """Return the workspace's chats, one per sequence, padded, with labels only for loss tokens."""
    chats = datasets.load_from_disk(str(workspace / "chats"))

    def pad(chat: dict[str, list[int]]) -> dict[str, list[int]]:
        tokens, loss_mask = chat["input_ids"], chat["completion_mask"]
        missing = LENGTH - len(tokens)
        labels = [token if bears else -100 for token, bears in zip(tokens, loss_mask, strict=True)]
        return {
            "input_ids": tokens + [0] * missing,
            "attention_mask": [1] * len(tokens) + [0] * missing,
            "labels": labels + [-100] * missing,
        }

    return chats.map(pad, remove_columns=chats.column_names).with_format("torch")


def make_trainer(
    workspace: Path, directory: Path, kind: str = "pretrain", dropout: float = 0.0, **settings: Any
) -> Trainer:
    """Return a trainer of the workspace's model that logs and saves at every step.

    `kind` is one of resumed_runs.CHOICES: data of `rows`, of `masked_rows`, or these with LoRA.
    """
    torch.manual_seed(42)
    config = AutoConfig.from_pretrained(workspace / f"dropout_{dropout}")
    args = TrainingArguments(
        output_dir=str(directory),
        learning_rate=tiny.RUN["learning_rate"],
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **({"per_device_train_batch_size": 2, "save_steps": 1} | settings),
    )
    model = AutoModelForCausalLM.from_config(config)
    if kind == "lora":
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=dropout))
    data = rows(workspace) if kind == "pretrain" else masked_rows(workspace)
    return Trainer(model=model, args=args, train_dataset=data)


def start(workspace: Path, run: str, cut: tuple[str, int] | None, **settings: Any) -> dict:
    """Train to the end, from the beginning or from the checkpoint that `cut` (run, step) names.

    Return METRICS of each step ("train") and, on the first rank only, the digests of the last
    checkpoint's tensors ("checkpoint").
    """
    trainer = make_trainer(workspace, Path(run), **settings)
    checkpoint = str(Path(cut[0]) / f"checkpoint-{cut[1]}") if cut else None
    trainer.train(resume_from_checkpoint=checkpoint)
    first = cut[1] if cut else 0
    found: dict[str, dict[str, Any]] = {"train": {}}
    for line in trainer.state.log_history:
        if "loss" in line and line["step"] > first:
            found["train"][str(line["step"])] = {metric: line[metric] for metric in METRICS}
    if trainer.is_world_process_zero():
        last = Path(run) / f"checkpoint-{trainer.state.global_step}"
        found["checkpoint"] = {
            "weights": digest(load_file(next(last.glob("*model.safetensors")))),
            "optimizer": digest(torch.load(last / "optimizer.pt", weights_only=True)),
        }
    return found
