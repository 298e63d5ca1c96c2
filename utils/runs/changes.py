"""What changed in a run since its last start, shown at once; what of it makes another run of it.

config.yaml stays as the first start wrote it. Each entry of provenance.json says which settings
that start changed, and what the data, the tokenizer and the model's configuration held; the
settings in force are all of them one after the other, so what was accepted once is accepted.
"""

import dataclasses
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.checkpoints.run_record import CONFIG, PROVENANCE, earlier_starts
from utils.config.errors import ConfigurationError
from utils.config.reading.strict_yaml import YamlError, load_mapping
from utils.config.run_settings import RunSettings
from utils.planning.base_weights import base_weights
from utils.planning.models import first_other_shape, model_contents
from utils.planning.run_data import RunData
from utils.planning.stages import own_checkpoint
from utils.runs.change_rules import compare, differing
from utils.runs.snapshot import Change, Snapshot

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
