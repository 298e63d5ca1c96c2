"""The loader gives every rank the right micro-batches of packed sequences, from any step on."""

import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from saved_datasets import documents_of, masks_of, save

from utils.config.arguments import eval_splits
from utils.data.loader import (
    PackedDataset,
    TrainLoader,
    model_inputs,
    packed_loader,
    source_names,
)
from utils.data.order import PADDING_SEQUENCE, GlobalBatchSampler, SampleOrder, eval_batches
from utils.data.packing import plan_packing
from utils.data.token_dataset import open_token_dataset

pytestmark = pytest.mark.usefixtures("own_cache")

T = 16
PAD = 999
SHAPED = ("input_ids", "labels", "position_ids")


def documents(count, seed):
    """Return documents with unique tokens, so that a token identifies its position."""
    lengths = np.random.default_rng(seed).integers(1, 40, count)
    starts = np.cumsum(lengths) - lengths
    return [list(range(s, s + n)) for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)]


def packed(path, packing="best_fit", **columns):
    dataset = open_token_dataset(save(path, documents(30, seed=0), **columns))
    plan = plan_packing(dataset.lengths, T, packing)
    return PackedDataset([dataset], [plan], PAD)


def masks_for(input_ids):
    generator = np.random.default_rng(1)
    return [generator.integers(0, 2, len(document)).tolist() for document in input_ids]


def row_by_hand(rows, number):
    """Return (input_ids, labels, position_ids, segment lengths) of one sequence, by token."""
    ids, labels, positions, lengths = [], [], [], []
    if number != PADDING_SEQUENCE:
        source = int(np.searchsorted(rows.first_of_source, number, side="right")) - 1
        dataset = rows.datasets[source]
        own = np.array([number - int(rows.first_of_source[source])])
        _, segments = rows.plans[source].segments_of(own)
        whole = documents_of(dataset), masks_of(dataset)
        for document, start, stop in zip(*map(np.ndarray.tolist, segments), strict=True):
            tokens, loss = (values[document][start:stop] for values in whole)
            loss[0] = 0
            ids += tokens
            labels += [token if bit else -100 for token, bit in zip(tokens, loss, strict=True)]
            positions += range(len(tokens))
            lengths.append(len(tokens))
    padding = T - len(ids)
    if padding:
        lengths.append(padding)
    return (
        ids + [PAD] * padding,
        labels + [-100] * padding,
        positions + list(range(padding)),
        lengths,
    )


def check_batch(rows, numbers):
    batch = model_inputs(rows.__getitems__(numbers), "cpu")
    expected = [row_by_hand(rows, number) for number in numbers]
    for key, values in zip(SHAPED, zip(*expected, strict=True), strict=False):
        assert batch[key].tolist() == list(values), key
    starts = np.concatenate([[0], np.cumsum([n for row in expected for n in row[3]])]).tolist()
    assert batch["cu_seq_lens_q"].tolist() == starts
    assert torch.equal(batch["cu_seq_lens_q"], batch["cu_seq_lens_k"])
    bound, longest = batch["max_length_q"], max(length for row in expected for length in row[3])
    assert longest <= bound <= T
    assert bound == T or bound < 2 * longest
    assert batch["max_length_k"] == bound
    assert isinstance(bound, int)
    predicting = torch.nn.functional.pad(batch["labels"][:, 1:] != -100, (0, 1)).flatten()
    assert batch["loss_positions"].tolist() == predicting.nonzero().flatten().tolist()
    assert not (batch["labels"][:, 0] != -100).any()


@pytest.mark.parametrize(
    ("packing", "mask"),
    [("best_fit", None), ("concat", "completion_mask"), ("none", "assistant_masks")],
)
def test_a_batch_equals_its_rows_token_by_token(tmp_path, packing, mask):
    input_ids = documents(30, seed=0)
    columns = {mask: masks_for(input_ids)} if mask else {}
    rows = packed(tmp_path / "d", packing=packing, **columns)
    numbers = list(range(len(rows)))
    check_batch(rows, numbers)
    check_batch(rows, [numbers[-1], PADDING_SEQUENCE, 0, 0])
    check_batch(rows, [PADDING_SEQUENCE])


def test_rows_of_several_sources_meet_in_one_batch(tmp_path):
    input_ids = documents(20, seed=3)
    plain = open_token_dataset(save(tmp_path / "plain", documents(30, seed=2)))
    masks = masks_for(input_ids)
    chats = open_token_dataset(save(tmp_path / "chats", input_ids, assistant_masks=masks))
    plans = [plan_packing(dataset.lengths, T) for dataset in (plain, chats)]
    rows = PackedDataset([plain, chats], plans, PAD)
    assert len(rows) == plans[0].sequences + plans[1].sequences == sum(rows.per_source)
    last = len(rows) - 1
    check_batch(rows, [last, 0, PADDING_SEQUENCE, plans[0].sequences, plans[0].sequences - 1, 3])
    numbers = np.array([last, PADDING_SEQUENCE, 0])
    expected = [plans[0].sequence_tokens[0], plans[1].sequence_tokens[-1]]
    assert rows.tokens_by_source(numbers).tolist() == expected
    parts = rows.documents_in(numbers)
    for dataset, tokens in zip(rows.datasets, expected, strict=True):
        own = [part for part in parts if part.dataset == dataset.path]
        assert sum(part.stop - part.start for part in own) == tokens
        assert all(part.stop <= dataset.lengths[part.document] for part in own)


