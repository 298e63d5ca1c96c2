"""Training that can be left at any step or evaluation batch, and goes on as if it had not been."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from typing_extensions import override

from utils.callbacks.stop import EvaluationInterrupted, StopWatch, carried_state, carry
from utils.checkpoints.store import Checkpoints
from utils.cluster.decisions import on_rank_0


class InterruptibleTrainerMixin(Trainer):
    """Carries over a stop what Trainer forgets: owed evaluations, and losses not yet logged.

    Put before a Trainer class; `StopWatch` among the callbacks decides when to stop. The losses of
    the steps since the last log are kept with each checkpoint: Trainer would log a mean without
    them after a resume. The hooks' contract is held by tests/integration/test_hooks.py.
    """

    def __init__(self, *, checkpoints: Checkpoints, **kwargs: Any):
        self.checkpoints = checkpoints
        self._counted_tokens: tuple[int, int] | None = None  # (steps, tokens in them)
        super().__init__(**kwargs)
        self.watch = next(
            callback
            for callback in self.callback_handler.callbacks
            if isinstance(callback, StopWatch)
        )

    @override
    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train, unless the run was stopped before its first step."""
        if not self.control.should_training_stop:
            self._take_losses_over()
            super()._run_epoch(*args, **kwargs)

    def _take_losses_over(self) -> None:
        """Put the losses that the checkpoint carries back where Trainer sums them up."""
        carried = carried_state(self.state)
        if "tokens" in carried:
            self._counted_tokens = (self.state.global_step, carried["tokens"])
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
        # The summary's mean is over the steps of this start alone.
        self._total_loss_scalar -= sum(sums) / len(sums)

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
            checkpoint = Path(str(self.args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
            if step not in self.watch.extra_saves:
                self.state.best_model_checkpoint = str(checkpoint)

    @override
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save with what a resumed run needs beyond Trainer's own state; collective over ranks."""
        carried = self.watch.carried(self.state.global_step)
        unlogged_steps = self.state.global_step - self._globalstep_last_logged
        if unlogged_steps:
            sums = self.accelerator.gather(self._tr_loss.detach().float().reshape(1))
            carried |= {"unlogged_steps": unlogged_steps, "unlogged_loss_sums": sums.tolist()}
        carried["tokens"] = self._tokens_so_far()
        carry(self.state, carried)
        if self.state.best_global_step in carried["extra_saves"]:
            # Trainer would find its directory; the uninterrupted run has none.
            self.state.best_global_step = None
        self._write_and_commit(model, trial)

    def _write_and_commit(self, model: nn.Module, trial: Any) -> None:
        step, state = self.state.global_step, self.state
        if self.checkpoints.is_committed(step):
            # Asked for twice at one step; Trainer would write over what is safe.
            if state.best_global_step == step:
                state.best_model_checkpoint = str(self.checkpoints.directory(step))
            return
        self.checkpoints.prepare(self._best())
        # Trainer names the best checkpoint where its directory is there. With sharded weights
        # (FSDP) that of this step came later: which rank found it was chance.
        on_rank_0(lambda: self.checkpoints.directory(step).mkdir(exist_ok=True))
        with self._without_trainers_rotation():
            super()._save_checkpoint(model, trial)
        self.checkpoints.commit(step, tokens=carried_state(state)["tokens"], best=self._best())

    def _best(self) -> Path | None:
        best = self.state.best_model_checkpoint
        return None if best is None else self.checkpoints.output_dir / Path(best).name

    def _tokens_so_far(self) -> int:
        """Return the real tokens (no padding) of all steps up to this one, of all starts."""
        done, tokens = self._counted_tokens or (0, 0)
        loader: Any = self.callback_handler.train_dataloader
        tokens += sum(loader.tokens_in_step(step) for step in range(done, self.state.global_step))
        self._counted_tokens = (self.state.global_step, tokens)
        return tokens

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
        asked = self.args.load_best_model_at_end
        if self.watch.stopped:
            self.args.load_best_model_at_end = False
        try:
            with self._without_trainers_rotation():
                return super()._finalize_training(trial, num_train_samples, start_time)
        finally:
            self.args.load_best_model_at_end = asked
