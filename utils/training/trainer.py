"""What a checkpoint says of its model beside the tensors: put beside FSDP's shards, and read again.

Without it a run could only go on where the model that it began with still is.
"""

import copy
import logging
import math
import types
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, Trainer
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import EvalLoopOutput
from typing_extensions import override

from utils.callbacks.metrics import MetricCallback, remove_default_reporting
from utils.config.errors import ConfigurationError
from utils.data.loader import TrainLoader, eval_loader
from utils.data.order import EvalBatchSampler, GlobalBatchSampler
from utils.data.sequences import Batch, PackedDataset, model_inputs
from utils.model.attention import shape_inputs
from utils.model.compilation import compile_layers, keep_products, leave_length_open
from utils.model.finished_model import with_stops
from utils.planning.memory_plan import Kernels
from utils.training.expert_balance import ExpertBalance
from utils.training.gradients import FiniteTrainerMixin, GradientBuckets, keep_gradients_in_buckets
from utils.training.interruptible import InterruptibleTrainerMixin
from utils.training.resume_state import ElasticTrainerMixin


def describe_shards(trainer: Trainer, directory: Path) -> None:
    """Write configuration and tokenizer beside the parts that the ranks write under FSDP.

    Before the commit, so that the manifest holds them.
    """
    if not trainer.is_fsdp_enabled or not trainer.args.should_save:
        return
    plugin: Any = trainer.accelerator.state.fsdp_plugin
    if "FULL_STATE_DICT" in str(plugin.state_dict_type):
        return  # Trainer saves a model
    model: Any = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    described = [model.config, trainer.processing_class]
    if isinstance(model, PreTrainedModel) and model.can_generate():
        described.append(model.generation_config)
    for each in described:
        each.save_pretrained(directory)


