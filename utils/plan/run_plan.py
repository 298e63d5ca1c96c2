"""The plan of a run, made from settings, data, model and launch, and its log lines."""

import logging
import math
import os
import shlex
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig, TrainingArguments

from utils.checkpoints.discovery import max_checkpoints
from utils.checkpoints.files import readable
from utils.config.arguments import MUON, FineTuneConfig, with_values
from utils.config.errors import ConfigurationError, Report
from utils.config.own_code import callback_class
from utils.config.precision import BY_LAUNCH, FAST_CPU
from utils.config.settings import RunSettings
from utils.data.order import GlobalBatchSampler
from utils.host.foreign import prefix_errors
from utils.host.redaction import redact
from utils.kernels.varlen import NAME
from utils.launch.processes import LaunchFacts
from utils.model.adapters import AdapterPlan, frozen_lines, plan_adapters
from utils.model.architecture import error_text, has_experts, without_weights
from utils.model.attention import (
    RUN_ANYWHERE,
    UNDECIDED,
    AttentionChoice,
    check_row_positions,
    choose_isolated_attention,
    is_recurrent,
)
from utils.model.finished_model import dtype_name, saved_dtype
from utils.model.flops import effective_length
from utils.model.layers import Float8Plan, choose_compilation, pads_to_longest, plan_float8
from utils.model.loss_head import LossHeadChoice, check_own_loss, choose_loss_head, router_term
from utils.model.probe import CPU, ProbeError
from utils.model.weights import COMPUTED, Quantized, check_quantization, weights_dtype
from utils.plan.context_parallel import check_context_parallel_model
from utils.plan.forecast import forecast_line, make_planner, suggest
from utils.plan.memory_estimate import checkpoint_bytes, count_parameters
from utils.plan.memory_plan import MemoryPlan, plan_memory
from utils.plan.memory_trace import Setup
from utils.plan.ranks import report_ranks
from utils.plan.rehearsal import rehearse
from utils.plan.run_data import RunData, plan_steps

logger = logging.getLogger(__name__)

DATA_WORKERS = 2  # batches are views of mapped files, so two processes keep a GPU supplied
# Strategies that LowPrecisionAdamW supports. They keep weights whole or shard them by rows.
LOW_PRECISION_STRATEGIES = ("single", "ddp", "fsdp2")


@dataclass(frozen=True)
class OptimizerStates:
    """Options of LowPrecisionAdamW: the type of Adam's moments, and how weights are rounded."""

    moment_type: str
    stochastic_rounding: bool


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run: the sequences of each step, the kernels, and the memory per device.

    to_longest: whether micro-batches are padded to their longest document. report: log lines.
    """

    settings: RunSettings
    sampler: GlobalBatchSampler
    total_steps: int
    adapters: AdapterPlan | None
    quantized: Quantized | None
    float8: Float8Plan | None
    attention: AttentionChoice
    loss_head: LossHeadChoice
    memory: MemoryPlan
    compiled: bool
    to_longest: bool
    optimizer_states: OptimizerStates | None
    checkpoint_bytes: int
    save_dtype: torch.dtype  # of the weights in final/
    data_workers: int
    report: Report

    @property
    def scheduled_saves(self) -> int:
        """The number of checkpoints that the run saves at regular intervals."""
        every = save_interval(self.settings.training, self.total_steps)
        return math.ceil(self.total_steps / every) if every else 0

    def training_arguments(self, run_id: str) -> TrainingArguments:
        """Return a copy of the TrainingArguments with the values of this plan."""
        training = self.settings.training
        checkpointing = self.memory.choice != "none"  # Trainer only knows a boolean
        return with_values(
            training,
            gradient_accumulation_steps=self.sampler.accumulation_steps,
            max_steps=self.total_steps,
            dataloader_num_workers=self.data_workers,
            dataloader_prefetch_factor=self.settings.values["dataloader_prefetch_factor"],
            activation_checkpointing=checkpointing,
            gradient_checkpointing=checkpointing,
            run_name=tracker_name(self.settings, run_id),
            # The loader of a resumed run begins at the right step. Trainer must skip no batches.
            ignore_data_skip=True,
            # If true, Trainer would cast the weights in place at the evaluation before the export.
            bf16_full_eval=False,
            fp16_full_eval=False,
            # Trainer would upload at each save. finish_run uploads once.
            push_to_hub=False,
            # Our class Checkpoints deletes old checkpoints.
            save_total_limit=None,
        )


def tracker_name(settings: RunSettings, run_id: str) -> str | None:
    """Return the run's name for trackers, without secrets. None means that the tracker chooses."""
    if settings.training.run_name:
        return redact(settings.training.run_name)
    if {"mlflow", "trackio"}.isdisjoint(settings.training.report_to or ()):
        return None
    # trackio recognizes a resumed run only by its name.
    return f"{settings.output_dir.absolute().name}-{run_id[:6]}"


