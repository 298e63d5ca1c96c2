"""What a run will do, worked out and said before any weight is loaded or any file is written."""

import logging
import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig, TrainingArguments

from utils.checkpoints.discovery import most_at_once
from utils.checkpoints.files import readable
from utils.config.arguments import (
    FineTuneConfig,
    accumulation_steps,
    batch_arithmetic,
    profiled_steps,
    token_count,
    with_values,
)
from utils.config.errors import ConfigurationError
from utils.config.precision import BY_LAUNCH, FAST_BF16, NODE_UNKNOWN
from utils.config.settings import RunSettings
from utils.data.order import GlobalBatchSampler, SampleOrder
from utils.kernels.varlen import NAME
from utils.launch.processes import LaunchFacts
from utils.model.adapters import AdapterPlan, plan_adapters
from utils.model.architecture import first_line, has_experts, without_weights
from utils.model.attention import (
    OPEN,
    RUN_ANYWHERE,
    AttentionChoice,
    check_row_positions,
    is_recurrent,
)
from utils.model.compilation import choose_compilation
from utils.model.finished_model import name_of, saved_dtype
from utils.model.flops import effective_length
from utils.model.isolation import NO_PADDING, choose_isolated_attention
from utils.model.loss_head import LossHeadChoice, choose_loss_head, router_term
from utils.model.probe import CPU, ProbeError
from utils.model.quantization import Quantized, check_quantization, quantized_layers
from utils.model.weights import weights_dtype
from utils.planning.memory import TYPES, MemoryPlan, Report, checkpoint_bytes, plan_memory
from utils.planning.memory_trace import Kernels
from utils.planning.rehearsal import rehearse
from utils.planning.run_data import RunData
from utils.planning.suggestions import forecast_line, make_planner, suggest
from utils.support.foreign import naming
from utils.support.redaction import redact

logger = logging.getLogger(__name__)

STRATEGIES = ("single", "ddp", "fsdp2")  # whose optimizer may be ours: weights whole, or rows


@dataclass(frozen=True)
class OptimizerStates:
    """What the moments are kept as, and whether weights are rounded up or down at random."""

    kept_as: str
    stochastic_rounding: bool


@dataclass(frozen=True)
class RunPlan:
    """The sequences of every step, what computes them, and what that takes.

    settings: as they were parsed. report: what the log says of the plan.
    """

    settings: RunSettings
    sampler: GlobalBatchSampler
    accumulation: int  # micro-batches that a rank accumulates per step
    total_steps: int
    scheduled_saves: int  # by step count
    adapters: AdapterPlan | None
    quantized: Quantized | None
    attention: AttentionChoice
    loss_head: LossHeadChoice
    memory: MemoryPlan
    compiled: bool
    optimizer_states: OptimizerStates | None
    checkpoint_bytes: int
    save_dtype: torch.dtype  # of final/
    report: Report

    def training_arguments(self, run_id: str) -> TrainingArguments:
        """Return the arguments of Trainer: a copy of the parsed ones with what the plan derives."""
        training = self.settings.training
        checkpointing = self.memory.choice != "none"  # Trainer knows a boolean
        return with_values(
            training,
            gradient_accumulation_steps=self.accumulation,
            max_steps=self.total_steps,
            activation_checkpointing=checkpointing,
            gradient_checkpointing=checkpointing,
            run_name=tracker_name(training, run_id),
            # The loader begins at the step itself: Trainer has no batches to skip.
            ignore_data_skip=True,
            # Trainer would cast the weights in place in the evaluation before the export.
            bf16_full_eval=False,
            fp16_full_eval=False,
            # Trainer would upload at each save. finish_run uploads once.
            push_to_hub=False,
            # Checkpoints deletes old ones.
            save_total_limit=None,
        )


def tracker_name(training: TrainingArguments, run_id: str) -> str | None:
    """Return the name of a run in its trackers, without known secrets; None: theirs."""
    if training.run_name:
        return redact(training.run_name)
    if {"mlflow", "trackio"}.isdisjoint(training.report_to or ()):
        return None
    # trackio finds the run of earlier starts by its name alone.
    return f"{Path(str(training.output_dir)).absolute().name}-{run_id[:6]}"


def log_plan(plan: RunPlan) -> None:
    """Log the arithmetic of a plan and what was chosen, in the order of the choices."""
    for level, text in plan.report:
        logger.log(level, "%s", text)


