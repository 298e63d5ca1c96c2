"""Contradictions in when and on what a run evaluates, logs and saves, and picks its best model."""

from collections.abc import Iterator

from utils.config.data_sources import eval_splits
from utils.config.reading.settings import SettingValues

# What compares evaluations with each other, and so needs to know which number counts.
_JUDGES = (
    ("load_best_model_at_end", True),
    ("save_best", True),
    ("lr_scheduler_type", "reduce_lr_on_plateau"),
    ("lr_scheduler_type", "greedy"),
)


def check_evaluation(values: SettingValues) -> Iterator[str]:
    """Refuse evaluation without splits, splits that are never evaluated, and an unsaid rhythm."""
    try:
        splits = eval_splits(values["eval_data"])
    except ValueError as error:
        yield str(error)
        return
    rhythm = values["eval_strategy"]
    evaluates = rhythm != "no" or values["eval_on_start"]
    if evaluates and not splits:
        asked = "eval_strategy" if rhythm != "no" else "eval_on_start"
        yield f"{values.shown(asked)} needs eval_data NAME=DIR"
    if splits and not evaluates:
        yield (
            f"eval_data is given ({values.sources['eval_data']}) but never evaluated: set "
            "eval_strategy: steps and eval_steps, or eval_strategy: epoch"
        )
    if rhythm == "steps" and values["eval_steps"] is None:
        yield f"{values.shown('eval_strategy')} needs eval_steps: every log would evaluate else"


def check_rhythms(values: SettingValues) -> Iterator[str]:
    """Refuse a number of steps where the strategy does not count steps."""
    for steps, strategy in (
        ("eval_steps", "eval_strategy"),
        ("save_steps", "save_strategy"),
        ("logging_steps", "logging_strategy"),
    ):
        if values.changed(steps) and values[strategy] != "steps":
            yield f"{values.shown(steps)} has no effect: {strategy} is {values[strategy]}"


def check_saves(values: SettingValues) -> Iterator[str]:
    """Refuse kinds of saves that exclude each other."""
    if values["save_strategy"] == "best":
        yield (
            f"{values.shown('save_strategy')} saves nothing while the model does not improve, and "
            "nothing at the end: a crash would lose all since. Give save_best: true beside "
            "save_steps"
        )
    if values["save_strategy"] == "no":
        for name in ("save_minutes", "save_best"):
            if values.changed(name) and values[name]:
                yield f"{values.shown(name)} has no effect: save_strategy is no"


def check_best_model(values: SettingValues) -> Iterator[str]:
    """Refuse to judge models by no metric, by one that no split logs, or the wrong way round."""
    try:
        splits = eval_splits(values["eval_data"])
    except ValueError:
        return  # check_evaluation says so
    metrics = [f"eval_{name}_{kind}" for name in splits for kind in ("loss", "perplexity")]
    known = f"one of {', '.join(metrics)}" if metrics else "the loss of a split in eval_data"
    metric = values["metric_for_best_model"]
    for judge in (name for name, value in _JUDGES if values[name] == value):
        if metric is None:
            yield f"{values.shown(judge)} needs metric_for_best_model: {known}"
        if values["eval_strategy"] == "no":
            yield f"{values.shown(judge)} needs an eval_strategy"
    if metric is None:
        return
    if f"eval_{metric.removeprefix('eval_')}" not in metrics:
        yield f"{values.shown('metric_for_best_model')}: no such metric is logged; give {known}"
    if metric.endswith("perplexity") and values["greater_is_better"] is not False:
        yield "a lower perplexity is better: add greater_is_better: false"
    if metric.endswith("loss") and values["greater_is_better"]:
        yield f"{values.shown('greater_is_better')}: a lower loss is better"
