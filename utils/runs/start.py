"""Starts a run: the process, then the run directory, new or resumed, claimed for this job."""

import dataclasses
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.callbacks.stop import remove_stale_requests
from utils.checkpoints.discovery import resume_point
from utils.checkpoints.files import (
    CONFIG,
    PROVENANCE,
    Manifest,
    check_layout,
    earlier_starts,
    known_run_id,
)
from utils.checkpoints.pickles import guard_loading, refuse_code
from utils.checkpoints.staging import BackgroundWriter, remove_leftovers
from utils.checkpoints.store import Checkpoints
from utils.config.errors import NoProgressError, UnfitClusterError
from utils.config.recipes import dump_yaml
from utils.config.settings import RunSettings
from utils.launch.processes import LaunchFacts, check_launch, requested_strategy
from utils.launch.script import configure_logging
from utils.launch.signals import install_stop_signals
from utils.model.finished_model import name_of
from utils.model.stages import weights_origin
from utils.planning.job import saves_of
from utils.planning.plan import RunPlan
from utils.planning.run_data import RunData
from utils.runs.changes import accepted_changes, identity_facts
from utils.runs.preflight import check_storage, is_finished, known_files, refuse_finished
from utils.runs.provenance import (
    package_versions,
    prepare_wandb,
    slurm_job,
    warn_of_other_versions,
    write_provenance,
)
from utils.support.collectives import gathered, on_rank_0
from utils.support.files import replace_text
from utils.support.host import global_rank
from utils.support.notes import mark_run_started
from utils.support.redaction import load_env_file
from utils.support.run_lock import leave_run_lock, take_run_lock

logger = logging.getLogger(__name__)

STARTS_WITHOUT_PROGRESS = 3


@dataclass(frozen=True)
class Claim:
    """What rank 0 found in the run directory: where to resume, and whether anything is left to do.

    `weights_from` is the directory that --init_from stands for in this run; None where this start
    takes nothing from it.
    """

    run_id: str
    resume_from: str | None
    weights_from: str | None
    finished: bool


@dataclass(frozen=True)
class Run(Claim):
    """A claimed run directory, and what its callbacks need of the plan."""

    output_dir: Path
    compiled: bool  # its layers
    hosts: tuple[str, ...]  # of each rank
    checkpoints: Checkpoints


def start_process(settings: RunSettings) -> LaunchFacts:
    """Set up logging, tokens, signals and loading, check the launch; the settings are parsed.

    A dry run on a login node stands for the launch that WORLD_SIZE and the accelerate variables
    describe. Raises ConfigurationError.
    """
    configure_logging()
    for note in settings.values.notes:
        logger.info("settings: %s", note)
    load_env_file()
    if not settings.run.dry_run:
        install_stop_signals()
        launch = check_launch()
        check_same_precision(settings, launch)
        guard_loading(launch.strategy)
        return launch
    import torch

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    # A build for CUDA names it on a login node without a GPU too, unless it has to look.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return LaunchFacts(
        rank=global_rank(),
        world_size=world_size,
        strategy=requested_strategy(os.environ, world_size),
        hosts=(),
        device="cpu" if accelerator is None else accelerator.type,
    )


def check_same_precision(settings: RunSettings, launch: LaunchFacts) -> None:
    """Refuse ranks that compute in different types; collective over ranks.

    Left open, bf16 follows from the CPU, and hosts may differ. Raises UnfitClusterError.
    """
    if launch.world_size == 1:
        return
    answers = gathered((settings.values["bf16"], settings.values.shown("bf16")))
    for rank, (bf16, shown) in enumerate(answers):
        if bf16 != answers[0][0]:
            raise UnfitClusterError(
                f"the ranks would compute in different types: {answers[0][1]} on "
                f"{launch.hosts[0]} (rank 0), {shown} on {launch.hosts[rank]} (rank {rank}): set "
                "bf16 yourself, or take nodes of one kind."
            )