def plan_run(
    settings: RunSettings, data: RunData, config: PreTrainedConfig, launch: LaunchFacts
) -> RunPlan:
    """Work out accumulation, steps, kernels and memory.

    Raises ConfigurationError when the global batch does not divide, the data is smaller than one
    global batch, no attention keeps packed documents apart, or the memory is too small. The error
    carries the report up to the refusal.
    """
    report = Report()
    try:
        return _plan(settings, data, config, launch, report)
    except ConfigurationError as error:
        error.report = tuple(report)
        raise


def _plan(
    settings: RunSettings,
    data: RunData,
    config: PreTrainedConfig,
    launch: LaunchFacts,
    report: Report,
) -> RunPlan:
    run, training = settings.run, settings.training
    sampler, accumulation = _steps(settings, data, launch, report)
    total_steps = sampler.total_steps
    check_quantization(settings, config, launch.strategy)
    states = choose_optimizer_states(settings, config, launch)
    report.say(f"precision: {precision_line(settings, config, states, launch.device)}")
    if training.bf16_full_eval or training.fp16_full_eval:
        report.say("bf16_full_eval, fp16_full_eval: evaluation computes as training does")
    device = probe_device(settings, launch)
    report += rehearse(settings, config, states is not None, total_steps, device)
    with naming(str(settings.model.model_config or config.name_or_path)):
        attention = _attention(settings, data, config, device)
    report.say(f"attention: {attention.reason}; {attention.proof}")
    adapters = plan_adapters(settings.model, config)
    adapted = settings
    if adapters is not None:
        adapted = replace(settings, model=adapters.model)
        for line in adapters.report:
            report.say(line)
    loss_head = _loss_head(settings, config, adapters, bool(data.new_tokens), device, report)
    elsewhere = on_a_login_node(settings, launch)
    compiled, why = choose_compilation(settings, config, launch, elsewhere)
    if why:
        report.say(f"compile: {why}")
    kernels = Kernels(attention, loss_head, compiled, elsewhere)
    planner = None
    if run.assume or run.suggest:
        document_tokens = effective_length(data.train.plans, sampler.order.shares())
        planner = make_planner(adapted, config, launch, kernels, document_tokens)
    if planner is not None and run.suggest:
        report += suggest(planner, launch)
    memory, lines = plan_memory(adapted, config, launch, kernels)
    report += lines
    if planner is not None:
        report.say(forecast_line(planner, launch, memory.choice, total_steps))
    saved_bytes = checkpoint_bytes(adapted, config, launch)
    if run.dry_run:
        report += report_run(settings, launch, total_steps, saved_bytes)
    every = save_interval(training, total_steps)
    return RunPlan(
        settings=settings,
        sampler=sampler,
        accumulation=accumulation,
        total_steps=total_steps,
        scheduled_saves=math.ceil(total_steps / every) if every else 0,
        adapters=adapters,
        quantized=quantized_layers(adapted.model, config),
        attention=attention,
        loss_head=loss_head,
        memory=memory,
        compiled=compiled,
        optimizer_states=states,
        checkpoint_bytes=saved_bytes,
        save_dtype=saved_dtype(settings, config, weights_dtype(settings.model, config)),
        report=report,
    )


def _steps(
    settings: RunSettings, data: RunData, launch: LaunchFacts, report: Report
) -> tuple[GlobalBatchSampler, int]:
    """Return the sequences of every step, and the micro-batches that a rank accumulates."""
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
    return sampler, accumulation


def _total_steps(settings: RunSettings, rows: int) -> int:
    """Return the steps of the run, by its tokens, its steps or its epochs of `rows` sequences."""
    run, training = settings.run, settings.training
    if run.max_tokens is not None:
        step_tokens = run.global_batch_size * settings.data.sequence_length
        return math.ceil(token_count(run.max_tokens) / step_tokens)
    if training.max_steps > 0:
        return training.max_steps
    # The last global batch is filled from the epoch after the last one, never cut short.
    return math.ceil(training.num_train_epochs * rows / run.global_batch_size)


def save_interval(training: TrainingArguments, total_steps: int) -> int | None:
    """Return after how many steps each a checkpoint is due; None: only a stop is saved."""
    if training.save_strategy == "epoch":
        return math.ceil(total_steps / max(1, math.ceil(training.num_train_epochs)))
    steps = training.save_steps
    if training.save_strategy == "steps":
        return math.ceil(total_steps * steps) if steps < 1 else int(steps)
    return None


