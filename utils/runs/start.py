"""Claims a run directory: for a new run, or to go on from the newest checkpoint of its own."""

import dataclasses
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.callbacks.requests import remove_stale_requests
from utils.checkpoints.background import BackgroundWriter
from utils.checkpoints.discovery import resume_point
from utils.checkpoints.layout import check_layout
from utils.checkpoints.pickles import refuse_code
from utils.checkpoints.run_record import (
    CONFIG,
    PROVENANCE,
    earlier_starts,
    known_run_id,
)
from utils.checkpoints.staging import remove_leftovers
from utils.checkpoints.store import Checkpoints, RunFacts
from utils.cluster.decisions import on_rank_0
from utils.cluster.launch import LaunchFacts
from utils.cluster.notes import mark_run_started
from utils.cluster.run_lock import leave_run_lock, take_run_lock
from utils.cluster.wandb_setup import prepare_wandb
from utils.cluster.whole_files import replace_text
from utils.config.reading.strict_yaml import dump_yaml
from utils.config.run_settings import RunSettings
from utils.planning.finished_model import name_of
from utils.planning.job_checks import saves_of
from utils.planning.plan import RunPlan
from utils.planning.run_data import RunData
from utils.planning.stages import weights_origin
from utils.runs.changes import accepted_changes, identity_facts
from utils.runs.claim import is_finished, known_files, refuse_finished
from utils.runs.preflight import check_storage
from utils.runs.provenance import (
    package_versions,
    say_other_versions,
    slurm_job,
    write_provenance,
)
from utils.runs.restarts import check_progress
from utils.runs.storage_room import StorageNeeds

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A claimed run directory: what to go on from, and whether anything is left to do.

    `weights_from` is the directory that --init_from stands for in this run; None where this start
    takes nothing from it.
    """

    output_dir: Path
    resume_from: str | None
    weights_from: str | None
    finished: bool
    checkpoint_bytes: int  # about
    compiled: bool  # its layers
    hosts: tuple[str, ...]  # of each rank
    checkpoints: Checkpoints


@dataclass(frozen=True)
class _Claim:
    """What rank 0 found in the run directory."""

    run_id: str
    resume_from: str | None
    weights_from: str | None
    finished: bool


def start_run(
    settings: RunSettings, plan: RunPlan, data: RunData, launch: LaunchFacts, *, script: str
) -> Run:
    """Claim ``--output_dir`` for these settings and record how this start came about.

    A new or empty directory starts a run; the directory of the same run goes on from its newest
    complete checkpoint. Writes config.yaml (once) and provenance.json (an entry a start). Rank 0
    looks and decides for all ranks. Raises ConfigurationError, with nothing written, for the
    directory of another run or of no run at all; StorageError and NoProgressError.
    """
    assert plan.attention is not None, "only a dry run leaves it open"
    output_dir = Path(str(settings.training.output_dir))
    saves = saves_of(settings, plan.total_steps)
    needs = StorageNeeds(plan.checkpoint_bytes, launch.world_size, saves, plan.total_steps)
    check_storage(output_dir, needs, launch)
    facts = {
        "script": script,
        "attention": dataclasses.asdict(plan.attention),
        "loss_head": dataclasses.asdict(plan.loss_head),
        "activation_checkpointing": plan.memory.facts(),
        "compiled": plan.compiled,
        "float32_products": plan.float32_products,
        "save_dtype": name_of(plan.save_dtype),
    }
    claim = on_rank_0(lambda: _claim(settings, facts, data, launch, plan))
    checkpoints = Checkpoints(
        output_dir,
        _run_facts(claim.run_id, settings, data, launch),
        launch.rank,
        keep=settings.training.save_total_limit,
        estimated_bytes=plan.checkpoint_bytes,
        background=_background(settings, claim, launch),
    )
    run = Run(
        output_dir,
        claim.resume_from,
        claim.weights_from,
        claim.finished,
        plan.checkpoint_bytes,
        plan.compiled,
        launch.hosts,
        checkpoints,
    )
    if launch.rank == 0:
        mark_run_started()
    if not run.finished:
        prepare_wandb(list(settings.training.report_to or ()), run.output_dir, launch.rank)
    return run


def _claim(
    settings: RunSettings,
    facts: Mapping[str, Any],
    data: RunData,
    launch: LaunchFacts,
    plan: RunPlan,
) -> _Claim:
    output_dir = Path(str(settings.training.output_dir))
    known_files(output_dir)  # nothing is written into a directory that is no run's
    take_run_lock(output_dir)
    known = known_files(output_dir)
    facts = {**facts, **identity_facts(settings, data)}
    changes = accepted_changes(output_dir, settings, facts)
    run_id = known_run_id(output_dir / PROVENANCE) or uuid.uuid4().hex
    resume_from = _resume_point(output_dir, run_id, launch.strategy) if known else None
    refuse_finished(output_dir, resume_from)
    if resume_from is not None:
        say_other_versions(resume_from)
    weights = weights_origin(settings, launch.strategy, resume_from)
    check_progress(earlier_starts(output_dir / PROVENANCE), resume_from, slurm_job(os.environ))
    remove_stale_requests(output_dir)
    if not known:
        _write_config(output_dir, settings.resolved)
    write_provenance(
        output_dir / PROVENANCE,
        launch,
        run_id=run_id,
        resumed_from=resume_from,
        weights_from=weights,
        **facts,
        **changes,
    )
    finished = is_finished(output_dir, resume_from, plan.total_steps)
    if finished:
        logger.info("%s is finished: nothing is left to do", output_dir)
        leave_run_lock(output_dir)
    return _Claim(run_id, resume_from, None if weights is None else weights["path"], finished)


def _background(
    settings: RunSettings, claim: _Claim, launch: LaunchFacts
) -> BackgroundWriter | None:
    """Return what writes checkpoints in the background, if asked; collective over ranks."""
    remove_leftovers()
    if claim.finished or not settings.run.async_save:
        return None
    return BackgroundWriter(claim.run_id, launch.rank)


def _resume_point(output_dir: Path, run_id: str, strategy: str) -> str | None:
    found = resume_point(output_dir, run_id)
    if found is not None:
        check_layout(found, strategy)
        refuse_code(found)
    return None if found is None else str(found)


def _run_facts(run_id: str, settings: RunSettings, data: RunData, launch: LaunchFacts) -> RunFacts:
    resolved = json.dumps(settings.resolved, sort_keys=True, default=str)
    return RunFacts(
        run_id=run_id,
        world_size=launch.world_size,
        strategy=launch.strategy,
        global_batch_size=settings.run.global_batch_size,
        fingerprints={
            "data": data.fingerprints(),
            "tokenizer": data.tokenizer_sha256,
            "settings": hashlib.sha256(resolved.encode()).hexdigest(),
        },
        versions=package_versions(),
    )


def _write_config(output_dir: Path, resolved: Mapping[str, Any]) -> None:
    """Write the resolved settings, atomically; the file is a recipe for the same run."""
    text = "# The resolved settings of this run; `--config` takes this file as a recipe.\n"
    text += dump_yaml(dict(resolved))
    replace_text(output_dir / CONFIG, text)
