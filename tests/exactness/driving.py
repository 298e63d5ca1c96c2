"""Starts drivers: programs of this folder that every rank of a launch runs, by a plan in JSON."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launching import ROOT, STRATEGIES, run_processes
from resumed_runs import CONFIGS

HERE = Path(__file__).parent
FOLDERS = (STRATEGIES, ROOT, ROOT / "tests" / "integration")
DRIVER_ENVIRONMENT = {"PYTHONPATH": ":".join(map(str, FOLDERS)), "TOKENIZERS_PARALLELISM": "false"}


def drive(driver: str, plan: Mapping[str, Any], strategy: str, ranks: int, root: Path) -> str:
    """Run a driver to its end in so many ranks; return what they printed."""
    path = root / "plan.json"
    path.write_text(json.dumps(plan))
    done = run_processes(
        CONFIGS[strategy],
        HERE / driver,
        [str(path)],
        processes=ranks,
        env=DRIVER_ENVIRONMENT,
        timeout_s=3600,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def drive_stock_trainer(
    starts: list[dict], ranks: int, workspace: Path, root: Path
) -> list[dict[str, Any]]:
    """The outcomes of these starts of plain Trainer, see stock_trainer.py."""
    plan = {"workspace": str(workspace), "starts": starts}
    drive("stock_trainer.py", plan, "ddp", ranks, root)
    return [json.loads(Path(f"{start['run']}.json").read_text()) for start in starts]