def report_run(
    settings: RunSettings, launch: LaunchFacts, total_steps: int, checkpoint_bytes: int
) -> Report:
    """Return the lines of a dry run on processes, saves and directory; raises ConfigurationError.

    What Slurm understood of a job, its time limit above all: see utils/submit/check.py.
    """
    training, output_dir = settings.training, Path(str(settings.training.output_dir))
    # As the user set it: a dry run without GPU sets use_cpu by itself.
    if settings.values.on_cpu and launch.strategy.startswith(("fsdp", "zero")):
        raise ConfigurationError(
            f"{launch.strategy} needs GPUs, but use_cpu or ACCELERATE_USE_CPU asks for the CPU, "
            "where accelerate would train with plain DDP: use strategy: cpu, or "
            "leave it out"
        )
    report = Report()
    report.say(f"processes: {launch.world_size}, strategy {launch.strategy}")
    if every := save_interval(training, total_steps):
        count = math.ceil(total_steps / every)
        most = most_at_once(training.save_total_limit, count) + settings.run.save_best
        minutes = settings.run.save_minutes
        report.say(
            f"saves: every {every:,} steps ({count:,} in all)"
            f"{f', at least every {minutes:g} minutes' if minutes else ''}"
            f"{', each new best' if settings.run.save_best else ''}; at most {most:,} at once, "
            f"{readable(checkpoint_bytes)} each: {readable(most * checkpoint_bytes)}, plus final/"
        )
    else:
        # A stop still saves; refusing would forbid short runs that nobody needs to resume.
        report.warn("save_strategy no: only a stop is saved, a crash loses everything")
    state = "resumes" if (output_dir / "config.yaml").exists() else "new"
    report.say(f"run directory: {output_dir} ({state})")
    report.say(f"to stop it with a checkpoint: touch {shlex.quote(f'{output_dir}/STOP')}")
    return report


def on_a_login_node(settings: RunSettings, launch: LaunchFacts) -> bool:
    """Say whether this only looks at a run that trains elsewhere, on other hardware."""
    if settings.run.assume:
        return True
    return settings.run.dry_run and launch.device == "cpu" and not settings.values.on_cpu


def choose_optimizer_states(
    settings: RunSettings, config: PreTrainedConfig, launch: LaunchFacts
) -> OptimizerStates | None:
    """Return what our own optimizer keeps; None: torch's does. Raises ConfigurationError."""
    run, weights = settings.run, weights_dtype(settings.model, config)
    trained = torch.float32 if settings.model.use_peft else weights  # PEFT's adapters
    own = name_of(trained)
    if run.ema_decay is not None and launch.strategy not in STRATEGIES:
        raise ConfigurationError(
            f"{settings.values.shown('ema_decay')} does not go with {launch.strategy}, which keeps "
            "weights in its own way: use multi_gpu.yaml or fsdp2.yaml, or leave it out."
        )
    if run.optim_states in (None, own) and not run.stochastic_rounding:
        return None
    asked = settings.values.shown("optim_states" if run.optim_states else "stochastic_rounding")
    if launch.strategy not in STRATEGIES:
        raise ConfigurationError(
            f"{asked} does not go with {launch.strategy}, which keeps states in its own way: use "
            "strategy: multi_gpu or fsdp2, or leave it out."
        )
    if run.stochastic_rounding and weights != torch.bfloat16:
        raise ConfigurationError(
            f"{asked} has no effect on weights in {own}: set dtype: bfloat16 to keep them in 2 "
            "bytes."
        )
    return OptimizerStates(run.optim_states or own, run.stochastic_rounding)