def log_plan(plan: RunPlan) -> None:
    """Log the lines of the plan."""
    for level, text in plan.report:
        logger.log(level, "%s", text)


def plan_run(
    settings: RunSettings, data: RunData, config: PreTrainedConfig, launch: LaunchFacts
) -> RunPlan:
    """Make the plan. If a ConfigurationError is raised, its `report` has the log lines so far."""
    run, elsewhere = settings.run, on_a_login_node(settings, launch)
    device = None if elsewhere else settings.training.device  # for tests with small models
    with Report() as report:
        sampler = plan_steps(settings, data, launch, report)
        for entry in settings.own_code.callbacks:
            callback_class(entry)  # raises an error for faulty code
        check_quantization(settings, config, launch.strategy)
        states = choose_optimizer_states(settings, config, launch)
        report.say(f"precision: {precision_line(settings, config, states, launch.device)}")
        rehearse(settings, config, states is not None, sampler.total_steps, device, report)
        attention = _plan_attention(settings, data, config, device, report)
        adapters = plan_adapters(settings.model, config)
        for line in adapters.report if adapters else frozen_lines(settings.model, config):
            report.say(line)
        model = adapters.model if adapters else settings.model
        loss_head = _plan_loss(settings, config, adapters, bool(data.new_tokens), device, report)
        compiled, why = choose_compilation(settings, config, launch, elsewhere)
        if why:
            report.say(f"compile: {why}")
        float8 = plan_float8(settings, config, launch, elsewhere, compiled, report)
        to_longest = pads_to_longest(settings, config, attention.name, compiled, report)
        setup = Setup(
            replace(settings, model=model), config, launch, attention, loss_head,
            count_parameters(model, config), compiled, elsewhere,
        )  # fmt: skip
        planner = None
        if run.assume or run.suggest:
            document_tokens = effective_length(data.train.plans, sampler.order.shares())
            planner = make_planner(setup, document_tokens)
            if run.suggest:
                suggest(planner, report)
        memory = plan_memory(setup, report)
        if planner is not None:
            report.say(forecast_line(planner, memory.choice, sampler.full_size_steps, to_longest))
            report_ranks(setup, planner.gpus, sampler, report)
        saved_bytes = checkpoint_bytes(setup)
        if run.dry_run:
            report_run(settings, launch, sampler.total_steps, saved_bytes, report)
    return RunPlan(
        settings=settings,
        sampler=sampler,
        total_steps=sampler.total_steps,
        adapters=adapters,
        quantized=setup.quantized,
        float8=float8,
        attention=attention,
        loss_head=loss_head,
        memory=memory,
        compiled=compiled,
        to_longest=to_longest,
        optimizer_states=states,
        checkpoint_bytes=saved_bytes,
        save_dtype=saved_dtype(settings, config, setup.dtype),
        data_workers=choose_data_workers(settings, launch, report),
        report=report,
    )


def choose_data_workers(settings: RunSettings, launch: LaunchFacts, report: Report) -> int:
    """Return the number of data workers: dataloader_num_workers, or a default of at most 2."""
    given = settings.values["dataloader_num_workers"]
    if given is not None or launch.device == "cpu" or settings.run.dry_run:
        return given or 0  # on a CPU the workers would take cores from the training
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    workers = max(0, min(DATA_WORKERS, cores - 2))
    report.say(f"data workers: {workers}, as this rank has {cores} cores (dataloader_num_workers)")
    return workers


