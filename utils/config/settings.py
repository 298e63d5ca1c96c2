"""The settings of a run: read from flags and recipes, completed, checked and made into objects."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from utils.config.arguments import (
    DataArguments,
    FineTuneConfig,
    ModelArguments,
    PretrainConfig,
    RunArguments,
    batch_sizes,
    eval_splits,
    fitting_micro_batch,
    with_values,
)
from utils.config.command_line import read_settings
from utils.config.declarations import SettingsCheck, SettingValues, counted_ranks
from utils.config.launch_settings import (
    derive_group_sizes,
    launch_environment,
    let_recipe_decide,
)
from utils.config.own_code import OwnCode
from utils.config.precision import settle_precision
from utils.config.raw_data import RawData, add_validation_split, replace_raw_files
from utils.config.refusals import (
    FINE_TUNING_CHECKS,
    NEED_BEST_METRIC,
    PRETRAINING_CHECKS,
)
from utils.config.rules import (
    check_contradictions,
    no_effect,
    reset_overruled,
    reset_setting,
    reset_without_effect,
)
from utils.config.strategy import describe_launch


@dataclass(frozen=True)
class RunSettings:
    """The parsed settings of a run. They do not change. RunPlan has the values derived from them.

    values: every setting by name, with its source. script: file name of the script. raw: the files
    that the run tokenizes before training. `data` already names the resulting datasets. staged:
    {(dataset folder, split): (original, copy on this node's disk)} of the copied splits.
    """

    run: RunArguments
    data: DataArguments
    model: ModelArguments
    training: TrainingArguments
    own_code: OwnCode
    values: SettingValues
    script: str
    raw: RawData | None
    staged: Mapping[tuple[str, str], Any] = field(default_factory=dict)

    @property
    def batch_sizes(self) -> dict[int, int]:
        """{first step: global batch size from this step on}. Raises ConfigurationError."""
        last, by_step = self.run.global_batch_size, self.run.batch_warmup
        return batch_sizes(last, by_step) if by_step else {0: last}

    @property
    def divisible_batch(self) -> int:
        """The greatest common divisor of `batch_sizes`. Ranks x micro-batch must divide it."""
        return math.gcd(*self.batch_sizes.values())

    @property
    def output_dir(self) -> Path:
        """The run directory."""
        return Path(str(self.training.output_dir))

    @property
    def resolved(self) -> dict[str, Any]:
        """{name: value} of all settings. The values have the form that recipes use."""
        return {name: self.values.written(name) for name in self.values}


def parse_pretraining(argv: Sequence[str] | None, description: str) -> RunSettings:
    """Return the settings of `pretrain.py`. Raises one ConfigurationError with all faults."""
    return _parse_settings(PretrainConfig, PRETRAINING_CHECKS, argv, "pretrain.py", description)


def parse_fine_tuning(argv: Sequence[str] | None, description: str) -> RunSettings:
    """Return the settings of `sft_train.py`. Raises one ConfigurationError with all faults."""
    return _parse_settings(FineTuneConfig, FINE_TUNING_CHECKS, argv, "sft_train.py", description)


def _parse_settings(
    training_class: type[PretrainConfig | FineTuneConfig],
    checks: Sequence[SettingsCheck],
    argv: Sequence[str] | None,
    script: str,
    description: str,
) -> RunSettings:
    settle = (
        *(describe_launch, derive_group_sizes, rename_checkpointing, choose_length),
        *(reset_overruled, add_validation_split, leave_out_old_keywords, derive_for_one_process),
        *(split_batch_sizes, derive_batch_sizes, derive_evaluation, derive_best_model),
        *(derive_packing, settle_precision, let_recipe_decide, reset_without_effect),
    )
    classes = (RunArguments, DataArguments, ModelArguments, OwnCode, training_class)
    values = read_settings(
        classes, argv, settle, (check_contradictions, *checks), script, description
    )
    # With these values a login node can check a recipe for bf16 on GPUs.
    without_gpu = values["dry_run"] and not torch.accelerator.is_available()
    overrides: dict[str, Any] = {"use_cpu": True, "tf32": None} if without_gpu else {}
    if values["dry_run"] or "LOCAL_RANK" not in values.environment:
        overrides["ddp_backend"] = None  # with a backend accelerate would look for other processes
    if values["dataloader_num_workers"] is None:
        # RunPlan derives the number. Without workers TrainingArguments refuses to prefetch.
        overrides |= {"dataloader_num_workers": 0, "dataloader_prefetch_factor": None}
    with launch_environment(values):
        training = values.build(training_class, **overrides)
    run, own_code = values.build(RunArguments), values.build(OwnCode)
    model = values.build(ModelArguments)
    data, raw = replace_raw_files(values.build(DataArguments), str(training.output_dir))
    return RunSettings(run, data, model, training, own_code, values, script, raw)


def with_derived(settings: RunSettings, found: Mapping[str, tuple[Any, str]]) -> RunSettings:
    """Return a copy of the settings with the derived values `found`, {name: (value, reason)}.

    Names are settings of RunArguments or DataArguments, or per_device_train_batch_size.
    """
    values = replace(settings.values, given={**settings.values.given}, notes=[])
    for name, (value, why) in found.items():
        values.derive(name, value, why)
    derive_batch_sizes(values)
    micro = "per_device_train_batch_size"
    return replace(
        settings,
        run=values.build(RunArguments),
        data=replace_raw_files(values.build(DataArguments), str(settings.training.output_dir))[0],
        training=with_values(settings.training, **{micro: values[micro]}),
        values=values,
    )


def rename_checkpointing(values: SettingValues) -> None:
    """Rename gradient_checkpointing* to activation_checkpointing*.

    If both names are set, the value from a flag or a later recipe is used.
    """
    for name in ("activation_checkpointing", "activation_checkpointing_kwargs"):
        old = name.replace("activation", "gradient")
        if old in values.given and values.rank(old) > values.rank(name):
            values.given[name] = values.given.pop(old)
        elif old in values.given:
            values.notes.append(no_effect(values, old, name))
            del values.given[old]


def choose_length(values: SettingValues) -> None:
    """Reset num_train_epochs if max_steps or max_tokens limits the run, or the reverse.

    The limit from a flag or a later recipe stays. If both limits are flags or in one recipe,
    num_train_epochs is reset, as transformers documents.
    """
    for limit in ("max_steps", "max_tokens"):
        if not values.changed(limit):
            continue
        if values.rank("num_train_epochs") > values.rank(limit):
            reset_setting(values, limit, "num_train_epochs")
        elif values.changed("num_train_epochs"):
            reset_setting(values, "num_train_epochs", limit)


def leave_out_old_keywords(values: SettingValues) -> None:
    """Reset a recipe's lr_scheduler_kwargs if a flag or later recipe names another schedule.

    If the new schedule accepts the keywords, they stay.
    """
    from transformers import get_scheduler

    schedule, keywords = "lr_scheduler_type", "lr_scheduler_kwargs"
    if not 0 < values.rank(keywords) < values.rank(schedule):
        return
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    try:
        get_scheduler(values[schedule], optimizer, 1, 10, dict(values[keywords] or {}))
    except (TypeError, ValueError):
        reset_setting(values, keywords, schedule)


def split_batch_sizes(values: SettingValues) -> None:
    """Move a mapping {step: size} from global_batch_size to batch_warmup.

    global_batch_size becomes the last size.
    """
    given = values.given.get("global_batch_size")
    if given is not None and isinstance(given.value, dict):
        sizes = batch_sizes(None, given.value)
        by_step = {str(step): size for step, size in sizes.items()}
        values.given["global_batch_size"] = replace(given, value=max(sizes.values()))
        values.given["batch_warmup"] = replace(given, value=by_step)
    elif 0 < values.rank("batch_warmup") < values.rank("global_batch_size"):
        reset_setting(values, "batch_warmup", "global_batch_size")  # from the config.yaml of a run


def derive_batch_sizes(values: SettingValues) -> None:
    """Derive global_batch_size from the micro-batch, or a micro-batch that fits the global batch.

    A smaller micro-batch with more accumulation gives the same training. The user's micro-batch
    is made smaller in three cases: with --suggest, if a flag or later recipe sets the global batch,
    or if the global batch is a multiple of the micro-batch but not of micro-batch x ranks.
    """
    total, micro = values["global_batch_size"], values["per_device_train_batch_size"]
    ranks = values.data_ranks
    micro_rank = values.rank("per_device_train_batch_size")
    if micro < 1:
        return  # check_ranges reports it
    if total is None:
        if micro_rank > 0 and values.rank("global_batch_size") == 0:  # else the data decide
            why = f"{values.shown('per_device_train_batch_size')} x {counted_ranks(ranks)}"
            values.derive("global_batch_size", micro * ranks, why)
        return
    by_step, name = values["batch_warmup"], "global_batch_size"
    if by_step:
        total, name = math.gcd(*batch_sizes(total, by_step).values()), "batch_warmup"
    elif values["suggest"] and total % ranks:
        why = f"--suggest: {values.shown(name)} does not divide over {counted_ranks(ranks)}"
        total = max(round(total / ranks), 1) * ranks
        values.derive(name, total, why)
    smaller = fitting_micro_batch(total, micro, ranks)
    may_change = micro_rank < max(values.rank("global_batch_size"), 1) or total % micro == 0
    may_change |= values["suggest"]
    if 0 < smaller < micro and may_change:
        why = f"{values.shown(name)} divides over {ranks} x {smaller}"
        values.derive("per_device_train_batch_size", smaller, why)


def derive_for_one_process(values: SettingValues) -> None:
    """For one process, set context_parallel to 1 and log that ddp_comm_hook has no effect."""
    if values.world_size > 1:
        return
    if values["context_parallel"] > 1:
        why = f"{values.shown('context_parallel')} has no effect on one process"
        values.derive("context_parallel", 1, why)
    if values["ddp_comm_hook"]:
        values.notes.append(f"{values.shown('ddp_comm_hook')} has no effect on one process")


def derive_packing(values: SettingValues) -> None:
    """Derive `packing: in_order` from `order: sequential`, because `best_fit` changes the order."""
    if values["order"] == "sequential" and values.rank("packing") == 0:
        values.derive("packing", "in_order", values.shown("order"))


def derive_evaluation(values: SettingValues) -> None:
    """Derive eval_strategy and eval_steps from save_strategy and save_steps."""
    if not values["eval_data"]:
        return
    by_steps = values["save_strategy"] == "steps"
    if values.rank("eval_strategy") == 0:
        strategy = "steps" if by_steps or values["eval_steps"] is not None else "epoch"
        values.derive("eval_strategy", strategy, f"{values.shown('eval_data')} is given")
    if values["eval_strategy"] == "steps" and values["eval_steps"] is None and by_steps:
        why = f"with each of {values.shown('save_steps')}"
        values.derive("eval_steps", values["save_steps"], why)


def derive_best_model(values: SettingValues) -> None:
    """Derive metric_for_best_model (for a single split), greater_is_better and save_best.

    save_best saves a checkpoint after each evaluation that is the best so far. save_best is derived
    for load_best_model_at_end if evaluations and saves are at different steps. Without it, Trainer
    could report the metric of a model that was not saved.
    """
    with suppress(ValueError):  # check_forms reports it
        splits = list(eval_splits(values["eval_data"]))
        judges = [name for name in NEED_BEST_METRIC if values[name]]
        if values["metric_for_best_model"] is None and judges and len(splits) == 1:
            why = f"{values.shown(judges[0])}, and the only split"
            values.derive("metric_for_best_model", f"eval_{splits[0]}_loss", why)
    metric = values["metric_for_best_model"] or ""
    if metric.endswith("perplexity") and values["greater_is_better"] is None:
        values.derive("greater_is_better", False, f"a lower {metric} is better")
    same_steps = values["eval_strategy"] == values["save_strategy"]
    if values["eval_strategy"] == "steps":
        same_steps = same_steps and values["eval_steps"] == values["save_steps"]
    wanted = values["load_best_model_at_end"] and values["eval_data"] and not same_steps
    if wanted and values.rank("save_best") == 0:
        why = f"{values.shown('load_best_model_at_end')}, and not each evaluation has a save"
        values.derive("save_best", True, why)
