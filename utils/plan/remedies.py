"""Changes that make a run fit its GPUs, by the same memory prediction that refused the run."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from utils.config.arguments import with_values
from utils.config.settings import RunSettings
from utils.launch.processes import LaunchFacts

SHOWN = 3
ROWS, RECOMPUTED = "per_device_train_batch_size", "activation_checkpointing"
GPUS = "GPUs"  # not a setting: the number of GPUs of the launch
SHARDED = ("fsdp1", "fsdp2", "zero3")
SHORTEST = 256  # tokens
LORA = {"use_peft": True, "dtype": "bfloat16"}
QLORA = LORA | {"load_in_4bit": True, "use_bnb_nested_quant": True}

Changes = dict[str, Any]
# A function that says whether a run with these settings, launch and checkpointing fits.
Fits = Callable[[RunSettings, LaunchFacts, str], bool]


def remedies(
    settings: RunSettings, launch: LaunchFacts, choice: str, possible: list[str], fits: Fits
) -> str:
    """Return a text with up to three changes, each of which makes the run fit."""
    found: list[Changes] = []
    for changes in candidates(settings, launch, choice, possible):
        enough = len(found) == SHOWN or any(one.keys() <= changes.keys() for one in found)
        if not enough and fits(*changed(settings, launch, choice, changes)):
            found.append(changes)
    if not found:
        return "no micro-batch, recomputation, sharding or LoRA makes it fit: take a smaller model"
    texts = [", ".join(f"{name}: {value}" for name, value in one.items()) for one in found]
    return "by the same prediction this fits: " + "; or ".join(texts).replace("True", "true")


def candidates(
    settings: RunSettings, launch: LaunchFacts, choice: str, possible: list[str]
) -> Iterator[Changes]:
    """Yield changes, smallest first. `remedies` skips a change that extends a fitting one."""
    rows, length = settings.training.per_device_train_batch_size, settings.data.sequence_length
    total, ranks, most = settings.run.global_batch_size, launch.world_size, possible[-1]
    least = {ROWS: 1, RECOMPUTED: most}
    smaller = [{ROWS: size} for size in range(rows - 1, 0, -1) if rows % size == 0]
    yield from smaller
    more = possible[possible.index(choice) + 1 :]
    yield from ({RECOMPUTED: each} for each in more)
    if more:
        yield from (one | {RECOMPUTED: most} for one in smaller)
    if ranks > 1 and launch.strategy not in SHARDED:
        yield {"strategy": "fsdp2"}
        yield {"strategy": "fsdp2"} | least
    while (ranks := ranks * 2) <= total:
        if total % ranks == 0:
            yield {GPUS: ranks, "strategy": "fsdp2"} | least
    if settings.script == "sft_train.py" and not settings.model.load_in_4bit:
        yield LORA | least
        yield QLORA | least
    while (length := length // 2) >= SHORTEST:
        yield {"sequence_length": length} | least


def changed(
    settings: RunSettings, launch: LaunchFacts, choice: str, changes: Changes
) -> tuple[RunSettings, LaunchFacts, str]:
    """Return settings, launch and activation checkpointing with these changes."""
    parts: dict[str, Any] = {
        "training": settings.training, "data": settings.data, "model": settings.model,
    }  # fmt: skip
    for name, part in parts.items():
        own = {key: value for key, value in changes.items() if key in vars(part)}
        parts[name] = with_values(part, **own)
    settings = replace(settings, **parts)
    strategy, ranks = changes.get("strategy", launch.strategy), changes.get(GPUS, launch.world_size)
    launch = replace(launch, strategy=strategy, world_size=ranks)
    return settings, launch, changes.get(RECOMPUTED, choice)