def choose_optimizer_states(
    settings: RunSettings, config: PreTrainedConfig, launch: LaunchFacts
) -> OptimizerStates | None:
    """Return LowPrecisionAdamW's options, or None if the run has another optimizer.

    Raises ConfigurationError if the strategy or the type of the weights excludes the options.
    """
    run, weights = settings.run, weights_dtype(settings.model, config)
    trained = torch.float32 if settings.model.use_peft else weights  # PEFT's adapters are float32
    own = dtype_name(trained)
    asked = [] if run.ema_decay is None else ["ema_decay"]
    if settings.training.optim == MUON:
        asked.append("optim")
    if run.optim_states not in (None, own):
        asked.append("optim_states")
    if run.stochastic_rounding:
        asked.append("stochastic_rounding")
    if asked and launch.strategy not in LOW_PRECISION_STRATEGIES:
        raise ConfigurationError(
            f"{settings.values.shown(asked[0])} does not go with {launch.strategy}, which keeps "
            "weights and states in its own way: use strategy: multi_gpu or fsdp2, or leave it out."
        )
    if run.stochastic_rounding and weights != torch.bfloat16:
        raise ConfigurationError(
            f"{settings.values.shown('stochastic_rounding')} has no effect on weights in {own}: "
            "set dtype: bfloat16 to keep them in 2 bytes."
        )
    if {"optim_states", "stochastic_rounding"}.isdisjoint(asked):
        return None
    return OptimizerStates(run.optim_states or own, run.stochastic_rounding)


def precision_line(
    settings: RunSettings, config: PreTrainedConfig, states: OptimizerStates | None, device: str
) -> str:
    """Return the log line on precision: the types of weights, products and optimizer states."""
    training, why = settings.training, settings.values.source("bf16")
    weights, mixed = weights_dtype(settings.model, config), training.mixed_precision
    hint = ""
    if settings.run.assume:
        device = "cuda"
    if mixed != "no" and why in (FAST_CPU, BY_LAUNCH):
        hint = f" ({why}; --bf16 false for float32)"
    elif why == "default" and mixed == "no" and device == "cuda" and not training.tf32:
        hint = " (--fp16 true is several times as fast on this GPU)"
    computed = "no mixed precision" if mixed == "no" else f"mixed precision {mixed}"
    parts = [f"{dtype_name(weights)} weights", f"{computed}{hint}"]
    if states is not None:
        rounded = ", weights rounded stochastically" if states.stochastic_rounding else ""
        parts.append(f"Adam's states in {states.moment_type}{rounded}")
    elif weights == torch.bfloat16 and not settings.model.use_peft:
        parts.append(
            "rounded to the nearest: updates below a 500th of a weight are lost "
            "(--stochastic_rounding true keeps them on average)"
        )
    if training.bf16_full_eval or training.fp16_full_eval:
        parts.append("evaluation as training (bf16_full_eval, fp16_full_eval have no effect)")
    return ", ".join(parts)


def save_interval(training: TrainingArguments, total_steps: int) -> int | None:
    """Return the steps between two regular checkpoints. None means no regular checkpoints."""
    if training.save_strategy == "epoch":
        return math.ceil(total_steps / max(1, math.ceil(training.num_train_epochs)))
    steps = training.save_steps
    if training.save_strategy == "steps":
        return math.ceil(total_steps * steps) if steps < 1 else int(steps)
    return None


def report_run(
    settings: RunSettings,
    launch: LaunchFacts,
    total_steps: int,
    checkpoint_bytes: int,
    report: Report,
) -> None:
    """Add a dry run's lines on processes, saves and run directory to `report`.

    Raises ConfigurationError if the settings ask for the CPU, but the strategy needs GPUs.
    """
    training, output_dir = settings.training, settings.output_dir
    # `values` has the user's use_cpu. A dry run without a GPU changes use_cpu in `training`.
    if settings.values.on_cpu and launch.strategy.startswith(("fsdp", "zero")):
        raise ConfigurationError(
            f"{launch.strategy} needs GPUs, but use_cpu or ACCELERATE_USE_CPU asks for the CPU, "
            "where accelerate would train with plain DDP: use strategy: cpu, or "
            "leave it out"
        )
    report.say(f"processes: {launch.world_size}, strategy {launch.name}")
    if every := save_interval(training, total_steps):
        count = math.ceil(total_steps / every)
        most = max_checkpoints(training.save_total_limit, count) + settings.run.save_best
        minutes = settings.run.save_minutes
        report.say(
            f"saves: every {every:,} steps ({count:,} in all)"
            f"{f', at least every {minutes:g} minutes' if minutes else ''}"
            f"{', each new best' if settings.run.save_best else ''}; at most {most:,} at once, "
            f"{readable(checkpoint_bytes)} each: {readable(most * checkpoint_bytes)}, plus final/"
        )
    else:
        # Do not refuse this: a stop still saves, and short runs need no other checkpoint.
        report.warn("save_strategy no: only a stop is saved, a crash loses everything")
    state = "resumes" if (output_dir / "config.yaml").exists() else "new"
    report.say(f"run directory: {output_dir} ({state})")
    report.say(f"to stop it with a checkpoint: touch {shlex.quote(f'{output_dir}/STOP')}")


