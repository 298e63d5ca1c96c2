"""What nobody set and what follows from the rest: the batch's sizes, when and by what to judge."""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from utils.config.batch import fitting_micro_batch
from utils.config.data_sources import eval_splits
from utils.config.reading.settings import SettingValues, UnusableSettingError

Found = Iterator[tuple[str, Any, str]]  # setting, value, why


def with_derived(values: SettingValues) -> tuple[SettingValues, list[str]]:
    """Return the values with what follows from them, and a line for each."""
    lines = []
    for derive in (_batch_sizes, _when_to_evaluate, _best_metric):
        found = list(_found(derive, values, os.environ))
        lines += [f"{name} {_shown(value)}: {why}" for name, value, why in found]
        values = values.replaced({name: (value, why) for name, value, why in found})
    return values, lines


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _found(
    derive: Callable[[SettingValues, Mapping[str, str]], Found],
    values: SettingValues,
    environment: Mapping[str, str],
) -> Found:
    try:
        yield from derive(values, environment)
    except UnusableSettingError:
        return  # that fault is said


def _batch_sizes(values: SettingValues, environment: Mapping[str, str]) -> Found:
    """Derive the global batch from the micro-batch, or a micro-batch that divides the global one.

    A micro-batch only says how much is computed at once, so a smaller one trains the same. One
    that was given stays, unless what does not go with it comes from a stronger source: a flag, or
    the number of ranks of this launch.
    """
    total, micro = values["global_batch_size"], values["per_device_train_batch_size"]
    ranks = int(environment.get("WORLD_SIZE", "1"))
    given = values.rank("per_device_train_batch_size") > 0
    if total is None:
        if given and micro > 0:
            yield (
                "global_batch_size", micro * ranks,
                f"{values.shown('per_device_train_batch_size')} x {ranks} "
                f"{'rank' if ranks == 1 else 'ranks'}; set it, and any number of ranks trains the "
                "same",
            )  # fmt: skip
        return
    if micro < 1 or total < 1 or total % (micro * ranks) == 0:
        return
    weaker = values.rank("per_device_train_batch_size") < values.rank("global_batch_size")
    by_launch = total % micro == 0  # it divides on one rank
    smaller = fitting_micro_batch(total, micro, ranks)
    if smaller and (weaker or by_launch):
        instead = f"{values.shown('per_device_train_batch_size')} does not divide " if given else ""
        where = f" over {ranks} ranks" if ranks > 1 else ""
        yield (
            "per_device_train_batch_size", smaller,
            f"{instead or 'what divides '}{values.shown('global_batch_size')}{where}",
        )  # fmt: skip


def _when_to_evaluate(values: SettingValues, environment: Mapping[str, str]) -> Found:
    """Derive the rhythm of evaluations from that of the checkpoints."""
    del environment
    strategy = values["eval_strategy"]
    by_steps = values["save_strategy"] == "steps"
    if values["eval_data"] and values.rank("eval_strategy") == 0 and not values["eval_on_start"]:
        strategy = "steps" if by_steps or values["eval_steps"] is not None else "epoch"
        yield "eval_strategy", strategy, f"{values.shown('eval_data')} is given"
    if strategy == "steps" and values["eval_steps"] is None and by_steps and values["eval_data"]:
        yield "eval_steps", values["save_steps"], f"with each of {values.shown('save_steps')}"


def _best_metric(values: SettingValues, environment: Mapping[str, str]) -> Found:
    """Derive what the best model is judged by, where there is one split, and which way round."""
    del environment
    metric = values["metric_for_best_model"]
    judge = next((name for name in ("save_best", "load_best_model_at_end") if values[name]), None)
    try:
        splits = list(eval_splits(values["eval_data"]))
    except ValueError:
        return  # check_evaluation says so
    if metric is None and judge is not None and len(splits) == 1:
        metric = f"eval_{splits[0]}_loss"
        yield "metric_for_best_model", metric, f"{values.shown(judge)}, and the only split"
    if metric is not None and metric.endswith("perplexity") and values["greater_is_better"] is None:
        yield "greater_is_better", False, f"a lower {metric} is better"
