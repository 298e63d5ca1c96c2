"""Training that can be left at any step or evaluation batch, and goes on as if it had not been."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from typing_extensions import override

from utils.callbacks.metrics import MetricCallback, RunLoss
from utils.callbacks.resume_state import carried_state, carry
from utils.callbacks.stop import EvaluationInterrupted, StopWatch
from utils.checkpoints.files import in_place_of_crc32
from utils.checkpoints.store import Checkpoints

logger = logging.getLogger(__name__)


class InterruptibleTrainerMixin(Trainer):
    """Carries over a stop what Trainer forgets: owed evaluations, and losses not yet logged.

    Put before a Trainer class; `StopWatch` among the callbacks decides when to stop. The losses of
    the steps since the last log are kept with each checkpoint: Trainer would log a mean without
    them after a resume. The hooks' contract is held by tests/integration/test_hooks.py.
    """

    def __init__(self, *, checkpoints: Checkpoints, save_best: bool = False, **kwargs: Any):
        self.checkpoints, self.save_best = checkpoints, save_best
        self.run_loss = RunLoss()
        super().__init__(**kwargs)
        self.watch = next(
            callback
            for callback in self.callback_handler.callbacks
            if isinstance(callback, StopWatch)
        )
        self.watch.checkpoints = checkpoints

    @override
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train; whatever ends it, the checkpoint that is being written is written to its end."""
        try:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        except Exception:
            try:
                self.checkpoints.finish()
            except Exception as error:  # what ended the run is what has to be said
                logger.error("the last checkpoint was not committed: %s", error)
            raise

    @override
    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train, unless the run was stopped before its first step."""
        if not self.control.should_training_stop:
            self._take_losses_over()
            super()._run_epoch(*args, **kwargs)

    def _take_losses_over(self) -> None:
        """Put the losses that the checkpoint carries back where they are summed up."""
        carried = carried_state(self.state)
        unlogged = carried.get("unlogged_steps", 0)
        self.run_loss = RunLoss.carried(carried, self.state.global_step - unlogged)
        sums = carried.get("unlogged_loss_sums", [])
        if not sums:
            return
        own = (
            sums[self.args.process_index]
            if len(sums) == self.args.world_size
            else sum(sums) / len(sums)  # as many ranks as it may be now, their mean is the same
        )
        self._tr_loss = torch.full_like(self._tr_loss, own)
        self._globalstep_last_logged -= carried["unlogged_steps"]

    @override
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; the summary's loss is the mean of the run, not of this start alone."""
        step = self.state.global_step
        if "loss" in logs:
            self.run_loss.count(step, logs["loss"])
        if "train_loss" in logs:
            self._count_unlogged_losses()
            mean = self.run_loss.mean()
            logs = {key: value for key, value in logs.items() if key != "train_loss"}
            logs |= {} if mean is None else {"train_loss": mean}
        super().log(logs, start_time)

    def _count_unlogged_losses(self) -> None:
        """Count the steps that a stop leaves without a log line; collective over ranks."""
        steps = self.state.global_step - self._globalstep_last_logged
        if steps:
            sums = self.accelerator.gather(self._tr_loss.detach().float().reshape(1))
            self.run_loss.count(self.state.global_step, sums.mean().item() / steps)

    @override
    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: torch.Tensor | float | None,
        model: nn.Module,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        """Log, evaluate and save as asked; where the evaluation is broken off, save and stop."""
        arguments = (
            tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time,
            learning_rate,
        )  # fmt: skip
        try:
            super()._maybe_log_save_evaluate(*arguments)
        except EvaluationInterrupted:
            self._forget_splits_evaluated_so_far()
            self.control.should_evaluate = False
            self.control.should_training_stop = True
            self.watch.ask_for_save(self.args, self.state, self.control)
            super()._maybe_log_save_evaluate(*arguments)  # what was due was logged: it only saves

    def _forget_splits_evaluated_so_far(self) -> None:
        self.state.log_history = [
            entry
            for entry in self.state.log_history
            if entry["step"] < self.state.global_step
            or not any(key.startswith("eval_") for key in entry)
        ]

    @override
    def _evaluate(
        self,
        trial: Any,
        ignore_keys_for_eval: list[str] | None,
        skip_scheduler: bool = False,
    ) -> dict[str, float]:
        """Evaluate; at the start of a resumed run with what belongs to the owed evaluation.

        Trainer skips the scheduler at the start alone: there `skip_scheduler` is true.
        """
        if not skip_scheduler:
            return super()._evaluate(trial, ignore_keys_for_eval)
        owed = self.watch.evaluation_due
        try:
            metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler=not owed)
        except EvaluationInterrupted:
            # The checkpoint that this start came from still says what is owed.
            self.control.should_training_stop = True
            return {}
        if owed:
            self.watch.evaluation_due = False
            self._judge_the_checkpoint(metrics, trial)
        return metrics

    def _judge_the_checkpoint(self, metrics: dict[str, float], trial: Any) -> None:
        """Do what follows an evaluation; the checkpoint of its step was written before it."""
        step = self.state.global_step
        if self._determine_best_metric(metrics=metrics, trial=trial):
            if self.save_best:
                # It would have been saved for its own sake, and it is there.
                self.control.should_save = False
                self.watch.extra_saves = [
                    saved for saved in self.watch.extra_saves if saved != step
                ]
            if step not in self.watch.extra_saves:
                self.state.best_model_checkpoint = str(self.checkpoints.directory(step))

    @override
    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Say whether the evaluation gave a new best; ask for its checkpoint with `save_best`."""
        best = super()._determine_best_metric(metrics, trial)
        if best and self.save_best:
            self.watch.save_the_best(self.control)
        return best

    @override
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save with what a resumed run needs beyond Trainer's own state; collective over ranks."""
        carried = self.watch.carried(self.state.global_step)
        unlogged_steps = self.state.global_step - self._globalstep_last_logged
        if unlogged_steps:
            sums = self.accelerator.gather(self._tr_loss.detach().float().reshape(1))
            carried |= {"unlogged_steps": unlogged_steps, "unlogged_loss_sums": sums.tolist()}
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, MetricCallback):
                carried |= callback.carried()
        loader: Any = self.callback_handler.train_dataloader
        loader.tokens_seen.count(self.state.global_step)
        carried["tokens"] = loader.tokens_seen.state()
        carried["run_loss"] = dataclasses.asdict(self.run_loss)
        carry(self.state, carried)
        if self.state.best_global_step in carried["extra_saves"]:
            # Trainer would find its directory; the uninterrupted run has none.
            self.state.best_global_step = None
        self._write_and_commit(model, trial)

    def _write_and_commit(self, model: nn.Module, trial: Any) -> None:
        step, state = self.state.global_step, self.state
        if not self.checkpoints.begin(step, self._best()):
            # Asked for twice at one step; Trainer would write over what is safe.
            if state.best_global_step == step:
                state.best_model_checkpoint = str(self.checkpoints.directory(step))
            return
        with self._without_trainers_rotation(), in_place_of_crc32():
            super()._save_checkpoint(model, trial)
        if self.checkpoints.staged:
            self._name_the_best()
        tokens = sum(carried_state(state)["tokens"].values())
        self.checkpoints.commit(step, tokens=tokens, best=self._best())

    @override
    def _get_output_dir(self, trial: Any) -> str:
        """Return where Trainer makes the checkpoint that it is about to write."""
        return str(self.checkpoints.run_dir)

    def _name_the_best(self) -> None:
        """Name the best checkpoint by where it will be; Trainer looked for it in memory."""
        state, step = self.state, self.state.global_step
        if state.best_global_step:
            best = self.checkpoints.directory(state.best_global_step)
            if state.best_global_step == step or best.is_dir():
                state.best_model_checkpoint = str(best)
        if self.args.should_save:
            folder = self.checkpoints.run_dir / self.checkpoints.directory(step).name
            state.save_to_json(str(folder / TRAINER_STATE_NAME))

    def _best(self) -> Path | None:
        best = self.state.best_model_checkpoint
        return None if best is None else self.checkpoints.output_dir / Path(best).name

    @contextlib.contextmanager
    def _without_trainers_rotation(self) -> Iterator[None]:
        """Keep Trainer from deleting checkpoints: it goes by times, and before ours is safe."""
        asked, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            yield
        finally:
            self.args.save_total_limit = asked

    @override
    def _load_best_model(self) -> None:
        """Load it if it is as it was committed; raises StorageError."""
        best = self._best()  # the run directory may have moved since it was found
        self.state.best_model_checkpoint = None if best is None else str(best)
        if best is not None:
            self.checkpoints.check(best)
        super()._load_best_model()

    @override
    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> Any:
        """End training; a stopped run keeps its weights: to load the best ones takes time."""
        self.checkpoints.finish()
        asked = self.args.load_best_model_at_end
        if self.watch.stopped:
            self.args.load_best_model_at_end = False
        try:
            with self._without_trainers_rotation():
                return super()._finalize_training(trial, num_train_samples, start_time)
        finally:
            self.args.load_best_model_at_end = asked
            self.checkpoints.close()
