"""Muon and AdamW on the demo's model and data: the steps to the same held-out loss.

    python -m benchmarks.comparisons.optimizers

Needs data/demo-pretrain (`make demo`). AdamW trains with five learning rates, two at a time on one
thread each; Muon trains with the best of them.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.hardware.circumstances import ROOT, circumstances
from benchmarks.progress import say
from utils.host.journal_file import read_journal

RESULT = ROOT / "benchmarks" / "results" / "experiments" / "muon.json"
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
STEPS = 240
CHANGES = {
    "sequence_length": 256, "max_steps": STEPS, "warmup_steps": 20, "eval_steps": 10,
    "max_eval_sequences": 16, "eval_data": "modules=data/demo-pretrain/modules",
    "save_strategy": "no", "load_best_model_at_end": "false", "use_cpu": "true",
    "compile": "false",
}  # fmt: skip


def main() -> int:
    """Train all runs and write the result file."""
    os.environ["OMP_NUM_THREADS"] = "1"
    spawned = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch, ProcessPoolExecutor(2, spawned) as pool:
        train = partial(trained, Path(scratch))
        runs = list(pool.map(partial(train, "adamw_torch_fused"), RATES))
        best = min(runs, key=last)
        muon = pool.submit(train, "muon", best["learning_rate"]).result()
    reached = steps_to(last(best), muon["losses"])
    result = circumstances("python -m benchmarks.comparisons.optimizers") | {
        "title": "Held-out loss of the demo's model by step, Muon beside AdamW",
        "settings": CHANGES,
        "runs": [*runs, muon],
        "best_rate_of_adamw": best["learning_rate"],
        "last_losses": {"adamw": last(best), "muon": last(muon)},
        "steps_of_muon_to_the_last_loss_of_adamw": reached,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    say(f"{result['last_losses']}; Muon reaches AdamW's last loss at step {reached}")
    return 0


def trained(scratch: Path, optimizer: str, rate: float) -> dict[str, Any]:
    """Train once; return the settings and the held-out loss by step."""
    import pretrain

    os.chdir(ROOT)
    directory = scratch / f"{optimizer}-{rate}"
    settings = CHANGES | {"optim": optimizer, "learning_rate": rate, "output_dir": directory}
    flags = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    assert pretrain.main(["--config", "recipes/pretrain/demo_cpu.yaml", *flags]) == 0
    lines = read_journal(directory / "metrics.jsonl")
    curve = {line["step"]: line["eval_modules_loss"] for line in lines if line["event"] == "eval"}
    return {"optim": optimizer, "learning_rate": rate, "losses": curve}


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
