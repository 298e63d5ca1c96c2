"""Callbacks, a dataclass with the callbacks of a run and the trainer's other helper objects."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from typing_extensions import override

from utils.callbacks.evaluation import EarlyStopping, Samples
from utils.callbacks.journal import Journal, LiveView
from utils.callbacks.memory import MemoryMonitor
from utils.callbacks.metrics import MixtureShares, Throughput
from utils.callbacks.nonfinite import NonFiniteGuard
from utils.callbacks.profiler import ProfilerWindow
from utils.callbacks.progress import Progress
from utils.callbacks.resume_check import ResumeCheck
from utils.callbacks.stop import StopWatch
from utils.callbacks.watchdog import HangWatch
from utils.config.errors import ConfigurationError
from utils.config.own_code import callback_class
from utils.training.losses import ExpertBalance, SourceLosses
from utils.training.optimizer import InheritedOptimizer
from utils.training.smoothing import AveragedWeights

OWN = "own_callbacks"  # key of the user's callbacks in a checkpoint


class Stateful(Protocol):
    """An object of the trainer that stores values in each checkpoint and restores them later."""

    def state(self) -> dict[str, Any]:
        """Return {unique key: JSON value} to store in a checkpoint. All ranks must call this."""

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore this object's values. `saved`: all objects' values, or {} in a new run."""


class DataEpochs(TrainerCallback):
    """A counter of epochs of the training data, because Trainer counts the run as one epoch.

    At the end of a data epoch, the callback requests a log if logging_strategy is "epoch", an
    evaluation if eval_strategy is "epoch", and a save if save_strategy is "epoch".
    """

    @override
    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Update `state.epoch`; request a log, an evaluation and a save if a data epoch ends.

        At the last step of the run, Trainer itself makes these requests.
        """
        sampler = kwargs["train_dataloader"].batch_sampler
        before = sampler.epoch_at(state.global_step - 1)
        state.epoch = sampler.epoch_at(state.global_step)
        ended = math.floor(state.epoch) > math.floor(before)
        if ended and state.global_step < state.max_steps:
            control.should_log |= args.logging_strategy == IntervalStrategy.EPOCH
            control.should_evaluate |= args.eval_strategy == IntervalStrategy.EPOCH
            control.should_save |= args.save_strategy == SaveStrategy.EPOCH


class OwnCallbacks:
    """The user's callbacks (--callbacks).

    Checkpoints store the attributes of each callback that is an ExportableState.
    """

    def __init__(self, entries: Sequence[str]):
        self.made = {entry: callback_class(entry)() for entry in entries}

    def state(self) -> dict[str, Any]:
        """Return {"own_callbacks": {name in --callbacks: attributes}}; {} if no callback has state.

        A checkpoint stores the attributes of rank 0's callbacks. Raises ConfigurationError if a
        callback's state has values that are not JSON.
        """
        exporting = {
            entry: each for entry, each in self.made.items() if isinstance(each, ExportableState)
        }
        states = {entry: callback.state() for entry, callback in exporting.items()}
        for entry, state in states.items():
            for part, values in state.items():
                _check_json(f"--callbacks {entry}: its state()[{part!r}]", values)
        exported = {entry: state.get("attributes") for entry, state in states.items()}
        return {OWN: exported} if exported else {}

    def restore(self, saved: dict[str, Any]) -> None:
        """Set the callbacks' attributes to their values in a checkpoint (`saved`)."""
        for entry, attributes in saved.get(OWN, {}).items():
            if entry in self.made:
                vars(self.made[entry]).update(attributes or {})


def _check_json(name: str, value: Any) -> None:
    """Raise ConfigurationError, with the path of the key, if a value cannot be stored as JSON."""
    try:
        json.dumps(value, sort_keys=True)
    except (TypeError, ValueError) as error:
        for key, inner in value.items() if isinstance(value, dict) else ():
            _check_json(f"{name}[{key!r}]", inner)
        raise ConfigurationError(
            f"{name} cannot be saved in a checkpoint, which holds JSON: {error}. Return numbers, "
            "strings, lists and dicts, such as loss.item() for a tensor."
        ) from error


@dataclass
class Callbacks:
    """The callbacks of a run and other helper objects. Fields for features that are off are None.

    utils/run/finish.py creates the objects. The trainer calls them by their field names.
    """

    progress: Progress
    epochs: DataEpochs
    watchdog: HangWatch
    inherited: InheritedOptimizer | None
    stop: StopWatch
    early_stopping: EarlyStopping | None
    average: AveragedWeights | None
    profiler: ProfilerWindow | None
    throughput: Throughput
    mixture: MixtureShares
    memory: MemoryMonitor
    guard: NonFiniteGuard
    journal: Journal
    resume_check: ResumeCheck
    live: LiveView
    samples: Samples
    balance: ExpertBalance | None
    source_losses: SourceLosses | None
    own: OwnCallbacks

    def in_order(self) -> list[TrainerCallback]:
        """Return the callbacks in the order in which they act on an event of training.

        `stop` comes after the callbacks that request evaluations and saves, and before the
        callbacks that measure how long evaluations and saves take.
        """
        order = [
            self.epochs, *self.own.made.values(), self.watchdog, self.inherited, self.stop,
            self.early_stopping,
            self.average, self.profiler, self.throughput, self.mixture, self.memory, self.guard,
            self.journal, self.resume_check, self.live,
        ]  # fmt: skip
        return [callback for callback in order if callback is not None]

    def metrics(self) -> dict[str, float]:
        """Return metrics to add to a training log, {name: value}. All ranks must call this."""
        figures = self.throughput.metrics() | self.mixture.metrics() | self.memory.metrics()
        if self.balance is not None:
            figures |= self.balance.metrics()
        if self.source_losses is not None:
            figures |= self.source_losses.metrics()
        return figures

    def stateful(self) -> list[Stateful]:
        """Return the objects that store values in each checkpoint."""
        everything: list[Stateful | None] = [
            self.stop, self.early_stopping, self.average, self.balance, self.source_losses,
            self.own,
        ]  # fmt: skip
        return [each for each in everything if each is not None]
