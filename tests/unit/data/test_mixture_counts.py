"""What a mixture has given so far: equal to counting sample by sample, close to what was asked."""

import numpy as np
import pytest
import tiny

from utils.data.order import BLOCK, GlobalBatchSampler, Interleaving, SampleOrder
from utils.data.packing import plan_packing
from utils.data.sequences import PackedDataset
from utils.data.token_dataset import open_token_dataset

WEIGHTS = [0.7, 0.2, 0.1]
BLOCKS = 40


@pytest.fixture
def sources(tmp_path, monkeypatch) -> PackedDataset:
    """Two sources that fill their rows differently: three quarters of the rows, other tokens."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = {"long": tiny.documents(50, seed=1, longest=60), "short": tiny.documents(70, 2, 15)}
    opened = [
        open_token_dataset(tiny.save(tmp_path / name, {"input_ids": documents}))
        for name, documents in rows.items()
    ]
    return PackedDataset(opened, [plan_packing(one.lengths, 64, "none") for one in opened])


def drawn_by_prefix(weights: list[float], samples: int, seed: int = 0) -> np.ndarray:
    """How many samples each source has given before each sample, (samples + 1, sources)."""
    sources, _ = Interleaving(weights, seed).locate(np.arange(samples))
    counts = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    return np.concatenate([np.zeros((1, len(weights)), dtype=np.int64), counts])


@pytest.mark.parametrize("sample", [0, 1, 700, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 300])
def test_samples_drawn_are_those_of_the_order(sample):
    counted = drawn_by_prefix(WEIGHTS, 6 * BLOCK)
    assert Interleaving(WEIGHTS, 0).samples_drawn(sample) == counted[sample].tolist()


@pytest.mark.parametrize("weights", [WEIGHTS, [1, 1], [0.97, 0.03], [5, 3, 1, 1]])
def test_how_far_a_prefix_may_be_from_the_weights(weights, capsys):
    """Less than a sample a source at the end of each block, a few dozen inside it."""
    counts = drawn_by_prefix(weights, BLOCKS * BLOCK)
    asked = np.arange(len(counts))[:, None] * np.array(weights) / sum(weights)
    away = np.abs(counts - asked)
    with capsys.disabled():
        print(
            f"\nmixture {weights}: samples away from the weights after any of {len(counts) - 1:,}: "
            f"{away.max():.1f}; at ends of blocks {away[::BLOCK].max():.2f}"
        )
    assert away[::BLOCK].max() < 1
    assert away.max() < 64


def test_epochs_and_shares_of_sources():
    order = SampleOrder([10, 1000], seed=3, weights=[1, 3])
    assert order.shares().tolist() == [0.25, 0.75]
    samples = 4 * BLOCK
    assert order.epochs_before(samples) == [BLOCK / 10, 3 * BLOCK / 1000]
    together = SampleOrder([10, 30], seed=3)
    assert together.shares().tolist() == [0.25, 0.75]
    assert together.epochs_before(100) == [2.5, 2.5]


def test_a_source_that_runs_out_is_gone_through_again_and_evenly():
    order = SampleOrder([10, 1000], seed=3, weights=[1, 3])
    sources, rows = order.locate(np.arange(4 * BLOCK))
    times = np.bincount(rows[sources == 0], minlength=10)
    assert times.max() - times.min() <= 1
    assert times.sum() == BLOCK


def test_tokens_and_documents_of_a_step_by_source(sources):
    sampler = GlobalBatchSampler(
        SampleOrder(sources.rows_per_source, seed=1, weights=[3, 1]),
        global_batch_size=8, micro_batch_size=2, rank=0, world_size=2, total_steps=50,
    )  # fmt: skip
    for step in (0, 17):
        rows = sampler.rows_of_step(step)
        by_source = sources.tokens_by_source(rows)
        parts = sources.documents_in_rows(rows)
        for source, opened in enumerate(sources.datasets):
            own = [part for part in parts if part.dataset == opened.path]
            assert sum(part.stop - part.start for part in own) == by_source[source]
            assert all(part.stop <= len(opened.tokens(part.document)) for part in own)


def test_the_shares_of_tokens_over_many_steps_are_those_asked_for(sources, capsys):
    order = SampleOrder(sources.rows_per_source, seed=1, weights=[3, 1])
    tokens = sources.tokens_by_source(order.global_rows(np.arange(2000 * 8)))
    per_row = np.array([plan.tokens / plan.rows for plan in sources.plans])
    asked = np.array([3, 1]) * per_row / (np.array([3, 1]) * per_row).sum()
    shares = tokens / tokens.sum()
    with capsys.disabled():
        print(
            f"\nshares of tokens of 16,000 samples: {shares.round(5)}, asked for {asked.round(5)}"
        )
    assert shares == pytest.approx(asked, abs=0.001)
    assert abs(asked[0] - 0.75) > 0.01, "tokens are not sequences here, or the test shows nothing"
