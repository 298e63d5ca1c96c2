"""One training run in its own process: predicted and measured memory.

    python -m benchmarks.memory.run pretrain OUTCOME.json --config ...

On a CPU: growth of the resident set from just before the model is loaded to its peak while training
(VmHWM, which the kernel lets a process reset). On a GPU: torch.cuda.max_memory_allocated.
"""

import importlib
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any


def main() -> int:
    """Run the script and write the outcome."""
    script, outcome, *argv = sys.argv[1:]
    from utils.launch.script import configure_environment

    configure_environment()
    import torch

    from utils.model import weights as models
    from utils.plan import run_plan

    found: dict[str, Any] = {}
    plan_memory, load_model = run_plan.plan_memory, models.load_model

    def note_plan(*given: Any) -> Any:
        memory = plan_memory(*given)
        found.update(asdict(memory), predicted=memory.predicted_bytes[memory.choice])
        return memory

    def start_measuring(*given: Any, **named: Any) -> Any:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forgets the peak
        found["before"] = resident("VmRSS")
        return load_model(*given, **named)

    run_plan.plan_memory = note_plan  # type: ignore[assignment] # watched, not changed
    models.load_model = start_measuring
    if code := importlib.import_module(script).main([*argv, "--save_strategy", "no"]):
        return code
    if torch.cuda.is_available():
        measured = torch.cuda.max_memory_allocated()
    else:
        measured = resident("VmHWM") - found["before"]
    result = {name: found[name] for name in ("choice", "predicted", "predicted_bytes")}
    Path(outcome).write_text(json.dumps(result | {"measured": measured}), encoding="utf-8")
    return 0


def resident(figure: str) -> int:
    """Return a figure of /proc/self/status in bytes."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    match = re.search(rf"^{figure}:\s+(\d+) kB", status, re.MULTILINE)
    assert match is not None, "Linux has it"
    return int(match.group(1)) * 1024


if __name__ == "__main__":
    sys.exit(main())
