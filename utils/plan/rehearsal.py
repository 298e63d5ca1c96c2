"""A rehearsal of one training step with tiny weights, before any real weights are loaded.

Dry runs and real starts try the optimizer, schedule, recomputation and trackers here. An error of a
library becomes a ConfigurationError that names the setting.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    SchedulerType,
    Trainer,
    TrainingArguments,
)
from transformers.integrations import get_reporting_integration_callbacks

from utils.config.arguments import MUON, with_values
from utils.config.declarations import SettingValues, is_installed
from utils.config.errors import ConfigurationError, Report
from utils.config.settings import RunSettings
from utils.model.architecture import error_text, without_weights
from utils.model.weights import weights_dtype

OPTIMIZER_SETTINGS = "optim optim_args optim_target_modules adam_beta1 adam_beta2 adam_epsilon"
SCHEDULE = "lr_scheduler_type lr_scheduler_kwargs warmup_steps learning_rate"
OPTIMIZER_SPECIFIC = ("adam_beta1", "adam_beta2", "adam_epsilon", "optim_target_modules")
NO_REENTRY = {"use_reentrant": False}  # transformers' default; torch warns if it is not given
LEAST_PEAK_FACTOR = 0.999
TINY_SIZE = 64  # size of the tiny weights: below 64 x 64 bitsandbytes keeps states in 32 bits
SAMPLED_STEPS = 256


class _Rehearsal(Trainer):
    """A Trainer without processes and callbacks. It can only build an optimizer and a schedule."""

    def __init__(self, args: TrainingArguments, model: PreTrainedModel, optimizer: Any):
        self.args, self.model, self.optimizer_cls_and_kwargs = args, model, optimizer
        self.optimizer = self.lr_scheduler = None


def rehearse(
    settings: RunSettings,
    config: PreTrainedConfig,
    own_optimizer: bool,
    total_steps: int,
    device: torch.device | None,
    report: Report,
) -> None:
    """Build the optimizer, schedule and trackers, and take one step on tiny weights.

    Adds lines on the schedule and on settings without effect to `report`. Raises ConfigurationError
    with the libraries' errors. own_optimizer: True if the run uses LowPrecisionAdamW instead of
    Trainer's optimizer, so the optimizer is not checked. device: the device that trains. None means
    a login node, where no step is taken.
    """
    values, args = settings.values, settings.training
    problems: list[str] = []
    with _collect_error(values, "activation_checkpointing_kwargs", problems):
        _try_recomputation(args)
    with _collect_error(values, "report_to", problems):
        for name in args.report_to or ():
            (callback,) = get_reporting_integration_callbacks([name])
            if not is_installed(name):  # importing an installed tracker takes seconds
                callback()
    model = _tiny_model(config, weights_dtype(settings.model, config), device)
    own_optimizer |= args.optim == MUON
    stand_in = (torch.optim.SGD, {"lr": args.learning_rate}) if own_optimizer else None
    trainer = _Rehearsal(args, model, stand_in)
    with _collect_error(values, OPTIMIZER_SETTINGS, problems):
        pairs = optimizer_pairs(args.optim_args)
        built = trainer.create_optimizer()
        if args.optim == MUON:
            muon_options(args.optim_args)
        if not own_optimizer:
            _check_options(args, model, pairs, built.defaults)
            _report_ignored_settings(settings, model, report)
        if device is not None:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            built.step()
    if trainer.optimizer is not None:
        with _collect_error(values, SCHEDULE, problems):
            _try_schedule(trainer, settings, total_steps, report)
    if problems:
        raise ConfigurationError(problems)


def _tiny_model(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device | None
) -> PreTrainedModel:
    """Return the model with weights of ones: at most 64 x 64 in size, one expert per layer."""
    model = without_weights(config)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            shape = [1] * (weight.ndim - 2) + [min(size, TINY_SIZE) for size in weight.shape[-2:]]
            tiny = nn.Parameter(torch.ones(shape, dtype=dtype, device=device))
            module.register_parameter(name, tiny)
    return model


@contextmanager
def _collect_error(values: SettingValues, names: str, problems: list[str]) -> Iterator[None]:
    """Catch an exception of the with block and add its text to `problems`.

    names: names of settings, separated by spaces. The text names the first setting, and those of
    the other settings that the user changed.
    """
    try:
        yield
    except Exception as error:
        first, *others = names.split()
        missing = isinstance(error, ImportError)  # only the first setting needs the package
        shown = [first, *(name for name in others if values.changed(name) and not missing)]
        text = error_text(error)
        if not isinstance(error, ValueError | ImportError | RuntimeError):
            text = f"{type(error).__name__}: {text}"
        problems.append(f"{', '.join(map(values.shown, shown))}: {text}")


def _try_recomputation(args: TrainingArguments) -> None:
    """Call torch's `checkpoint` with the user's options. Wrong keys or values raise an error."""
    given: Any = args.activation_checkpointing_kwargs  # TrainingArguments made it a mapping
    keywords: dict[str, Any] = dict(given or {})
    every = keywords.pop("every_n_layers", 1)
    if type(every) is not int or every < 1:
        raise ValueError(f"every_n_layers has to be a whole number above 0, not {every!r}")
    if type(offload := keywords.pop("offload", False)) is not bool:
        raise ValueError(f"offload has to be true or false, not {offload!r}")
    weight = torch.ones(1, requires_grad=True)
    with warnings.catch_warnings(action="ignore"):  # the real model gives the same warnings
        result: Any = checkpoint(lambda inputs: inputs * inputs, weight, **(keywords or NO_REENTRY))
        result.backward()


def _check_options(
    args: TrainingArguments, model: PreTrainedModel, given: dict[str, str], defaults: dict[str, Any]
) -> None:
    """Raise ValueError for a key of optim_args that does not change the optimizer's options.

    given: optim_args as a dict. defaults: the options with which Trainer built the optimizer.
    """
    pairs = [f"{key}={value}" for key, value in given.items()]
    for pair, (key, value) in zip(pairs, given.items(), strict=True):
        if key != "weight_decay" and str(defaults.get(key)).lower() == value.lower():
            continue  # repeats a default, for example relative_step=false
        without = [each for each in pairs if each != pair]
        other = [f"{key}=x" if each == pair else each for each in pairs]  # try another value
        texts = map(",".join, (pairs, without, other))
        options = {_optimizer_text(with_values(args, optim_args=text), model) for text in texts}
        # Trainer sets weight_decay on each group of weights, which overrides optim_args.
        if len(options) == 1 or key == "weight_decay":
            raise ValueError(
                f"{key} has no effect in optim_args: leave it out (learning_rate, weight_decay, "
                "adam_beta1, adam_beta2 and adam_epsilon are settings)"
            )


def _report_ignored_settings(settings: RunSettings, model: PreTrainedModel, report: Report) -> None:
    values, args = settings.values, settings.training
    for name in OPTIMIZER_SPECIFIC:
        without = with_values(args, **{name: values.declared[name].default})
        if values.changed(name) and _optimizer_text(without, model) == _optimizer_text(args, model):
            report.say(f"settings: {values.shown(name)} has no effect: {values.shown('optim')}")


def _optimizer_text(args: TrainingArguments, model: PreTrainedModel) -> str:
    """Return Trainer's optimizer and its options as text, or the text of Trainer's error."""
    try:
        return repr(Trainer.get_optimizer_cls_and_kwargs(args, model))
    except Exception as error:
        return repr(error)


def optimizer_pairs(text: str | None) -> dict[str, str]:
    """Parse `KEY=VALUE,KEY=VALUE` into a dict. Raises ValueError for another form."""
    pairs: dict[str, str] = {}
    for pair in text.replace(" ", "").split(",") if text else ():
        key, _, value = pair.partition("=")
        if not key or not value or "=" in value or key in pairs:
            raise ValueError(
                f"{pair!r} is no KEY=VALUE: give each key once, with commas between them, as in "
                "momentum=0.9,nesterov=true"
            )
        pairs[key] = value
    return pairs


def muon_options(text: str | None) -> dict[str, Any]:
    """Return Muon's momentum and ns_steps, with defaults. Raises ValueError for wrong options."""
    given = {"momentum": "0.95", "ns_steps": "5"} | optimizer_pairs(text)
    with suppress(ValueError):
        momentum, iterations = float(given.pop("momentum")), int(given.pop("ns_steps"))
        if 0 <= momentum < 1 and 0 < iterations < 100 and not given:
            return {"momentum": momentum, "ns_steps": iterations}
    raise ValueError(
        "muon takes momentum, at least 0 and below 1, and ns_steps, 1 to 99: "
        "momentum=0.95,ns_steps=5 are the defaults"
    )


