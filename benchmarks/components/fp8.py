"""fp8 beside bf16 on one GPU: the speed of an 8B Llama's layers, losses of 300 steps, LoRA.

    python -m benchmarks.components.fp8 benchmarks/results/gpu/fp8.json
    python -m benchmarks.components.fp8 --toy /tmp/fp8.json   a rehearsal on any machine

Speed: all weights are trained, layers are compiled, at two depths, whose difference is the time of
a layer. Losses: pretrain.py on the bytes of Python's own library. Needs torchao. Takes 4 minutes.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells.shapes import LLAMA_8B
from benchmarks.cells.toy import toy_shape
from benchmarks.comparisons.turns import quiet_environment
from benchmarks.hardware.circumstances import ROOT, circumstances
from benchmarks.progress import say
from benchmarks.workloads.workload import SEED, make_tokenizer

RECIPES: dict[str, Any] = {
    "bf16": False,
    "rowwise": True,
    "tensorwise": "tensorwise",
}  # values of --fp8
ROWS, LENGTH, DEPTHS = 2, 4096, (4, 12)
WARM, TIMED = 3, 8
STEPS, SEQUENCE, HELD_OUT = 300, 1024, 64
BYTES = 272  # the vocabulary: 256 bytes after two special tokens, a multiple of 16
LLAMA_124M: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 2048,
    "vocab_size": BYTES,
}  # fmt: skip
TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip
TRAINING: dict[str, Any] = {
    "global_batch_size": 8, "per_device_train_batch_size": 8,
    "learning_rate": 6e-4, "warmup_steps": 30, "bf16": "true", "compile": "true", "seed": SEED,
    "save_strategy": "no", "logging_steps": 1,
}  # fmt: skip
LIMIT_S = {"speed": 90.0, "losses": 150.0}


def main() -> int:
    """Run all parts, each with a time limit; write the JSON after each part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--toy", action="store_true", help="toy sizes: a rehearsal")
    parser.add_argument("--speed", choices=RECIPES, help="only this one, in this process")
    given = parser.parse_args()
    if given.speed:
        given.output.write_text(json.dumps(speed(given.speed, given.toy)))
        return 0
    made_by = "python -m benchmarks.components.fp8 benchmarks/results/gpu/fp8.json"
    result: dict[str, Any] = circumstances(made_by) | {"toy": given.toy, "speed": {}, "failed": {}}
    with tempfile.TemporaryDirectory(prefix="stoker-benchmark-") as scratch:
        for recipe in RECIPES:
            file = Path(scratch) / "speed.json"
            command = [sys.executable, "-m", "benchmarks.components.fp8", str(file)]
            command += ["--speed", recipe, *(["--toy"] if given.toy else [])]
            part = f"speed of {recipe}"
            if in_time({part: command}, LIMIT_S["speed"], Path(scratch), result["failed"]):
                result["speed"][recipe] = json.loads(file.read_text())
                say(f"{recipe}: {file.read_text()}")
            write(result, given.output)
        train(result, Path(scratch), given.toy)
    write(result, given.output)
    say(f"failed: {[*result['failed']]}; written to {given.output}")
    return 1 if result["failed"] else 0


