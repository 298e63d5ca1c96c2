"""PackedTrainer, a Trainer for packed sequences, with a loss weighted by tokens."""

import gc
import logging
import time
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import EvalLoopOutput
from typing_extensions import override

from utils.callbacks.evaluation import FinishedEarlyError
from utils.callbacks.memory import memory_page
from utils.callbacks.progress import Phase
from utils.callbacks.stop import EvaluationInterrupted
from utils.config.errors import ConfigurationError
from utils.data.loader import Batch, TrainLoader, model_inputs, packed_loader
from utils.data.order import PADDING_SEQUENCE, eval_batches
from utils.kernels.ulysses import context_group, cut_inputs, cut_positions
from utils.launch.processes import exchange_in_bf16, has_replicas, tune_strategy
from utils.model.attention import shape_inputs
from utils.model.finished_model import finished_generation
from utils.model.layers import compile_layers, keep_products
from utils.model.loss_head import install_own_loss, next_labels
from utils.model.probe import fork_random
from utils.plan.run_data import RunData
from utils.plan.run_plan import RunPlan
from utils.training.callbacks import Callbacks
from utils.training.losses import EvaluationTotals, mean_loss
from utils.training.optimizer import optimizer_of
from utils.training.saving import RestoreAtBegin, SavingTrainer
from utils.training.smoothing import EmbeddingNoise

logger = logging.getLogger(__name__)


