"""Muon and AdamW on the demo's model and data: the steps to the same held-out loss.

    python -m benchmarks.comparisons.optimizers

Needs data/demo-pretrain (`make demo`). AdamW trains with five learning rates, Muon with three of
them. Two runs at a time, on one thread each.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.hardware.circumstances import ROOT, circumstances
from benchmarks.progress import say
from utils.host.journal_file import read_journal

RESULT = ROOT / "benchmarks" / "results" / "experiments" / "muon.json"
STEPS, EVERY = 120, 10
RATES = {"adamw_torch_fused": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2), "muon": (2e-3, 4e-3, 8e-3)}
CHANGES = {
    "sequence_length": 256, "max_steps": STEPS, "warmup_steps": 15, "eval_steps": EVERY,
    "max_eval_sequences": 32,
    "eval_data": "modules=data/demo-pretrain/modules", "save_strategy": "no",
    "load_best_model_at_end": "false", "use_cpu": "true", "compile": "false",
}  # fmt: skip


def main() -> int:
    """Train all runs and write the result file."""
    jobs = [(optimizer, rate) for optimizer, rates in RATES.items() for rate in rates]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(2) as pool:
        curves = list(pool.map(lambda job: losses(*job, Path(scratch)), jobs))
    runs = [
        {"optim": optimizer, "learning_rate": rate, "losses": curve}
        for (optimizer, rate), curve in zip(jobs, curves, strict=True)
    ]
    best = {name: min((run for run in runs if run["optim"] == name), key=last) for name in RATES}
    adamw, muon = best.values()
    result = circumstances("python -m benchmarks.comparisons.optimizers") | {
        "title": "Held-out loss of the demo's model by step, Muon beside AdamW",
        "settings": CHANGES,
        "runs": runs,
        "best": {
            name: {"learning_rate": run["learning_rate"], "loss": last(run)}
            for name, run in best.items()
        },
        "muon_steps_to_the_last_loss_of_adamw": steps_to(last(adamw), muon["losses"]),
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    say(f"{result['best']}, Muon at step {result['muon_steps_to_the_last_loss_of_adamw']}")
    return 0


def losses(optimizer: str, rate: float, scratch: Path) -> dict[int, float]:
    """Train once; return the held-out loss by step."""
    directory = scratch / f"{optimizer}-{rate}"
    settings = CHANGES | {"optim": optimizer, "learning_rate": rate, "output_dir": directory}
    flags = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    command = [sys.executable, "pretrain.py", "--config", "recipes/pretrain/demo_cpu.yaml", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = read_journal(directory / "metrics.jsonl")
    return {line["step"]: line["eval_modules_loss"] for line in lines if line["event"] == "eval"}


def last(run: dict[str, Any]) -> float:
    """Return the loss after the last step."""
    return run["losses"][STEPS]


def steps_to(loss: float, curve: dict[int, float]) -> float | None:
    """Return the step at which a falling curve reaches a loss, or None if it does not."""
    steps, values = np.array([*curve]), np.array([*curve.values()])
    reached = np.flatnonzero(values <= loss)
    if not len(reached):
        return None
    after = reached[0]
    pair = slice(after - 1, after + 1)
    return round(float(np.interp(-loss, -values[pair], steps[pair])), 1)


if __name__ == "__main__":
    sys.exit(main())
