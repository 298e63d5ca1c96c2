"""Runs that are interrupted at every step: settings, interruption, and comparison of two runs.

To cut a run at a step means to make a run directory as if the run was killed after this step.
"""

import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

STEPS = 8
# Strategy -> number of ranks and accelerate config.
RANKS = {"single": 1, "ddp": 2, "fsdp2": 2, "zero2": 2}
CONFIGS = {"single": "multi_gpu", "ddp": "multi_gpu"} | {
    name: name for name in ("fsdp2", "zero1", "zero2", "zero3")
}
CHOICES: dict[str, tuple[Any, ...]] = {
    "kind": ("pretrain", "sft", "lora"),
    "dropout": (0.0, 0.1),
    "accumulation": (1, 4),
    "workers": (0, 2),
}
# The fields of a log that must agree. All other fields are times and memory.
COMPARED = ("loss", "grad_norm", "learning_rate", "tokens_seen", "epoch")
EVALUATED = (*(f"eval_heldout_{n}" for n in ("loss", "perplexity", "accuracy", "tokens")), "epoch")


@dataclass(frozen=True)
class Case:
    """One configuration: a strategy and an option from each of CHOICES."""

    strategy: str
    kind: str
    dropout: float
    accumulation: int
    workers: int

    @property
    def name(self) -> str:
        return "-".join(map(str, asdict(self).values()))

    @property
    def script(self) -> str:
        return "pretrain" if self.kind == "pretrain" else "sft_train"

    def argv(self, workspace: Path, output_dir: Path, **changes: object) -> list[str]:
        """Return the command line, which is the same for the whole run and the resumed run."""
        dropout = f"dropout_{self.dropout}"
        micro_batch_size = 2
        settings: dict[str, object] = {
            **tiny.RUN,
            "output_dir": output_dir,
            "max_steps": STEPS,
            "per_device_train_batch_size": micro_batch_size,
            "global_batch_size": micro_batch_size * self.accumulation * RANKS.get(self.strategy, 2),
            "dataloader_num_workers": self.workers,
            "lr_scheduler_type": "cosine",
            "weight_decay": 0.1,  # splits the parameters into groups
            "save_steps": 1,
            "save_total_limit": STEPS,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "per_device_eval_batch_size": 8,
            "metric_for_best_model": "eval_heldout_loss",
        }
        if self.kind == "pretrain":
            settings |= {
                "train_data": workspace / "documents",
                "eval_data": f"heldout={workspace / 'heldout'}",
                "tokenizer_name_or_path": workspace / "tokenizer",
                "model_config": workspace / dropout / "config.json",
            }
        else:
            settings |= {
                "train_data": workspace / "chats",
                "eval_data": f"heldout={workspace / 'chats_heldout'}",
                "model_name_or_path": workspace / dropout,
            }
        if self.kind == "lora":
            settings |= {"use_peft": "true", "lora_r": 4, "lora_dropout": self.dropout}
        return tiny.flags(**settings | changes)


@pytest.fixture(scope="session")
def models(workspace: Path, base_model: Path) -> Path:
    """Add the models of the cases to the workspace, with and without dropout."""
    for dropout in CHOICES["dropout"]:
        directory = workspace / f"dropout_{dropout}"
        shutil.copytree(base_model, directory)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"attention_dropout": dropout}))
    return workspace


def every_case(strategy: str) -> list[Case]:
    """Return all 24 cases of a strategy."""
    return [Case(strategy, *chosen) for chosen in itertools.product(*CHOICES.values())]


def cut(whole: Path, step: int, run: Path) -> None:
    """Make a run directory as if `whole` had been killed right after this step's save.

    The journal has all steps of `whole`, as if later steps had been logged but not saved.
    """
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    for name in ("config.yaml", "provenance.json", "metrics.jsonl"):
        shutil.copy(whole / name, run / name)
    for saved in range(1, step + 1):
        name = f"checkpoint-{saved}"
        # Checkpoints are never changed, so links can replace copies.
        shutil.copytree(whole / name, run / name, copy_function=os.link)


def outcome(run: Path) -> dict[str, Any]:
    """Return, as JSON, the results of a finished run that must not depend on the cut."""
    from utils.host.journal_file import read_journal

    last = run / f"checkpoint-{STEPS}"
    state = json.loads((last / "trainer_state.json").read_text())
    lines = read_journal(run / "metrics.jsonl")

    def logged(event: str, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        ours = [line for line in lines if line["event"] == event]
        return {str(line["step"]): {name: line[name] for name in names} for line in ours}

    return {
        "train": logged("train", COMPARED),
        "evaluations": logged("eval", EVALUATED),
        "best": [state["best_metric"], Path(state["best_model_checkpoint"]).name],
        "checkpoint": checkpoint_digests(last),
        "final": {"model.safetensors": digest(load_file(run / "final" / "model.safetensors"))},
    }


def checkpoint_digests(checkpoint: Path) -> dict[str, str]:
    """Return a digest of the values of every file with tensors in a checkpoint.

    Values are hashed, because equal values may have other bytes when they are pickled again.
    """
    found = {}
    for path in sorted(checkpoint.rglob("*")):
        name = str(path.relative_to(checkpoint))
        if path.suffix == ".safetensors":
            found[name] = digest(load_file(path))
        elif path.suffix in (".pt", ".pth", ".bin"):
            found[name] = digest(torch.load(path, map_location="cpu", weights_only=False))
        elif path.name == ".metadata":
            found[str(path.parent.relative_to(checkpoint))] = digest(sharded(path.parent))
    return found


def sharded(directory: Path) -> dict[str, Any]:
    """Load a directory of torch.distributed.checkpoint, and join the shards of each tensor."""
    with tempfile.NamedTemporaryFile() as whole:
        dcp_to_torch_save(directory, whole.name)
        return torch.load(whole.name, weights_only=False)


def digest(value: Any) -> str:
    """Return the SHA-256 of nested values. For a tensor, hash its type, shape and bytes."""
    whole = hashlib.sha256()
    for part in _parts(value):
        whole.update(part)
    return whole.hexdigest()


def _parts(value: Any) -> Iterable[bytes]:
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous()
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield f"{key}:".encode()
            yield from _parts(value[key])
    elif isinstance(value, list | tuple):
        yield f"[{len(value)}".encode()
        for item in value:
            yield from _parts(item)
    elif hasattr(value, "tobytes"):
        yield value.tobytes()
    elif isinstance(value, str | int | float | bool | None):
        yield repr(value).encode()
    else:
        yield from _parts(vars(value))


def largest_differences(
    pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]], metrics: Sequence[str]
) -> dict[str, float]:
    """Return the largest |difference| between resumed and whole runs over the resumed steps."""
    largest = dict.fromkeys(metrics, 0.0)
    for whole, resumed in pairs:
        assert resumed["train"]
        for step, line in resumed["train"].items():
            for metric in metrics:
                different = abs(line[metric] - whole["train"][step][metric])
                largest[metric] = max(largest[metric], different)
    return {f"largest_{metric}_difference": value for metric, value in largest.items()}
