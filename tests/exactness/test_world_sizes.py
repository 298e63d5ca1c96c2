"""One run on 1, 2 and 4 ranks in any order: the same samples in the same global batches.

The sequences of each rank are recorded at the model's inputs, in the ranks of real launches. Losses
agree up to rounding, because sums over ranks are added in another order.
"""

import itertools
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from rank_driver import drive, found
from resumed_runs import STEPS, Case, largest_differences
from stock_trainer import METRICS

from utils.config.declarations import counted_ranks

pytestmark = pytest.mark.slow
EXHAUSTIVE = pytest.mark.exhaustive

GLOBAL_BATCH_SIZE = 8
SETTINGS = {
    "global_batch_size": GLOBAL_BATCH_SIZE,
    "per_device_train_batch_size": 1,
    # Both changes are between two logs, so the next log averages losses from two numbers of ranks.
    "logging_steps": 2,
    # The best checkpoint is one of the first steps (see rank_driver.py), so the last number of
    # ranks loads a checkpoint of the first number of ranks.
    "eval_steps": 1,
    "load_best_model_at_end": "true",
}
CUTS = (3, 5)  # the steps at which the number of ranks changes
# A few units in the last place of losses of about 4 in float32.
ROUNDING = 1e-5
SAMPLE = {"zero3": [(2, 1)], "ddp": [(1, 2)]}
EVERY_ORDER = list(itertools.permutations((1, 2, 4)))
FIGURES = "world_sizes"


@dataclass(frozen=True)
class Start:
    """A start, named by the numbers of ranks of the run so far. Its own number is the last."""

    ranks: tuple[int, ...]
    directory: Path
    dropout: float = 0.0
    repetition: str = ""

    @property
    def run(self) -> Path:
        name = "-".join(map(str, self.ranks))
        return self.directory / f"dropout_{self.dropout}" / f"run-{name}{self.repetition}"

    @property
    def cut(self) -> list | None:
        if len(self.ranks) == 1:
            return None
        before = Start(self.ranks[:-1], self.directory, self.dropout)
        return [str(before.run), CUTS[len(self.ranks) - 2]]

    def outcome(self) -> dict:
        return found({"run": self.run})

    def micro_batches(self) -> dict[int, list[list[list[str]]]]:
        """Return the sequences by step, rank and micro-batch."""
        by_rank = [found({"run": self.run}, rank) for rank in range(self.ranks[-1])]
        return {int(step): [own[step] for own in by_rank] for step in by_rank[0]}

    def global_batches(self) -> dict[int, list[str]]:
        """Return the sequences by step in the order of samples: by micro-batch, then by rank."""
        return {
            step: [
                row
                for micro_step in zip(*by_rank, strict=True)
                for rows in micro_step
                for row in rows
            ]
            for step, by_rank in self.micro_batches().items()
        }


def every_start(orders: list[tuple[int, ...]], directory: Path) -> list[Start]:
    """Return the starts of all prefixes of these orders, with short prefixes first."""
    lengths = range(1, len(orders[0]) + 1)
    begun = dict.fromkeys(order[:length] for length in lengths for order in orders)
    return [Start(ranks, directory) for ranks in begun]


def launches(starts: list[Start]) -> list[list[Start]]:
    """Group all starts by launches with the same number of ranks, in an order that can run."""

    def launch(start: Start) -> tuple[int, int]:
        return len(start.ranks), start.ranks[-1]

    return [list(now) for _, now in itertools.groupby(sorted(starts, key=launch), launch)]


@pytest.mark.parametrize(
    ("strategy", "kind", "orders"),
    [
        *(
            pytest.param(name, "pretrain", EVERY_ORDER, marks=() if name in SAMPLE else EXHAUSTIVE)
            for name in ("ddp", "fsdp2", "zero1", "zero2", "zero3")
        ),
        *(
            pytest.param(name, "lora", [(2, 1)], marks=EXHAUSTIVE)
            for name in ("fsdp2", "zero2", "zero3")
        ),
        pytest.param("zero1 then zero2", "pretrain", [(2, 4), (2, 2)], marks=EXHAUSTIVE),
    ],
)
def test_any_order_of_world_sizes_is_one_run(
    strategy, kind, orders, models, tmp_path, exhaustive, figures
):
    orders = orders if exhaustive else SAMPLE[strategy]
    starts = every_start(orders, tmp_path)
    # Resume twice from one checkpoint. New ranks have random states that no earlier rank had.
    first, second = orders[0][:2]
    with_dropout = exhaustive or strategy == "ddp"
    repeated_from = [Start((first,), tmp_path, 0.1)] if with_dropout else []
    names = ("a", "b") if with_dropout else ()
    repeated = [Start((first, second), tmp_path, 0.1, name) for name in names]
    told = ""
    for now in launches(starts + repeated_from + repeated):
        name = strategy.split(" then ")[: len(now[0].ranks)][-1]
        items = [
            {
                "case": asdict(Case(name, kind, start.dropout, 1, 0)),
                "changes": SETTINGS,
                "run": str(start.run),
                "cut": start.cut,
                "judge_early": True,
            }
            for start in now
        ]
        told += drive(items, name, now[0].ranks[-1], models, tmp_path)
    assert_the_same_samples(starts)
    reference = starts[0].outcome()
    differences = compare(starts, reference)
    for one, other in itertools.pairwise(repeated):
        assert one.outcome() == other.outcome(), "derived random states vary"
    said = f"the checkpoint is of {counted_ranks(first)}, now there are {second}: random states"
    assert said in told
    figures(FIGURES)[f"{strategy} {kind}"] = {
        "orders": len(orders),
        "starts": len(starts),
        "global_batches_compared": sum(len(start.global_batches()) for start in starts),
        "global_batches_with_other_samples": 0,
        **differences,
    }