def precision_line(
    settings: RunSettings, config: PreTrainedConfig, states: OptimizerStates | None, device: str
) -> str:
    """Say in which types weights and states are kept and computed with, and who chose that."""
    training, why = settings.training, settings.values.source("bf16")
    weights, mixed = weights_dtype(settings.model, config), training.mixed_precision
    hint = ""
    if settings.run.assume:
        device = "cuda"
    if mixed != "no" and why in (FAST_BF16, BY_LAUNCH):
        hint = f" ({why}; --bf16 false for float32)"
    elif why == NODE_UNKNOWN:
        hint = f" ({why})"
    elif why == "default" and mixed == "no" and device == "cuda" and not training.tf32:
        hint = " (--bf16 true is several times as fast on a GPU)"
    computed = "no mixed precision" if mixed == "no" else f"mixed precision {mixed}"
    parts = [f"{name_of(weights)} weights", f"{computed}{hint}"]
    if states is not None:
        rounded = ", weights rounded stochastically" if states.stochastic_rounding else ""
        parts.append(f"Adam's states in {states.kept_as}{rounded}")
    elif weights == torch.bfloat16 and not settings.model.use_peft:
        parts.append(
            "rounded to the nearest: updates below a 500th of a weight are lost "
            "(--stochastic_rounding true keeps them on average)"
        )
    return ", ".join(parts)


def _attention(
    settings: RunSettings, data: RunData, config: PreTrainedConfig, device: torch.device | None
) -> AttentionChoice:
    """Choose the attention and prove that it keeps packed documents apart in this model."""
    model, training = settings.model, settings.training
    whole_rows = all(
        plan.one_document_each
        for rows in (data.train, *data.evaluation.values())
        for plan in rows.plans
    )
    if not whole_rows:
        check_row_positions(config, settings.data.sequence_length)
    if device is None:
        asked = model.attn_implementation
        reason = f"{asked}, settled on the compute node (there is no accelerator here)"
        proof = _proved_on_cpu(asked, config, whole_rows)
        return AttentionChoice(NAME, OPEN, reason, unproved=proof)
    computed = TYPES.get(training.mixed_precision) or weights_dtype(model, config)
    choice = choose_isolated_attention(
        model.attn_implementation, config, device, computed, whole_rows=whole_rows
    )
    rows = (training.per_device_train_batch_size, training.per_device_eval_batch_size)
    if choice.batches == "alone" and max(rows) > 1:
        raise ConfigurationError(
            f"{config.model_type} computes other logits where sequences are padded, and "
            f"micro-batches of {rows[0]} sequences (evaluation: {rows[1]}) need padding. To train "
            f"it, set {NO_PADDING}."
        )
    return choice


def probe_device(settings: RunSettings, launch: LaunchFacts) -> torch.device | None:
    """Return the device that small models are tried on: the one that trains.

    Kernels in Triton (flash-linear-attention, mamba-ssm, causal-conv1d) run on no other. None on a
    login node: a CPU stands in, and what does not run on it is tried where the run trains.
    """
    return None if on_a_login_node(settings, launch) else settings.training.device


def _proved_on_cpu(requested: str | None, config: PreTrainedConfig, whole_rows: bool) -> str:
    """Prove on a login node what does not depend on a GPU's kernels; return what was found.

    Documents that see each other through attention do so on every device. Recurrent layers have
    kernels of their own on GPUs, which may keep apart what the CPU's do not. Raises
    ConfigurationError.
    """
    asked = requested if requested in RUN_ANYWHERE else "auto"
    try:
        choice = choose_isolated_attention(asked, config, CPU, torch.float32, whole_rows=whole_rows)
    except (ConfigurationError, ImportError) as error:
        if not (isinstance(error, ProbeError | ImportError) or is_recurrent(config)):
            raise
        return f"checked there, where the run trains. Here, on a CPU: {first_line(error)}"
    return choice.proof


def _loss_head(
    settings: RunSettings,
    config: PreTrainedConfig,
    adapters: AdapterPlan | None,
    has_new_tokens: bool,
    device: torch.device | None,
    report: Report,
) -> LossHeadChoice:
    """Choose how the loss is computed; without a device that trains, a CPU proves what it can."""
    training = settings.training
    fine_tuning = isinstance(training, FineTuneConfig)
    given = training.router_aux_loss_coef if isinstance(training, FineTuneConfig) else None
    router = router_term(config, fine_tuning=fine_tuning, given=given)
    # PEFT trains new tokens' rows in layers of its own, which the fused head goes past.
    adapted = adapters is not None and (adapters.targets.head or has_new_tokens)
    choice = choose_loss_head(settings.model.loss_head, config, adapted, router, device)
    report.say(f"loss: {choice.reason}")
    if has_experts(without_weights(config)):
        term = f"times {router.coefficient:g}" if router else "none: output_router_logits adds it"
        report.say(f"experts: load-balancing loss of each global batch, {term}")
    return choice
