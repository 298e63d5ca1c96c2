"""Train some steps in each rank of a launch, and write the median seconds of a step.

torchrun ... -m benchmarks.durations.ddp_run VARIANT PREPARED SCRATCH OUTCOME SIZE

VARIANT is `stoker`, `copies` (gradients beside DDP's buckets) or `static_graph`.
"""

import contextlib
import os
import statistics
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from utils.launch.processes import tune_strategy
from utils.launch.script import configure_environment, run_script

STEPS, WARM_UP = 14, 4


def with_copies(accelerator: Any) -> None:
    """Set up DDP as a run does, but keep gradients beside its buckets."""
    tune_strategy(accelerator)
    accelerator.ddp_handler.gradient_as_bucket_view = False


def main() -> None:
    """Run pretrain.py; the first rank writes the outcome."""
    from utils.callbacks.journal import read_journal

    variant, prepared, scratch, outcome, size = sys.argv[1:]
    configure_environment()
    import pretrain

    run = Path(scratch) / size
    settings = {
        "output_dir": run,
        "model_config": Path(prepared) / f"{size}.json",
        "tokenizer_name_or_path": Path(prepared) / "tokenizer",
        "train_data": Path(prepared) / "documents",
        "sequence_length": 128,
        "global_batch_size": 4,
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
    }
    if variant == "static_graph":
        settings["ddp_static_graph"] = True
    argv = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("utils.run.finish.export_final", return_value=run))
        if variant == "copies":
            stack.enter_context(mock.patch("utils.training.trainer.tune_strategy", with_copies))
        assert pretrain.main(argv) == 0
    if os.environ["RANK"] == "0":
        lines = [line for line in read_journal(run / "metrics.jsonl") if line["event"] == "train"]
        steps = [line["step_time_s"] for line in lines if line["step"] > WARM_UP]
        Path(outcome).write_text(str(statistics.median(steps)))


if __name__ == "__main__":
    sys.exit(run_script(main))  # a rank ends as the scripts' do
