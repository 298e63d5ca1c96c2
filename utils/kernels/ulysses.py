"""Attention of sequences that are cut over ranks: each rank gets all tokens of some heads.

The ranks of a group hold equally long slices of each sequence, in the order of the ranks. Before
attention, an all-to-all gives each rank all tokens of some heads. After attention, an all-to-all
gives each rank its own tokens with all heads. Any kernel for packed documents thus runs on whole
sequences with their own boundaries (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509).
"""

import datetime
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from utils.kernels.linear_cross_entropy import IGNORED
from utils.kernels.per_document import ScoreTerms


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share each micro-batch; a rank holds one of `size` slices of each sequence.

    rank: index of this process in the group. group: None to send nothing, as to count memory.
    """

    size: int
    rank: int
    group: dist.ProcessGroup | None = None

    def slice_of(self, states: Tensor) -> Tensor:
        """Return this rank's slice of (rows, tokens, ...), contiguous."""
        return states.unflatten(1, (self.size, -1))[:, self.rank].contiguous()

    def own_heads(
        self, query: Tensor, key: Tensor, value: Tensor, terms: ScoreTerms
    ) -> tuple[Tensor, Tensor, Tensor, ScoreTerms]:
        """Exchange (rows, own tokens, all heads, dim) for (rows, all tokens, own heads, dim).

        With fewer key heads than ranks, each key head goes to several ranks. The returned `terms`
        have the sinks of this rank's heads.
        """
        if (copies := self.size // key.shape[2]) > 1:
            key, value = (states.repeat_interleave(copies, dim=2) for states in (key, value))
        query, key, value = (self._heads_for_tokens(states) for states in (query, key, value))
        if terms.sinks is not None:
            terms = terms._replace(sinks=terms.sinks.chunk(self.size)[self.rank])
        return query, key, value, terms

    def own_tokens(self, states: Tensor) -> Tensor:
        """Exchange (rows, all tokens, own heads, dim) for (rows, own tokens, all heads, dim)."""
        blocks = states.unflatten(1, (self.size, -1)).movedim(1, 0)
        received = _AllToAll.apply(blocks, self.group)  # (size, rows, own tokens, heads, dim)
        # With one head per rank flatten makes a view, but AFMoE's output.view needs a copy.
        return received.movedim(0, 2).flatten(2, 3).contiguous()

    def _heads_for_tokens(self, states: Tensor) -> Tensor:
        blocks = states.unflatten(2, (self.size, -1)).movedim(2, 0)
        received = _AllToAll.apply(blocks, self.group)  # (size, rows, tokens, own heads, dim)
        return received.movedim(0, 1).flatten(1, 2)


class _AllToAll(torch.autograd.Function):
    """All-to-all of (size, ...): block j goes to rank j, and block j of the result is from rank j.

    The backward pass exchanges the gradients likewise.
    """

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        # Collectives ignore strides: without contiguous() they would send wrong heads.
        blocks = blocks.contiguous()
        received = torch.empty_like(blocks)
        if group is not None:
            dist.all_to_all_single(received, blocks, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradient, ctx.group), None


def context_group(size: int, timeout_s: float) -> ContextGroup | None:
    """Return this rank's group of `size` consecutive ranks, or None if `size` is 1. Collective.

    A node has consecutive ranks, so a group stays inside a node if `size` divides its GPUs.
    """
    if size == 1:
        return None
    timeout = datetime.timedelta(seconds=timeout_s)
    own, _ = dist.new_subgroups(size, timeout=timeout)
    return ContextGroup(size, dist.get_rank(own), own)


def cut_positions(positions: Tensor, length: int, context: ContextGroup) -> Tensor:
    """Return the positions inside this rank's slices, as indices into these slices.

    positions (N,): indices into the flattened tokens of sequences of `length` tokens, in CPU
    memory, because this selection would make the host wait for a GPU.
    """
    rows, places = positions // length, positions % length
    own = length // context.size
    is_own = places // own == context.rank
    cut = (rows * own + places % own)[is_own]
    return cut.pin_memory() if positions.is_pinned() else cut


def cut_inputs(inputs: dict[str, Any], context: ContextGroup) -> dict[str, Any]:
    """Return a model's inputs (rows, length) as this rank's slices (rows, length / size).

    Adds `shift_labels`, the label after each token, because a slice lacks the label after its last
    token. Document boundaries still count tokens of whole sequences.
    """
    own = inputs["input_ids"].shape[1] // context.size
    following = functional.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)
    per_token = {name: inputs[name] for name in ("input_ids", "labels", "position_ids")}
    per_token["shift_labels"] = following
    cut = inputs | {name: context.slice_of(value) for name, value in per_token.items()}
    if "sequence_tokens" in cut:
        cut["sequence_tokens"] = (cut["sequence_tokens"] - context.rank * own).clamp(0, own)
    return cut | {"context": context}
