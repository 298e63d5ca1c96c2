"""The record of all starts of a run in provenance.json, and checks of changed settings.

A start is one execution of the script, and a resume is another start. config.yaml stays as the
first start wrote it. The list `starts` in provenance.json has an entry for each start, with changed
settings and with digests of data, tokenizer and model. A changed setting stays changed for all
later starts. Settings in IDENTITY, such as the seed, determine the results of a run. The user
can change them only with --accept_changes.
"""

import datetime
import json
import logging
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig

from utils.checkpoints.discovery import own_checkpoint
from utils.checkpoints.files import DamagedCheckpointError, file_digests, read_manifest
from utils.checkpoints.record import RunRecord, settings_in_force
from utils.config.arguments import train_sources
from utils.config.declarations import is_true, shown
from utils.config.errors import ConfigurationError
from utils.config.settings import RunSettings
from utils.host.atomic_files import replace_text
from utils.host.environment import inherited, without_indices
from utils.host.machine import cpu_fact
from utils.host.redaction import redacted, without_exported
from utils.host.run_lock import RESTART_IN_JOB
from utils.launch.opening import git_state, package_versions
from utils.launch.processes import LaunchFacts
from utils.launch.signals import NODE_DIR
from utils.launch.slurm import job_times
from utils.model.architecture import causal_lm_class
from utils.model.weights import base_weights, model_contents
from utils.plan.run_data import RunData
from utils.plan.run_plan import RunPlan

logger = logging.getLogger(__name__)

_SLURM_FIELDS = {
    "job_id": "SLURM_JOB_ID", "job_name": "SLURM_JOB_NAME",
    "array_job_id": "SLURM_ARRAY_JOB_ID", "array_task_id": "SLURM_ARRAY_TASK_ID",
    "cluster": "SLURM_CLUSTER_NAME", "partition": "SLURM_JOB_PARTITION",
    "node_list": "SLURM_JOB_NODELIST", "nodes": "SLURM_JOB_NUM_NODES",
    "restart_count": "SLURM_RESTART_COUNT", "restart_in_job": RESTART_IN_JOB,
    "command": "STOKER_SUBMITTED",
}  # fmt: skip
LAUNCHER_SCRIPT = "slurm/launch_node.sh"


def write_provenance(
    path: Path, launch: LaunchFacts, *, run_id: str, resumed_from: str | None, **facts: Any
) -> None:
    """Append an entry for this start to provenance.json. Only rank 0 calls this.

    resumed_from: the path of the loaded checkpoint, or None. facts: more fields of the entry, as
    JSON values. A killed process never leaves a partial file. Raises ConfigurationError if the old
    file is damaged.
    """
    devices = [launch.device]
    if launch.device == "cuda":
        devices = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
    slurm = slurm_job(os.environ)
    if slurm and slurm["command"]:
        slurm["command"] = without_exported(slurm["command"])
    entry = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "resumed_from": resumed_from,
        "argv": sys.argv,
        "python": platform.python_version(),
        "git": git_state(),
        "launch": {
            "strategy": launch.name,
            "world_size": launch.world_size,
            "replicas": launch.replicas,
            "hosts": list(dict.fromkeys(launch.hosts)),
            "gpus": sorted({*zip(launch.hosts, launch.gpus, strict=False)}),
            "cpu": cpu_fact("model name"),  # of the first node
            "devices": devices,
            "launcher": LAUNCHER_SCRIPT if NODE_DIR in os.environ else None,
        },
        "slurm": slurm and redacted({**slurm, **job_times()}),
        **facts,
    }
    content = {"format": 1, "run_id": run_id, "starts": [*RunRecord(path.parent).starts, entry]}
    replace_text(path, json.dumps(content, indent=2) + "\n")