def write(result: dict[str, Any], output: Path) -> None:
    """Write the results so far."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")


def in_time(
    commands: dict[str, list[str]], limit_s: float, scratch: Path, failed: dict[str, str]
) -> bool:
    """Run commands side by side; note in `failed` the last lines of each that fails."""
    until, running = time.monotonic() + limit_s, {}
    for name, command in commands.items():
        with (scratch / f"{name}.log").open("w") as log:
            running[name] = subprocess.Popen(
                command, cwd=ROOT, env=quiet_environment(scratch), stdout=log, stderr=log
            )
    for name, process in running.items():
        try:
            code: int | str = process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            code = f"no end after {limit_s:g} s"
        if code != 0:
            last = (scratch / f"{name}.log").read_text().splitlines()[-25:]
            failed[name] = "\n".join([f"ended with {code}", *last])
            say(f"FAILED {name}: {failed[name]}")
    return not failed.keys() & commands.keys()


def speed(recipe: str, is_toy: bool) -> dict[str, Any]:
    """Return milliseconds of a training step by depth and of a layer, and tokens per second."""
    from utils.launch.script import configure_environment

    configure_environment()
    import torch

    depths, rows, length = ((2, 4), 2, 64) if is_toy else (DEPTHS, ROWS, LENGTH)
    shape = toy_shape(LLAMA_8B) if is_toy else LLAMA_8B
    found, cuda = {}, torch.cuda.is_available()
    for depth in reversed(depths):
        step = step_of(recipe, shape | {"num_hidden_layers": depth}, rows, length)
        durations = []
        for _ in range(WARM + TIMED):
            begin = time.perf_counter()
            step()
            if cuda:
                torch.cuda.synchronize()
            durations.append(time.perf_counter() - begin)
        found[depth] = 1000 * statistics.median(durations[WARM:])
        del step
        gc.collect()
    layer = (found[depths[1]] - found[depths[0]]) / (depths[1] - depths[0])
    whole = found[depths[1]] + (LLAMA_8B["num_hidden_layers"] - depths[1]) * layer
    return {
        "tokens": rows * length,
        "step_ms": found,
        "layer_ms": layer,
        "tokens_per_second": {depth: 1000 * rows * length / ms for depth, ms in found.items()},
        "tokens_per_second_of_32_layers": 1000 * rows * length / whole,
    }


def step_of(recipe: str, shape: dict[str, Any], rows: int, length: int) -> Any:
    """Return a function that takes a step: forward, backward, clipping, AdamW."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from utils.kernels.linear_cross_entropy import linear_cross_entropy
    from utils.model.layers import Float8Plan, compile_layers, float8_layers

    config = AutoConfig.for_model(**shape)
    config._attn_implementation = "sdpa"
    on = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)
    with torch.device(on):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        tokens = torch.randint(shape["vocab_size"], (rows, length))
    if recipe != "bf16":
        Float8Plan(recipe, float8_layers(config)[0], emulated=on == "cpu").convert(model)
    if on == "cuda":
        compile_layers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        with torch.autocast(on, torch.bfloat16):
            hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
            total, _, _ = linear_cross_entropy(
                hidden.flatten(0, 1), model.lm_head.weight, tokens.flatten(), compiled=True
            )
        (total / tokens.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def train(result: dict[str, Any], scratch: Path, is_toy: bool) -> None:
    """Train in bf16 and in fp8 on the same data at the same time, and LoRA for five steps."""
    shape, steps, length, chosen = LLAMA_124M, STEPS, SEQUENCE, dict(TRAINING)
    if is_toy:
        shape, steps, length = LLAMA_124M | TINY, 2, 64
        chosen |= {"compile": "false", "use_cpu": "true"}
    make_data(scratch, shape, steps, length)
    chosen |= {"tokenizer_name_or_path": scratch / "tokenizer", "sequence_length": length}
    evaluated = {"eval_data": f"heldout={scratch / 'heldout'}", "eval_steps": 100}
    commands = {}
    for recipe, fp8 in RECIPES.items():
        own = {"fp8": str(fp8).lower(), "max_steps": steps, "output_dir": scratch / recipe}
        own |= evaluated | {"model_config": scratch / "model.json", "train_data": scratch / "train"}
        commands[recipe] = command_of("pretrain.py", chosen | own)
    own = {"fp8": "true", "max_steps": 5, "output_dir": scratch / "lora", "use_peft": "true"}
    own |= {"model_name_or_path": scratch / "base", "train_data": scratch / "chats"}
    commands["lora"] = command_of("sft_train.py", chosen | own)
    in_time(commands, LIMIT_S["losses"], scratch, result["failed"])
    result |= {"losses": {}, "evaluations": {}}
    for name in commands:
        journal = scratch / name / "metrics.jsonl"
        text = journal.read_text() if journal.exists() else ""
        lines = [json.loads(line) for line in text.splitlines()]
        result["losses"][name] = [line["loss"] for line in lines if "loss" in line]
        figures = [line["eval_heldout_loss"] for line in lines if "eval_heldout_loss" in line]
        result["evaluations"][name] = figures
        say(f"{name}: {result['losses'][name][-3:]}, held out {figures}")


def make_data(directory: Path, shape: dict[str, Any], steps: int, length: int) -> None:
    """Write train/, heldout/ and chats/ from Python's library as bytes; tokenizer and LoRA's base.

    Lengths of documents differ: rows of one length that end in blanks would look padded.
    """
    import datasets
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    random = np.random.default_rng(SEED)
    documents = steps * TRAINING["global_batch_size"] * 3 // 2 + HELD_OUT
    lengths = random.integers(length // 2, length, documents)
    paths = [path for kind in ("stdlib", "purelib") for path in library(kind)]
    tokens = np.zeros(0, dtype=np.uint16)
    for path in random.permutation(np.array(paths, dtype=object)):
        if len(tokens) < lengths.sum():
            text = np.frombuffer(path.read_bytes()[: 100 * length], dtype=np.uint8)
            tokens = np.concatenate([tokens, text.astype(np.uint16) + 2])
    rows = np.split(tokens, np.cumsum(lengths))[:documents]
    masks = [(np.arange(len(row)) > 9).astype(np.int8) for row in rows[:HELD_OUT]]
    datasets.disable_progress_bars()
    for name, columns in {
        "train": {"input_ids": rows[HELD_OUT:]},
        "heldout": {"input_ids": rows[:HELD_OUT]},
        "chats": {"input_ids": rows[:HELD_OUT], "completion_mask": masks},
    }.items():
        datasets.Dataset.from_dict(columns).save_to_disk(directory / name)
    make_tokenizer(BYTES, directory / "tokenizer")
    (directory / "model.json").write_text(json.dumps(shape))
    torch.manual_seed(SEED)
    base = AutoConfig.for_model(**shape | {"num_hidden_layers": 3})
    AutoModelForCausalLM.from_config(base, dtype=torch.bfloat16).save_pretrained(directory / "base")


def library(kind: str) -> list[Path]:
    """Return the Python files of the standard library or of the installed packages."""
    return sorted(Path(sysconfig.get_path(kind)).rglob("*.py"))


def command_of(script: str, settings: dict[str, Any]) -> list[str]:
    """Return the command line of a training."""
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [sys.executable, str(ROOT / script), *flags]


if __name__ == "__main__":
    sys.exit(main())
