"""SavingTrainer, the base class of both trainers: saves checkpoints, loads them, picks the best.

An evaluation may find a new best step. If a checkpoint of this step is saved, this checkpoint
becomes the best checkpoint. A checkpoint that was saved only because the run was interrupted never
becomes the best checkpoint: an uninterrupted run would not have this checkpoint, and both runs must
end with the same model.

If the number of ranks is unchanged, each rank restores its RNG states exactly. If it has changed,
the batch is divided into other micro-batches, so dropout masks cannot be the same. All ranks then
get new RNG states, computed from (seed, step, rank). Resuming twice from one checkpoint thus gives
the same weights bit for bit, and no two ranks draw the same numbers.
"""

import logging
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import SaveStrategy
from typing_extensions import override

from utils.callbacks.progress import Phase
from utils.callbacks.stop import EvaluationInterrupted
from utils.checkpoints.discovery import best_checkpoint
from utils.checkpoints.files import OWN_STATE, read_manifest
from utils.checkpoints.record import copy_record
from utils.checkpoints.store import Checkpoints
from utils.config.declarations import counted_ranks
from utils.config.errors import ConfigurationError
from utils.data.loader import TrainLoader
from utils.host.collectives import gathered
from utils.model.finished_model import set_generation_settings, write_processor_files
from utils.training.callbacks import Callbacks
from utils.training.losses import rank_share
from utils.training.zero_resharding import loadable_checkpoint

logger = logging.getLogger(__name__)

EXTRA_SAVES = "extra_saves"  # key of our values in a checkpoint's trainer_state.json


class RestoreAtBegin(TrainerCallback):
    """The trainer's first callback: calls `restore(train loader)` when training begins.

    Trainer resets its loss sums before this event, so `restore` can set them.
    """

    def __init__(self, restore: Callable[[TrainLoader], None]):
        self.restore = restore

    @override
    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        self.restore(kwargs["train_dataloader"])


