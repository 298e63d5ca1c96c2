"""What a start was given and what that held; what changed from one start to the next."""

import dataclasses
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.checkpoints.manifest import CONFIG, PROVENANCE, earlier_starts
from utils.config.arguments import eval_splits, train_sources
from utils.config.errors import ConfigurationError
from utils.config.recipes import YamlError, load_mapping
from utils.config.settings import RunSettings
from utils.model.stages import own_checkpoint
from utils.model.weights import base_weights, first_other_shape, model_contents
from utils.planning.run_data import RunData

PLACES = frozenset(
    {"model_name_or_path", "model_config", "init_from", "tokenizer_name_or_path", "output_dir"}
)


@dataclass(frozen=True)
class Snapshot:
    """The settings of a start, the directory each one's paths are relative to, and what they held.

    `facts` are those in provenance.json: data fingerprints, the tokenizer's hash, the contents of
    the model's configuration, what lies under LoRA's adapters; a missing one is not known.
    """

    settings: Mapping[str, Any]
    directories: Mapping[str, str | None]
    facts: Mapping[str, Any]

    def place(self, name: str) -> Any:
        """Return a setting with its paths made absolute, to tell two spellings from two places."""
        value = self.settings.get(name)
        base = Path(self.directories.get(name) or os.getcwd())  # noqa: PTH109 - see there
        if value is None:
            return None
        if name == "train_data":
            sources = train_sources(value)
            return [((base / source.directory).resolve(), source.weight) for source in sources]
        if name == "eval_data":
            return {split: (base / path).resolve() for split, path in eval_splits(value).items()}
        return (base / value).resolve() if name in PLACES else value


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

    @property
    def title(self) -> str:
        """What changed, for a reader."""
        return self.what or self.name


def shown(value: Any) -> str:
    """Write a value out for a reader."""
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, float):
        return f"{value:.12g}"
    return "null" if value is None else str(value)


# What changed in the things that settings name: data, tokenizer, model, weights under adapters.

WEIGHTS = ("model_name_or_path", "init_from")
NAME_CONTENTS = frozenset(
    {"train_data", "tokenizer_name_or_path", "model_config", "model_revision", *WEIGHTS}
)


def model_setting(settings: Mapping[str, Any]) -> str:
    """Return the setting that gives the model's configuration."""
    names = ("model_config", *WEIGHTS)
    return next((name for name in names if settings.get(name) is not None), "model_config")


def same_contents(name: str, before: Snapshot, now: Snapshot, checkpoint: str | None) -> str:
    """Return why a path that changed is harmless; nothing where it is not known to be."""
    if name == "train_data":
        weights = [[weight for _, weight in snapshot.place(name)] for snapshot in (before, now)]
        same = _known_same(_fingerprints(before), _fingerprints(now)) and weights[0] == weights[1]
        return "the same contents" if same else ""
    if name == "tokenizer_name_or_path":
        same = _known_same(*(snapshot.facts.get("tokenizer_sha256") for snapshot in (before, now)))
        return "the same tokenizer" if same else ""
    if name in (*WEIGHTS, "model_revision"):
        # Adapters alone are in the checkpoints of LoRA, not the weights under them.
        own = checkpoint is not None and not now.settings.get("use_peft") and name in WEIGHTS
        if own:
            return "the run goes on from weights of its own"
        return "the same weights" if _known_same(*_base_weights(before, now)) else ""
    contents = (snapshot.facts.get("model_config") for snapshot in (before, now))
    return "the same contents" if _known_same(*contents) else ""


