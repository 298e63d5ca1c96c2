"""Loaders of micro-batches of packed sequences, and the model's inputs made from a micro-batch."""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from utils.data.arrow_columns import IGNORED_LABEL
from utils.data.order import PADDING_SEQUENCE, GlobalBatchSampler
from utils.data.packing import PackPlan
from utils.data.token_dataset import TokenDataset
from utils.host.redaction import redact
from utils.launch.signals import shield_loader_worker

PADDED_TO = 64  # tokens; lengths are multiples of 64, so that kernels are chosen for few shapes

# A batch from PackedDataset, of B sequences of T tokens:
# input_ids       (B, T) int32
# loss_mask       (B, T) bool: which tokens are trained on; never the first token of a segment. A
#                 segment is one document's part of a sequence, or the padding at a sequence's end.
# cu_seq_lens     int32: the starts of all segments in the flattened (B * T) tokens, then B * T. No
#                 segment is empty, because flash kernels would start work for empty segments.
# loss_positions  int64: the flattened positions from which a trained token is predicted
# sequence_tokens (B,) int64: tokens of each sequence before its padding
# sources         (sources, B) bool: the source of each sequence, if there are several sources
Batch = dict[str, torch.Tensor]


def model_inputs(batch: Batch, device: torch.device | str) -> dict[str, Any]:
    """Move a micro-batch to the device; return {name: value} of the model's inputs.

    input_ids, labels and position_ids are (B, T) int64. Labels are not shifted. Tokens that are not
    trained on have the label -100. In each segment (one document's part of a sequence) positions
    begin with 0. max_length_q and max_length_k are an upper bound of the segment lengths. Copies
    from pinned memory do not block.
    """
    moved = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
    input_ids, cu_seq_lens = moved.pop("input_ids").long(), moved.pop("cu_seq_lens")
    tokens = input_ids.numel()
    segment_starts = cu_seq_lens[:-1].repeat_interleave(cu_seq_lens.diff(), output_size=tokens)
    positions = torch.arange(tokens, device=device) - segment_starts
    # Flash kernels start work for `longest` tokens of each segment, and may plan again for each new
    # value. Powers of two give few values. `batch` is on the CPU, so reading it does not block.
    longest = int(np.diff(batch["cu_seq_lens"].numpy()).max())
    longest = min(1 << (longest - 1).bit_length(), input_ids.shape[1])
    return {
        "input_ids": input_ids,
        "labels": torch.where(moved.pop("loss_mask"), input_ids, IGNORED_LABEL),
        "position_ids": positions.view_as(input_ids),
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": longest,
        "max_length_k": longest,
        **moved,
    }


class DocumentPart(NamedTuple):
    """The tokens [start, stop) of one document. `document`: its row in `dataset`, from 0."""

    dataset: Path
    document: int
    start: int
    stop: int


