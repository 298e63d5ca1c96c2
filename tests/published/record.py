"""Try every published model and record the results.

python tests/published/record.py [results file]
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/integration"), str(Path(__file__).parent)]
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

RESULTS = ROOT / "benchmarks/results/published_models.json"


def result_of(model: Any, seen: dict[str, Any]) -> dict[str, Any]:
    """Return a model's row in the table of docs/models.md."""
    facts = {"name": model.name, "year": model.year}
    facts |= {"model_type": model.config["model_type"], "why": model.why}
    if "refused" in seen:
        return facts | dict.fromkeys(("pretraining", "sft", "lora", "packed"), False)
    return facts | {
        "pretraining": len(seen["pretraining"]) == 3 and seen["resumed"],
        "sft": len(seen["sft"]) == 2,
        "lora": len(seen["lora"]) == 2 and seen["lora_generated"] > 0,
        "packed": seen["packed"],
        "loss_difference": float(f"{seen['plain_loss_difference']:.1e}"),
    }


def main(path: Path) -> None:
    """Write the results of all models."""
    import transformers
    import trials
    from published_models import MODELS

    results = []
    with tempfile.TemporaryDirectory() as folder, trials.quiet_process(Path(folder) / "cache"):
        trials.prepare(Path(folder))
        for number, model in enumerate(MODELS):
            (root := Path(folder) / str(number)).mkdir()
            results.append(result_of(model, trials.try_model(model, Path(folder), root)))
            sys.stderr.write(f"{model.name}: {results[-1]}\n")
    found = {"transformers": transformers.__version__, "models": results}
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
