"""What a resumed run needs beyond the files that Trainer reads itself.

A rank's random states continue exactly where it has some. On another number of ranks nothing can
continue exactly (dropout masks belong to micro-batches, and these are cut differently): all ranks
get new states, each by (seed, step, rank). The same resume gives the same bits twice, and no two
ranks or starts draw the same numbers.
"""

import logging
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from typing_extensions import override

from utils.checkpoints.discovery import best_checkpoint
from utils.checkpoints.files import OWN_STATE, read_manifest
from utils.checkpoints.record import copy_record
from utils.data.order import PADDING_SEQUENCE
from utils.support.collectives import gathered

if TYPE_CHECKING:
    from utils.training.trainer import PackedTrainer

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """A collaborator of the trainer with values that a resumed run needs."""

    def state(self) -> dict[str, Any]:
        """Return JSON for the next checkpoint, under names of its own; collective over ranks."""

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore from the values of all collaborators; empty at the first start of a run."""


class ResumeState(TrainerCallback):
    """Saves and restores the position in the data, losses not logged yet, and callbacks' state.

    As JSON in trainer_state.json. The order of samples is a pure function of the step
    (utils/data/order.py): no batch is read and skipped. It precedes the callbacks that it restores.
    """

    def __init__(self, trainer: "PackedTrainer"):
        self.trainer = trainer

    def save(self, write: Callable[[], None]) -> None:
        """Commit a checkpoint that `write` writes as Trainer does; collective over ranks."""
        self.collect()
        trainer, state, checkpoints = self.trainer, self.trainer.state, self.trainer.checkpoints
        step = state.global_step
        if state.best_global_step in trainer.callbacks.stop.extra_saves:
            # Trainer would find its directory; the uninterrupted run has none.
            state.best_global_step = None
        if not checkpoints.begin(step):
            # Asked for twice at one step; Trainer would write over what is safe.
            if state.best_global_step == step:
                state.best_model_checkpoint = str(checkpoints.directory(step))
            return
        write()
        if trainer.args.should_save:
            run_dir, name = checkpoints.run_dir, checkpoints.directory(step).name
            copy_record(checkpoints.output_dir, run_dir / name)
        if checkpoints.staged:
            # Trainer looked for the best checkpoint in memory.
            if state.best_global_step:
                best = checkpoints.directory(state.best_global_step)
                if state.best_global_step == step or best.is_dir():
                    state.best_model_checkpoint = str(best)
            if trainer.args.should_save:
                folder = checkpoints.run_dir / checkpoints.directory(step).name
                state.save_to_json(str(folder / TRAINER_STATE_NAME))
        checkpoints.commit(step, tokens=sum(_saved(state)["tokens"].values()))

    def name_the_best(self) -> None:
        """Note that the evaluation which a stopped run owed found the checkpoint to be the best."""
        state, extra = self.trainer.state, self.trainer.callbacks.stop.extra_saves
        if self.trainer.save_best and state.global_step in extra:
            extra.remove(state.global_step)  # the uninterrupted run saves it for its own sake
        if state.global_step not in extra:
            best = self.trainer.checkpoints.directory(state.global_step)
            state.best_model_checkpoint = str(best)

    def collect(self) -> None:
        """Put all of it into Trainer's state, which a save writes; collective over ranks."""
        trainer, step = self.trainer, self.trainer.state.global_step
        loader: Any = trainer.callback_handler.train_dataloader
        loader.tokens_seen.count(step)
        values: dict[str, Any] = {"tokens": dict(loader.tokens_seen.by_name)}
        if unlogged := step - trainer._globalstep_last_logged:
            sums = gathered(trainer._tr_loss.item())
            values |= {"unlogged_steps": unlogged, "unlogged_loss_sums": sums}
        for each in trainer.callbacks.stateful():
            values |= each.state()
        states: Any = trainer.state.stateful_callbacks  # a dict, whatever its annotation says
        states[OWN_STATE] = values

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore what the checkpoint holds."""
        saved, loader = _saved(state), kwargs["train_dataloader"]
        if state.global_step:  # the checkpoint names the best one where it once was
            best = best_checkpoint(self.trainer.checkpoints.directory(state.global_step))
            state.best_model_checkpoint = str(best) if best and best.is_dir() else None
        loader.batch_sampler.resume_at(state.global_step)
        if "tokens" in saved:
            loader.tokens_seen.resume(state.global_step, saved["tokens"])
        if sums := saved.get("unlogged_loss_sums"):
            own = rank_share(sums, args)
            self.trainer._tr_loss = torch.full_like(self.trainer._tr_loss, own)
            self.trainer._globalstep_last_logged -= saved["unlogged_steps"]
        for each in self.trainer.callbacks.stateful():
            each.restore(saved)

    def mean_loss(self) -> float:
        """Return the mean loss of the run's steps, over all its starts; collective over ranks."""
        state, total, counted = self.trainer.state, 0.0, 0.0
        for entry in state.log_history:
            if "loss" in entry:
                total += entry["loss"] * (entry["step"] - counted)
                counted = entry["step"]
        if state.global_step > counted:  # steps that a stop leaves without a log
            sums = gathered(self.trainer._tr_loss.item())
            total += sum(sums) / len(sums)
        return total / max(state.global_step, 1)

    @override
    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let DDP lay out its gradient buckets, alike in resumed and uninterrupted runs.

        By one micro-batch of padding forward and back, whose gradients are zero and dropped. It
        also shows within the first seconds whether a micro-batch fits into memory.
        """
        trainer, model = self.trainer, self.trainer.model_wrapped
        if not isinstance(model, DistributedDataParallel):
            return
        trainer.callbacks.progress.begin_step(state.global_step + 1)
        padding = [PADDING_SEQUENCE] * args.per_device_train_batch_size
        batch = trainer._prepare_inputs(trainer.train_sequences.__getitems__(padding))
        model.train()
        devices = [args.device] if args.device.type == "cuda" else []
        with torch.random.fork_rng(devices), trainer.compute_loss_context_manager():
            loss = model(**batch, use_cache=False, num_items_in_batch=1)["loss"]
            trainer.accelerator.backward(loss)
        model.zero_grad()


def _saved(state: TrainerState) -> dict[str, Any]:
    states: Any = state.stateful_callbacks
    return states.get(OWN_STATE, {})


def rank_share(sums: list[float], args: TrainingArguments) -> float:
    """Return this rank's sum; on another number of ranks one with the same mean over ranks."""
    same = len(sums) == args.world_size
    return sums[args.process_index] if same else sum(sums) / len(sums)