def set_generation_settings(trainer: Trainer, generation: GenerationConfig | None) -> None:
    """Let the model be saved with these: Trainer and SFTTrainer write special tokens into them."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if generation is not None:
        base.generation_config = copy.deepcopy(generation)


# What both trainers share: packed rows, token-weighted losses, merged metrics.

logger = logging.getLogger(__name__)


class PackedTrainerMixin(FiniteTrainerMixin, InterruptibleTrainerMixin, ElasticTrainerMixin):
    """A Trainer on packed rows: own loaders, one token-weighted loss, metrics out.

    Put before a Trainer class. ``sampler`` fixes which rows each step takes (utils/data/order.py);
    ``train_rows`` and ``eval_rows`` assemble them. tests/integration/test_hooks.py holds the
    contract of every method overridden here with the pinned transformers and TRL.
    """

    def __init__(
        self,
        *,
        train_rows: PackedDataset,
        eval_rows: Mapping[str, PackedDataset],
        sampler: GlobalBatchSampler,
        kernels: Kernels,
        activation_checkpointing: str,
        **kwargs: Any,
    ):
        self.train_rows = train_rows
        self.eval_rows = dict(eval_rows)
        self.sampler = sampler
        attention, loss_head, compiled = kernels
        assert attention is not None, "only a dry run leaves it open"
        self.batches = attention.batches
        self.fused_head = loss_head.name == "fused"
        loss_head.install(kwargs["model"], compiled)  # before PEFT wraps it
        if activation_checkpointing == "selective":
            keep_products(kwargs["model"])
        self.compiled = compiled
        if compiled:
            compile_layers(kwargs["model"])  # before FSDP2 shards them
        self.generation = self._finished_generation(kwargs["model"], kwargs["processing_class"])
        kwargs |= {"data_collator": _rows_are_batches, "eval_dataset": self.eval_rows or None}
        super().__init__(**kwargs)
        if not self.model_accepts_loss_kwargs:
            raise ConfigurationError(
                f"{type(self.model).__name__} takes no num_items_in_batch, so its loss cannot be "
                "weighted by tokens over accumulation and ranks: use another architecture."
            )
        assert isinstance(self.model, nn.Module)
        keep_mode(self.model)
        if self.args.bf16_full_eval or self.args.fp16_full_eval:
            logger.info("bf16_full_eval, fp16_full_eval: evaluation computes as training does")
        self.balance: ExpertBalance | None = None
        if loss_head.router is not None:
            self.balance = ExpertBalance(loss_head.router, self.accelerator)
            self.add_callback(self.balance)
        self._flops_per_token = 0
        remove_default_reporting(self)
        keep_gradients_in_buckets(self.accelerator)
        self.add_callback(GradientBuckets(self))

    def _finished_generation(self, model: Any, tokenizer: Any) -> GenerationConfig | None:
        """Return the model's generation settings, which stop where the data taught it to."""
        if not model.can_generate():
            return None
        ends = [tokenizer.eos_token_id]
        ends += [dataset.end_of_turn_token_id for dataset in self.train_rows.datasets]
        return with_stops(model.generation_config, [end for end in ends if end is not None])

    @override
    def get_train_dataloader(self) -> TrainLoader:  # type: ignore[override] # stands in for one
        """Return the loader of the whole run; the callbacks set where it starts."""
        return TrainLoader(
            self.train_rows,
            self.sampler,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            persistent_workers=self.args.dataloader_persistent_workers,
            seed=self.args.seed,
        )

    @override
    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a loader over each row of the named split once, shared between the ranks."""
        rows = self.eval_rows[eval_dataset]
        sampler = EvalBatchSampler(
            len(rows),
            self.args.per_device_eval_batch_size,
            rank=self.args.process_index,
            world_size=self.args.world_size,
        )
        return eval_loader(
            rows,
            sampler,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )

    @override
    def _prepare_inputs(self, inputs: Batch) -> dict[str, Any]:
        """Move a micro-batch to the device and widen it there.

        Trainer's own waits for each tensor, and so for all that was started before it.
        """
        # All logits need no positions, and dense models no tokens by row: they are not moved.
        unused = set() if self.fused_head else {"loss_positions"}
        unused |= set() if self.balance else {"row_tokens"}
        inputs = {name: value for name, value in inputs.items() if name not in unused}
        made = model_inputs(inputs, self.args.device)
        if self.compiled:
            leave_length_open(made["cu_seq_lens_q"])
        return shape_inputs(made, self.batches)

    @override
    def _get_num_items_in_batch(
        self, batch_samples: list[Batch], device: torch.device
    ) -> torch.Tensor:
        """Count the loss-bearing tokens of the global batch: on the host, added up on the device.

        Trainer's own copies its count to the device, which waits for it.
        """
        own = sum(len(batch["loss_positions"]) for batch in batch_samples)
        items = torch.full((), own, dtype=torch.int64, device=device)
        return self.accelerator.reduce(items, reduction="sum")

    @override
    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Any]:
        """Take the micro-batches of a step, and count what the experts' term needs of all."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.balance is not None:
            self.balance.begin_step(batches, self._count_assignments)
        return batches, items

    def _count_assignments(self, batch: Batch) -> Any:
        self.model_wrapped.train()  # as it routes when it trains
        with torch.no_grad(), self.compute_loss_context_manager():
            prepared = self._prepare_inputs(batch)
            return self.model_wrapped(**prepared, use_cache=False, count_only=True)

    @override
    def floating_point_ops(self, inputs: Batch) -> int:
        """Return Trainer's estimate; it goes through all parameters, which is done once here."""
        tokens = inputs["input_ids"].numel()
        if not self._flops_per_token:
            self._flops_per_token = super().floating_point_ops(inputs) // tokens
        return self._flops_per_token * tokens

    @override
    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return the loss summed over loss-bearing tokens, divided by those of the global batch.

        The experts' term is added after that. Trainer's own, for SFT too: TRL's counts the tokens
        of one row only and synchronises the device several times a micro-batch. Of a global
        batch without any such token it is 0.
        """
        assert isinstance(num_items_in_batch, torch.Tensor), "counted by this trainer itself"
        inputs = {**inputs, "use_cache": False}
        loss, outputs = Trainer.compute_loss(
            self, model, inputs, True, num_items_in_batch.clamp(min=1)
        )
        if self.balance is not None:
            loss = loss + self.balance.weighted(outputs)
        self.guard.take_loss(loss, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    @override
    def prediction_step(
        self,
        model: nn.Module,
        inputs: Batch,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, None, None]:
        """Add the micro-batch's summed loss and its loss-bearing tokens to the split's totals."""
        prepared = self._prepare_inputs(inputs)
        prepared.pop("row_tokens", None)  # the loss of a model, not of its routers
        with torch.no_grad(), self.compute_loss_context_manager():
            # Divided by one item, the mean is a sum; an all-padding micro-batch gives 0.
            outputs = model(**prepared, use_cache=False, num_items_in_batch=1)
        tokens = prepared["labels"][:, 1:].ne(-100).sum()
        self._eval_totals += torch.stack((outputs["loss"].double(), tokens.double()))
        return None, None, None

    @override
    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate one split: the mean loss over all its loss-bearing tokens, and its exponential.

        Equal on any number of ranks and for any batch size, up to rounding: Trainer's own averages
        the means of micro-batches.
        """
        self._eval_totals = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        # Outside of training Trainer would cast the weights in place for bf16_full_eval, and the
        # evaluation after the last step comes before the export.
        training, self.is_in_train = self.is_in_train, True
        try:
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        finally:
            self.is_in_train = training
        loss_sum, tokens = self.accelerator.reduce(self._eval_totals, reduction="sum").tolist()
        loss = loss_sum / tokens
        assert output.metrics is not None
        output.metrics[f"{metric_key_prefix}_loss"] = loss
        output.metrics[f"{metric_key_prefix}_perplexity"] = _exponential(loss)
        output.metrics[f"{metric_key_prefix}_tokens"] = int(tokens)
        return output

    @override
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the figures of every MetricCallback added to training logs first."""
        if "loss" in logs:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, MetricCallback):
                    logs.update(callback.metrics())
        super().log(logs, start_time)

    @override
    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write none: a run directory describes itself by config.yaml and provenance.json."""

    @override
    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raise ConfigurationError where tensors are missing: Trainer warns and keeps random ones.

        Those tied to one that was loaded are not.
        """
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or {})
        missing = [name for name in load_result.missing_keys if name not in tied]
        if missing:
            raise ConfigurationError(
                f"the checkpoint lacks {len(missing)} tensors of the model, {missing[0]} first: "
                "it is of another model, or of a version of Stoker that wrote experts under other "
                "names. Start a run with another --output_dir and its final/ as --init_from."
            )
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as Trainer does; with FSDP's shards what describes model and tokenizer, too."""
        set_generation_settings(self, self.generation)
        super().save_model(output_dir, _internal_call)
        describe_shards(self, Path(output_dir or str(self.args.output_dir)))

    @override
    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Save model and tokenizer, without the pickle of the settings that Trainer adds.

        Under the names that tensors have in the model, by which Trainer loads them: save_pretrained
        would write those of the published format, where each expert is a tensor of its own.
        """
        model: Any = self.model
        if isinstance(model, PreTrainedModel):
            vars(model)["save_pretrained"] = partial(
                model.save_pretrained, save_original_format=False
            )
        try:
            super()._save(output_dir, state_dict)
        finally:
            vars(model).pop("save_pretrained", None)
        if self.args.should_save:
            (Path(output_dir or str(self.args.output_dir)) / TRAINING_ARGS_NAME).unlink(
                missing_ok=True
            )


def keep_mode(model: nn.Module) -> None:
    """Let `model.train()` do nothing in a model that trains: Trainer calls it every micro-batch.

    torch walks through the tree of modules then, milliseconds for a deep model. Looking whether
    each module is in that mode already, by a list, takes a hundredth of that; the model's own mode
    alone would not do, for PEFT puts a model in training around one that is loaded in evaluation.
    """
    known: list[nn.Module] = []

    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        if not known or any(module.training is not mode for module in known):
            type(self).train(self, mode)
            known[:] = self.modules()
        return self

    model.train = types.MethodType(train, model)  # type: ignore[method-assign]


def _rows_are_batches(batch: Batch) -> Batch:
    """Stand in for a collator: the loaders assemble whole batches (utils/data/sequences.py)."""
    return batch


def _exponential(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


# The trainer of pretrain.py.


class PretrainTrainer(PackedTrainerMixin, Trainer):
    """Next-token pretraining on packed documents."""