class PackedTrainer(SavingTrainer):
    """A Trainer for packed sequences, with its own data loaders.

    The loss of a step is the mean over all loss tokens of the global batch.
    tests/integration/test_hooks.py checks that Trainer calls each overridden method.
    """

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, args: TrainingArguments,
        plan: RunPlan, data: RunData, callbacks: Callbacks, **kwargs: Any,
    ):  # fmt: skip
        self.settings = settings = plan.settings
        self.train_sequences = data.train.padded(plan.to_longest)
        splits = data.evaluation.items()
        self.eval_splits = {name: rows.padded(plan.to_longest) for name, rows in splits}
        self.sampler, self.compiled, self.memory = plan.sampler, plan.compiled, plan.memory
        self.context = context_group(settings.run.context_parallel, args.ddp_timeout)
        loss_head, self.batches = plan.loss_head, plan.attention.batches
        self.fused_head, own_loss = loss_head.name == "fused", settings.own_code.loss
        self.used = {"loss_positions": self.fused_head or own_loss, "sources": self.fused_head}
        loss_head.install(model, self.compiled)  # before PEFT wraps it
        if own_loss:
            install_own_loss(model, own_loss)
        if plan.float8:
            plan.float8.convert(model)  # before PEFT wraps its layers
        if plan.memory.choice == "selective":
            keep_products(model)
        if self.compiled:
            compile_layers(model)  # before FSDP2 shards them
        padded = settings.model.pad_embeddings_to_multiple_of is not None
        self.generation = finished_generation(model, tokenizer, data.train, padded)
        self.callbacks, self.checkpoints = callbacks, callbacks.stop.checkpoints
        self.save_best = settings.run.save_best
        self.extra_saves = []
        super().__init__(
            model=model,
            args=args,
            processing_class=tokenizer,
            data_collator=dict,  # never called, because the loaders assemble whole batches
            eval_dataset=self.eval_splits or None,
            optimizer_cls_and_kwargs=optimizer_of(args, plan, self.get_decay_parameter_names),
            callbacks=[RestoreAtBegin(self._restore), *callbacks.in_order()],
            **kwargs,
        )
        for reporter in (PrinterCallback, ProgressCallback):
            self.remove_callback(reporter)  # the Journal callback reports instead
        # In fp16 overflowing gradients are no error, because a loss scaler skips these steps.
        self.callbacks.guard.checks_gradients = self.accelerator.mixed_precision != "fp16"
        tune_strategy(self.accelerator)
        self.sums_replicas = has_replicas(self.accelerator)
        # Replace Trainer's NEFTune noise, which depends on the length of packed sequences.
        alpha, self.neftune_noise_alpha = self.neftune_noise_alpha, None
        self.noise = EmbeddingNoise(self.model, alpha) if alpha else None
        if not self.model_accepts_loss_kwargs:
            raise ConfigurationError(
                f"{type(self.model).__name__} takes no num_items_in_batch, so its loss cannot be "
                "weighted by tokens over accumulation and ranks: use another architecture."
            )

    @override
    def get_train_dataloader(self) -> TrainLoader:  # type: ignore[override] # stands in for one
        """Return the loader for all steps of the run. `_restore` sets the first step."""
        args = self.args
        return TrainLoader(
            self.train_sequences, self.sampler, num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory, prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers, seed=args.seed,
        )  # fmt: skip

    @override
    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a loader of this rank's micro-batches of the held-out split named `eval_dataset`.

        With max_eval_sequences, the loader has a fixed random choice of the split's sequences.
        """
        sequences, args = self.eval_splits[eval_dataset], self.args
        context_parallel = self.settings.run.context_parallel
        batches = eval_batches(
            len(sequences), args.per_device_eval_batch_size,
            rank=args.process_index // context_parallel,
            world_size=args.world_size // context_parallel,
            at_most=self.settings.data.max_eval_sequences,
        )  # fmt: skip
        workers, pinned = args.dataloader_num_workers, args.dataloader_pin_memory
        return packed_loader(sequences, batches, num_workers=workers, pin_memory=pinned)

    @override
    def _prepare_inputs(self, inputs: Batch) -> dict[str, Any]:
        """Move a micro-batch to the device without blocking; return the model's inputs."""
        # Only experts use sequence_tokens.
        needed = {**self.used, "sequence_tokens": self.callbacks.balance is not None}
        used = {name: value for name, value in inputs.items() if needed.get(name, True)}
        self.callbacks.progress.begin_batch(inputs)
        context, length = self.context, inputs["input_ids"].shape[1]
        if context is not None and "loss_positions" in used:
            used["loss_positions"] = cut_positions(used["loss_positions"], length, context)
        prepared = model_inputs(used, self.args.device)
        if self.noise is not None:
            rows, tokens = len(prepared["input_ids"]), prepared["input_ids"].numel()
            self.noise.set_lengths(prepared["cu_seq_lens_q"], tokens, context, rows)
        if self.compiled:  # layers accept any number of documents
            torch._dynamo.mark_dynamic(prepared["cu_seq_lens_q"], 0)
        if context is not None:
            prepared = cut_inputs(prepared, context)
        return shape_inputs(prepared, self.batches)

    @override
    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Batch], torch.Tensor]:
        """Return a list of a step's micro-batches, and the number of loss tokens on all ranks.

        If the global batch grows during the run, the list has one item: the list of the
        micro-batches. Does not wait for the device.
        """
        self.callbacks.progress.begin_step(self.state.global_step + 1)
        if self.sampler.grows:
            num_batches = self.sampler.accumulation_at(self.state.global_step)
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        own = sum(len(batch["loss_positions"]) for batch in batches)
        items = torch.full((), own, dtype=torch.int64, device=device)
        items = self.accelerator.reduce(items, reduction="sum")
        items //= self.settings.run.context_parallel  # this many ranks have the same micro-batch
        if self.callbacks.balance is not None:
            self.callbacks.balance.begin_step(batches, self._expert_assignments)
        result: Any = [batches] if self.sampler.grows else batches
        return result, items

    @override
    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Do the forward and backward pass of a micro-batch (`inputs`); return its loss.

        If the global batch grows during the run, `inputs` is the list of a step's micro-batches,
        because Trainer supports only a fixed number of micro-batches. The result is then the sum of
        their losses. FSDP2 reduces the gradients over shards in each micro-batch (see
        tune_strategy). HSDP sums gradients over replicas only in a step's last micro-batch.
        """
        *first, last = inputs if self.sampler.grows else [inputs]
        losses, shards = [], self.accelerator.is_fsdp2
        for batch in first:
            if self.sums_replicas:
                model.set_requires_all_reduce(False)
            with nullcontext() if shards else self.accelerator.no_sync(model=model):
                losses.append(super().training_step(model, batch, *args, **kwargs))
        if self.sums_replicas:
            model.set_requires_all_reduce(self.accelerator.sync_gradients)
        return sum(losses, super().training_step(model, last, *args, **kwargs))

    def _expert_assignments(self, batch: Batch) -> torch.Tensor:
        """Return the number of tokens that each expert gets in a micro-batch, (experts,)."""
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
        """Return the summed loss of a micro-batch, divided by the loss tokens of the global batch.

        num_items_in_batch: the number of these loss tokens. Without loss tokens the loss is 0. The
        load-balancing loss of experts is added. With `return_outputs`, the result is (loss, model
        outputs). This method calls Trainer's method, even in FineTuneTrainer: TRL's method would
        count the tokens of one sequence and wait for the device.
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
        """Return 0: the callback Throughput counts FLOPs. Trainer's count would include padding."""
        return 0

    @override
    def prediction_step(
        self, model: nn.Module, inputs: Batch, *_: Any, **__: Any
    ) -> tuple[None, None, None]:
        """Add a micro-batch's loss to the held-out split's totals; return (None, None, None)."""
        prepared = self._prepare_inputs(inputs)
        prepared.pop("sequence_tokens", None)  # no load-balancing loss in an evaluation
        with torch.no_grad(), self.compute_loss_context_manager():
            # Divide by one: the loss is the sum over tokens, 0 for a micro-batch of padding.
            outputs = model(**prepared, use_cache=False, num_items_in_batch=1)
        following = prepared.get("shift_labels")
        if following is None:
            following = next_labels(prepared["labels"])
        self._eval_totals.add(outputs, following)
        self.callbacks.progress.batches_done += 1
        return None, None, None

    @override
    def evaluation_loop(  # type: ignore[override] # Trainer gives all but the loader by name
        self, dataloader: Any, metric_key_prefix: str = "eval", **others: Any
    ) -> EvalLoopOutput:
        """Evaluate one split. The metrics are means over loss tokens, not over batches."""
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
        """Evaluate the split `eval_dataset`. If None, generate samples and evaluate all splits."""
        if eval_dataset is None:
            self.callbacks.progress.begin(Phase.EVALUATE, self.state.global_step)
            self.callbacks.samples.generate(self)
        return super().evaluate(eval_dataset, *args, **kwargs)

    @override
    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, wait for the last save, and return Trainer's result.

        If memory runs out, write a file that lists what used the memory.
        """
        gc.freeze()  # else each full collection scans all imported objects, 0.25 s
        with memory_page(self):
            try:
                return super().train(*args, **kwargs)
            except EvaluationInterrupted:  # before the first step; the resumed run evaluates again
                self.callback_handler.on_train_end(self.args, self.state, self.control)
            except FinishedEarlyError:
                return self._finalize_training(None, 0, time.time())
            except BaseException:
                try:
                    self.checkpoints.finish()
                except Exception as error:  # raise the first error, not this one
                    logger.error("the last checkpoint was not committed: %s", error)
                self.callbacks.watchdog.leave()
                raise
            finally:
                self.checkpoints.close()
                gc.unfreeze()

    @override
    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train all steps of the run, which Trainer counts as one epoch."""
        self.callbacks.progress.begin_step(self.state.global_step + 1)
        alone = self.accelerator.distributed_type == DistributedType.NO
        if self.settings.run.ddp_comm_hook and not alone:
            exchange_in_bf16(self.model_wrapped)
        if isinstance(self.model_wrapped, DistributedDataParallel) or (
            alone and self.train_sequences.to_longest
        ):
            self._try_longest(self.model_wrapped)
        super()._run_epoch(*args, **kwargs)

    def _try_longest(self, model: nn.Module) -> None:
        """Run a forward and a backward pass on one micro-batch of padding; drop the gradients.

        The pass shows within seconds whether the longest micro-batch fits into memory. The pass
        also lets DDP arrange its gradient buckets, so that a resumed run has the same buckets.
        """
        padding = [PADDING_SEQUENCE] * self.args.per_device_train_batch_size
        longest = self.train_sequences.padded(to_longest=False)
        batch = self._prepare_inputs(longest.__getitems__(padding))
        model.train()
        with fork_random(self.args.device), self.compute_loss_context_manager():
            loss = model(**batch, use_cache=False, num_items_in_batch=1)["loss"]
            self.accelerator.backward(loss)
        model.zero_grad()

    @override
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log `logs`. Training logs get the callbacks' metrics. The last log gets the mean loss."""
        if "loss" in logs:
            logs.update(self.callbacks.metrics())
        if "train_loss" in logs:
            self.callbacks.progress.begin(Phase.FINISH, self.state.global_step)
            self.checkpoints.finish()  # so that the journal lists this save before the summary
            logs["train_loss"] = mean_loss(self.state, self._tr_loss)
            if not logs["total_flos"]:
                del logs["total_flos"]  # the callback Throughput counts FLOPs instead
        super().log(logs, start_time)