def slurm_job(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return {field: value} of this Slurm job, or None outside a job."""
    if "SLURM_JOB_ID" not in environment:
        return None
    return {field: environment.get(name) for field, name in _SLURM_FIELDS.items()}


# Settings that determine the numbers of a run: the samples and their order, the trained weights and
# their type, and the curve of the learning rate.
IDENTITY = frozenset({
    "train_data", "sequence_length", "packing", "order", "on_overlong", "global_batch_size", "seed",
    "batch_warmup", "skip_documents",
    "model_name_or_path", "model_revision", "model_config", "init_from", "tokenizer_name_or_path",
    "dtype", "bf16", "fp16", "fp8", "lora_alpha", "use_rslora", "lr_scheduler_type",
    "lr_scheduler_kwargs", "warmup_steps", "stochastic_rounding", "ema_decay", "load_in_4bit",
    "bnb_4bit_quant_type", "use_bnb_nested_quant", "loss",
    "ddp_comm_hook",
})  # fmt: skip
# {setting: reason} of settings that cannot change when a run resumes, even with --accept_changes.
# The reason continues the words "its checkpoints". torch restores the optimizer's param_groups, so
# a new learning rate has no effect.
IN_THE_CHECKPOINT = {
    name: why
    for why, names in {
        "hold the optimizer's old value, a new one has no effect": "learning_rate weight_decay "
        "adam_beta1 adam_beta2 adam_epsilon optim_args",
        "hold the optimizer's state as the old one has it": "optim optim_states",
        "hold other tensors than the run would have": "use_peft use_dora lora_r "
        "lora_target_modules lora_target_parameters lora_modules_to_save "
        "pad_embeddings_to_multiple_of freeze train_only",
        "hold the best value of the old one, with which nothing else compares": ""
        "metric_for_best_model",
    }.items()
    for name in names.split()
}
WEIGHT_SETTINGS = ("model_name_or_path", "init_from")
# Settings that name files. A new value may name the same contents, so the contents are compared.
FILE_SETTINGS = (
    "train_data", "tokenizer_name_or_path", "model_config", *WEIGHT_SETTINGS, "model_revision",
    "loss", "skip_documents",
)  # fmt: skip
# Contents that may change when a run resumes. The change is logged.
HARMLESS_INPUTS = ("eval_data", "versions", "environment", "callbacks")
# Settings that apply to a single start of a run, so a change is not reported.
PER_START_SETTINGS = frozenset({"accept_changes", "assume", "dry_run", "init_optimizer", "suggest"})
MANY_CHANGES = 2  # with more changes than this, the user probably wants a new run
# Increase these when a new version of Stoker changes the last bits of some runs.
NUMERICS = 4
NUMERICS_OF_FSDP2 = 5  # FSDP2 sums gradients over the ranks per micro-batch, not per step
# The defaults of these settings depend on the machine and launch, so a dry run ignores changes.
HOST_DEFAULTS = (
    "bf16", "fp16", "use_cpu", "global_batch_size", "per_device_train_batch_size",
    "context_parallel",
)  # fmt: skip


class Snapshot(NamedTuple):
    """The settings of a start, and digests of its inputs (see `_input_digests`)."""

    settings: Mapping[str, Any]
    contents: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Change:
    """A difference between two starts: a changed setting or changed contents of a file.

    name: the setting, whose value may name a file. what: the name of the change in the log. old,
    new: values or digests. note: a remark for the log. dangerous: whether the change needs
    `--accept_changes NAME`. impossible: why --accept_changes does not allow the change, or "".
    """

    name: str
    what: str
    old: Any
    new: Any
    note: str = ""
    dangerous: bool = False
    impossible: str = ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"  {self.what}: {shown(self.old)} -> {shown(self.new)}{note}"

    def problem(self, output_dir: Path) -> str:
        """Return an error text that says why the run does not resume and what the user can type."""
        changed = f"its {self.what} is {shown(self.old)}, now it is {shown(self.new)}"
        if self.impossible:
            return (
                f"{output_dir} cannot resume: {changed}, but its checkpoints {self.impossible}. "
                "Give the old value, or take its weights into a new run: --init_from with another "
                "--output_dir."
            )
        return (
            f"{output_dir} holds another run: {changed}. Go back to the old one to resume, "
            f"accept the new one (--accept_changes {self.name}), or name another --output_dir."
        )


def identity_facts(settings: RunSettings, data: RunData) -> dict[str, Any]:
    """Return {field: value} for provenance.json: digests of inputs, and package versions.

    The inputs are data, tokenizer, model and own code. Only rank 0 calls this.
    """
    launch = settings.values.environment
    by_fsdp2 = is_true("ACCELERATE_USE_FSDP", launch) and launch.get("FSDP_VERSION") == "2"
    left_out: dict[str, str | int] = {}
    if file := settings.data.skip_documents:
        left_out = {"file SHA-256": file_digests([Path(file).expanduser()])[0]}
        left_out["documents"] = sum(map(len, data.train.skipped))
    return {
        "data": data.fingerprints(),
        "skip_documents": left_out,
        "tokenizer_sha256": data.tokenizer_sha256,
        "model_config": model_contents(settings),
        "base_weights": base_weights(settings),
        "numerics": NUMERICS_OF_FSDP2 if by_fsdp2 else NUMERICS,
        "versions": package_versions(),
        "own_code": settings.own_code.digests(),
        "environment": [] if settings.run.dry_run else redacted(inherited(os.environ)),
    }


def _input_digests(facts: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return {setting: {name: digest}} for the inputs of a start, such as data and weights.

    facts: the result of `identity_facts`, or a start's entry in provenance.json. Inputs without a
    known digest get {}. In the result, model_config has the digests of the model's configuration,
    and model_name_or_path has those of its weights, even if other settings name the model.
    """
    data, weights = facts.get("data") or {}, facts.get("base_weights") or {}
    variables = " ".join(map(without_indices, facts.get("environment") or ()))
    digests = {
        "train_data": {"content fingerprint": data.get("train")},
        "skip_documents": facts.get("skip_documents") or {},
        "tokenizer_name_or_path": {"SHA-256": facts.get("tokenizer_sha256")},
        "model_config": facts.get("model_config") or {},
        "model_name_or_path": weights.get("sha256", weights),
        "eval_data": {split: data[split] for split in data if split != "train"},
        "versions": facts.get("versions") or {},
        "environment": {"variables": variables},
        # --accept_changes needs a setting's name. No setting orders the sums, so `seed` is used.
        "seed": {"version of the sums (their last bits)": facts.get("numerics", 1)},
        **{"callbacks": {}, "loss": {}, **facts.get("own_code", {})},
    }
    return {name: each if any(each.values()) else {} for name, each in digests.items()}


def compare_samples(checkpoint: Path | None, plan: RunPlan) -> None:
    """Warn if a changed global batch makes the resumed run leave out or repeat samples.

    checkpoint: the checkpoint to resume from. None means a new run.
    """
    if checkpoint is None:
        return
    try:
        manifest = read_manifest(checkpoint)
    except (DamagedCheckpointError, OSError):  # `resume_point` renames a damaged one
        return
    step, sampler = manifest.step, plan.sampler
    jump = sampler.samples_before(step) - manifest.samples
    if jump and manifest.samples:  # older versions did not record samples
        logger.warning(
            "batch: %s comes after %s samples, and with these sizes of the global batch %s: the "
            "run %s %s samples. With the old sizes for the steps before it goes on where it was: "
            "global_batch_size: {0: ..., %d: %d}",
            checkpoint.name, f"{manifest.samples:,}", f"{manifest.samples + jump:,}",
            "leaves out" if jump > 0 else "repeats", f"{abs(jump):,}", step, sampler.size_at(step),
        )  # fmt: skip


def accepted_changes(
    output_dir: Path,
    settings: RunSettings,
    facts: Mapping[str, Any],
    derived: Mapping[str, Any],
    *,
    resumes: bool = False,
) -> dict[str, Any]:
    """Log changes since the last start. Return fields for provenance.json, or {} without changes.

    facts: the result of `identity_facts`, and the script. derived: values that the plan chose for
    settings that may be null. resumes: whether this start resumes a run of another directory.
    Raises ConfigurationError for a change that the checkpoints do not allow, and for a dangerous
    change that is not in --accept_changes.
    """
    starts = RunRecord(output_dir).starts
    if not starts:
        return {}
    if (script := starts[-1].get("script", facts["script"])) != facts["script"]:
        raise ConfigurationError(
            f"{output_dir} holds a run of {script}: name another --output_dir."
        )
    # Settings that the older version of Stoker did not have count as set to their defaults.
    defaults = {name: one.default for name, one in settings.values.declared.items()}
    # Mask secrets in both, because the first start masked them in config.yaml.
    old = redacted(defaults | settings_in_force(output_dir, starts))
    new = redacted(settings.resolved)
    same = {name: value for name, value in derived.items() if old[name] == value}
    new = new | {name: value for name, value in same.items() if new[name] is None}
    resumes |= own_checkpoint(output_dir) is not None
    if settings.run.dry_run and resumes:
        new = new | {name: old[name] for name in HOST_DEFAULTS if settings.values.rank(name) == 0}
    before, now = Snapshot(old, _input_digests(starts[-1])), Snapshot(new, _input_digests(facts))
    changes = list(find_changes(before, now, resumes=resumes))
    if not changes:
        return {}
    table = "\n".join(map(str, changes))
    logger.warning("changed since the last start in %s:\n%s", output_dir, table)
    accepted = settings.run.accept_changes
    problems = [
        change.problem(output_dir)
        for change in changes
        if change.impossible or (change.dangerous and change.name not in accepted)
    ]
    if len(problems) > MANY_CHANGES:
        problems.insert(0, f"{output_dir} holds another run: for a new run add --output_dir NAME.")
    if problems and settings.run.assume:  # --assume only predicts, so any change is allowed
        logger.warning("a start would be refused: %s", "\n".join(problems))
    elif problems:
        raise ConfigurationError(problems)
    return {
        "changed": {change.what: new[change.what] for change in changes if change.what in new},
        "accepted": sorted({change.name for change in changes if change.dangerous}),
        "altered": sorted({change.name for change in changes}),
    }


def find_changes(before: Snapshot, now: Snapshot, *, resumes: bool) -> Iterator[Change]:
    """Yield a Change for each difference. resumes: whether the start `now` loads a checkpoint."""
    dangerous = set()
    for name, new in now.settings.items():
        old, note, impossible = before.settings.get(name, new), "", ""
        if name in PER_START_SETTINGS or new == old:
            continue
        if name in FILE_SETTINGS:
            note = _why_harmless(name, before, now, resumes=resumes)
        elif name in ("max_steps", "max_tokens", "num_train_epochs"):
            note = f"the {now.settings['lr_scheduler_type']} schedule takes its new curve"
        elif resumes and not _is_compatible(name, old, new):
            impossible = IN_THE_CHECKPOINT.get(name, "")
        if name in IDENTITY and not note:
            dangerous.add(name)
        yield Change(name, name, old, new, note, name in dangerous, impossible)
    weights = "model_name_or_path" if now.settings["init_from"] is None else "init_from"
    config = weights if now.settings["model_config"] is None else "model_config"
    for kind, old in before.contents.items():
        name = {"model_config": config, "model_name_or_path": weights}.get(kind, kind)
        new, impossible = now.contents.get(kind, {}), ""
        if kind == "model_config" and resumes:
            impossible = _shape_difference(old, new)
        keys = [key for key in old.keys() | new.keys() if old.get(key) != new.get(key)]
        if old and new and keys and (impossible or name not in dangerous):
            key, note = min(keys), f"and {len(keys) - 1} more" if len(keys) > 1 else ""
            what, is_dangerous = f"{name}: {key}", name not in HARMLESS_INPUTS
            yield Change(name, what, old.get(key), new.get(key), note, is_dangerous, impossible)


def _shape_difference(*contents: Mapping[str, Any]) -> str:
    """Return a text on the first tensor whose shape differs between configurations, or ""."""
    if not all(contents) or contents[0] == contents[1]:
        return ""
    shapes = []
    for config in (AutoConfig.for_model(**each) for each in contents):
        with torch.device("meta"):
            # Call the class, because from_config would shard the weights under ZeRO-3.
            model: Any = causal_lm_class(config)(config)
        shapes.append({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    for name in shapes[0] | shapes[1]:
        was, is_now = (each.get(name, "not there") for each in shapes)
        if was != is_now:
            return f"have other tensors: {name} was {was} and would be {is_now}"
    return ""


def _is_compatible(name: str, old: Any, new: Any) -> bool:
    """Return whether a checkpoint saved with the value `old` can resume with the value `new`."""
    if name == "metric_for_best_model":  # no metric so far, or the same metric
        return old is None or str(new).removeprefix("eval_") == old.removeprefix("eval_")
    return name == "optim" and {old, new} == {"adamw_torch", "adamw_torch_fused"}


def _why_harmless(name: str, before: Snapshot, now: Snapshot, *, resumes: bool) -> str:
    """Return why a new path or name does not change results, or "" if results may change."""
    if name in WEIGHT_SETTINGS and resumes and not now.settings.get("use_peft"):
        return "the run resumes from weights of its own"  # LoRA's checkpoints have only adapters
    if name == "train_data":
        # Without weights the number of entries may differ: several raw files are one dataset.
        old, new = (train_sources(one.settings[name]).values() for one in (before, now))
        if [*filter(None, old)] != [*filter(None, new)]:  # the sources' weights changed
            return ""
    kind = "model_name_or_path" if name in (*WEIGHT_SETTINGS, "model_revision") else name
    old_digests, new_digests = (one.contents[kind] for one in (before, now))
    return "the same contents" if old_digests and old_digests == new_digests else ""
