"""torchtune's own recipes for one device (0.6), full and with LoRA, over its own packing.

Tuned: packed rows, FlexAttention on a GPU, layers and loss compiled, AdamW as one kernel. Its loop
reads each step's loss back, which no setting turns off, and makes each row's mask as it goes. It
has no mixed precision: LoRA's adapters are bf16 as the frozen weights are, where the others have
them in float32.
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch

from benchmarks.baselines.torchtune_config import recipe_config
from benchmarks.recording.job import CannotRunError, Job, Outcome, run_baseline
from benchmarks.recording.steps import StepRecorder

# torchtune always imports these.
NEEDED = ("torchao", "torchdata", "omegaconf", "sentencepiece", "tiktoken", "psutil")
FULL = ("full_finetune_single_device", "FullFinetuneRecipeSingleDevice")
LORA = ("lora_finetune_single_device", "LoRAFinetuneRecipeSingleDevice")


def train(job: Job) -> Outcome:
    """Fine-tune on the workload's tokenized chats."""
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            raise CannotRunError(f"{package} is not installed")
    supply_what_is_missing()
    from omegaconf import DictConfig

    config = DictConfig(recipe_config(job))
    recorder = StepRecorder(job)
    recipe = recipe_class(*(LORA if job.lora_rank else FULL))(config)
    recipe.setup(config)
    watch_recipe(recipe, recorder)
    recipe.train()
    recipe.cleanup()
    return recorder.outcome(attention="flex" if torch.cuda.is_available() else "sdpa")


def supply_what_is_missing() -> None:
    """Let torchtune 0.6 import a torchao that is new enough for PEFT (0.16).

    torchtune imports two quantizers that this torchao no longer has and that no run here uses. Call
    this before importing torchtune.
    """
    from torchao import quantization

    for name in ("int4_weight_only", "int8_dynamic_activation_int4_weight"):
        if not hasattr(quantization, name):
            setattr(quantization, name, None)


def recipe_class(file: str, name: str) -> Any:
    """Return a class of torchtune's recipes: files beside the package, which nothing may import."""
    package = importlib.util.find_spec("torchtune")
    assert package
    assert package.origin
    path = Path(package.origin).parents[1] / "recipes" / f"{file}.py"
    spec = importlib.util.spec_from_file_location(file, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def watch_recipe(recipe: Any, recorder: StepRecorder) -> None:
    """Let a recipe that is set up tell the recorder of each step, and save nothing at its end."""
    loss_step = recipe._loss_step

    def watched(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        recorder.saw_batch(batch["tokens"], batch["labels"])
        recorder.saw_chats({"input_ids": batch["tokens"], "position_ids": batch["input_pos"]})
        loss: torch.Tensor = loss_step(batch)
        recorder.saw_loss(loss)
        return loss

    recipe._loss_step = watched
    recipe.save_checkpoint = lambda **_: None
    recipe._optimizer.register_step_post_hook(lambda *_: recorder.ended_step())


if __name__ == "__main__":
    run_baseline(train)