def on_a_login_node(settings: RunSettings, launch: LaunchFacts) -> bool:
    """Return whether this is a dry run for GPUs that this machine does not have."""
    on_cpu = settings.run.dry_run and launch.device == "cpu"
    return bool(settings.run.assume) or (on_cpu and not settings.values.on_cpu)


def _plan_attention(
    settings: RunSettings,
    data: RunData,
    config: PreTrainedConfig,
    device: torch.device | None,
    report: Report,
) -> AttentionChoice:
    """Choose an attention that isolates packed documents and works with context_parallel."""
    model, training = settings.model, settings.training
    whole_rows = all(
        plan.one_document_each
        for rows in (data.train, *data.evaluation.values())
        for plan in rows.plans
    )
    asked = model.attn_implementation
    with prefix_errors(str(model.model_config or config.name_or_path)):
        if not whole_rows:
            check_row_positions(config, settings.data.sequence_length)
        if device is None:
            reason = f"{asked}, settled on the compute node (there is no accelerator here)"
            proof = _test_isolation(asked, config, whole_rows)
            choice = AttentionChoice(NAME, UNDECIDED, reason, unproved=proof)
        else:
            dtype = COMPUTED.get(training.mixed_precision) or weights_dtype(model, config)
            choice = choose_isolated_attention(asked, config, device, dtype, whole_rows=whole_rows)
    report.say(f"attention: {choice.reason}; {choice.proof}")
    check_context_parallel_model(settings, config, choice, device, report)
    return choice


def _test_isolation(requested: str | None, config: PreTrainedConfig, whole_rows: bool) -> str:
    """Test on a login node's CPU that packed documents do not attend to each other.

    Returns the result as text. whole_rows: whether each sequence has only one document. Raises
    ConfigurationError if the test fails, because the masks are the same on a GPU. Exceptions:
    recurrent models that fail, and models that do not run on a CPU, are tested in the real run.
    """
    asked = requested if requested in RUN_ANYWHERE else "auto"
    try:
        choice = choose_isolated_attention(asked, config, CPU, torch.float32, whole_rows=whole_rows)
    except (ConfigurationError, ImportError) as error:
        if not (isinstance(error, ProbeError | ImportError) or is_recurrent(config)):
            raise
        return f"checked there, where the run trains. Here, on a CPU: {error_text(error)}"
    return choice.proof


def _plan_loss(
    settings: RunSettings,
    config: PreTrainedConfig,
    adapters: AdapterPlan | None,
    has_new_tokens: bool,
    device: torch.device | None,
    report: Report,
) -> LossHeadChoice:
    """Choose how to compute logits and loss. device: None means a login node."""
    training = settings.training
    fine_tuning = isinstance(training, FineTuneConfig)
    given = training.router_aux_loss_coef if isinstance(training, FineTuneConfig) else None
    router = router_term(config, fine_tuning=fine_tuning, given=given)
    # PEFT puts new tokens' trained rows into its own layers, which the fused head bypasses.
    adapted = adapters is not None and (adapters.trains_head or has_new_tokens)
    requested, own = settings.model.loss_head, settings.own_code.loss
    if own:
        check_own_loss(own)
        if requested == "fused" or router is not None:
            why = "a load-balancing loss" if router else settings.values.shown("loss_head")
            raise ConfigurationError(
                f"--loss {own} does not go with {why}: it gets the logits alone"
            )
        requested = "logits"
    choice = choose_loss_head(requested, config, adapted, router, device)
    if own:
        choice = replace(choice, reason=f"{own} in training, cross-entropy in evaluations")
    report.say(f"loss: {choice.reason}")
    if has_experts(without_weights(config)):
        term = f"times {router.coefficient:g}" if router else "none: output_router_logits adds it"
        report.say(f"experts: load-balancing loss of each global batch, {term}")
    return choice
