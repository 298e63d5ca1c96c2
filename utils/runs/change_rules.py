"""Which settings make a run what it is, and what a changed one means for a run that goes on."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.config.data_sources import eval_splits, train_sources

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
PLACES = frozenset(
    {"model_name_or_path", "model_config", "init_from", "tokenizer_name_or_path", "output_dir"}
)
WEIGHTS = ("model_name_or_path", "init_from")

_BRANCH = (
    "A run of its own takes its weights over: --init_from {checkpoint}, with --init_optimizer true "
    "for the moments too."
)


@dataclass(frozen=True)
class Snapshot:
    """The settings of a start, the directory each one's paths are relative to, and what they held.

    `facts` are those in provenance.json: data fingerprints, the tokenizer's hash, the contents of
    the model's configuration; a missing one is not known.
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
    yield from _content_changes(before, now)


def model_setting(settings: Mapping[str, Any]) -> str:
    """Return the setting that gives the model's configuration."""
    names = ("model_config", *WEIGHTS)
    return next((name for name in names if settings.get(name) is not None), "model_config")


def _setting_change(
    name: str, old: Any, new: Any, before: Snapshot, now: Snapshot, checkpoint: str | None
) -> Change:
    note, dangerous, impossible = "", name in IDENTITY, ""
    if name in ("train_data", "tokenizer_name_or_path", "model_config", *WEIGHTS):
        note = _same_contents(name, before, now, checkpoint)
        dangerous = not note
    elif name in DURATION:
        note = _new_end(now.settings)
    elif name == "global_batch_size" and checkpoint is not None:
        # The order of samples is a pure function of step and batch (utils/data/order.py).
        missed = "some are left out" if new > old else "some come again"
        note = f"after step k the data goes on at sample {new} k, not {old} k: {missed}"
    elif checkpoint is not None:
        impossible = _why_impossible(name, old, new, checkpoint)
    return Change(name, _shown(old), _shown(new), "", note, dangerous, impossible)


def _why_impossible(name: str, old: Any, new: Any, checkpoint: str) -> str:
    branch = _BRANCH.format(checkpoint=checkpoint)
    if name in IN_THE_CHECKPOINT:
        return f"The optimizer's state brings its own, a new one has no effect. {branch}"
    if name == "optim" and not {old, new} <= SAME_OPTIMIZER:
        return f"Its checkpoints hold the state of {old}, which {new} cannot go on with. {branch}"
    if name == "optim_states":
        kept = "the weights' type" if old is None else old
        return f"Its checkpoints hold Adam's states in {kept}. {branch}"
    if name in OTHER_TENSORS:
        return "Its checkpoints hold other tensors than the run would have."
    return ""


def _same_contents(name: str, before: Snapshot, now: Snapshot, checkpoint: str | None) -> str:
    """Return why a path that changed is harmless; nothing where it is not known to be."""
    if name == "train_data":
        weights = [[weight for _, weight in snapshot.place(name)] for snapshot in (before, now)]
        same = _known_same(_fingerprints(before), _fingerprints(now)) and weights[0] == weights[1]
        return "the same contents" if same else ""
    if name == "tokenizer_name_or_path":
        same = _known_same(*(snapshot.facts.get("tokenizer_sha256") for snapshot in (before, now)))
        return "the same tokenizer" if same else ""
    if name in WEIGHTS:
        # Adapters alone are in the checkpoints of LoRA, not the weights under them.
        own = checkpoint is not None and not now.settings.get("use_peft")
        return "the run goes on from weights of its own" if own else ""
    contents = (snapshot.facts.get("model_config") for snapshot in (before, now))
    return "the same contents" if _known_same(*contents) else ""


def _content_changes(before: Snapshot, now: Snapshot) -> Iterator[Change]:
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
            yield Change("eval_data", was, is_now, f"eval_data {split} (content fingerprint)")
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


def _model_changes(before: Snapshot, now: Snapshot) -> Iterator[Change]:
    old, new = (snapshot.facts.get("model_config") for snapshot in (before, now))
    if old is None or new is None:
        return
    name = model_setting(now.settings)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            yield Change(
                name, _shown(old.get(key)), _shown(new.get(key)), f"{name}: {key}", dangerous=True
            )


def _fingerprints(snapshot: Snapshot) -> list[str]:
    return snapshot.facts.get("data", {}).get("train", [])


def _known_same(old: Any, new: Any) -> bool:
    return bool(old) and old == new


def _new_end(settings: Mapping[str, Any]) -> str:
    schedule = settings["lr_scheduler_type"]
    if schedule in WITHOUT_AN_END:
        return ""
    return f"the {schedule} schedule has another end: the learning rate goes on along its new curve"


def _digests(fingerprints: list[str]) -> str:
    return " ".join(fingerprint[:8] for fingerprint in fingerprints)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, float):
        return f"{value:.12g}"
    return "null" if value is None else str(value)
