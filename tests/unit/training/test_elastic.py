"""Going on with another number of ranks: the hooks of Trainer that it hangs on, and what is said.

Whole runs are in tests/exactness/test_world_sizes.py.
"""

import inspect
import logging
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from utils.checkpoints.manifest import Manifest, write_manifest
from utils.training.interruptible import InterruptibleTrainerMixin
from utils.training.resume_state import ElasticTrainerMixin
from utils.training.trainer import PackedTrainerMixin

SIGNATURES = {
    "_save_rng_state": ["self", "output_dir"],
    "_load_rng_state": ["self", "checkpoint"],
    "_prepare_for_training": ["self", "max_steps", "train_dataloader", "resume_from_checkpoint"],
    "_load_best_model": ["self"],
}


def test_the_hooks_have_the_signatures_we_override():
    own = {name for name in vars(ElasticTrainerMixin) if hasattr(Trainer, name)}
    own = {name for name in own if callable(getattr(Trainer, name)) and not name.startswith("__")}
    assert own == set(SIGNATURES)
    for name, parameters in SIGNATURES.items():
        assert list(inspect.signature(getattr(Trainer, name)).parameters) == parameters


def test_trainer_calls_the_hooks_where_we_take_them_to_be_called():
    assert "deepspeed_load_checkpoint(" in inspect.getsource(Trainer._prepare_for_training)
    assert "deepspeed_load_checkpoint(" in inspect.getsource(Trainer._load_best_model)
    assert "_load_rng_state(resume_from_checkpoint)" in inspect.getsource(Trainer._run_epoch)
    assert "_save_rng_state(output_dir)" in inspect.getsource(Trainer._save_checkpoint)
    assert "global_step*" in inspect.getsource(deepspeed_load_checkpoint)


def test_ours_is_the_first_to_be_asked():
    order = PackedTrainerMixin.__mro__
    assert order.index(InterruptibleTrainerMixin) < order.index(ElasticTrainerMixin)
    assert order.index(ElasticTrainerMixin) < order.index(Trainer)


@pytest.fixture
def trainer(tmp_path):
    """What the hooks ask a trainer for, on rank 1 of 2."""

    def make(rank: int = 1, world_size: int = 2, step: int = 3):
        args = SimpleNamespace(
            process_index=rank, world_size=world_size, seed=42, device=torch.device("cpu")
        )
        made = ElasticTrainerMixin.__new__(ElasticTrainerMixin)
        made.args, made.state = args, SimpleNamespace(global_step=step)
        return made

    return make


@pytest.fixture(autouse=True)
def _restore():
    states = random.getstate(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    torch.set_rng_state(states[1])


def commit(directory, world_size: int) -> str:
    write_manifest(directory, Manifest("run", 3, 24, 9, world_size, "ddp", 8, {}, {}, "now", {}))
    return str(directory)


def test_as_many_ranks_go_on_with_their_own_states(trainer, tmp_path, caplog):
    checkpoint = commit(tmp_path, 2)
    trainer()._save_rng_state(checkpoint)
    expected = torch.rand(9).tolist()
    torch.rand(5)
    with caplog.at_level(logging.INFO):
        trainer()._load_rng_state(checkpoint)
    assert torch.rand(9).tolist() == expected
    assert not caplog.records
    trainer(rank=0)._save_rng_state(checkpoint)
    assert {path.name for path in tmp_path.glob("rng*")} == {"rng_state_0.pth", "rng_state_1.pth"}


def test_other_ranks_get_new_states_of_their_own_aloud(trainer, tmp_path, caplog):
    checkpoint = commit(tmp_path, 4)
    for rank in range(4):
        trainer(rank, 4)._save_rng_state(checkpoint)  # there is a file of rank 1, but not for this
    saved = torch.rand(9).tolist()
    drawn = []
    for rank, step in [(0, 3), (1, 3), (1, 4)]:
        with caplog.at_level(logging.INFO):
            trainer(rank, step=step)._load_rng_state(checkpoint)
        drawn.append(torch.rand(9).tolist())
    assert saved not in drawn
    assert len({tuple(numbers) for numbers in drawn}) == 3
    torch.rand(5)
    trainer(1)._load_rng_state(checkpoint)
    assert torch.rand(9).tolist() == drawn[1], "the same resume twice"
    assert "the checkpoint is of 4 ranks, now there are 2: random states" in caplog.text


def test_a_missing_file_of_random_states_is_an_error(trainer, tmp_path):
    """Trainer would go on with other states, and say so where nobody looks."""
    with pytest.raises(FileNotFoundError, match=r"rng_state_1\.pth"):
        trainer()._load_rng_state(commit(tmp_path, 2))