def test_a_batch_has_fixed_shapes_and_no_attention_mask(tmp_path):
    rows = packed(tmp_path / "d")
    shapes = set()
    for numbers in ([0, 1, 2], [PADDING_SEQUENCE] * 3, [5, PADDING_SEQUENCE, 4]):
        batch = model_inputs(rows.__getitems__(numbers), "cpu")
        # The inputs of the layers are static; only the number of loss positions varies.
        seen = {name: value for name, value in batch.items() if name != "loss_positions"}
        shapes.add(tuple(value.shape for value in seen.values() if torch.is_tensor(value)))
        assert [batch[key].dtype for key in SHAPED] == [torch.int64] * 3
        assert batch["cu_seq_lens_q"].dtype == batch["cu_seq_lens_k"].dtype == torch.int32
        assert set(batch) == {
            *SHAPED, "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
            "loss_positions", "sequence_tokens",
        }  # fmt: skip
        padding = batch["input_ids"] == PAD
        assert torch.equal(batch["sequence_tokens"], (~padding).sum(dim=1))
    assert len(shapes) == 1


def test_to_longest_a_batch_is_as_long_as_its_longest_document(tmp_path):
    dataset = open_token_dataset(save(tmp_path / "d", [[1] * 3, [2] * 70, [3] * 200]))
    rows = PackedDataset([dataset], [plan_packing(dataset.lengths, 150, "none", "truncate")], PAD)
    short = rows.padded(to_longest=True)
    for numbers, length in (
        ([0, 0], 64), ([0, 1, PADDING_SEQUENCE], 128), ([2, 0], 150), ([PADDING_SEQUENCE], 64),
    ):  # fmt: skip
        fixed, batch = (model_inputs(each.__getitems__(numbers), "cpu") for each in (rows, short))
        for key in SHAPED:
            assert torch.equal(batch[key], fixed[key][:, :length]), key
        assert torch.equal(batch["sequence_tokens"], fixed["sequence_tokens"])
        of_labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:] != -100
        assert torch.equal(batch["loss_positions"], of_labels.flatten().nonzero()[:, 0])
        assert batch["cu_seq_lens_q"].diff().sum() == batch["input_ids"].numel()


def loader(rows, *, rank=0, world_size=1, **options):
    order = SampleOrder(rows.per_source, seed=7)
    sampler = GlobalBatchSampler(order, 8, 2, rank, world_size, 6)
    return TrainLoader(rows, sampler, **options)


def same(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(torch.as_tensor(one[k]), torch.as_tensor(other[k])) for k in one)


def test_ranks_together_load_the_batches_of_one_from_any_step_on(tmp_path):
    rows = packed(tmp_path / "d")
    batches = list(loader(rows))
    ranks = [list(loader(rows, rank=rank, world_size=2)) for rank in range(2)]
    same([batch for turn in zip(*ranks, strict=True) for batch in turn], batches)
    for step in range(6):
        real = sum(int((batch["input_ids"] != PAD).sum()) for batch in batches[4 * step :][:4])
        assert loader(rows).tokens_seen.in_step(step).tolist() == [real]
    resumed = loader(rows)
    resumed.batch_sampler.start_step = 4
    same(list(resumed), batches[16:])
    assert len(resumed) == len(batches) == 24


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_load_the_same_batches_in_the_same_order(tmp_path, context):
    rows = packed(tmp_path / "d")
    ahead = loader(rows, num_workers=2, prefetch_factor=3, multiprocessing_context=context)
    same(list(ahead), list(loader(rows)))


def test_loading_draws_nothing_from_the_global_random_state(tmp_path):
    rows = packed(tmp_path / "d")
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = pickle.dumps(np.random.get_state())
    list(loader(rows, pin_memory=True))
    list(packed_loader(rows, eval_batches(len(rows), 4, 0, 1)))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert pickle.dumps(np.random.get_state()) == numpy_state


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        ("/d/web/train /d/code/train", "web code"),
        ("/a/web /b/web /b/code", "a/web b/web b/code"),
        ("/train /a/train", "/ a"),
        ("/one", "one"),
    ],
)
def test_names_are_short_and_differ(paths, names):
    assert source_names([Path(path) for path in paths.split()]) == names.split()


def test_no_secret_in_the_name_of_a_folder_becomes_that_of_a_metric(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "so-Secret: it is")
    folder = "/a/web so-Secret: it is x"
    assert source_names([Path(folder), Path("/a/code")]) == ["web *** x", "code"]
    assert eval_splits([folder]) == {"web_x": folder}
