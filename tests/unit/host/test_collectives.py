"""All ranks get one rank's answer or refusal, in real processes over gloo."""

import multiprocessing

import pytest
import torch

from utils.config.errors import ConfigurationError, StorageError
from utils.host.collectives import gathered, on_every_rank, on_rank_0


def refuse(rank: int) -> None:
    raise ConfigurationError([f"rank {rank} will not", "and says why"])


def fill(_rank: int) -> None:
    raise OSError(28, "No space left on device", "/data/x")


def as_rank(rank: int, store: str, answers) -> None:
    where = f"file://{store}"
    torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    said: list[object] = [gathered(rank * 10)]
    acted: list[int] = []
    said.append(on_rank_0(lambda: acted.append(rank) or f"rank {rank} decides"))
    assert acted == ([0] if rank == 0 else [])
    said.append(on_every_rank(lambda: f"rank {rank} too"))
    for decide in (on_rank_0, on_every_rank):
        for action in (refuse, fill):
            try:
                decide(lambda action=action: action(rank))
            except ConfigurationError as error:
                said.append((type(error).__name__, error.problems))
    answers.put((rank, said))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_all_ranks_get_the_answer_or_raise_the_refusal(tmp_path):
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(as_rank, (str(tmp_path / "store"), answers), nprocs=2)
    said = dict(answers.get() for _ in range(2))
    assert said[0] == said[1]
    values, one, every, refusal, full, refusals, all_full = said[0]
    assert values == [0, 10]
    assert one == "rank 0 decides"
    assert every == ["rank 0 too", "rank 1 too"]
    assert refusal == ("ConfigurationError", ["rank 0 will not", "and says why"])
    assert refusals == ("ConfigurationError", [*refusal[1], "rank 1 will not"])
    assert full[0] == all_full[0] == "StorageError"
    assert "No space left on device, writing /data/x" in full[1][0]


def test_a_process_alone_decides_for_itself_and_our_own_bugs_are_no_refusals():
    assert gathered(3) == [3]
    assert on_rank_0(lambda: 4) == 4
    assert on_every_rank(lambda: 5) == [5]
    with pytest.raises(StorageError, match="No space left on device"):
        on_rank_0(lambda: fill(0))
    with pytest.raises(ZeroDivisionError):
        on_every_rank(lambda: 1 / 0)
