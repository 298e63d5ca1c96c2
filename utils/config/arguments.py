"""What the user may set of data and model in `pretrain.py` and `sft_train.py`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from trl import ModelConfig

from utils.config.data_sources import TrainSource, eval_splits, train_sources
from utils.config.refusals import REFUSED_MODEL_SETTINGS

ATTENTION_IMPLEMENTATIONS = (
    "auto",
    "packed_varlen",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
    "eager",
)


@dataclass
class DataArguments:
    """The token datasets and how they become sequences."""

    _argument_group_name = "data"

    train_data: list[str] = field(
        metadata={
            "help": "token datasets to train on, DIR or DIR=weight (all or none weighted, by "
            "share of the samples)"
        }
    )
    sequence_length: int = field(metadata={"help": "tokens per packed sequence"})
    eval_data: list[str] = field(
        default_factory=list,
        metadata={
            "help": "held-out token datasets, NAME=DIR (or DIR, its last folder being the name); "
            "each logs eval_NAME_loss and "
            "eval_NAME_perplexity"
        },
    )
    packing: Literal["best_fit", "concat", "none"] = field(
        default="best_fit",
        metadata={
            "help": "how documents fill sequences: best_fit keeps documents whole, concat puts "
            "them end to end, none gives each a sequence of its own"
        },
    )
    on_overlong: Literal["error", "truncate", "drop"] = field(
        default="error",
        metadata={
            "help": "fine-tuning: what to do with a document longer than sequence_length "
            "(pretraining splits it)"
        },
    )
    tokenizer_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "tokenizer directory; null: the one beside the training data, which it was "
            "made with, else the model's own"
        },
    )

    @property
    def train_sources(self) -> tuple[TrainSource, ...]:
        """The training datasets with their weights."""
        return train_sources(self.train_data)

    @property
    def eval_splits(self) -> dict[str, str]:
        """The directory of each evaluation split, by name."""
        return eval_splits(self.eval_data)


@dataclass
class ModelArguments(ModelConfig):
    """TRL's names for models and LoRA; from scratch with `model_config`."""

    _argument_group_name = "model"
    refused_settings: ClassVar[Mapping[str, str]] = REFUSED_MODEL_SETTINGS

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "model directory or Hub name whose weights to start from"},
    )
    model_config: str | None = field(
        default=None,
        metadata={
            "help": "JSON or YAML file with a transformers configuration (model_type and the "
            "rest): start from random weights instead of model_name_or_path, or from those of "
            "init_from"
        },
    )
    init_from: str | None = field(
        default=None,
        metadata={
            "help": "an earlier stage whose weights to start from: the directory of a run, of a "
            "checkpoint or of a model; the architecture is its own, or model_config's"
        },
    )
    init_optimizer: bool = field(
        default=False,
        metadata={
            "help": "take the optimizer's state (Adam's moments and counts) over from the "
            "checkpoint that init_from names, under a new schedule"
        },
    )
    dtype: str | None = field(
        default=None,
        metadata={
            "help": "type of the weights in memory; null: float32, as stable training needs. "
            "Mixed precision is --bf16",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )
    save_dtype: str = field(
        default="auto",
        metadata={
            "help": "type of the weights in final/; auto: that of the model the run began with (a "
            "model from random weights: as trained). Checkpoints are always exact",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )
    attn_implementation: str | None = field(
        default="auto",
        metadata={
            "help": "attention kernel; auto takes the fastest one here that keeps packed "
            "documents apart, and says which",
            "choices": ATTENTION_IMPLEMENTATIONS,
        },
    )
    loss_head: str = field(
        default="auto",
        metadata={
            "help": "fused computes the loss some tokens at a time, so that their logits are never "
            "all in memory; auto takes it where it is proved to compute the same as logits",
            "choices": ["auto", "fused", "logits"],
        },
    )
    compile: bool | None = field(
        default=None,
        metadata={
            "help": "compile the model layer by layer: faster steps after a slow first one; what "
            "was compiled is kept between jobs (TORCHINDUCTOR_CACHE_DIR); null: on where a GPU "
            "trains a dense model"
        },
    )