def content_changes(before: Snapshot, now: Snapshot) -> Iterator[Change]:
    """Yield what changed in the things that the settings name."""
    old, new = _fingerprints(before), _fingerprints(now)
    if old and new and old != new:
        yield Change(
            "train_data", _digests(old), _digests(new), "train_data (content fingerprint)", "", True
        )
    splits = before.facts.get("data", {}).keys() & now.facts.get("data", {}).keys() - {"train"}
    for split in sorted(splits):
        was, is_now = (_digests(snapshot.facts["data"][split]) for snapshot in (before, now))
        if was != is_now:
            metric = str(now.settings.get("metric_for_best_model")).removeprefix("eval_")
            judges = metric.rpartition("_")[0] == split
            note = f"the best {metric} so far is that of the old one" if judges else ""
            yield Change("eval_data", was, is_now, f"eval_data {split} (content fingerprint)", note)
    hashes = [snapshot.facts.get("tokenizer_sha256") for snapshot in (before, now)]
    if all(hashes) and hashes[0] != hashes[1]:
        was, is_now = (_digests([str(sha256)]) for sha256 in hashes)
        yield Change(
            "tokenizer_name_or_path",
            was,
            is_now,
            "tokenizer_name_or_path (SHA-256)",
            dangerous=True,
        )
    yield from _model_changes(before, now)
    yield from _base_weights_changes(before, now)


def _model_changes(before: Snapshot, now: Snapshot) -> Iterator[Change]:
    old, new = (snapshot.facts.get("model_config") for snapshot in (before, now))
    if old is None or new is None:
        return
    name = model_setting(now.settings)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            yield Change(
                name, shown(old.get(key)), shown(new.get(key)), f"{name}: {key}", dangerous=True
            )


def _base_weights_changes(before: Snapshot, now: Snapshot) -> Iterator[Change]:
    """Yield that other weights lie under the adapters, whatever path or branch names them."""
    old, new = _base_weights(before, now)
    if not old or not new or old.keys() != new.keys() or old == new:
        return  # of a directory and of the Hub: the setting itself is another one
    name = next(name for name in WEIGHTS if now.settings.get(name) is not None)
    if "commit" in new:
        note = f"--model_revision {old['commit']} names the old one"
        yield Change(name, old["commit"], new["commit"], f"{name} (commit)", note, True)
        return
    files = [
        file
        for file in sorted(old["sha256"].keys() | new["sha256"].keys())
        if old["sha256"].get(file) != new["sha256"].get(file)
    ]
    was, is_now = (base["sha256"].get(files[0]) for base in (old, new))
    note = f"and {len(files) - 1} files more" if len(files) > 1 else ""
    what = f"{name}: {files[0]} (SHA-256)"
    yield Change(name, _digest(was), _digest(is_now), what, note, True)


def _base_weights(*snapshots: Snapshot) -> list[dict[str, Any] | None]:
    return [snapshot.facts.get("base_weights") for snapshot in snapshots]


def _digest(sha256: str | None) -> str:
    return "not there" if sha256 is None else sha256[:8]


def _fingerprints(snapshot: Snapshot) -> list[str]:
    return snapshot.facts.get("data", {}).get("train", [])


def _known_same(old: Any, new: Any) -> bool:
    return bool(old) and old == new


def _digests(fingerprints: list[str]) -> str:
    return " ".join(fingerprint[:8] for fingerprint in fingerprints)


# Which settings make a run what it is, and what a changed one means for a run that goes on.

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


# What changed in a run since its last start, shown at once; what of it makes another run of it.

logger = logging.getLogger(__name__)

OLD_WIDTH = 40  # of the column of old values; longer ones stick out


def identity_facts(settings: RunSettings, data: RunData) -> dict[str, Any]:
    """Return what the settings name by its contents, as provenance.json keeps it; on rank 0."""
    return {
        "cwd": os.getcwd(),  # noqa: PTH109 - what relative settings are relative to
        "data": data.fingerprints(),
        "tokenizer_sha256": data.tokenizer_sha256,
        "model_config": model_contents(settings),
        "base_weights": base_weights(settings),
    }


