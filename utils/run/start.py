"""The start of a run: set up the process, lock output_dir, find the checkpoint to resume from.

A dry run checks output_dir in the same way and writes nothing. A dry run does not check other nodes
and does not read the tensors of a checkpoint.
"""

import copy
import dataclasses
import json
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_token, is_offline_mode, try_to_load_from_cache
from transformers import PreTrainedConfig

from utils.callbacks.evaluation import UNIMPROVED
from utils.callbacks.stop import remove_stale_requests
from utils.checkpoints.adoption import adopt_checkpoint, foreign_checkpoint
from utils.checkpoints.discovery import own_checkpoint, resume_point
from utils.checkpoints.files import (
    CONFIG,
    FINAL,
    OWN_STATE,
    PROVENANCE,
    DamagedCheckpointError,
    Manifest,
    check_layout,
    read_manifest,
)
from utils.checkpoints.pickles import guard_loading, refuse_code
from utils.checkpoints.record import RunRecord
from utils.checkpoints.store import BackgroundWriter, Checkpoints, remove_leftovers
from utils.config.errors import ConfigurationError, StorageError
from utils.config.launch_settings import group_sizes, is_hybrid, strategy_variables
from utils.config.recipes import MASKED_NOTE, dump_yaml
from utils.config.settings import RunSettings
from utils.config.strategy import AUTO, SUBMITTING, read_config, strategy_path
from utils.host.atomic_files import replace_text
from utils.host.collectives import on_rank_0
from utils.host.environment import report_environment
from utils.host.hub import stay_offline, use_cache_if_offline
from utils.host.machine import global_rank
from utils.host.redaction import load_env_file, redacted
from utils.host.run_lock import leave_run_lock, refuse_if_in_use, run_owners, take_run_lock
from utils.kernels.cpu_products import choose_products, keep_freed_memory, products_name
from utils.launch.processes import (
    LaunchFacts,
    check_connected,
    check_launch,
    report_groups,
    requested_replicas,
    requested_strategy,
)
from utils.launch.restart import note_restarts
from utils.launch.script import configure_logging
from utils.launch.signals import install_stop_signals
from utils.launch.verdict import mark_run_started
from utils.model.finished_model import dtype_name
from utils.model.stages import origin_directory, weights_origin
from utils.model.weights import check_without_loading, published_rows, weights_dtype
from utils.plan.run_data import RunData
from utils.plan.run_plan import RunPlan, on_a_login_node, tracker_name
from utils.publish.hub import NO_TOKEN
from utils.run import preflight
from utils.run.provenance import (
    accepted_changes,
    compare_samples,
    identity_facts,
    slurm_job,
    write_provenance,
)
from utils.run.trackers import prepare_trackers

logger = logging.getLogger(__name__)

