"""Kinds of cells: each is a piece of work and those who do it."""

import importlib.util
from dataclasses import dataclass

from benchmarks.workloads.workload import Workload

OURS = "Stoker"
OURS_TUNED = "Stoker, tuned"


@dataclass(frozen=True)
class Baseline:
    """A toolkit with its settings: `module` of benchmarks/baselines/, and what it `needs`.

    `variant` is for the module to read; `environment` holds variables of its process.
    """

    name: str
    module: str
    tuned: bool = True
    needs: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    variant: str = ""

    def reason_not_to_run(self) -> str | None:
        """Say why it cannot run here; None: it can."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        return None


STOKER = Baseline(OURS, "stoker", tuned=False)
TUNED_STOKER = Baseline(OURS_TUNED, "stoker")
TRAINER = Baseline("Trainer, as documented", "hf_trainer", tuned=False)
TUNED_TRAINER = Baseline("Trainer, tuned", "hf_trainer")
SFT_TRAINER = Baseline("SFTTrainer, as documented", "trl_sft", tuned=False)
TUNED_SFT_TRAINER = Baseline("SFTTrainer, tuned", "trl_sft")
PLAIN_LOOP = Baseline("plain loop, tuned", "plain_loop")
LITGPT = Baseline("litgpt, as documented", "litgpt", tuned=False, needs="litgpt")
TUNED_LITGPT = Baseline("litgpt, tuned", "litgpt", needs="litgpt")


@dataclass(frozen=True)
class TrainingCell:
    """Baselines that train the same model on the same documents in the same precision.

    `precision` is a key of benchmarks/recording/precision.py.
    `lora_rank` above 0: the weights are frozen, adapters of that rank on all linear layers but the
    last are trained. `trace`: a step more shows which kernels ran.
    """

    name: str
    title: str
    workload: Workload
    precision: str
    micro_batch_size: int
    baselines: tuple[Baseline, ...]
    steps: int = 10
    warmup_steps: int = 3
    learning_rate: float = 1e-3
    lora_rank: int = 0
    trace: bool = False


@dataclass(frozen=True)
class ComponentCell:
    """A part of a step, measured alone: `module` of benchmarks/components/, at its own sizes."""

    module: str
    sizes: tuple[int, ...] = ()  # others than the module's

    @property
    def name(self) -> str:
        """Return the name for the command line and the results."""
        return self.module


@dataclass(frozen=True)
class DurationCell:
    """A wait that a user sees: `module` of benchmarks/durations/, at its own sizes."""

    module: str
    sizes: tuple[int, ...] = ()  # others than the module's
    most_repeats: int = 3  # each takes the better part of a minute

    @property
    def name(self) -> str:
        """Return the name for the command line and the results."""
        return self.module


@dataclass(frozen=True)
class SweepCell:
    """A training cell whose sequences grow as long as a baseline can; each size once."""

    base: TrainingCell
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return the name for the command line and the results."""
        return self.base.name


@dataclass(frozen=True)
class ProbeCell:
    """The peaks of the device: matrix products and copies."""

    name: str = "probes"
    toy: bool = False


Cell = TrainingCell | ComponentCell | DurationCell | SweepCell | ProbeCell
