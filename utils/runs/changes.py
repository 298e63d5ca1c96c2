"""What changed in a run since its last start: one table; what makes it another run is refused.

config.yaml stays as the first start wrote it. Each entry of provenance.json says which settings
that start changed, and what the data, the tokenizer and the model's configuration held; the
settings in force are all of them one after the other, so what was accepted once is accepted.
"""

import dataclasses
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.checkpoints.files import CONFIG, PROVENANCE, earlier_starts
from utils.config.arguments import eval_splits, train_sources
from utils.config.errors import ConfigurationError
from utils.config.recipes import YamlError, load_file
from utils.config.settings import RunSettings
from utils.model.stages import own_checkpoint
from utils.model.weights import base_weights, first_other_shape, model_contents
from utils.planning.run_data import RunData

logger = logging.getLogger(__name__)

# With another value of these the numbers are another run's: the samples and their order, what is
# trained, in which type, and along which curve the learning rate continues.
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
WEIGHTS = ("model_name_or_path", "init_from")
# A changed value of these names other things, or the same ones elsewhere: the contents decide.
# Each one's key in provenance.json, and how equal contents are called.
CONTENTS = {
    "train_data": ("data", "the same contents"),
    "tokenizer_name_or_path": ("tokenizer_sha256", "the same tokenizer"),
    "model_config": ("model_config", "the same contents"),
    **dict.fromkeys([*WEIGHTS, "model_revision"], ("base_weights", "the same weights")),
}
PATHS = frozenset({*WEIGHTS, "model_config", "tokenizer_name_or_path", "output_dir"})
SAME_OPTIMIZER = frozenset({"adamw_torch", "adamw_torch_fused"})
# They say what this start is to do, not what the run is.
OF_THIS_START = frozenset({"accept_changes", "dry_run", "init_optimizer"})
# One more wherever a version of Stoker sums in another order on a CPU.
CPU_ROUNDING = 2


@dataclass(frozen=True)
class Snapshot:
    """The settings of a start, the directory each one's paths are relative to, and what they held.

    `facts` are those of `identity_facts` in provenance.json; a missing one is not known.
    """

    settings: Mapping[str, Any]
    directories: Mapping[str, str | None]
    facts: Mapping[str, Any]

    def absolute(self, name: str) -> Any:
        """Return a setting with its paths made absolute: two spellings of one path are equal."""
        value = self.settings.get(name)
        base = Path(self.directories.get(name) or os.getcwd())  # noqa: PTH109 - see there
        if value is None:
            return None
        if name == "train_data":
            sources = train_sources(value)
            return [((base / source.directory).resolve(), source.weight) for source in sources]
        if name == "eval_data":
            return {split: (base / path).resolve() for split, path in eval_splits(value).items()}
        return (base / value).resolve() if name in PATHS else value

    def contents(self, name: str) -> Any:
        """Return what one of the settings in CONTENTS held; None or empty: not known."""
        held = self.facts.get(CONTENTS[name][0])
        return (held or {}).get("train") if name == "train_data" else held


@dataclass(frozen=True)
class Change:
    """One changed setting, or one changed thing that a setting names (`what`).

    `dangerous` ones need the user's consent, by `name`; `impossible` says why none would help.
    """

    name: str
    old: str
    new: str
    what: str = ""
    note: str = ""
    dangerous: bool = False
    impossible: str = ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"  {self.what or self.name}: {self.old} -> {self.new}{note}"


def identity_facts(settings: RunSettings, data: RunData) -> dict[str, Any]:
    """Return what the settings name by its contents, as provenance.json keeps it; on rank 0."""
    return {
        "cwd": os.getcwd(),  # noqa: PTH109 - what relative settings are relative to
        "data": data.fingerprints(),
        "tokenizer_sha256": data.tokenizer_sha256,
        "model_config": model_contents(settings),
        "base_weights": base_weights(settings),
        "cpu_rounding": CPU_ROUNDING,
    }


