"""The arithmetic of a run: its steps, the micro-batches per step, the steps between saves."""

import math

from transformers import TrainingArguments

from utils.config.arguments import (
    counted_ranks,
    fitting_micro_batch,
    profiled_steps,
    token_count,
)
from utils.config.errors import ConfigurationError, Report
from utils.config.settings import RunSettings
from utils.data.order import GlobalBatchSampler, SampleOrder
from utils.launch.processes import LaunchFacts
from utils.plan.run_data import RunData


def plan_steps(
    settings: RunSettings, data: RunData, launch: LaunchFacts, report: Report
) -> GlobalBatchSampler:
    """Return the sampler of each step's sequences, and add the arithmetic to `report`.

    Raises ConfigurationError if the global batch does not divide into micro-batches of all ranks,
    if the data is smaller than one global batch, or if profile_steps come after the last step.
    """
    run, training = settings.run, settings.training
    micro_batch = training.per_device_train_batch_size
    accumulation = accumulation_steps(run.global_batch_size, micro_batch, launch.world_size)
    if (rows := len(data.train)) < run.global_batch_size:
        raise ConfigurationError(
            f"the training data makes {rows:,} sequences, fewer than global_batch_size "
            f"{run.global_batch_size:,}: lower it, or add data."
        )
    length, total_steps = settings.data.sequence_length, _total_steps(settings, rows)
    step_tokens = run.global_batch_size * length
    if run.max_tokens is not None:
        tokens = token_count(run.max_tokens)
        report.say(f"max_tokens: {tokens:,} / {step_tokens:,} a step = {total_steps:,} steps")
    sampler = GlobalBatchSampler(
        SampleOrder(data.train.per_source, training.seed, data.weights),
        run.global_batch_size, micro_batch, launch.rank, launch.world_size, total_steps,
    )  # fmt: skip
    report.say(f"batch: {batch_arithmetic(micro_batch, length, launch.world_size, accumulation)}")
    report.say(
        f"run: {total_steps:,} steps = {sampler.epoch_at(total_steps):.2f} epochs of {rows:,} "
        f"sequences = {total_steps * step_tokens:,} tokens with padding"
    )
    if run.profile_steps and (last := profiled_steps(run.profile_steps)[1] - 1) > total_steps:
        raise ConfigurationError(f"profile_steps {run.profile_steps}: the run has no step {last:,}")
    return sampler


def _total_steps(settings: RunSettings, rows: int) -> int:
    """Return the steps of max_tokens, else of max_steps, else of the epochs of `rows` sequences."""
    run, training = settings.run, settings.training
    if run.max_tokens is not None:
        step_tokens = run.global_batch_size * settings.data.sequence_length
        return math.ceil(token_count(run.max_tokens) / step_tokens)
    if training.max_steps > 0:
        return training.max_steps
    # The last global batch is full: its missing sequences come from one more epoch.
    return math.ceil(training.num_train_epochs * rows / run.global_batch_size)


def save_interval(training: TrainingArguments, total_steps: int) -> int | None:
    """Return the number of steps between two checkpoints; None: only a stop saves one."""
    if training.save_strategy == "epoch":
        return math.ceil(total_steps / max(1, math.ceil(training.num_train_epochs)))
    steps = training.save_steps
    if training.save_strategy == "steps":
        return math.ceil(total_steps * steps) if steps < 1 else int(steps)
    return None


def scheduled_saves(training: TrainingArguments, total_steps: int) -> int:
    """Return the number of checkpoints that save_strategy and save_steps ask for."""
    every = save_interval(training, total_steps)
    return math.ceil(total_steps / every) if every else 0


def accumulation_steps(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Return the number of micro-batches that each rank accumulates per optimizer step.

    global_batch_size: sequences per optimizer step over all ranks. micro_batch_size: sequences per
    rank and forward pass. world_size: ranks. Raises ConfigurationError if the global batch is not
    a multiple of micro-batch x ranks; the message names the nearest multiples.
    """
    at_once = micro_batch_size * world_size
    if global_batch_size > 0 and global_batch_size % at_once == 0:
        return global_batch_size // at_once
    below = max(global_batch_size, 0) // at_once * at_once
    nearest = [str(size) for size in (below, below + at_once) if size > 0]
    advice = f"use global_batch_size {' or '.join(nearest)}"
    if smaller := fitting_micro_batch(global_batch_size, micro_batch_size, world_size):
        advice += f", or per_device_train_batch_size {smaller}"
    raise ConfigurationError(
        f"global_batch_size {global_batch_size} does not divide over {counted_ranks(world_size)} "
        f"of {micro_batch_size} sequences each, which makes {at_once} at once: {advice}"
    )


def batch_arithmetic(
    micro_batch_size: int, sequence_length: int, world_size: int, accumulation: int
) -> str:
    """Return as text: sequences x tokens x ranks x accumulation = tokens per optimizer step."""
    tokens = micro_batch_size * sequence_length * world_size * accumulation
    return (
        f"{micro_batch_size} sequences x {sequence_length:,} tokens x {counted_ranks(world_size)} "
        f"x {accumulation} accumulation = {tokens:,} tokens/step"
    )