def accepted_changes(
    output_dir: Path, settings: RunSettings, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Show what changed since the last start; return what this start has to record of it.

    `facts` are those of `identity_facts`, and the script. Raises ConfigurationError for each change
    that makes another run and was not accepted, and for what its checkpoints cannot go on with.
    """
    starts = earlier_starts(output_dir / PROVENANCE)
    accepted = list(dict.fromkeys(settings.run.accept_changes))
    if not starts:
        _say_what_did_not_change(accepted, [])
        return {}
    if starts[-1]["script"] != facts["script"]:
        raise ConfigurationError(
            f"{output_dir} holds a run of {starts[-1]['script']}: name another --output_dir."
        )
    before = in_force(output_dir, starts)
    # A setting that came with a later version of Stoker had its default before.
    declared = settings.values.declared
    unknown = {name: declared[name].default for name in declared.keys() - before.settings.keys()}
    before = dataclasses.replace(before, settings={**unknown, **before.settings})
    now = Snapshot(settings.resolved, dict.fromkeys(settings.resolved, facts["cwd"]), facts)
    checkpoint = own_checkpoint(str(output_dir))
    changes = list(compare(before, now, None if checkpoint is None else str(checkpoint)))
    if changes:
        logger.warning("changed since the last start in %s:\n%s", output_dir, table(changes))
    _say_what_did_not_change(accepted, changes)
    problems = [
        _problem(output_dir, change)
        for change in changes
        if change.impossible or (change.dangerous and change.name not in accepted)
    ]
    if checkpoint is not None:
        problems += _other_shapes(output_dir, before.facts, facts)
    if problems:
        raise ConfigurationError(problems)
    record: dict[str, Any] = {}
    if changes:
        record["changed"] = {name: now.settings[name] for name in differing(before, now)}
        record["accepted"] = sorted({change.name for change in changes if change.dangerous})
    return record


def in_force(output_dir: Path, starts: Sequence[Mapping[str, Any]]) -> Snapshot:
    """Return the settings of the last start: those of the first with all changes since."""
    try:
        saved, faults = load_mapping((output_dir / CONFIG).read_text(encoding="utf-8"))
    except (YamlError, UnicodeDecodeError) as error:
        saved, faults = {}, [str(error)]
    if faults:
        raise ConfigurationError(
            f"{output_dir / CONFIG} is not as the first start wrote it ({faults[0]}): put it back."
        )
    settings = {name: value for name, (value, _) in saved.items()}
    directories = dict.fromkeys(settings, starts[0].get("cwd"))
    for start in starts:
        changed = start.get("changed", {})
        settings |= changed
        directories |= dict.fromkeys(changed, start.get("cwd"))
    return Snapshot(settings, directories, starts[-1])


def table(changes: Iterable[Change]) -> str:
    """Write changes out in aligned lines: name, old -> new, and what is to be said of it."""
    changes = list(changes)
    name_width = max(len(change.title) for change in changes)
    old_width = min(max(len(change.old) for change in changes), OLD_WIDTH)
    return "\n".join(
        f"  {change.title:<{name_width}}  {change.old:<{old_width}} -> {change.new}"
        + (f"   ({change.note})" if change.note else "")
        for change in changes
    )


def _problem(output_dir: Path, change: Change) -> str:
    said = f"its {change.title} is {change.old}, now it is {change.new}"
    if change.impossible:
        return (
            f"{output_dir} cannot go on: {said}. {change.impossible} Give the old value, or name "
            "another --output_dir."
        )
    return (
        f"{output_dir} holds another run: {said}. Name another --output_dir, give the old value to "
        f"go on, or go on with the new one: --accept_changes {change.name}."
    )


def _other_shapes(output_dir: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say which tensor the model would have in another shape than the checkpoints, if any."""
    old, new = before.get("model_config"), now["model_config"]
    if old is None or new is None or old == new:
        return []
    difference = first_other_shape(old, new)
    if difference is None:
        return []
    return [
        f"{output_dir} cannot go on with this model configuration, accepted or not: {difference}. "
        "Put the old one back, or name another --output_dir."
    ]


def _say_what_did_not_change(accepted: Iterable[str], changes: Iterable[Change]) -> None:
    changed = {change.name for change in changes}
    for name in accepted:
        if name not in changed:
            logger.warning("accept_changes names %s, which did not change", name)