def accepted_changes(
    output_dir: Path, settings: RunSettings, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Show what changed since the last start; return what this start has to record of it.

    `facts` are those of `identity_facts`, and the script. Raises ConfigurationError for each change
    that makes another run and was not accepted, and for what its checkpoints cannot continue with.
    """
    starts = earlier_starts(output_dir / PROVENANCE)
    if not starts:
        return {}
    if starts[-1]["script"] != facts["script"]:
        raise ConfigurationError(
            f"{output_dir} holds a run of {starts[-1]['script']}: name another --output_dir."
        )
    before = in_force(output_dir, starts)
    # A setting that came with a later version of Stoker had its default before.
    declared = settings.values.declared
    new = {name: declared[name].default for name in declared.keys() - before.settings.keys()}
    before = dataclasses.replace(before, settings={**new, **before.settings})
    now = Snapshot(settings.resolved, dict.fromkeys(settings.resolved, facts["cwd"]), facts)
    checkpoint = own_checkpoint(str(output_dir))
    changes = list(compare(before, now, None if checkpoint is None else str(checkpoint)))
    if changes:
        table = "\n".join(map(str, changes))
        logger.warning("changed since the last start in %s:\n%s", output_dir, table)
    accepted = settings.run.accept_changes
    problems = [
        _problem(output_dir, change)
        for change in changes
        if change.impossible or (change.dangerous and change.name not in accepted)
    ]
    if checkpoint is not None:
        problems += _other_shapes(output_dir, before.facts, facts)
    if problems:
        raise ConfigurationError(problems)
    if not changes:
        return {}
    return {
        "changed": {name: now.settings[name] for name in differing(before, now)},
        "accepted": sorted({change.name for change in changes if change.dangerous}),
    }


def in_force(output_dir: Path, starts: Sequence[Mapping[str, Any]]) -> Snapshot:
    """Return the settings of the last start: those of the first with all changes since."""
    try:
        saved = load_file(output_dir / CONFIG)
    except YamlError as error:
        raise ConfigurationError(
            f"{output_dir / CONFIG} is not as the first start wrote it ({error}): put it back."
        ) from error
    settings = {name: value for name, (value, _) in saved.items()}
    directories = dict.fromkeys(settings, starts[0].get("cwd"))
    for start in starts:
        changed = start.get("changed", {})
        settings |= changed
        directories |= dict.fromkeys(changed, start.get("cwd"))
    return Snapshot(settings, directories, starts[-1])


def differing(before: Snapshot, now: Snapshot) -> list[str]:
    """Return the settings whose value is another one, however it is spelled."""
    return [
        name
        for name, value in now.settings.items()
        if name not in OF_THIS_START
        and name in before.settings
        and value != before.settings[name]
        and now.absolute(name) != before.absolute(name)
    ]


def compare(before: Snapshot, now: Snapshot, checkpoint: str | None) -> Iterator[Change]:
    """Yield every change; `checkpoint` is what the run resumes from (None: it starts at step 0)."""
    for name in differing(before, now):
        old, new = before.settings[name], now.settings[name]
        note, dangerous, impossible = "", name in IDENTITY, ""
        if name in CONTENTS:
            note = _same_contents(name, before, now, checkpoint)
            dangerous = not note
        elif name in ("max_steps", "num_train_epochs"):
            note = f"the {now.settings['lr_scheduler_type']} schedule takes its new curve"
        elif name == "global_batch_size" and checkpoint is not None:
            # The order of samples is a pure function of step and batch (utils/data/order.py).
            missed = "some are left out" if new > old else "some come again"
            note = f"after step k the data continues at sample {new} k, not {old} k: {missed}"
        elif checkpoint is not None:
            impossible = _why_impossible(name, old, new, checkpoint)
        yield Change(name, shown(old), shown(new), "", note, dangerous, impossible)
    yield from _data_changes(before, now)
    yield from _model_changes(before, now)
    rounding = before.facts.get("cpu_rounding", 1)
    if before.facts.get("launch", {}).get("devices") == ["cpu"] and rounding != CPU_ROUNDING:
        note = "the git commit in provenance.json has the old one"
        what = "order of sums on a CPU (version of Stoker)"
        yield Change("use_cpu", str(rounding), str(CPU_ROUNDING), what, note, dangerous=True)


def _why_impossible(name: str, old: Any, new: Any, checkpoint: str) -> str:
    if name in OTHER_TENSORS:
        return "Its checkpoints hold other tensors than the run would have."
    reason = ""
    if name in IN_THE_CHECKPOINT:
        reason = "The optimizer's state brings its own, a new one has no effect."
    elif name == "optim" and not {old, new} <= SAME_OPTIMIZER:
        reason = f"Its checkpoints hold the state of {old}, which {new} cannot use."
    elif name == "optim_states":
        reason = f"Its checkpoints hold Adam's states in {old or 'the type of the weights'}."
    elif name == "metric_for_best_model" and old is not None and not _same_metric(old, new):
        reason = f"Its checkpoints hold the best {old}, with which nothing else compares."
    if not reason:
        return ""
    return (
        f"{reason} A run of its own takes its weights over: --init_from {checkpoint}, with "
        "--init_optimizer true for the moments too."
    )


def _same_metric(old: str, new: str | None) -> bool:
    # To none is a change as well: the best value would outlast it, and meet the next metric.
    return new is not None and old.removeprefix("eval_") == new.removeprefix("eval_")


def _same_contents(name: str, before: Snapshot, now: Snapshot, checkpoint: str | None) -> str:
    """Return why a path that changed is harmless; empty if it is not known to be."""
    if name in WEIGHTS and checkpoint is not None and not now.settings.get("use_peft"):
        return "the run resumes from weights of its own"  # LoRA's checkpoints hold adapters alone
    if name == "train_data":
        old, new = ([weight for _, weight in one.absolute(name)] for one in (before, now))
        if old != new:
            return ""
    known = before.contents(name)
    return CONTENTS[name][1] if known and known == now.contents(name) else ""


def _data_changes(before: Snapshot, now: Snapshot) -> Iterator[Change]:
    """Yield what changed in the contents of data and tokenizer."""
    old, new = before.contents("train_data"), now.contents("train_data")
    if old and new and old != new:
        what = "train_data (content fingerprint)"
        yield Change("train_data", _short(old), _short(new), what, dangerous=True)
    old_data, new_data = before.facts.get("data", {}), now.facts.get("data", {})
    for split in sorted(old_data.keys() & new_data.keys() - {"train"}):
        if old_data[split] != new_data[split]:
            what = f"eval_data {split} (content fingerprint)"
            yield Change("eval_data", _short(old_data[split]), _short(new_data[split]), what)
    name = "tokenizer_name_or_path"
    old, new = before.contents(name), now.contents(name)
    if old and new and old != new:
        yield Change(name, _short([old]), _short([new]), f"{name} (SHA-256)", dangerous=True)


def _model_changes(before: Snapshot, now: Snapshot) -> Iterator[Change]:
    """Yield what changed in the model's configuration, and in the weights under adapters."""
    old, new = before.contents("model_config"), now.contents("model_config")
    if old is not None and new is not None:
        names = ("model_config", *WEIGHTS)
        name = next((one for one in names if now.settings.get(one) is not None), "model_config")
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                was, is_now = shown(old.get(key)), shown(new.get(key))
                yield Change(name, was, is_now, f"{name}: {key}", dangerous=True)
    old, new = before.contents("init_from"), now.contents("init_from")
    if not old or not new or old.keys() != new.keys() or old == new:
        return  # of a directory and of the Hub: the setting itself is another one
    name = next(name for name in WEIGHTS if now.settings.get(name) is not None)
    if "commit" in new:
        note = f"--model_revision {old['commit']} names the old one"
        yield Change(name, old["commit"], new["commit"], f"{name} (commit)", note, True)
        return
    was, is_now = old["sha256"], new["sha256"]
    files = sorted(file for file in was.keys() | is_now.keys() if was.get(file) != is_now.get(file))
    note = f"and {len(files) - 1} files more" if len(files) > 1 else ""
    digests = [_short([one.get(files[0], "missing")]) for one in (was, is_now)]
    yield Change(name, digests[0], digests[1], f"{name}: {files[0]} (SHA-256)", note, True)


def shown(value: Any) -> str:
    """Write a value out for a reader."""
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, float):
        return f"{value:.12g}"
    return "null" if value is None else str(value)


def _short(digests: Iterable[str]) -> str:
    return " ".join(digest[:8] for digest in digests)


def _problem(output_dir: Path, change: Change) -> str:
    changed = f"its {change.what or change.name} is {change.old}, now it is {change.new}"
    if change.impossible:
        return (
            f"{output_dir} cannot resume: {changed}. {change.impossible} Give the old value, or "
            "name another --output_dir."
        )
    return (
        f"{output_dir} holds another run: {changed}. Name another --output_dir, give the old value "
        f"to resume, or resume with the new one: --accept_changes {change.name}."
    )


def _other_shapes(output_dir: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say which tensor the model would have in another shape than the checkpoints, if any."""
    old, new = before.get("model_config"), now["model_config"]
    difference = first_other_shape(old, new) if old and new and old != new else None
    if difference is None:
        return []
    return [
        f"{output_dir} cannot resume with this model configuration, accepted or not: {difference}. "
        "Put the old one back, or name another --output_dir."
    ]
