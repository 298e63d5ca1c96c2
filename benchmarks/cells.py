"""What is measured: each cell is a piece of work and those who do it."""

import importlib.util
from dataclasses import dataclass

from benchmarks.workloads import LLAMA_11M, LLAMA_23M, Workload

OURS = "Stoker"
OURS_TUNED = "Stoker, tuned"


@dataclass(frozen=True)
class Contestant:
    """A toolkit with its settings: `module` of benchmarks/contestants/, and what it `needs`.

    `module` None: a toolkit that nothing here drives yet. `variant` is for the module to read;
    `environment` holds variables of its process.
    """

    name: str
    module: str | None
    tuned: bool = True
    needs: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    variant: str = ""

    def reason_not_to_run(self) -> str | None:
        """Say why it cannot run here; None: it can."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        return None if self.module else "there is no adapter for it"


STOKER = Contestant(OURS, "stoker", tuned=False)
TUNED_STOKER = Contestant(OURS_TUNED, "stoker")
TRAINER = Contestant("Trainer, as documented", "hf_trainer", tuned=False)
TUNED_TRAINER = Contestant("Trainer, tuned", "hf_trainer")
SFT_TRAINER = Contestant("SFTTrainer, as documented", "trl_sft", tuned=False)
TUNED_SFT_TRAINER = Contestant("SFTTrainer, tuned", "trl_sft")
PLAIN_LOOP = Contestant("plain loop, tuned", "plain_loop")
LITGPT = Contestant("litgpt, as documented", "litgpt", tuned=False, needs="litgpt")
TUNED_LITGPT = Contestant("litgpt, tuned", "litgpt", needs="litgpt")


@dataclass(frozen=True)
class TrainingCell:
    """Contestants that train the same model on the same documents in the same precision.

    `precision` is "fp32", "bf16" (mixed: weights in fp32) or "bf16_weights" (everything in bf16).
    `lora_rank` above 0: the weights are frozen, adapters of that rank on all linear layers but the
    last are trained. `trace`: a step more shows which kernels ran.
    """

    name: str
    title: str
    workload: Workload
    precision: str
    micro_batch_size: int
    contestants: tuple[Contestant, ...]
    steps: int = 10
    warmup_steps: int = 3
    learning_rate: float = 1e-3
    lora_rank: int = 0
    checkpointing: bool = False
    trace: bool = False


@dataclass(frozen=True)
class ComponentCell:
    """A part of a step, measured alone: `module` of benchmarks/components/, at its own sizes."""

    module: str
    sizes: tuple[int, ...] = ()  # others than the module's

    @property
    def name(self) -> str:
        """What the command line and the results call it."""
        return self.module


@dataclass(frozen=True)
class Variant:
    """Stoker with other settings; `held` ones have to train as well as the first."""

    name: str
    settings: tuple[tuple[str, str], ...] = ()
    precision: str = "fp32"
    held: bool = True


@dataclass(frozen=True)
class ParityCell:
    """Runs of Stoker on the same documents, whose losses are compared and not their speed."""

    name: str
    title: str
    workload: Workload
    micro_batch_size: int
    steps: int
    learning_rate: float
    variants: tuple[Variant, ...]


@dataclass(frozen=True)
class DurationCell:
    """A wait that a user sees: `module` of benchmarks/durations/, at its own sizes."""

    module: str
    sizes: tuple[int, ...] = ()  # others than the module's
    most_repeats: int = 3  # each takes the better part of a minute

    @property
    def name(self) -> str:
        """What the command line and the results call it."""
        return self.module


@dataclass(frozen=True)
class SweepCell:
    """A training cell with one thing growing, as long as a contestant can.

    `grows` is "sequence_length" or "num_hidden_layers". Each size is taken once.
    """

    base: TrainingCell
    grows: str
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        """What the command line and the results call it."""
        return self.base.name


@dataclass(frozen=True)
class ProbeCell:
    """What the device can do at best: matrix products and copies."""

    name: str = "probes"
    toy: bool = False


Cell = TrainingCell | ComponentCell | ParityCell | DurationCell | SweepCell | ProbeCell


def _stoker_with(name: str, **variables: str) -> Contestant:
    return Contestant(name, "stoker", tuned=False, environment=tuple(variables.items()))


_HEAP_ONLY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}  # glibc's
_ROWS = Workload(LLAMA_23M, sequence_length=512, documents=64)
_CHATS = Workload(LLAMA_11M, sequence_length=2048, documents=400, mean_length=300)
_PRETRAINING = (
    STOKER, TUNED_STOKER, TRAINER, TUNED_TRAINER, LITGPT, TUNED_LITGPT, PLAIN_LOOP,
)  # fmt: skip
_FINE_TUNING = (STOKER, TUNED_STOKER, SFT_TRAINER, TUNED_SFT_TRAINER, TUNED_TRAINER)

CPU_CELLS: tuple[Cell, ...] = (
    TrainingCell(
        "pretrain_fp32", "Pretraining, 23 M parameters, 4 x 512 tokens, fp32",
        _ROWS, "fp32", 4, _PRETRAINING,
    ),
    TrainingCell(
        "pretrain_bf16", "Pretraining, 23 M parameters, 4 x 512 tokens, bf16",
        _ROWS, "bf16", 4, _PRETRAINING,
    ),
    TrainingCell(
        "sft_bf16", "Fine-tuning, 11 M parameters, chats of 300 tokens, bf16",
        _CHATS, "bf16", 1, _FINE_TUNING,
    ),
    SweepCell(
        TrainingCell(
            "pretrain_growth", "Pretraining, 23 M parameters, one row that grows, bf16",
            Workload(LLAMA_23M, sequence_length=512, documents=8), "bf16", 1,
            (STOKER, TRAINER, PLAIN_LOOP), steps=8, warmup_steps=3,
        ),
        "sequence_length", (256, 512, 1024, 2048),
    ),
    ComponentCell("loss_head"),
    ComponentCell("attention"),
    ComponentCell("loader"),
    ComponentCell("packing"),
    ComponentCell("tokenization"),
    DurationCell("start_up", most_repeats=2),
    DurationCell("checkpoint_stall"),
)  # fmt: skip

_LLAMA_1M = LLAMA_11M | {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "vocab_size": 2048,
}
_SMALL_ROWS = Workload(_LLAMA_1M, sequence_length=64, documents=1920)
_ROUNDED = (("dtype", "bfloat16"), ("stochastic_rounding", "true"))

# What a choice of ours is worth: Stoker beside itself without it.
EXPERIMENTS: tuple[Cell, ...] = (
    TrainingCell(
        "large_tensors", "Pretraining as above, bf16: where large tensors lie",
        _ROWS, "bf16", 4,
        (
            STOKER,
            _stoker_with("ordinary pages", THP_MEM_ALLOC_ENABLE="0"),
            _stoker_with("heap only", THP_MEM_ALLOC_ENABLE="0", **_HEAP_ONLY),
            _stoker_with("huge pages, heap only", **_HEAP_ONLY),
        ),
    ),
    ComponentCell("short_documents"),
    ComponentCell("logits_layout"),
    ParityCell(
        "low_precision", "Losses in fewer bits, 1 M parameters, 120 steps of 16 x 64 tokens",
        _SMALL_ROWS, 16, 120, 3e-3,
        (
            Variant("float32"),
            Variant("mixed precision bf16", precision="bf16"),
            Variant("states in bfloat16", (("optim_states", "bfloat16"),)),
            Variant("states in int8", (("optim_states", "int8"),)),
            Variant("weights in bfloat16, rounded stochastically", _ROUNDED),
            Variant(
                "weights in bfloat16, rounded stochastically, states in int8",
                (*_ROUNDED, ("optim_states", "int8")),
            ),
            Variant(
                "weights in bfloat16, rounded to the nearest", (("dtype", "bfloat16"),), held=False
            ),
        ),
    ),
)  # fmt: skip