def _try_schedule(
    trainer: _Rehearsal, settings: RunSettings, total_steps: int, report: Report
) -> None:
    """Compute learning rates over the whole run, and add a line on the schedule to `report`.

    Adds a warning if the highest rate is below the setting learning_rate. Raises ValueError if a
    rate is negative or not finite.
    """
    values, rate = settings.values, settings.training.learning_rate
    scheduler: Any = trainer.create_scheduler(total_steps)
    report.say(schedule_line(settings.training, scheduler, total_steps))
    if not isinstance(scheduler, LambdaLR):
        for _ in range(3):
            scheduler.step(1.0)  # an evaluation's metric
        return
    warmup = min(settings.training.get_warmup_steps(total_steps), total_steps - 1)
    sampled = range(0, total_steps, total_steps // SAMPLED_STEPS + 1)
    steps = sorted({*sampled, warmup, total_steps - 1})
    factors = [scale(step) for step in steps for scale in scheduler.lr_lambdas]
    for factor in factors:
        if not math.isfinite(factor) or factor < 0:
            raise ValueError(f"a learning rate would be {factor * rate:.3g}")
    for scale in scheduler.lr_lambdas:
        scale(total_steps)  # torch also computes the rate after the last step; no step uses it
    if (peak := max(factors)) < LEAST_PEAK_FACTOR:
        report.warn(
            f"{values.shown('lr_scheduler_type')}: the learning rate is at most {peak * rate:.3g} "
            f"in this run, not {rate:g} ({total_steps:,} steps, {values.shown('warmup_steps')})"
        )


def schedule_line(args: TrainingArguments, scheduler: Any, total_steps: int) -> str:
    """Return the log line on the schedule and the optimizer of a run of `total_steps` steps.

    The line has the learning rate of the last step. This is not the schedule's lowest rate if the
    run ends earlier than the schedule.
    """
    kind, given = str(SchedulerType(args.lr_scheduler_type).value), args.lr_scheduler_kwargs
    options, parts = dict(given) if isinstance(given, dict) else {}, list[str]()
    last = ", then as the evaluations decide"
    if isinstance(scheduler, LambdaLR):
        scale: Any = scheduler.lr_lambdas[0]
        last = f", {scale(total_steps - 1) * args.learning_rate:.3g} in the last step"
        if kind != "constant":
            parts.append(f"warmup {args.get_warmup_steps(total_steps):,}")
        for name in ("stable", "decay") if kind == "warmup_stable_decay" else ():
            parts.append(f"{name} {scale.keywords[f'num_{name}_steps']:,}")
            options.pop(f"num_{name}_steps", None)
    of = f": {', '.join(parts)}" if parts else ""
    optimizer = getattr(args.optim, "value", args.optim)  # an enum, or "muon"
    told = f" ({', '.join(f'{name} {value}' for name, value in options.items())})"
    return (
        f"schedule: {kind}{of} of {total_steps:,} steps{told if options else ''}; "
        f"optimizer: {optimizer}, learning rate {args.learning_rate:.3g}{last}"
    )