def start_run(
    settings: RunSettings, plan: RunPlan, data: RunData, launch: LaunchFacts, *, script: str
) -> Run:
    """Claim ``--output_dir`` for these settings and record how this start came about.

    A new or empty directory starts a run; the directory of the same run resumes from its newest
    complete checkpoint. Writes config.yaml (once) and provenance.json (an entry a start). Rank 0
    looks and decides for all ranks. Raises ConfigurationError, with nothing written, for the
    directory of another run or of no run at all; StorageError and NoProgressError.
    """
    output_dir = Path(str(settings.training.output_dir))
    check_storage(output_dir, plan, saves_of(settings, plan.total_steps), launch)
    claim = on_rank_0(lambda: _claim(settings, plan, data, launch, script))
    remove_leftovers()
    background = None
    if settings.run.async_save and not claim.finished:
        background = BackgroundWriter(claim.run_id, launch.rank)
    checkpoints = Checkpoints(
        output_dir,
        _manifest(claim.run_id, settings, data, launch),
        launch.rank,
        keep=settings.training.save_total_limit,
        estimated_bytes=plan.checkpoint_bytes,
        background=background,
    )
    if launch.rank == 0:
        mark_run_started()
        if not claim.finished:
            prepare_wandb(settings.training.report_to or (), output_dir, claim.run_id)
    return Run(
        **vars(claim), output_dir=output_dir, compiled=plan.compiled, hosts=launch.hosts,
        checkpoints=checkpoints,
    )  # fmt: skip


def _claim(
    settings: RunSettings, plan: RunPlan, data: RunData, launch: LaunchFacts, script: str
) -> Claim:
    """Lock the directory, refuse what cannot resume, and write this start down; on rank 0."""
    output_dir = Path(str(settings.training.output_dir))
    known_files(output_dir)  # nothing is written into a directory that is no run's
    take_run_lock(output_dir)
    known = known_files(output_dir)
    facts = _plan_facts(plan, script) | identity_facts(settings, data)
    changes = accepted_changes(output_dir, settings, facts)
    run_id = known_run_id(output_dir / PROVENANCE) or uuid.uuid4().hex
    checkpoint = resume_point(output_dir, run_id) if known else None
    resume_from = None
    if checkpoint is not None:
        resume_from = str(checkpoint)
        check_layout(checkpoint, launch.strategy)
        refuse_code(checkpoint)
        warn_of_other_versions(resume_from)
    refuse_finished(output_dir, resume_from)
    weights = weights_origin(settings, launch.strategy, resume_from)
    check_progress(earlier_starts(output_dir / PROVENANCE), resume_from, slurm_job(os.environ))
    remove_stale_requests(output_dir)
    if not known:
        text = "# The resolved settings of this run; `--config` takes this file as a recipe.\n"
        replace_text(output_dir / CONFIG, text + dump_yaml(dict(settings.resolved)))
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
    return Claim(run_id, resume_from, None if weights is None else weights["path"], finished)


def _plan_facts(plan: RunPlan, script: str) -> dict[str, Any]:
    assert plan.attention is not None, "only a dry run leaves it open"
    return {
        "script": script,
        "attention": dataclasses.asdict(plan.attention),
        "loss_head": dataclasses.asdict(plan.loss_head),
        "activation_checkpointing": plan.memory.facts(),
        "compiled": plan.compiled,
        "float32_products": plan.float32_products,
        "save_dtype": name_of(plan.save_dtype),
    }


def _manifest(run_id: str, settings: RunSettings, data: RunData, launch: LaunchFacts) -> Manifest:
    """Return what the manifests of this start have in common."""
    resolved = json.dumps(settings.resolved, sort_keys=True, default=str)
    return Manifest(
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


def check_progress(
    starts: Sequence[Mapping[str, Any]], resume_from: str | None, job: Mapping[str, Any] | None
) -> None:
    """Refuse to start where three earlier starts of this same job began, and so came to nothing.

    `starts` are those in provenance.json, `job` is this job as it writes it. A job that the user
    submitted anew may always try. Raises NoProgressError.
    """
    if job is None or int(job["restart_count"] or 0) == 0:
        return

    def begin(slurm: Mapping[str, Any] | None, checkpoint: str | None) -> tuple[Any, ...]:
        # What stays when Slurm starts a job again at the same step; ids are a cluster's own.
        job_id = None if slurm is None else (slurm["cluster"], slurm["job_id"])
        return job_id, None if checkpoint is None else Path(checkpoint).name

    own = begin(job, resume_from)
    same = [start for start in starts if begin(start["slurm"], start["resumed_from"]) == own]
    if len(same) >= STARTS_WITHOUT_PROGRESS:
        raise NoProgressError(
            f"job {job['job_id']} began {len(same)} times at {own[1] or 'step 0'} and reached no "
            "checkpoint beyond it. Look in its log for what ended it each time; if it was the time "
            "limit, give it more (--time) or save more often (a smaller save_steps). sbatch of the "
            "same command tries again."
        )