@EXHAUSTIVE
@pytest.mark.parametrize("accumulation", ["not adapted", "adapted manually"])
def test_plain_trainer_on_other_numbers_of_ranks(accumulation, models, tmp_path, figures):
    """Run plain Trainer with unchanged accumulation, and with accumulation corrected by hand."""
    starts = every_start(EVERY_ORDER, tmp_path)
    for now in launches(starts):
        ranks = now[0].ranks[-1]
        items = [
            {
                "run": str(start.run),
                "cut": start.cut,
                "max_steps": STEPS,
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": GLOBAL_BATCH_SIZE
                // (start.ranks[0] if accumulation == "not adapted" else ranks),
            }
            for start in now
        ]
        for start in now:
            start.run.parent.mkdir(exist_ok=True)
        drive(items, "ddp", ranks, models, tmp_path)
    others, pairs = 0, []
    for start in starts:
        # Compare runs with the same first number of ranks, which decides Trainer's global batch.
        reference = next(one for one in starts if one.ranks == start.ranks[:1])
        whole = reference.global_batches()
        others += sum(rows != whole[step] for step, rows in start.global_batches().items())
        pairs.append((reference.outcome(), start.outcome()))
    assert (others > 0) == (accumulation == "not adapted"), "Trainer changed: see what quotes it"
    figures(FIGURES)[f"plain Trainer, ddp, accumulation {accumulation}"] = {
        "orders": len(EVERY_ORDER),
        "starts": len(starts),
        "global_batches_compared": sum(len(start.global_batches()) for start in starts),
        "global_batches_with_other_samples": others,
        **largest_differences(pairs, METRICS),
    }


def assert_the_same_samples(starts: list[Start]) -> None:
    reference = starts[0].global_batches()
    assert sorted(reference) == list(range(STEPS))
    for start in starts:
        begins_at = start.cut[1] if start.cut else 0
        batches = start.global_batches()
        assert sorted(batches) == list(range(begins_at, STEPS)), start.ranks
        for step, rows in batches.items():
            assert rows == reference[step], f"{start.ranks}: other samples at step {step}"
        ranks = start.ranks[-1]
        for by_rank in start.micro_batches().values():
            assert {len(own) for own in by_rank} == {GLOBAL_BATCH_SIZE // ranks}, "accumulation"
            assert len(by_rank) == ranks


def compare(starts: list[Start], reference: dict) -> dict[str, float]:
    """Return the largest differences from the first start. Exact figures must be equal."""
    pairs = [(reference, start.outcome()) for start in starts[1:]]
    exact = largest_differences(pairs, ("learning_rate", "tokens_seen", "epoch"))
    assert not any(exact.values()), exact
    largest_eval_loss = 0.0
    for start, (_, ended) in zip(starts[1:], pairs, strict=True):
        assert ended["train"].keys() == reference["train"].keys()
        assert ended["best"][1] == "checkpoint-2"
        if start.ranks[0] == starts[0].ranks[0]:
            assert ended["final"] == reference["final"], f"{start.ranks}: another best model"
        assert ended["evaluations"].keys() == reference["evaluations"].keys()
        for step, evaluation in ended["evaluations"].items():
            before = reference["evaluations"][step]
            assert evaluation["eval_heldout_tokens"] == before["eval_heldout_tokens"]
            different = abs(evaluation["eval_heldout_loss"] - before["eval_heldout_loss"])
            largest_eval_loss = max(largest_eval_loss, different)
    largest = largest_differences(pairs, METRICS)
    largest["largest_eval_loss_difference"] = largest_eval_loss
    assert max(largest.values()) < ROUNDING, largest
    return largest