class DataEpochs(TrainerCallback):
    """Counts the epochs of the data: Trainer sees one long epoch.

    What Trainer does at the end of an epoch is asked for at the step that ends one of the data.
    """

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count; act on epochs that end, but for the run's last step, where Trainer's ends."""
        sampler = kwargs["train_dataloader"].batch_sampler
        before = sampler.epoch_at(state.global_step - 1)
        state.epoch = sampler.epoch_at(state.global_step)
        ended = math.floor(state.epoch) > math.floor(before)
        if ended and state.global_step < state.max_steps:
            control.should_log |= args.logging_strategy == IntervalStrategy.EPOCH
            control.should_evaluate |= args.eval_strategy == IntervalStrategy.EPOCH
            control.should_save |= args.save_strategy == SaveStrategy.EPOCH


def save_random_states(directory: Path, args: TrainingArguments) -> None:
    """Write the states of this rank, plain numbers and tensors alone, under Trainer's name for it.

    Of the devices just the rank's own: Trainer writes those of all that its node has, by their
    number there, which means nothing on nodes of another shape.
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
    torch.save(states, directory / _file_name(args))


def load_random_states(checkpoint: Path, args: TrainingArguments, step: int) -> None:
    """Restore the states of this rank, running no code of the file; derive them on other ranks."""
    ranks = read_manifest(checkpoint).world_size
    if ranks != args.world_size:
        _derive_random_states(args.seed, step, args.process_index)
        logger.info(
            "the checkpoint is of %d ranks, now there are %d: random states (dropout) are new, by "
            "seed %d, step %d and rank; samples and global batches stay the same",
            ranks, args.world_size, args.seed, step,
        )  # fmt: skip
        return
    path = checkpoint / _file_name(args)
    states = torch.load(path, map_location="cpu", weights_only=True)
    kind, words, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["cpu"])
    if args.device.type != "cpu":
        torch.get_device_module(args.device).set_rng_state(states["device"], args.device)


def _derive_random_states(seed: int, step: int, rank: int) -> None:
    words = np.random.SeedSequence([seed, step, rank]).generate_state(4, np.uint32).tolist()
    random.seed(words[0])
    np.random.seed(words[1])
    torch.manual_seed(words[2] << 32 | words[3])  # of all devices, too


def _file_name(args: TrainingArguments) -> str:
    return "rng_state.pth" if args.world_size == 1 else f"rng_state_{args.process_index}.pth"
