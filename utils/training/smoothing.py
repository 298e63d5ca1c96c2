"""Averaged weights (EMA) and noise on the embeddings (NEFTune)."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint, is_initialized
from transformers import TrainerCallback
from typing_extensions import override

from utils.kernels.ulysses import ContextGroup

EMA_FOLDER = "ema"  # in a checkpoint; contains the averaged weights
AVERAGED_STEPS_KEY = (
    "averaged_steps"  # key of the number of steps in a checkpoint's trainer_state.json
)

logger = logging.getLogger(__name__)


class AveragedWeights(TrainerCallback):
    """The exponential moving average (EMA) of the trained weights, in float32.

    final/ gets the average instead of the weights. After step n, the average moves towards the
    weights by the fraction 1 - d. d is the smaller of `decay` and (1 + n) / (10 + n), so the first
    weights are soon forgotten. Under FSDP2 each rank averages its shards. Any number of ranks can
    load the average from a checkpoint.
    """

    def __init__(self, decay: float, resume_from: str | None):
        self.decay, self.resumed, self.steps = decay, resume_from, 0

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the number of averaged steps from a checkpoint. `load` reads the average."""
        self.steps = saved.get(AVERAGED_STEPS_KEY, 0)

    def state(self) -> dict[str, Any]:
        """Return {"averaged_steps": count} for a checkpoint. `save` stores the average."""
        return {AVERAGED_STEPS_KEY: self.steps}

    @override
    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        """Set the average to a copy of the weights, or to the average in the resumed checkpoint."""
        trained = [each for each in kwargs["model"].named_parameters() if each[1].requires_grad]
        self.weights = [_local(weight) for _, weight in trained]
        self.average = {name: weight.detach().float().clone() for name, weight in trained}
        if self.resumed is not None:
            self.load(Path(self.resumed))

    @override
    @torch.no_grad()
    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Move the average towards the weights."""
        self.steps += 1
        share = 1 - min(self.decay, (1 + self.steps) / (10 + self.steps))
        averages = [_local(value) for value in self.average.values()]
        if all(weight.dtype == torch.float32 for weight in self.weights):
            torch._foreach_lerp_(averages, self.weights, share)
        else:  # one by one: a float32 copy of all weights would need as much memory as the average
            for average, weight in zip(averages, self.weights, strict=True):
                average.lerp_(weight.float(), share)

    def save(self, directory: Path) -> None:
        """Write the average into a checkpoint. All ranks must call this."""
        folder = str(directory / EMA_FOLDER)
        checkpoint.save(
            {EMA_FOLDER: self.average}, checkpoint_id=folder, no_dist=not is_initialized()
        )

    def load(self, directory: Path) -> None:
        """Read the average from a checkpoint. All ranks must call this.

        If the checkpoint has no average, the current average stays.
        """
        folder = directory / EMA_FOLDER
        if not folder.is_dir():
            logger.info("ema: %s holds no average; it begins with the weights there", directory)
            return
        state = {EMA_FOLDER: self.average}
        checkpoint.load(state, checkpoint_id=str(folder), no_dist=not is_initialized())

    @torch.no_grad()
    def copy_into_model(self) -> None:
        """Copy the averaged weights into the model, at the end of the run."""
        for weight, average in zip(self.weights, self.average.values(), strict=True):
            weight.copy_(_local(average))


def _local(value: Tensor) -> Tensor:
    value = value.detach()
    local: Any = getattr(value, "to_local", None)
    return value if local is None else local()


class EmbeddingNoise:
    """NEFTune: noise on the embeddings in training (Jain et al. 2023, arXiv 2310.05914).

    The noise is uniform between +-alpha / sqrt(length * width). `length` is the length of the
    token's document, as in the authors' code. transformers' hook would use the length of the packed
    sequence.
    """

    def __init__(self, model: Any, alpha: float):
        self.alpha = alpha
        self.lengths: Tensor | None = None  # length of each token's document
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        base.get_input_embeddings().register_forward_hook(self._add)

    def set_lengths(
        self, cu_seq_lens: Tensor, tokens: int, context: ContextGroup | None = None, rows: int = 1
    ) -> None:
        """Store the length of each token's document in the next micro-batch.

        cu_seq_lens: the document boundaries. tokens: the number of tokens in the micro-batch.
        context: the context-parallel group of this rank, or None. In a group, this rank computes
        one slice of each sequence. rows: the number of sequences.
        """
        lengths = cu_seq_lens.diff()
        self.lengths = lengths.repeat_interleave(lengths, output_size=tokens)
        if context is not None:
            self.lengths = context.slice_of(self.lengths.view(rows, -1))

    def _add(self, embedding: nn.Module, _: Any, output: Tensor) -> Tensor | None:
        if not embedding.training:
            return None
        assert self.lengths is not None, "set_lengths comes first"
        scale = self.alpha * (self.lengths * output.shape[-1]).float().rsqrt()
        noise = torch.empty_like(output).uniform_(-1, 1)
        return output + noise * scale.reshape(*output.shape[:-1], 1).to(output.dtype)
