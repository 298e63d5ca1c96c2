"""What is measured: each cell is a piece of work and those who do it."""

from dataclasses import dataclass

from benchmarks.workloads import LLAMA_11M, LLAMA_23M, Workload

OURS = "Stoker"
OURS_TUNED = "Stoker, tuned"


@dataclass(frozen=True)
class Contestant:
    """A toolkit with its settings: `module` of benchmarks/contestants/, and what it `needs`.

    `environment` holds variables of its process.
    """

    name: str
    module: str
    tuned: bool = True
    needs: str | None = None
    environment: tuple[tuple[str, str], ...] = ()


STOKER = Contestant(OURS, "stoker", tuned=False)
TUNED_STOKER = Contestant(OURS_TUNED, "stoker")
TRAINER = Contestant("Trainer, as documented", "hf_trainer", tuned=False)
TUNED_TRAINER = Contestant("Trainer, tuned", "hf_trainer")
SFT_TRAINER = Contestant("SFTTrainer, as documented", "trl_sft", tuned=False)
TUNED_SFT_TRAINER = Contestant("SFTTrainer, tuned", "trl_sft")
PLAIN_LOOP = Contestant("plain loop, tuned", "plain_loop")


@dataclass(frozen=True)
class TrainingCell:
    """Contestants that train the same model on the same documents in the same precision."""

    name: str
    title: str
    workload: Workload
    precision: str
    micro_batch_size: int
    contestants: tuple[Contestant, ...]
    steps: int = 10
    warmup_steps: int = 3


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


Cell = TrainingCell | ComponentCell | ParityCell


def _stoker_with(name: str, **variables: str) -> Contestant:
    return Contestant(name, "stoker", tuned=False, environment=tuple(variables.items()))


_HEAP_ONLY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}  # glibc's
_ROWS = Workload(LLAMA_23M, sequence_length=512, documents=64)
_CHATS = Workload(LLAMA_11M, sequence_length=2048, documents=400, mean_length=300)
_PRETRAINING = (STOKER, TUNED_STOKER, TRAINER, TUNED_TRAINER, PLAIN_LOOP)
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
    ComponentCell("loss_head"),
    ComponentCell("attention"),
    ComponentCell("loader"),
    ComponentCell("packing"),
    ComponentCell("tokenization"),
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
