"""sequence_length and global_batch_size of a run that gives neither."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import planned
import pytest
import tiny
from transformers import AutoConfig

from utils.config.errors import ConfigurationError, Report
from utils.config.settings import parse_fine_tuning, parse_pretraining
from utils.data.packing import plan_packing
from utils.launch.processes import LaunchFacts
from utils.plan import run_data
from utils.plan.run_data import choose_sizes, default_batch_size, plan_steps

SMALL = np.full(300, 400)  # 120,000 tokens


@pytest.fixture
def sized(tmp_path, monkeypatch):
    """Return a function for the settings of a run, given lengths of documents and positions."""

    def settle(lengths, positions=32_768, ranks=1, parse=parse_fine_tuning, held_out=(), **given):
        splits = {"train": np.array(lengths), "held": np.array(held_out or [10])}
        monkeypatch.setattr(
            run_data, "_open", lambda *words: SimpleNamespace(lengths=splits[words[2]])
        )
        model = tiny.make_model_config(tmp_path / "m.json", max_position_embeddings=positions)
        flags = {"model_config": model, "train_data": "d", "output_dir": tmp_path / "run"}
        if held_out:
            flags["eval_data"] = "held=h"
        settings = parse(tiny.flags(use_cpu=True, **flags | given), "")
        launch = LaunchFacts(0, ranks, "ddp", (), "cpu")
        return choose_sizes(settings, AutoConfig.from_pretrained(model), launch)

    return settle


@pytest.mark.parametrize(
    ("longest", "positions", "length"),
    [
        (30, 32_768, 1024),
        (1024, 32_768, 1024),
        (1025, 32_768, 2048),
        (9000, 32_768, 4096),
        (9000, 1024, 1024),
        (30, 512, 512),
        (3000, 3000, 3000),
    ],
)
def test_a_sequence_holds_the_longest_document_within_limits(sized, longest, positions, length):
    settings = sized([longest, *SMALL], positions)
    assert settings.data.sequence_length == length
    (note,) = [each for each in settings.values.notes if each.startswith("sequence_length")]
    assert f"the longest of 301 documents has {max(longest, 400):,} tokens" in note
    assert f"{positions} positions" in note
    assert note.endswith("--sequence_length changes it")
    assert settings.resolved["sequence_length"] == length, "config.yaml keeps it"


def test_longer_chats_lose_their_end_and_the_log_counts_them(sized):
    settings = sized([5000, 6000, *SMALL], held_out=[7000])
    assert settings.data.on_overlong == "truncate"
    note = "on_overlong truncate: 3 documents lose their end; --sequence_length 7000 keeps it"
    assert note in settings.values.notes
    assert sized([5000, *SMALL], on_overlong="error").data.on_overlong == "error"
    assert sized([5000, *SMALL], sequence_length=1024).data.on_overlong == "error", "as before"
    assert sized([5000, *SMALL], parse=parse_pretraining).data.on_overlong == "error", "splits"
    assert sized(SMALL).data.on_overlong == "error"


@pytest.mark.parametrize(
    ("rows", "ranks", "batch"),
    [(1, 1, 1), (399, 1, 1), (1000, 1, 4), (12799, 1, 32), (12800, 1, 64), (10**6, 1, 64),
     (1000, 8, 8), (1000, 4, 4), (10**6, 3, 66)],
)  # fmt: skip
def test_an_epoch_has_200_steps_or_a_step_64_sequences(rows, ranks, batch):
    assert default_batch_size(rows, ranks) == batch
    assert batch % ranks == 0


def test_the_batch_follows_from_the_data_and_divides_over_the_ranks(sized):
    settings = sized(np.tile(SMALL, 10), ranks=2)  # 1,200,000 tokens
    batch, micro = settings.run.global_batch_size, settings.training.per_device_train_batch_size
    assert (batch, micro) == (4, 2)
    (note,) = [each for each in settings.values.notes if each.startswith("global_batch_size")]
    assert note == (
        "global_batch_size 4: about 1,171 sequences, 2 ranks, so 293 steps an epoch; "
        "--global_batch_size changes it"
    )
    settings = sized(np.tile(SMALL, 10), packing="none")
    assert settings.run.global_batch_size == 8, "each of 3,000 documents is a sequence"
    assert settings.data.sequence_length == 512, "unpacked, longer sequences only pad more"
    assert sized([4000, *SMALL]).training.per_device_train_batch_size == 1, "a batch of one"
    long = sized(np.full(2000, 4000))
    assert (long.run.global_batch_size, long.training.per_device_train_batch_size) == (8, 2)


def test_a_recipe_that_sets_the_batch_to_null_has_it_derived(sized):
    given = {"sequence_length": 1024, "per_device_train_batch_size": 1}
    settings = sized(np.tile(SMALL, 10), global_batch_size="null", **given)
    assert settings.run.global_batch_size == 4
    assert settings.resolved["global_batch_size"] == 4, "a resume keeps it"


def test_given_sizes_stay_and_nothing_is_read(sized, monkeypatch):
    settings = sized(SMALL, sequence_length=64, per_device_train_batch_size=3, ranks=1)
    assert (settings.data.sequence_length, settings.run.global_batch_size) == (64, 3)
    assert settings.training.per_device_train_batch_size == 3


def test_the_estimate_is_at_most_the_number_of_sequences():
    for lengths in (SMALL, np.arange(1, 900), np.array([5000, 3, 3, 3])):
        plan = plan_packing(lengths, 1024, "best_fit", "split", where="x")
        assert plan.sequences >= int(lengths.sum()) // 1024


@pytest.fixture
def begun(monkeypatch):
    """Let the run's directory hold a start with 16 sequences of 64 tokens a step."""
    before = {"sequence_length": 64, "on_overlong": "error", "global_batch_size": 16}
    monkeypatch.setattr(
        run_data,
        "resumed_record",
        lambda own: SimpleNamespace(starts=[{}], directory=own.training.output_dir),
    )
    monkeypatch.setattr(run_data, "settings_in_force", lambda *_: before)


