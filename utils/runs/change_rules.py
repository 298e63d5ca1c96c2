"""Which settings make a run what it is, and what a changed one means for a run that goes on."""

from collections.abc import Iterator, Mapping
from typing import Any

from utils.runs.content_rules import NAME_CONTENTS, content_changes, same_contents
from utils.runs.snapshot import Change, Snapshot, shown

# With another value of these the numbers are another run's: the samples and their order, what is
# trained, in which type, and along which curve the learning rate goes on.
IDENTITY = frozenset(
    {
        "train_data", "sequence_length", "packing", "on_overlong", "global_batch_size", "seed",
        "model_name_or_path", "model_revision", "model_config", "init_from",
        "tokenizer_name_or_path", "dtype", "bf16", "fp16", "lora_alpha", "use_rslora",
        "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "stochastic_rounding",
    }
)  # fmt: skip
# What a checkpoint brings along (torch puts the param_groups of the saved optimizer back): another
# value would have no effect, and nobody would be told.
IN_THE_CHECKPOINT = frozenset(
    {"learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args"}
)
# Tensors of other shapes or other meaning than the checkpoint has.
OTHER_TENSORS = frozenset(
    {
        "use_peft", "use_dora", "lora_r", "lora_target_modules", "lora_target_parameters",
        "lora_modules_to_save",
    }
)  # fmt: skip
SAME_OPTIMIZER = frozenset({"adamw_torch", "adamw_torch_fused"})
# They say what this start is to do, not what the run is.
OF_THIS_START = frozenset({"accept_changes", "dry_run", "init_optimizer"})
DURATION = frozenset({"max_steps", "num_train_epochs"})
WITHOUT_AN_END = frozenset(
    {"constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "greedy"}
)

_BRANCH = (
    "A run of its own takes its weights over: --init_from {checkpoint}, with --init_optimizer true "
    "for the moments too."
)


def differing(before: Snapshot, now: Snapshot) -> list[str]:
    """Return the settings whose value is another one, however it is spelled."""
    return [
        name
        for name, value in now.settings.items()
        if name not in OF_THIS_START
        and name in before.settings
        and value != before.settings[name]
        and now.place(name) != before.place(name)
    ]


def compare(before: Snapshot, now: Snapshot, checkpoint: str | None) -> Iterator[Change]:
    """Yield every change; `checkpoint` is what the run goes on from (None: it starts at step 0)."""
    for name in differing(before, now):
        old, new = before.settings[name], now.settings[name]
        yield _setting_change(name, old, new, before, now, checkpoint)
    yield from content_changes(before, now)


def _setting_change(
    name: str, old: Any, new: Any, before: Snapshot, now: Snapshot, checkpoint: str | None
) -> Change:
    note, dangerous, impossible = "", name in IDENTITY, ""
    if name in NAME_CONTENTS:
        note = same_contents(name, before, now, checkpoint)
        dangerous = not note
    elif name in DURATION:
        note = _new_end(now.settings)
    elif name == "global_batch_size" and checkpoint is not None:
        # The order of samples is a pure function of step and batch (utils/data/order.py).
        missed = "some are left out" if new > old else "some come again"
        note = f"after step k the data goes on at sample {new} k, not {old} k: {missed}"
    elif checkpoint is not None:
        impossible = _why_impossible(name, old, new, checkpoint)
    return Change(name, shown(old), shown(new), "", note, dangerous, impossible)


def _why_impossible(name: str, old: Any, new: Any, checkpoint: str) -> str:
    branch = _BRANCH.format(checkpoint=checkpoint)
    if name in IN_THE_CHECKPOINT:
        return f"The optimizer's state brings its own, a new one has no effect. {branch}"
    if name == "optim" and not {old, new} <= SAME_OPTIMIZER:
        return f"Its checkpoints hold the state of {old}, which {new} cannot go on with. {branch}"
    if name == "optim_states":
        kept = "the weights' type" if old is None else old
        return f"Its checkpoints hold Adam's states in {kept}. {branch}"
    if name == "metric_for_best_model" and old is not None and _other_metric(old, new):
        # To none as well: the best value would outlast it, and meet the next metric.
        return f"Its checkpoints hold the best {old}, against which nothing else counts. {branch}"
    if name in OTHER_TENSORS:
        return "Its checkpoints hold other tensors than the run would have."
    return ""


def _other_metric(old: str, new: str | None) -> bool:
    return new is None or old.removeprefix("eval_") != new.removeprefix("eval_")


def _new_end(settings: Mapping[str, Any]) -> str:
    schedule = settings["lr_scheduler_type"]
    if schedule in WITHOUT_AN_END:
        return ""
    return f"the {schedule} schedule has another end: the learning rate goes on along its new curve"
