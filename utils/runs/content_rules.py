"""What changed in the things that settings name: data, tokenizer, model, weights under adapters."""

from collections.abc import Iterator, Mapping
from typing import Any

from utils.runs.snapshot import Change, Snapshot, shown

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
