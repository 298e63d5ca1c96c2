"""The trainer of both scripts: packed sequences, token-weighted losses, committed checkpoints."""

import gc
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import EvalLoopOutput, SaveStrategy
from typing_extensions import override

from utils.callbacks.evaluation import FinishedEarlyError
from utils.callbacks.out_of_memory import memory_page
from utils.callbacks.progress import Phase
from utils.callbacks.stop import EvaluationInterrupted
from utils.config.errors import ConfigurationError
from utils.config.settings import RunSettings
from utils.data.loader import Batch, TrainLoader, eval_loader, model_inputs
from utils.data.order import eval_batches
from utils.launch.processes import tune_strategy
from utils.model.attention import shape_inputs
from utils.model.compilation import compile_layers, keep_products, leave_length_open
from utils.model.finished_model import finished_generation, set_generation_settings
from utils.planning.plan import RunPlan
from utils.planning.run_data import RunData
from utils.training.callbacks import Callbacks
from utils.training.losses import EvaluationTotals
from utils.training.optimizer import optimizer_of
from utils.training.resume_state import (
    DataEpochs,
    ResumeState,
    load_random_states,
    save_random_states,
)
from utils.training.smoothing import EmbeddingNoise
from utils.training.zero_resharding import loadable_checkpoint

logger = logging.getLogger(__name__)


