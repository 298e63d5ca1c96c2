"""Attention of sequences that are split over ranks: ranks exchange tokens for heads.

The ranks of a group hold equally long slices of each sequence, in the order of the ranks. Before
attention, an all-to-all gives each rank all tokens of some heads. After attention, an all-to-all
gives each rank its own tokens with all heads. A kernel for packed documents therefore runs on whole
sequences (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509).
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
    """A group of `size` ranks that share each micro-batch. Each rank has a slice of each sequence.

    rank: index of this process in the group. group: None in a memory estimate, which sends nothing.
    """

    size: int
    rank: int
    group: dist.ProcessGroup | None = None

    def slice_of(self, states: Tensor) -> Tensor:
        """Return this rank's slice of `states` (rows, tokens, ...), as a contiguous tensor."""
        return states.unflatten(1, (self.size, -1))[:, self.rank].contiguous()

    def own_heads(
        self, query: Tensor, key: Tensor, value: Tensor, terms: ScoreTerms
    ) -> tuple[Tensor, Tensor, Tensor, ScoreTerms]:
        """Return states of all tokens for this rank's heads, (rows, tokens, own heads, dim).

        query, key and value have only this rank's tokens, but all heads. If there are fewer key
        heads than ranks, each key head goes to several ranks. The returned `terms` have the sinks
        of this rank's heads.
        """
        if (copies := self.size // key.shape[2]) > 1:
            key, value = (states.repeat_interleave(copies, dim=2) for states in (key, value))
        query, key, value = (self._tokens_of_own_heads(states) for states in (query, key, value))
        if terms.sinks is not None:
            terms = terms._replace(sinks=terms.sinks.chunk(self.size)[self.rank])
        return query, key, value, terms

    def own_tokens(self, states: Tensor) -> Tensor:
        """Return states of this rank's tokens for all heads, (rows, own tokens, heads, dim).

        states: all tokens of this rank's heads, (rows, tokens, own heads, dim).
        """
        blocks = states.unflatten(1, (self.size, -1)).movedim(1, 0)
        received = _AllToAll.apply(blocks, self.group)  # (size, rows, own tokens, heads, dim)
        # With one head per rank flatten returns a view, but AFMoE's output.view needs a copy.
        return received.movedim(0, 2).flatten(2, 3).contiguous()

    def _tokens_of_own_heads(self, states: Tensor) -> Tensor:
        blocks = states.unflatten(2, (self.size, -1)).movedim(2, 0)
        received = _AllToAll.apply(blocks, self.group)  # (size, rows, tokens, own heads, dim)
        return received.movedim(0, 1).flatten(1, 2)


class _AllToAll(torch.autograd.Function):
    """All-to-all exchange of blocks (size, ...).

    Block j goes to rank j. Block j of the result comes from rank j. The backward pass exchanges the
    gradients in the same way.
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
    """Return this rank's group of `size` consecutive ranks, or None if `size` is 1.

    All ranks must call this. A node has consecutive ranks, so a group is inside one node if `size`
    divides the node's number of GPUs. timeout_s: time limit of an exchange in the group.
    """
    if size == 1:
        return None
    timeout = datetime.timedelta(seconds=timeout_s)
    own, _ = dist.new_subgroups(size, timeout=timeout)
    return ContextGroup(size, dist.get_rank(own), own)


def cut_positions(positions: Tensor, length: int, context: ContextGroup) -> Tensor:
    """Return the `positions` in this rank's slices, as indices into the tokens of the slices.

    positions (N,): indices into the tokens of all sequences, which have `length` tokens each. They
    are in CPU memory, because a selection on a GPU would block the host.
    """
    rows, offsets = positions // length, positions % length
    slice_length = length // context.size
    is_own = offsets // slice_length == context.rank
    indices = (rows * slice_length + offsets % slice_length)[is_own]
    return indices.pin_memory() if positions.is_pinned() else indices


def cut_inputs(inputs: dict[str, Any], context: ContextGroup) -> dict[str, Any]:
    """Return this rank's slices (rows, length / size) of a model's inputs (rows, length).

    Adds `shift_labels`, the label after each token, because a slice lacks the label after its last
    token. Document boundaries stay unchanged: they count the tokens of whole sequences.
    """
    slice_length = inputs["input_ids"].shape[1] // context.size
    following = functional.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)
    per_token = {name: inputs[name] for name in ("input_ids", "labels", "position_ids")}
    per_token["shift_labels"] = following
    cut = inputs | {name: context.slice_of(value) for name, value in per_token.items()}
    if "sequence_tokens" in cut:
        earlier_tokens = context.rank * slice_length
        own_tokens = cut["sequence_tokens"] - earlier_tokens
        cut["sequence_tokens"] = own_tokens.clamp(0, slice_length)
    return cut | {"context": context}