# If the Hub cache has one of these files, it has the weights of the model.
WEIGHT_FILES = (
    "model.safetensors", "model.safetensors.index.json",
    "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """The run in output_dir: a new run, or a run to resume from the checkpoint `resume_from`.

    finished: whether no step is left and final/ exists. facts: values for provenance.json (script,
    digests of inputs, changed settings). weights_from: the weights directory of --init_from. None
    if no weights are loaded from there.
    """

    run_id: str
    resume_from: str | None
    finished: bool
    facts: Mapping[str, Any]
    weights_from: str | None = None


def start_process(settings: RunSettings) -> LaunchFacts:
    """Set up logging, access tokens, signals and safe unpickling. Return the LaunchFacts.

    LaunchFacts are the rank, hosts and strategy. A dry run takes them from WORLD_SIZE and
    accelerate's environment variables. Raises ConfigurationError, for example if the processes are
    not connected.
    """
    configure_logging(debug=settings.values["log_level"] in ("debug", "detail"))
    for note in settings.values.notes:
        logger.info("settings: %s", note)
    load_env_file()
    report_environment()
    if settings.training.push_to_hub and not (os.environ.get("HF_WRITE_TOKEN") or get_token()):
        logger.warning("push_to_hub: %s Nothing will be uploaded without.", NO_TOKEN)
    if settings.training.log_level == "debug":  # NCCL reads these variables in the first collective
        for name in ("NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG"):
            os.environ.setdefault(name, "INFO")
    launch = _planned_launch(settings) if settings.run.dry_run else _real_launch(settings)
    if on_rank_0(lambda: _choose_hub_mode(settings)):  # so that all ranks load the same commits
        stay_offline()
    report_strategy(settings, launch)
    if launch.device == "cpu" and not on_a_login_node(settings, launch):
        keep_freed_memory(os.environ)
        if line := choose_products():
            logger.info("float32 products: %s", line)
    return launch


def _choose_hub_mode(settings: RunSettings) -> bool:
    model = settings.model
    is_offline = use_cache_if_offline(model.model_name_or_path, model.model_revision)
    return use_cache_if_offline(settings.values["tokenizer_name_or_path"]) or is_offline


def _real_launch(settings: RunSettings) -> LaunchFacts:
    """Check the launch of the processes, and return its facts.

    All ranks must call this. Rank 0 copies --resume_from_checkpoint to output_dir.
    """
    install_stop_signals()
    os.environ |= group_sizes(settings.values.environment)  # accelerate reads them
    launch = check_launch()
    preflight.check_same_start(settings, launch)
    args, output_dir = settings.training, settings.output_dir
    on_rank_0(lambda: refuse_if_in_use(output_dir))
    on_rank_0(lambda: preflight.check_directory(output_dir))  # before the work on data and model

    def adopt() -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        take_run_lock(output_dir)
        adopt_checkpoint(
            args.resume_from_checkpoint, output_dir, needs_best=bool(args.load_best_model_at_end)
        )

    if args.resume_from_checkpoint:
        on_rank_0(adopt)  # before anything reads provenance.json in output_dir
    guard_loading(launch.strategy)
    return launch


def _planned_launch(settings: RunSettings) -> LaunchFacts:
    """Return the launch that a dry run assumes, from WORLD_SIZE and accelerate's variables."""
    preflight.check_directory(settings.output_dir, writable=False)  # check_start checks writing
    world_size = settings.values.world_size
    # Without check_available a CUDA build of torch names CUDA even on a node without a GPU.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = "cpu" if accelerator is None or settings.run.assume else accelerator.type
    strategy = requested_strategy(settings.values.environment, world_size)
    if SUBMITTING not in os.environ and not settings.run.assume:  # the run would use this host
        check_connected(world_size, visible_gpus=0)
    replicas = requested_replicas(settings.values.environment)
    return LaunchFacts(global_rank(), world_size, strategy, (), device, replicas)


def report_strategy(settings: RunSettings, launch: LaunchFacts) -> None:
    """Log HSDP's groups, and that --strategy has no effect if the launch has another strategy."""
    given, shown = settings.run.strategy, settings.values.shown("strategy")
    environment = settings.values.environment
    if is_hybrid(environment):
        report_groups(launch, int(environment.get("LOCAL_WORLD_SIZE", launch.world_size)))
    if given == AUTO:
        return
    asked = strategy_variables(read_config(strategy_path(given), shown).content)
    strategy = requested_strategy(asked, launch.world_size)
    if launch.world_size == 1 and launch.strategy == "single":
        if given not in ("single_gpu", "cpu"):
            logger.info("%s has no effect: there is one process", shown)
    elif (strategy, is_hybrid(asked)) != (launch.strategy, is_hybrid(environment)):
        logger.warning("%s has no effect: the launch decides, by %s", shown, launch.name)


def start_run(plan: RunPlan, data: RunData, launch: LaunchFacts) -> tuple[Run, Checkpoints]:
    """Lock output_dir and write provenance.json. Return the run and its store for checkpoints.

    An empty or missing directory gets a new run and config.yaml. A run with these settings resumes
    from its newest undamaged checkpoint. All ranks must call this, and rank 0 decides. Raises
    ConfigurationError if the directory has another run or other files, StorageError for too little
    space or damaged checkpoints, and NoProgressError if a requeued job resumed at the same step
    several times.
    """
    settings = plan.settings
    preflight.check_storage(plan, launch)
    run = on_rank_0(lambda: _lock_and_record(plan, data, launch))
    remove_leftovers()
    background = None
    if settings.run.async_save and not run.finished:
        background = BackgroundWriter(run.run_id, launch.rank)
    manifest = Manifest(
        run_id=run.run_id,
        world_size=launch.world_size,
        strategy=launch.strategy,
        global_batch_size=settings.run.global_batch_size,
        fingerprints={"data": run.facts["data"], "tokenizer": run.facts["tokenizer_sha256"]},
        versions=run.facts["versions"],
    )
    checkpoints = Checkpoints(
        settings.output_dir,
        manifest,
        launch.rank,
        keep=settings.training.save_total_limit,
        estimated_bytes=plan.checkpoint_bytes,
        background=background,
    )
    checkpoints.samples_before = plan.sampler.samples_before
    if launch.rank == 0:
        step = int(Path(run.resume_from or "checkpoint-0").name.rpartition("-")[2])
        note_restarts(settings.run.restarts_in_job, step)
        mark_run_started(settings.output_dir, launch.gpus)
        if not run.finished:
            prepare_trackers(settings, tracker_name(settings, run.run_id), run.run_id, step)
    return run, checkpoints


def _lock_and_record(plan: RunPlan, data: RunData, launch: LaunchFacts) -> Run:
    """Lock output_dir, find the run, and write config.yaml and provenance.json. Return the run.

    Only rank 0 calls this. A resumed run keeps its config.yaml.
    """
    settings, output_dir = plan.settings, plan.settings.output_dir
    take_run_lock(output_dir)
    RunRecord(output_dir).restore()
    run = find_run(plan, data, launch)
    weights = weights_origin(settings, launch.strategy, run.resume_from)
    starts = RunRecord(output_dir).starts
    preflight.check_progress(starts, run.resume_from, slurm_job(os.environ))
    remove_stale_requests(output_dir)
    if not starts:
        text = "# The resolved settings of this run; `--config` takes this file as a recipe.\n"
        resolved = redacted(settings.resolved)
        if resolved != settings.resolved:
            text += f"{MASKED_NOTE}\n"
        replace_text(output_dir / CONFIG, text + dump_yaml(resolved))
    write_provenance(
        output_dir / PROVENANCE,
        launch,
        run_id=run.run_id,
        resumed_from=run.resume_from,
        weights_from=weights,
        attention=dataclasses.asdict(plan.attention),
        loss_head=dataclasses.asdict(plan.loss_head),
        activation_checkpointing=dataclasses.asdict(plan.memory),
        context_parallel=settings.run.context_parallel,
        compiled=plan.compiled,
        to_longest=plan.to_longest,
        float32_products=products_name(),
        save_dtype=dtype_name(plan.save_dtype),
        given={name: each.source for name, each in settings.values.given.items()},
        **run.facts,
    )
    if run.finished:
        logger.info("%s is finished: nothing is left to do, unless it gets more steps", output_dir)
        leave_run_lock(output_dir)
    return run if weights is None else dataclasses.replace(run, weights_from=weights["path"])


def check_start(plan: RunPlan, data: RunData, config: PreTrainedConfig, launch: LaunchFacts) -> int:
    """Check output_dir and weights in a dry run. Return 0, or raise the error of a real run."""
    settings, output_dir = plan.settings, plan.settings.output_dir
    try:
        preflight.check_output_room(plan)
    except StorageError as error:
        if SUBMITTING in os.environ or not on_a_login_node(settings, launch):
            raise
        logger.warning("%s", error.problems[0])  # jobs may have other storage than a login node
    for name, text in RunRecord(output_dir).damage.items():
        logger.warning("%s %s", output_dir / name, text)
    run = find_run(plan, data, launch)
    owner = next(run_owners(output_dir), None)
    if owner is not None and owner.alive:
        logger.warning(
            "%s trains in %s now: a start before its end is refused (exit code 2)%s",
            f"job {owner.job}" if owner.job else owner, output_dir,
            f"; --dependency=afterany:{owner.job} waits for it" if owner.job else "",
        )  # fmt: skip
    if run.finished:
        logger.info("%s is finished: a start would have nothing to do", output_dir)
    elif run.resume_from is not None:
        logger.info("a start would resume from %s", run.resume_from)
    origin = origin_directory(settings, launch.strategy, run.resume_from)
    _check_weights(settings, config, origin, data.new_tokens)
    return 0


def find_run(plan: RunPlan, data: RunData, launch: LaunchFacts) -> Run:
    """Return the run in output_dir, or a new run if output_dir has no run.

    Only rank 0 calls this. Raises ConfigurationError if the run cannot resume with these settings
    or output_dir has other files. Raises StorageError if all checkpoints are damaged.
    """
    settings, output_dir = plan.settings, plan.settings.output_dir
    dry_run = settings.run.dry_run
    known = preflight.has_run_files(output_dir)
    named = settings.training.resume_from_checkpoint if dry_run else None  # a start has copied it
    foreign = foreign_checkpoint(named, output_dir)
    record = output_dir if foreign is None else foreign.record
    facts: dict[str, Any] = {}
    if known or foreign or not dry_run:
        facts = {"script": settings.script, **identity_facts(settings, data)}
        derived = {"dataloader_num_workers": plan.data_workers, "compile": plan.compiled}
        newest = foreign.directory if foreign else own_checkpoint(output_dir)
        knows_launch = "WORLD_SIZE" in settings.values.environment
        if newest is not None and (knows_launch or not on_a_login_node(settings, launch)):
            with suppress(DamagedCheckpointError, OSError):  # `resume_point` renames a damaged one
                check_layout(newest, launch.strategy)
        compare_samples(newest, plan)
        facts |= accepted_changes(record, settings, facts, derived, resumes=foreign is not None)
    run_id = RunRecord(record).run_id or uuid.uuid4().hex
    checkpoint = resume_point(output_dir, run_id, dry_run=dry_run) if known else None
    if foreign is not None:
        checkpoint = foreign.directory
    has_final = (output_dir / FINAL).exists()
    if checkpoint is None and has_final:  # training would overwrite it
        raise ConfigurationError(
            f"{output_dir} holds a finished run without checkpoints ({output_dir / FINAL}): "
            "name another --output_dir; nothing is written over."
        )
    if checkpoint is None:
        return Run(run_id, None, False, facts)
    refuse_code(checkpoint)
    patience = settings.run.early_stopping_patience
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    own_state = state.get("stateful_callbacks", {}).get(OWN_STATE, {})
    done = read_manifest(checkpoint).step >= plan.total_steps
    done |= patience is not None and own_state.get(UNIMPROVED, 0) >= patience
    return Run(run_id, str(checkpoint), has_final and done, facts)


def _check_weights(
    settings: RunSettings, config: PreTrainedConfig, origin: Path | None, new_tokens: Sequence[int]
) -> None:
    """Check that the tensors in the weights files have the names and shapes of the model's tensors.

    origin: the weights directory of --init_from, or None. Raises ConfigurationError if names or
    shapes differ. Also raises ConfigurationError if weights are missing from the Hub cache and this
    process is offline or submits a job, because jobs have no network.
    """
    model = settings.model
    if origin is None and (model.init_from is not None or model.model_config is not None):
        return  # the weights are random or come from the run's own checkpoint
    path = str(origin or model.model_name_or_path)
    cached = (
        try_to_load_from_cache(path, file, revision=model.model_revision) for file in WEIGHT_FILES
    )
    if not Path(path).is_dir() and not any(isinstance(file, str) for file in cached):
        if SUBMITTING not in os.environ and not is_offline_mode():
            logger.info("weights: %s is not in the cache here, a start downloads it", path)
            return
        raise ConfigurationError(
            f"--model_name_or_path {path}: its weights are not in the cache of the Hub here, and "
            "there is no network, as in jobs. Where there is one, with the HF_HOME of the job "
            f"(slurm/cluster.env): python prepare_data.py --models {path}"
        )
    check_without_loading(
        path,
        exact=model.init_from is not None,
        revision=model.model_revision,
        config=copy.deepcopy(published_rows(settings, config, path, new_tokens)),
        dtype=weights_dtype(model, config),
        local_files_only=True,
    )
