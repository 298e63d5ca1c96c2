"""A tokenizer, token datasets and a model that train a whole run in a second or two."""

import json
import shutil
from pathlib import Path

import datasets
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 128
WORDS = ["<eos>", "<pad>", *(f"t{number}" for number in range(VOCABULARY - 2))]

# Settings of a run of six steps with a checkpoint in the middle and at the end.
RUN: dict[str, object] = {
    "sequence_length": 64, "global_batch_size": 4, "per_device_train_batch_size": 2,
    "max_steps": 6, "learning_rate": 1e-2, "logging_steps": 1, "save_steps": 3,
    "bf16": False,  # the same numbers on a CPU with AMX
}  # fmt: skip


def compiled_graphs() -> int:
    """Return how many graphs this process has compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def make_tokenizer(directory: Path) -> Path:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="t0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.save_pretrained(directory)
    return directory


def documents(count: int, seed: int, longest: int = 60) -> list[list[int]]:
    """Make learnable documents: each token is the previous one plus a constant step."""
    random = np.random.default_rng(seed)
    lengths = random.integers(3, longest, size=count)
    starts = random.integers(2, VOCABULARY, size=count)
    return [
        [int(2 + (start + 3 * place) % (VOCABULARY - 2)) for place in range(length)]
        for start, length in zip(starts, lengths, strict=True)
    ]


def masked(rows: list[list[int]]) -> dict[str, list[list[int]]]:
    """Mask the first third of each document as prompt; the rest has a loss."""
    masks = [[int(place >= max(1, len(row) // 3)) for place in range(len(row))] for row in rows]
    return {"input_ids": rows, "completion_mask": masks}


def save(directory: Path, columns: dict[str, list[list[int]]]) -> Path:
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns).save_to_disk(directory)
    return directory


def make_model_config(path: Path, **changes: object) -> Path:
    config = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "vocab_size": VOCABULARY,
    }  # fmt: skip
    path.write_text(json.dumps(config | changes))
    return path


def flags(**settings: object) -> list[str]:
    """Turn settings into a command line; leave out settings of None."""
    argv: list[str] = []
    for name, value in settings.items():
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        argv += [f"--{name}", *map(str, values)]
    return argv


def figures(output_dir: Path, *names: str) -> torch.Tensor:
    """Return these figures of every journal line that has them."""
    from utils.host.journal_file import read_journal

    lines = read_journal(output_dir / "metrics.jsonl")
    return torch.tensor([line[name] for line in lines for name in names if name in line])


def evaluations(output_dir: Path, split: str) -> dict[int, float]:
    """Return the losses of a split by step."""
    from utils.host.journal_file import read_journal

    metric = f"eval_{split}_loss"
    lines = read_journal(output_dir / "metrics.jsonl")
    return {line["step"]: line[metric] for line in lines if metric in line}


def train_lines(output_dir: Path) -> list[dict]:
    """Return the training logs of a run from its journal."""
    from utils.host.journal_file import read_journal

    return [line for line in read_journal(output_dir / "metrics.jsonl") if line["event"] == "train"]


def losses(output_dir: Path) -> list[float]:
    """Return the training losses of a run by step from its journal."""
    return [line["loss"] for line in train_lines(output_dir)]


def weights(output_dir: Path) -> bytes:
    """Return the weights of the finished model."""
    return (output_dir / "final" / "model.safetensors").read_bytes()


def cut(output_dir: Path, step: int) -> Path:
    """Make the run look as if it had died after its checkpoint of `step`."""
    for checkpoint in output_dir.glob("checkpoint-*"):
        if int(checkpoint.name.split("-")[1]) > step:
            shutil.rmtree(checkpoint)
    for name in ("final", "adapter"):
        shutil.rmtree(output_dir / name, ignore_errors=True)
    return output_dir


def copied(run: Path, target: Path, step: int | None = None) -> Path:
    """Copy a run without its lock, which this process holds; `step` is for `cut`."""
    shutil.copytree(run, target, ignore=shutil.ignore_patterns(".lock"))
    return target if step is None else cut(target, step)


def assert_same_run(run: Path, whole: Path) -> None:
    """Check for bit-equal losses and a bit-equal finished model."""
    assert losses(run) == losses(whole)
    assert weights(run) == weights(whole)


def plain_loss(model: torch.nn.Module, columns: dict[str, list[list[int]]]) -> float:
    """Return the expected loss: that of the plain model, with each document alone and unpadded."""
    total, targets = 0.0, 0
    rows = columns["input_ids"]
    for row, mask in zip(rows, columns.get("completion_mask", rows), strict=True):
        ids = torch.tensor([row])
        labels = ids.masked_fill(torch.tensor([mask]) == 0, -100)
        count = int(labels[:, 1:].ne(-100).sum())
        with torch.no_grad():
            total += model(input_ids=ids, labels=labels).loss.item() * count
        targets += count
    return total / targets


def starts(output_dir: Path) -> list[dict]:
    """Return the starts in provenance.json."""
    return json.loads((output_dir / "provenance.json").read_text())["starts"]