class SavingTrainer(Trainer):
    """A Trainer that completes each checkpoint with a manifest file and resumes bit for bit.

    extra_saves  steps whose save was not scheduled but requested by a stop, a SAVE file or
                 save_minutes. The checkpoints of these steps cannot become the best checkpoint.
    """

    # PackedTrainer sets these before Trainer's constructor.
    callbacks: Callbacks
    checkpoints: Checkpoints
    save_best: bool
    generation: Any
    extra_saves: list[int]

    @override
    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: Any, *others: Any, **named: Any
    ) -> None:
        """Log, evaluate and save if due. If a stop interrupts the evaluation, log and save only."""
        if self.state.global_step == self.callbacks.progress.first_step:
            self.callbacks.own.state()  # raise errors now, not at the first checkpoint
        self.callbacks.guard.take_step(self.state.global_step - 1, grad_norm)
        try:
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *others, **named)
        except EvaluationInterrupted:
            self.state.log_history = [  # drop the results of the splits evaluated so far
                entry
                for entry in self.state.log_history
                if entry["step"] < self.state.global_step
                or not any(key.startswith("eval_") for key in entry)
            ]
            # The log is written and no evaluation is due any more: this call only saves.
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *others, **named)
        if self.control.should_training_stop:
            self.callbacks.progress.begin(Phase.FINISH, self.state.global_step)

    @override
    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate; return the metrics. Raises NotFiniteError if an earlier step had a NaN or inf.

        A save is requested if early stopping ends the run, unless save_strategy is "no". With
        save_best, a save is also requested at a new best step.

        Trainer sets `skip_scheduler` for an evaluation before the first step. Early stopping and
        the choice of the best step ignore this evaluation. Exception: if a stop prevented this
        evaluation before a resume, the metrics count. But no save is requested, because the step
        already has a checkpoint.
        """
        self.callbacks.progress.begin(Phase.EVALUATE, self.state.global_step)
        self.callbacks.guard.settle()
        at_start, postponed = skip_scheduler, self.callbacks.stop.evaluation_due
        skip_scheduler = at_start and not postponed
        metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        if skip_scheduler:
            return metrics
        stopping = self.callbacks.early_stopping
        ends_run = stopping is not None and stopping.take_evaluation(
            self.args, self.state, self.control, metrics
        )
        last = ends_run and self.args.save_strategy != SaveStrategy.NO
        # Trainer compares the same metrics again later, and then finds no new best.
        best = self._determine_best_metric(metrics=metrics, trial=trial)
        self.callbacks.stop.evaluation_due = False
        if not at_start and (last or (best and self.save_best)):
            # An uninterrupted run saves this step as well, so the save is not an extra one.
            self.callbacks.stop.unscheduled_save = False
            self.control.should_save = True
        elif at_start and best:
            step = self.state.global_step
            if self.save_best and step in self.extra_saves:
                self.extra_saves.remove(step)
            if step not in self.extra_saves:
                self._name_best_checkpoint()
        return metrics

    @override
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Check that the weights are finite, then save a checkpoint. All ranks must call this."""
        state, checkpoints, step = self.state, self.checkpoints, self.state.global_step
        self.callbacks.progress.begin(Phase.SAVE, step)
        self.callbacks.guard.settle(model)
        self.extra_saves = [saved for saved in self.extra_saves if saved != step]
        if self.callbacks.stop.unscheduled_save:
            self.extra_saves.append(step)
        if state.best_global_step in self.extra_saves:
            state.best_global_step = None  # else Trainer would call this checkpoint the best
        values = self._values_to_save()
        states: Any = state.stateful_callbacks  # a dict, whatever its annotation says
        states[OWN_STATE] = values
        is_new = checkpoints.begin(step)
        if is_new:  # never overwrite a committed checkpoint
            super()._save_checkpoint(model, trial)
        self._name_best_checkpoint()
        if not is_new:
            return
        folder = checkpoints.run_dir / checkpoints.directory(step).name
        if self.args.should_save and checkpoints.staged:
            # Trainer's file has the path of the staging directory in memory: write the final path.
            state.save_to_json(str(folder / TRAINER_STATE_NAME))
        if self.args.should_save:
            copy_record(checkpoints.output_dir, folder)
        checkpoints.commit(step, tokens=sum(values["tokens"].values()))

    def _name_best_checkpoint(self) -> None:
        """Set `state.best_model_checkpoint` to the best step's checkpoint, if it exists."""
        state, best = self.state, self.state.best_global_step
        if not best:
            return
        directory = self.checkpoints.directory(best)
        # This step's checkpoint may still be in memory and not on disk.
        if best == state.global_step or directory.is_dir():
            state.best_model_checkpoint = str(directory)

    def log_best_checkpoint(self) -> None:
        """Log the best checkpoint's path and metric; warn if the best step has no checkpoint."""
        state, best = self.state, self.state.best_model_checkpoint
        if not state.best_global_step:
            return
        metric = f"{self.args.metric_for_best_model} = {state.best_metric:.4f}"
        if best and best.endswith(f"-{state.best_global_step}"):
            logger.info("best checkpoint: %s (%s)", best, metric)
        elif self.args.load_best_model_at_end:
            logger.warning(
                "the best evaluation (%s at step %d) has no checkpoint, so final/ holds %s: "
                "--save_best true writes one at each new best",
                metric, state.best_global_step, best or "the last step",
            )  # fmt: skip

    def _values_to_save(self) -> dict[str, Any]:
        """Return Stoker's values for a checkpoint, {name: JSON value}. All ranks must call this."""
        step = self.state.global_step
        loader: Any = self.callback_handler.train_dataloader
        loader.tokens_seen.count(step)
        values: dict[str, Any] = {EXTRA_SAVES: self.extra_saves}
        values["tokens"] = dict(loader.tokens_seen.by_name)
        if steps := step - self._globalstep_last_logged:
            sums = gathered(self._tr_loss.item())
            values |= {"unlogged_steps": steps, "unlogged_loss_sums": sums}
        for part in self.callbacks.stateful():
            values |= part.state()
        return values

    def _restore(self, loader: TrainLoader) -> None:
        """Restore the values from `_values_to_save`, and the path of the best checkpoint."""
        state, step = self.state, self.state.global_step
        states: Any = state.stateful_callbacks
        saved = states.get(OWN_STATE, {})
        if step:  # the run directory may have moved since the checkpoint named the best one
            best = best_checkpoint(self.checkpoints.directory(step))
            state.best_model_checkpoint = str(best) if best and best.is_dir() else None
        self.extra_saves = list(saved.get(EXTRA_SAVES, []))
        loader.batch_sampler.start_step = step
        if "tokens" in saved:
            loader.tokens_seen.resume(step, saved["tokens"])
        if sums := saved.get("unlogged_loss_sums"):
            own = rank_share(sums, self.args)
            self._tr_loss = torch.full_like(self._tr_loss, own)
            self._globalstep_last_logged -= saved["unlogged_steps"]
        for part in self.callbacks.stateful():
            part.restore(saved)
        self.callbacks.own.state()  # raises an error if a checkpoint could not store the state

    @override
    def _get_output_dir(self, trial: Any) -> str:
        """Return the directory in which Trainer creates its checkpoint-N."""
        return str(self.checkpoints.run_dir)

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model and tokenizer, without Trainer's training_args.bin, which is a pickle.

        Each tensor is saved under its name in the model, because Trainer loads by these names. By
        default save_pretrained would write the Hub's names, with one tensor for each expert.
        """
        directory, model = Path(output_dir or str(self.args.output_dir)), self.model
        bare: Any = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        set_generation_settings(bare, self.generation)
        if isinstance(model, PreTrainedModel):
            save = partial(model.save_pretrained, save_original_format=False)
            vars(model)["save_pretrained"] = save
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            vars(model).pop("save_pretrained", None)
        if not self.args.should_save:
            return
        (directory / TRAINING_ARGS_NAME).unlink(missing_ok=True)
        write_processor_files(bare.processor_files, self.processing_class, directory)
        plugin: Any = getattr(self.accelerator.state, "fsdp_plugin", None)
        if self.is_fsdp_enabled and "FULL_STATE_DICT" not in str(plugin.state_dict_type):
            # Under FSDP with sharded checkpoints Trainer saves no configuration and no tokenizer.
            # The run could then not resume after its initial model is deleted.
            savable: list[Any] = [bare.config, self.processing_class]
            if isinstance(bare, PreTrainedModel) and bare.can_generate():
                savable.append(bare.generation_config)
            for each in savable:
                each.save_pretrained(directory)

    @override
    def _save_rng_state(self, output_dir: str) -> None:
        save_random_states(Path(output_dir), self.args)
        if self.callbacks.average is not None:
            self.callbacks.average.save(Path(output_dir))

    @override
    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        """Prepare model and optimizer; load the checkpoint of a resumed run.

        A ZeRO checkpoint that another number of ranks saved is converted first. After loading, the
        learning rate is set by the current schedule. Returns the result of Trainer's method.
        """
        if resume_from_checkpoint is not None:
            self.callbacks.progress.begin(Phase.LOAD, self.state.global_step)
        with loadable_checkpoint(self, resume_from_checkpoint) as loadable:
            prepared = super()._prepare_for_training(max_steps, train_dataloader, loadable)
        if resume_from_checkpoint is not None:
            follow_schedule(self.lr_scheduler)
        return prepared

    @override
    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_random_states(Path(checkpoint), self.args, self.state.global_step)

    @override
    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint's weights.

        The class of the model's configuration reads config.json here. Trainer would use
        PreTrainedConfig, which refuses the config.json of some models.
        """
        model: Any = self.model
        with mock.patch("transformers.trainer.PreTrainedConfig", type(model.config)):
            super()._load_from_checkpoint(*args, **kwargs)

    @override
    def _load_best_model(self) -> None:
        """Load the best checkpoint, except after a stop. Raises StorageError if it is damaged."""
        if self.callbacks.stop.stopped or self.state.best_model_checkpoint is None:
            return
        best = Path(self.state.best_model_checkpoint)
        self.callbacks.progress.begin(Phase.LOAD, self.state.global_step)
        self.checkpoints.check(best)
        with loadable_checkpoint(self, str(best)) as loadable:
            self.state.best_model_checkpoint = loadable
            super()._load_best_model()
        if self.callbacks.average is not None:
            self.callbacks.average.load(best)
        self.state.best_model_checkpoint = str(best)

    @override
    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raise ConfigurationError if the checkpoint lacks a tensor: its values would be random."""
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        missing = [name for name in load_result.missing_keys if name not in tied]
        if missing:
            raise ConfigurationError(
                f"the checkpoint lacks {len(missing)} tensors of the model, {missing[0]} first: it "
                "is another model's or another Stoker's. Give final/ to a new run (--init_from)."
            )
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))


def follow_schedule(scheduler: Any) -> None:
    """Set the next step's learning rate to the rate of the current schedule.

    Trainer restores the rate in the checkpoint. The two rates differ only if a setting of the
    schedule has changed, such as max_steps.
    """
    if isinstance(scheduler, AcceleratedScheduler):  # under DeepSpeed
        scheduler = scheduler.scheduler
    if not isinstance(scheduler, LambdaLR):
        return  # such as reduce_lr_on_plateau: the rate follows from the losses, not from the step
    step, factors = scheduler.last_epoch, scheduler.lr_lambdas
    rates = [base * at(step) for base, at in zip(scheduler.base_lrs, factors, strict=True)]
    groups = scheduler.optimizer.param_groups
    if rates != [group["lr"] for group in groups]:
        logger.info(
            "learning rate: the schedule has changed, step %d takes %.3g instead of %.3g",
            step + 1, rates[0], groups[0]["lr"],
        )  # fmt: skip
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


def save_random_states(directory: Path, args: TrainingArguments) -> None:
    """Save this rank's RNG states as plain numbers and tensors, in Trainer's file rng_state*.pth.

    Trainer would save the states of all GPUs of the node by their indices. A resumed run on a node
    with other GPUs would then restore wrong states.
    """
    kind, words, *rest = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(words, dtype=np.int64)), *rest),
        "cpu": torch.get_rng_state(),
    }
    if args.device.type != "cpu":
        states["device"] = torch.get_device_module(args.device).get_rng_state(args.device)
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(states, directory / _rng_file_name(args))


def load_random_states(checkpoint: Path, args: TrainingArguments, step: int) -> None:
    """Restore this rank's RNG states, or set new states if the number of ranks has changed."""
    ranks = read_manifest(checkpoint).world_size
    if ranks != args.world_size:
        keys = [args.seed, step, args.process_index]
        words = np.random.SeedSequence(keys).generate_state(4, np.uint32).tolist()
        random.seed(words[0])
        np.random.seed(words[1])
        torch.manual_seed(words[2] << 32 | words[3])  # seeds all devices
        logger.info(
            "the checkpoint is of %s, now there are %d: random states (dropout) are new, by "
            "seed %d, step %d and rank; samples and global batches stay the same",
            counted_ranks(ranks), args.world_size, args.seed, step,
        )  # fmt: skip
        return
    path = checkpoint / _rng_file_name(args)
    states = torch.load(path, map_location="cpu", weights_only=True)
    kind, words, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["cpu"])
    if args.device.type != "cpu":
        torch.get_device_module(args.device).set_rng_state(states["device"], args.device)


def _rng_file_name(args: TrainingArguments) -> str:
    return "rng_state.pth" if args.world_size == 1 else f"rng_state_{args.process_index}.pth"
