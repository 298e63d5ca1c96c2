"""Train a few steps with one save, at each size, and write what the save held training up by.

python -m benchmarks.durations.saving_run TOOLKIT PREPARED SCRATCH OUTCOME SIZE...
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

STEPS, SAVED_STEP = 5, 3


class Stalls:
    """Seconds between the end of a step and the next one, by step; without the save and with it."""

    def __init__(self) -> None:
        from transformers import Trainer

        self.seconds: dict[int, float] = {}
        log_save_evaluate = Trainer._maybe_log_save_evaluate

        def watched(trainer: Any, *args: Any, **kwargs: Any) -> None:
            begin = time.perf_counter()
            log_save_evaluate(trainer, *args, **kwargs)
            self.seconds[trainer.state.global_step] = time.perf_counter() - begin

        replaced: Any = Trainer
        replaced._maybe_log_save_evaluate = watched

    def take(self) -> float:
        """Return the seconds of the save."""
        others = [self.seconds[step] for step in range(1, STEPS) if step != SAVED_STEP]
        stall = self.seconds[SAVED_STEP] - statistics.median(others)
        self.seconds.clear()
        return stall


def train_stoker(prepared: Path, size: int, run: Path, *, async_save: bool) -> None:
    """Train with pretrain.py."""
    import pretrain

    settings = {
        "output_dir": run,
        "model_config": prepared / f"{size}.json",
        "tokenizer_name_or_path": prepared / "tokenizer",
        "train_data": prepared / "documents",
        "sequence_length": 64,
        "global_batch_size": 2,
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "save_steps": SAVED_STEP,
        "bf16": False,  # as Trainer
        "use_cpu": True,
        "async_save": async_save,
    }
    argv = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    assert pretrain.main(argv) == 0
    assert (run / f"checkpoint-{SAVED_STEP}" / "manifest.json").exists()


def train_trainer(prepared: Path, size: int, run: Path) -> None:
    """Train with transformers' Trainer."""
    from datasets import load_from_disk
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    from benchmarks.baselines.hf_trainer import collate

    args = TrainingArguments(
        output_dir=str(run),
        per_device_train_batch_size=2,
        max_steps=STEPS,
        save_steps=SAVED_STEP,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    Trainer(
        model=AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(str(prepared / f"{size}.json"))
        ),
        args=args,
        train_dataset=load_from_disk(str(prepared / "documents")),
        data_collator=collate,
    ).train()
    assert (run / f"checkpoint-{SAVED_STEP}" / "optimizer.pt").exists()


def main() -> None:
    """Write {size: seconds}."""
    from utils.launch.script import configure_environment

    toolkit, prepared, scratch, outcome, *sizes = sys.argv[1:]
    configure_environment()
    stalls = Stalls()
    found = {}
    for size in map(int, sizes):
        run = Path(scratch) / str(size)
        if toolkit == "trainer":
            train_trainer(Path(prepared), size, run)
        else:
            train_stoker(Path(prepared), size, run, async_save=toolkit == "stoker_async")
        found[size] = stalls.take()
    Path(outcome).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