class PackedDataset(Dataset):
    """The packed sequences of one or several datasets (sources), numbered from 0 over all datasets.

    pad_token_id fills the end of a sequence. No document attends to padding, so any id works.
    to_longest: pad a micro-batch to the length of its longest sequence, rounded up to a multiple of
    64 tokens. skipped: for each dataset, indices of documents to leave out. Padding replaces these
    documents, so all other documents stay in their sequences.
    """

    def __init__(
        self, datasets: Sequence[TokenDataset], plans: Sequence[PackPlan], pad_token_id: int = 0,
        skipped: Sequence[np.ndarray] = (),
    ):  # fmt: skip
        self.datasets, self.plans = tuple(datasets), tuple(plans)
        self.skipped = list(skipped) or [np.zeros(0, dtype=np.int64)] * len(plans)
        self.to_longest = False
        self.sequence_length = plans[0].sequence_length
        self.pad_token_id = pad_token_id
        self.per_source = [plan.sequences for plan in plans]
        self.first_of_source = np.cumsum([0, *self.per_source])

    def padded(self, to_longest: bool) -> "PackedDataset":
        """Return a copy of this dataset with the given `to_longest`."""
        copied = copy.copy(self)
        copied.to_longest = to_longest
        return copied

    def __len__(self) -> int:
        return int(self.first_of_source[-1])

    def __getitems__(self, sequences: Sequence[int]) -> Batch:
        """Return the micro-batch of the sequences with these numbers. -1 is a padding sequence."""
        count, length = len(sequences), self.sequence_length
        # These lists have one item for each segment, source by source, then one for each padded
        # tail. owners: the index of the item's sequence in `sequences`. tokens: the token ids.
        # trained: a mask that is not 0 for trained tokens.
        owners, tokens, trained = [], [], []
        used = np.zeros(count, dtype=np.int64)  # tokens of each sequence
        sources = np.zeros((len(self.plans), count), dtype=bool)
        for source, indices, numbers in self._by_source(np.asarray(sequences, dtype=np.int64)):
            of_sequence, segments = self.plans[source].segments_of(numbers)
            if len(self.skipped[source]):
                kept = np.isin(segments.document, self.skipped[source], invert=True).nonzero()[0]
                of_sequence, segments = of_sequence[kept], segments.take(kept)
            ids, masks = self.datasets[source].pieces(segments)
            owners.append(indices[of_sequence])
            tokens += ids
            trained += masks
            np.add.at(used, owners[-1], segments.lengths)
            sources[source, indices] = True
        if self.to_longest:
            length = min(-(-max(int(used.max()), 1) // PADDED_TO) * PADDED_TO, length)
        tail_lengths = length - used
        padded = tail_lengths.nonzero()[0]
        owners.append(padded)
        for tail in tail_lengths[padded].tolist():
            tokens.append(np.full(tail, self.pad_token_id, dtype=np.int32))
            trained.append(np.zeros(tail, dtype=bool))
        order = np.concatenate(owners).argsort(kind="stable").tolist()
        tokens = [tokens[i] for i in order]
        input_ids = np.concatenate(tokens, dtype=np.int32, casting="same_kind")
        # Masks may be int64; int8 is enough for 0 and 1.
        loss_mask = (
            np.concatenate([trained[i] for i in order], dtype=np.int8, casting="unsafe") != 0
        )
        boundaries = np.cumsum([0, *map(len, tokens)], dtype=np.int32)
        loss_mask[boundaries[:-1]] = False
        of_mixture = {"sources": torch.from_numpy(sources)} if len(self.plans) > 1 else {}
        return of_mixture | {
            "input_ids": torch.from_numpy(input_ids.reshape(count, length)),
            "loss_mask": torch.from_numpy(loss_mask.reshape(count, length)),
            "cu_seq_lens": torch.from_numpy(boundaries),
            # The position before each trained token; the first token of a sequence is not trained.
            "loss_positions": torch.from_numpy(np.flatnonzero(loss_mask[1:])),
            "sequence_tokens": torch.from_numpy(used),
        }

    def tokens_by_source(self, sequences: np.ndarray) -> np.ndarray:
        """Return how many tokens of each source are in `sequences`, int64 (sources,).

        Padding is not counted. `sequences` are sequence numbers.
        """
        tokens = np.zeros(len(self.plans), dtype=np.int64)
        for source, _, own in self._by_source(sequences):
            tokens[source] = self.plans[source].sequence_tokens[own].sum()
        return tokens

    def documents_in(self, sequences: np.ndarray) -> list[DocumentPart]:
        """Return the document parts in the sequences with these numbers, source by source."""
        parts = []
        for source, _, own in self._by_source(sequences):
            _, segments = self.plans[source].segments_of(own)
            for part in zip(*(column.tolist() for column in segments), strict=True):
                parts.append(DocumentPart(self.datasets[source].path, *part))
        return parts

    def _by_source(self, sequences: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield (source, indices, numbers) for each source that has some of these sequences.

        indices: the indices of the source's sequences in `sequences`. numbers: the numbers of these
        sequences within the source
        """
        sources = np.searchsorted(self.first_of_source, sequences, side="right") - 1
        for source in sorted(set(sources[sequences != PADDING_SEQUENCE].tolist())):
            indices = (sources == source).nonzero()[0]
            yield source, indices, sequences[indices] - self.first_of_source[source]


class TokenCounts:
    """A counter of the tokens that all ranks have trained on since step 0, by source.

    Padding is not counted. Every rank computes the same counts without communication. `by_name`
    also has the tokens of sources that the run used before a resume and no longer uses.
    """

    def __init__(self, in_step: Callable[[int], np.ndarray], names: Sequence[str]):
        """`in_step(step)` returns a step's tokens by source, int64 (sources,). Steps begin at 0."""
        self.in_step, self.names = in_step, tuple(names)
        self.resume(0, {})

    def resume(self, steps: int, tokens: Mapping[str, int]) -> None:
        """Set the counts after the first `steps` steps to `tokens`, {source: tokens}."""
        self.steps, self.by_name = steps, dict.fromkeys(self.names, 0) | dict(tokens)

    def count(self, steps: int) -> int:
        """Return the number of tokens in the first `steps` steps, summed over all sources."""
        for step in range(self.steps, steps):
            for name, tokens in zip(self.names, self.in_step(step).tolist(), strict=True):
                self.by_name[name] += tokens
        self.steps = max(steps, self.steps)
        return sum(self.by_name.values())


def source_names(paths: Sequence[Path]) -> list[str]:
    """Return a short, distinct name for the dataset at each path.

    For /data/web/train and /data/code/train the names are web and code. Known secrets in paths are
    masked, because the names appear in metrics and checkpoints.
    """
    parts = [tuple(map(redact, path.parts)) for path in paths]
    length = 1
    while len({part[-length:] for part in parts}) < len(set(parts)):
        length += 1
    ends = [part[-length:] for part in parts]
    while len({end[-1] for end in ends}) == 1 and min(map(len, ends)) > 1:
        ends = [end[:-1] for end in ends]
    return ["/".join(end) for end in ends]


def mixture_line(rows: PackedDataset, sampler: GlobalBatchSampler) -> str:
    """Return the log line with each source's share of the mixture and its epochs in the run."""
    shares = sampler.order.shares()
    tokens = shares * [plan.sequence_tokens.mean() for plan in rows.plans]
    epochs = sampler.order.epochs_before(sampler.samples_before(sampler.total_steps))
    names = source_names([dataset.path for dataset in rows.datasets])
    sources = (
        f"{name} {share:.1%} of the sequences (of the tokens {own / tokens.sum():.1%}), "
        f"its {count:,} are each seen {times:.2f} times"
        for name, share, own, count, times in zip(
            names, shares, tokens, rows.per_source, epochs, strict=True
        )
    )
    return f"mixture: {'; '.join(sources)}"


class TrainLoader:
    """A loader of one rank's training micro-batches, beginning at `batch_sampler.start_step`.

    Iteration draws nothing from global random generators, so a resumed run draws the same numbers
    as an uninterrupted run. `wait_s`: the seconds that training has waited for micro-batches.
    """

    def __init__(self, dataset: PackedDataset, sampler: GlobalBatchSampler, **workers: Any):
        """`workers`: keyword arguments for `packed_loader`, such as num_workers."""
        self.loader = packed_loader(dataset, sampler, **workers)
        self.batch_sampler, self.dataset, self.wait_s = sampler, dataset, 0.0
        names = source_names([source.path for source in dataset.datasets])
        self.tokens_seen = TokenCounts(
            lambda step: dataset.tokens_by_source(sampler.sequences_of_step(step)), names
        )

    def __len__(self) -> int:
        """Return the number of micro-batches that this rank trains on in the whole run.

        Steps before a resume are included. If the global batch grows during the run, return the
        number of steps, because Trainer then takes the micro-batches of a step as one item.
        """
        sampler = self.batch_sampler
        return sampler.total_steps if sampler.grows else len(sampler)

    def __iter__(self) -> Iterator[Batch]:
        before = time.perf_counter()
        for batch in self.loader:
            self.wait_s += time.perf_counter() - before
            yield batch
            before = time.perf_counter()


def packed_loader(
    dataset: PackedDataset,
    batches: GlobalBatchSampler | list[list[int]],
    *,
    seed: int = 0,
    num_workers: int = 0,
    pin_memory: bool = False,
    **options: Any,
) -> DataLoader:
    """Return a DataLoader of micro-batches from `dataset`.

    batches: the sequence numbers of each micro-batch. options: DataLoader's arguments for workers
    """
    if num_workers == 0:
        options = {}  # without workers, torch refuses options for workers
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=num_workers,
        # Pinning speeds up copies to an accelerator; without one torch would only warn.
        pin_memory=pin_memory and torch.accelerator.is_available(),
        collate_fn=dict,  # `PackedDataset.__getitems__` has made the batch already
        worker_init_fn=shield_loader_worker,
        # Without `generator` every iterator would draw a number from torch's global generator.
        generator=torch.Generator().manual_seed(seed),
        **options,
    )