@pytest.mark.parametrize("length", [None, 64])
def test_a_smaller_micro_batch_keeps_the_global_batch_of_the_run(sized, begun, length):
    given = {"sequence_length": length} if length else {}
    settings = sized(SMALL, per_device_train_batch_size=2, **given)
    assert (settings.data.sequence_length, settings.run.global_batch_size) == (64, 16)
    assert settings.training.per_device_train_batch_size == 2
    assert f"global_batch_size 16: as the run in {settings.training.output_dir} began" in (
        settings.values.notes
    )
    accepted = sized(SMALL, per_device_train_batch_size=2, accept_changes="global_batch_size")
    assert accepted.run.global_batch_size == 2
    assert sized(SMALL, global_batch_size=8).run.global_batch_size == 8


def test_groups_that_share_sequences_are_not_counted_as_ranks():
    given = {"model_config": "m", "train_data": "d", "output_dir": "o", "sequence_length": 64}
    settings = parse_pretraining(tiny.flags(use_cpu=True, global_batch_size=4, **given), "")
    settings = replace(settings, run=replace(settings.run, context_parallel=2))
    settings.training.per_device_train_batch_size = 1
    launch, data = LaunchFacts(0, 8, "ddp", (), "cpu"), SimpleNamespace(train=range(3))
    with pytest.raises(
        ConfigurationError, match=r"3 sequences, .*: use at most 6 ranks, a shorter"
    ):
        plan_steps(settings, data, launch, Report())


@pytest.mark.parametrize(
    ("batch", "micro", "chosen", "rows"),
    [(4, 4, 8, 1), (20, 1, 16, 1), (23, 3, 24, 3), (16, 3, 16, 2)],
)
def test_a_suggestion_goes_on_with_the_nearest_batch_that_divides(batch, micro, chosen, rows):
    given = planned.settings(
        use_cpu=None, bf16=None, dry_run="true", assume="8xH100-80GB", suggest="true",
        strategy="fsdp2", global_batch_size=batch, per_device_train_batch_size=micro,
    )  # fmt: skip
    assert given.run.global_batch_size == chosen
    assert given.training.per_device_train_batch_size == rows
    said = [note for note in given.values.notes if note.startswith("global_batch_size")]
    expected = f"global_batch_size {chosen}: --suggest: global_batch_size {batch} (--global_batch"
    assert [note.startswith(expected) for note in said] == [True] * (chosen != batch)
