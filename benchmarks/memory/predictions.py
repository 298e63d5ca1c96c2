"""Compares predicted with measured memory; writes to benchmarks/results/memory/.

    python -m benchmarks.memory                    every shape on the device that is here
    python -m benchmarks.memory --cells recipe_shape --choices none,full

Each run is a process of its own of a few steps, more with documents of all lengths: malloc's heap
grows for some of them.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.comparisons.turns import run_process
from benchmarks.hardware.circumstances import ROOT, circumstances
from benchmarks.progress import say
from benchmarks.workloads.workload import LLAMA_11M, LLAMA_23M, Workload, make_workload
from utils.model.layers import CHOICES

BOUND = {"cpu": 1.0, "cuda": 0.10}  # a process on a CPU takes up to twice what its tensors do
STEPS = 3
CHAT_TOKENS = 300
LLAMA_6M = LLAMA_11M | {  # recipes/model/llama_6m.yaml
    "intermediate_size": 1024, "num_key_value_heads": 2, "vocab_size": 8192,
}  # fmt: skip
EXPERTS_30M = LLAMA_23M | {
    "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
    "intermediate_size": 512,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model with a micro-batch, and the settings that make a difference."""

    model: dict[str, Any]
    rows: int
    length: int
    settings: tuple[str, ...] = ()
    script: str = "pretrain"
    documents: int = 0  # of all lengths; 0: one for each row, which it fills
    steps: int = STEPS

    @property
    def workload(self) -> Workload:
        """The documents that it trains on."""
        if self.documents:
            return Workload(self.model, self.length, self.documents, CHAT_TOKENS)
        return Workload(self.model, self.length, self.rows * self.steps)


EAGER, COMPILED = ("--compile", "false"), ("--compile", "true")
FP32 = ("--bf16", "false", *EAGER)
SHAPES = {
    "recipe_shape": Shape(LLAMA_6M, 4, 512, FP32),
    "fp32": Shape(LLAMA_23M, 4, 512, FP32),
    "bf16": Shape(LLAMA_23M, 4, 512, ("--bf16", "true", *EAGER)),
    "pure_bf16": Shape(LLAMA_23M, 4, 512, ("--dtype", "bfloat16", *EAGER)),
    "compiled": Shape(LLAMA_23M, 4, 512, ("--bf16", "true", *COMPILED)),
    "experts": Shape(EXPERTS_30M, 4, 512, FP32),
    "long_rows": Shape(LLAMA_23M, 2, 2048, FP32),
    "lora": Shape(LLAMA_23M, 4, 512, (*FP32, "--use_peft", "true"), "sft_train"),
    "qlora": Shape(
        LLAMA_23M, 4, 512, (*FP32, "--use_peft", "true", "--load_in_4bit", "true"), "sft_train"
    ),
    "chats": Shape(LLAMA_11M, 1, 2048, FP32, "sft_train", documents=400, steps=20),
}


def measure(shape: Shape, choice: str) -> dict[str, Any]:
    """Train a few steps in a process of its own; return bytes, and measured over predicted."""
    with tempfile.TemporaryDirectory(prefix="stoker-memory-") as scratch:
        directory = Path(scratch)
        work = make_workload(shape.workload, directory)
        weights = ["--model_name_or_path", f"{work}/weights"]
        outcome = directory / "outcome.json"
        arguments = [
            shape.script, str(outcome), *weights, *shape.settings,
            "--train_data", f"{work}/documents", "--tokenizer_name_or_path", f"{work}/tokenizer",
            "--sequence_length", str(shape.length), "--max_steps", str(shape.steps),
            "--global_batch_size", str(shape.rows),
            "--per_device_train_batch_size", str(shape.rows),
            "--output_dir", str(directory / "run"), "--activation_checkpointing", choice,
            *([] if torch.cuda.is_available() else ["--use_cpu", "true"]),
        ]  # fmt: skip
        run_process("benchmarks.memory.run", arguments, directory)
        found: dict[str, Any] = json.loads(outcome.read_text())
    return found | {"ratio": found["measured"] / found["predicted"]}


def main() -> int:
    """Measure what the command line names; 1 where a prediction is further off than the bound."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory")
    parser.add_argument("--cells", default=",".join(SHAPES))
    parser.add_argument("--choices", default=",".join(CHOICES))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cells: dict[str, dict[str, Any]] = {}
    off: list[str] = []
    made_by = f"python -m benchmarks.memory --cells {given.cells} --choices {given.choices}"
    result = circumstances(made_by) | {"bound": BOUND[device], "off": off, "cells": cells}
    path = given.results / "memory" / f"{device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in given.cells.split(","):
        for choice in given.choices.split(","):
            found = measure(SHAPES[name], choice)
            cells.setdefault(name, {})[choice] = found
            if abs(found["ratio"] - 1) > BOUND[device]:
                off.append(f"{name} {choice}")
            say(f"{name:14} {choice:10} measured / predicted = {found['ratio']:.2f}")
            path.write_text(json.dumps(result, indent=2) + "\n")  # what is measured stays
    return 1 if off else 0