class PackedTrainer(Trainer):
    """A Trainer on packed sequences: own loaders, one loss weighted by tokens, committed saves.

    tests/integration/test_hooks.py checks each override.
    """

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, settings: RunSettings,
        plan: RunPlan, data: RunData, callbacks: Callbacks, **kwargs: Any,
    ):  # fmt: skip
        self.train_sequences, self.eval_splits = data.train, dict(data.evaluation)
        self.sampler, self.compiled, self.memory = plan.sampler, plan.compiled, plan.memory
        assert plan.attention is not None, "only a dry run leaves it open"
        loss_head, self.batches = plan.loss_head, plan.attention.batches
        self.fused_head = loss_head.name == "fused"
        loss_head.install(model, self.compiled)  # before PEFT wraps it
        if plan.memory.choice == "selective":
            keep_products(model)
        if self.compiled:
            compile_layers(model)  # before FSDP2 shards them
        padded = settings.model.pad_embeddings_to_multiple_of is not None
        self.generation = finished_generation(model, tokenizer, data.train, padded)
        self.callbacks, self.checkpoints = callbacks, callbacks.stop.checkpoints
        self.save_best = settings.run.save_best
        self.resume_state = ResumeState(self)
        if settings.training.bf16_full_eval or settings.training.fp16_full_eval:
            # Trainer would cast the weights in place in the evaluation before the export.
            logger.info("bf16_full_eval, fp16_full_eval: evaluation computes as training does")
            settings.training.bf16_full_eval = settings.training.fp16_full_eval = False
        # Trainer would make the repository now, and upload at each save; the end of the run does.
        self.settings, settings.training.push_to_hub = settings, False
        super().__init__(
            model=model,
            args=settings.training,
            processing_class=tokenizer,
            data_collator=dict,  # the loaders assemble whole batches: none is called
            eval_dataset=self.eval_splits or None,
            optimizer_cls_and_kwargs=optimizer_of(settings.training, plan),
            callbacks=[self.resume_state, DataEpochs(), *callbacks.in_order()],
            **kwargs,
        )
        for reporter in (PrinterCallback, ProgressCallback):
            self.remove_callback(reporter)  # the journal reports
        self.args.save_total_limit = None  # Checkpoints deletes old ones
        # A loss scaler tries whether gradients overflow, and leaves those steps out itself.
        self.callbacks.guard.judges_gradients = self.accelerator.mixed_precision != "fp16"
        tune_strategy(self.accelerator)
        # Trainer's own noise goes by the length of packed sequences.
        alpha, self.neftune_noise_alpha = self.neftune_noise_alpha, None
        self.noise = EmbeddingNoise(self.model, alpha) if alpha else None
        if not self.model_accepts_loss_kwargs:
            raise ConfigurationError(
                f"{type(self.model).__name__} takes no num_items_in_batch, so its loss cannot be "
                "weighted by tokens over accumulation and ranks: use another architecture."
            )

    @override
    def get_train_dataloader(self) -> TrainLoader:  # type: ignore[override] # stands in for one
        """Return the loader of the whole run; ResumeState sets where it starts."""
        args = self.args
        return TrainLoader(
            self.train_sequences, self.sampler, num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory, prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers, seed=args.seed,
        )  # fmt: skip

    @override
    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a loader that visits each sequence of a split once, or those of the sample."""
        sequences, args = self.eval_splits[eval_dataset], self.args
        batches = eval_batches(
            len(sequences), args.per_device_eval_batch_size, rank=args.process_index,
            world_size=args.world_size, at_most=self.settings.data.max_eval_sequences,
        )  # fmt: skip
        workers, pinned = args.dataloader_num_workers, args.dataloader_pin_memory
        return eval_loader(sequences, batches, num_workers=workers, pin_memory=pinned)

    @override
    def _prepare_inputs(self, inputs: Batch) -> dict[str, Any]:
        """Move a micro-batch to the device and widen it there; Trainer waits for each tensor."""
        # All logits need no positions, and dense models no tokens by sequence: they stay here.
        needed = dict.fromkeys(("loss_positions", "sources"), self.fused_head)
        needed["sequence_tokens"] = self.callbacks.balance is not None
        used = {name: value for name, value in inputs.items() if needed.get(name, True)}
        self.callbacks.progress.begin_batch(inputs)
        made = model_inputs(used, self.args.device)
        if self.noise is not None:
            self.noise.take_boundaries(made["cu_seq_lens_q"], made["input_ids"].numel())
        if self.compiled:
            leave_length_open(made["cu_seq_lens_q"])
        return shape_inputs(made, self.batches)

    @override
    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Batch], torch.Tensor]:
        """Take the micro-batches of a step, and count loss tokens: Trainer waits for the device."""
        self.callbacks.progress.begin_step(self.state.global_step + 1)
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        own = sum(len(batch["loss_positions"]) for batch in batches)
        items = torch.full((), own, dtype=torch.int64, device=device)
        items = self.accelerator.reduce(items, reduction="sum")
        if self.callbacks.balance is not None:
            self.callbacks.balance.begin_step(batches, self._expert_assignments)
        return batches, items

    def _expert_assignments(self, batch: Batch) -> torch.Tensor:
        """Return how often a micro-batch chooses each expert, as the model routes in training."""
        model: Any = self.model_wrapped
        model.train()
        with torch.no_grad(), self.compute_loss_context_manager():
            prepared = self._prepare_inputs(batch)
            return model(**prepared, use_cache=False, count_only=True).assignments

    @override
    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:  # fmt: skip
        """Return the loss summed over loss tokens, divided by those of the global batch.

        Plus the experts' term; 0 where the global batch has no loss token. Trainer's own for SFT,
        too: TRL's counts the tokens of one sequence only and waits for the device several times.
        """
        assert isinstance(num_items_in_batch, torch.Tensor), "see get_batch_samples"
        inputs, items = {**inputs, "use_cache": False}, num_items_in_batch.clamp(min=1)
        loss, outputs = Trainer.compute_loss(self, model, inputs, True, items)
        if self.callbacks.source_losses is not None:
            self.callbacks.source_losses.add(outputs)
        if self.callbacks.balance is not None:
            loss = loss + self.callbacks.balance.weighted(outputs)
        self.callbacks.guard.take_loss(loss)
        return (loss, outputs) if return_outputs else loss

    @override
    def floating_point_ops(self, inputs: Batch) -> int:
        """Return 0: Throughput counts, Trainer would add 6 for each weight and padded token."""
        return 0

    @override
    def prediction_step(
        self, model: nn.Module, inputs: Batch, *_: Any, **__: Any
    ) -> tuple[None, None, None]:
        """Add what the micro-batch has to the split's totals."""
        prepared = self._prepare_inputs(inputs)
        prepared.pop("sequence_tokens", None)  # the loss of a model, not of its routers
        with torch.no_grad(), self.compute_loss_context_manager():
            # Divided by one item, the mean is a sum; an all-padding micro-batch gives 0.
            outputs = model(**prepared, use_cache=False, num_items_in_batch=1)
        self._eval_totals.add(outputs, prepared["labels"])
        self.callbacks.progress.batches_done += 1
        return None, None, None

    @override
    def evaluation_loop(  # type: ignore[override] # Trainer gives all but the loader by name
        self, dataloader: Any, metric_key_prefix: str = "eval", **others: Any
    ) -> EvalLoopOutput:
        """Evaluate one split by means over all its loss tokens.

        Equal for any ranks and batch size, up to rounding: Trainer averages micro-batches' means.
        """
        self._eval_totals = EvaluationTotals(self.args.device)
        split = metric_key_prefix.removeprefix("eval_")
        self.callbacks.progress.begin_split(split, len(dataloader))
        output = super().evaluation_loop(dataloader, metric_key_prefix=metric_key_prefix, **others)
        assert output.metrics is not None
        output.metrics.update(self._eval_totals.figures(metric_key_prefix))
        evaluated = self.settings.data.max_eval_sequences or len(dataloader.dataset)
        return output._replace(num_samples=min(evaluated, len(dataloader.dataset)))

    @override
    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate all splits, after samples: their time then counts as the evaluations'."""
        if eval_dataset is None:
            self.callbacks.progress.begin(Phase.EVALUATE, self.state.global_step)
            self.callbacks.samples.take(self)
        return super().evaluate(eval_dataset, *args, **kwargs)

    @override
    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; whatever ends it, the checkpoint that is being written is finished."""
        with memory_page(self):
            return self._train(*args, **kwargs)

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        gc.freeze()  # what was imported stays: each full collection would look through it, 0.25 s
        try:
            return super().train(*args, **kwargs)
        except EvaluationInterrupted:  # before the first step: its checkpoint says what is owed
            self.callback_handler.on_train_end(self.args, self.state, self.control)
        except FinishedEarlyError:
            return self._finalize_training(None, 0, time.time())
        except BaseException:
            try:
                self.checkpoints.finish()
            except Exception as error:  # what ended the run is what the user has to read
                logger.error("the last checkpoint was not committed: %s", error)
            self.callbacks.watchdog.leave()
            raise
        finally:
            self.checkpoints.close()
            gc.unfreeze()

    @override
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; training logs get the callbacks' figures, the summary the mean loss of the run."""
        if "loss" in logs:
            logs.update(self.callbacks.metrics())
        if "train_loss" in logs:
            self.callbacks.progress.begin(Phase.FINISH, self.state.global_step)
            self.checkpoints.finish()  # the journal lists its save before the summary
            logs["train_loss"] = self.resume_state.mean_loss()
            if not logs["total_flos"]:
                del logs["total_flos"]  # not counted
        super().log(logs, start_time)

    @override
    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: Any, *others: Any, **named: Any
    ) -> None:
        """Log, evaluate and save what is due; an interrupted evaluation is followed by a save."""
        self.callbacks.guard.take_step(self.state.global_step - 1, grad_norm)
        try:
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *others, **named)
        except EvaluationInterrupted:
            self.state.log_history = [  # without the splits evaluated so far
                entry
                for entry in self.state.log_history
                if entry["step"] < self.state.global_step
                or not any(key.startswith("eval_") for key in entry)
            ]
            # What was due is logged, and no evaluation is due any more: this only saves.
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *others, **named)
        if self.control.should_training_stop:
            self.callbacks.progress.begin(Phase.FINISH, self.state.global_step)

    @override
    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate after finite steps alone; ask for a checkpoint of a new best, or the run's end.

        Trainer skips the scheduler at the start alone. If a stopped run owes this evaluation, what
        follows from its metrics follows there; the checkpoint of its step was written before it.
        """
        self.callbacks.guard.settle()
        at_start, owed = skip_scheduler, self.callbacks.stop.evaluation_due
        skip_scheduler = at_start and not owed
        metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        if skip_scheduler:
            return metrics
        judge, given = self.callbacks.early_stopping, (self.args, self.state, self.control, metrics)
        ended = judge is not None and judge.take_evaluation(*given)
        last = ended and self.args.save_strategy != SaveStrategy.NO
        # Trainer judges the same metrics again, which are no new best then.
        best = self._determine_best_metric(metrics=metrics, trial=trial)
        self.callbacks.stop.evaluation_due = False
        if not at_start and (last or (best and self.save_best)):
            self.callbacks.stop.save_the_best(self.control)
        elif best and at_start:
            self.resume_state.name_the_best()
        return metrics

    @override
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Commit a checkpoint, of finite weights alone; collective over ranks."""
        self.callbacks.progress.begin(Phase.SAVE, self.state.global_step)
        self.callbacks.guard.settle(model)
        self.resume_state.save(lambda: super(PackedTrainer, self)._save_checkpoint(model, trial))

    @override
    def _get_output_dir(self, trial: Any) -> str:
        """Return where Trainer makes the checkpoint that it is about to write."""
        return str(self.checkpoints.run_dir)

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model and tokenizer; without the pickle of the settings that Trainer adds.

        Under the names that tensors have in the model, by which Trainer loads them: save_pretrained
        would write those of the published format, where each expert is a tensor of its own.
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
        bare.published.write(self.processing_class, directory)
        plugin: Any = getattr(self.accelerator.state, "fsdp_plugin", None)
        if self.is_fsdp_enabled and "FULL_STATE_DICT" not in str(plugin.state_dict_type):
            # Shards, where Trainer saves no model: a run could only resume where the model that it
            # began with still is.
            described: list[Any] = [bare.config, self.processing_class]
            if isinstance(bare, PreTrainedModel) and bare.can_generate():
                described.append(bare.generation_config)
            for each in described:
                each.save_pretrained(directory)

    @override
    def _save_rng_state(self, output_dir: str) -> None:
        """Save this rank's random states, of its own device alone; and the averaged weights."""
        save_random_states(Path(output_dir), self.args)
        if self.callbacks.average is not None:
            self.callbacks.average.save(Path(output_dir))

    @override
    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random states of this rank, or derive new ones on another number of ranks."""
        if checkpoint is not None:
            load_random_states(Path(checkpoint), self.args, self.state.global_step)

    @override
    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        """Prepare model and optimizer and load the checkpoint; under ZeRO resharded if need be."""
        if resume_from_checkpoint is not None:
            self.callbacks.progress.begin(Phase.LOAD, self.state.global_step)
        with loadable_checkpoint(self, resume_from_checkpoint) as loadable:
            return super()._prepare_for_training(max_steps, train_dataloader, loadable)

    @override
    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Read config.json with the model's class: the base class refuses some layer types."""
        model: Any = self.model
        with mock.patch("transformers.trainer.PreTrainedConfig", type(model.config)):
            super()._load_from_checkpoint(*args, **kwargs)

    @override
    def _load_best_model(self) -> None:
        """Load it, or raise StorageError if it is damaged; a stopped run keeps its weights."""
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
        """Raise ConfigurationError if tensors are missing: Trainer keeps random ones, and warns."""
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        missing = [name for name in load_result.missing_keys if name not in tied]
        if missing:
            raise ConfigurationError(
                f"the checkpoint lacks {len(missing)} tensors of the model, {missing[0]} first: it "
                "is another model's or another Stoker's. Give final/ to a new run (--init_from)."
            )
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))
