import multiprocessing
from pathlib import Path

import pytest

from utils.data.prepare.merge_shards import ShardArray


def arrays(root: Path, tasks: int, array: str = "7") -> list[ShardArray]:
    return [ShardArray(root, array, task, tasks) for task in range(tasks)]


def test_one_task_merges_and_goes_on_after_a_requeue(tmp_path):
    first, second = arrays(tmp_path, 2)
    assert second.claim_merge()
    assert not first.claim_merge()
    assert second.claim_merge()


def test_another_array_counts_anew(tmp_path):
    for task in arrays(tmp_path, 2, "7"):
        task.finish()
        task.claim_merge()
    again, other = arrays(tmp_path, 2, "8")
    assert again.finish() == [1]
    assert other.finish() == []
    assert other.claim_merge()


def test_a_merged_workspace_is_told_by_its_absence(tmp_path):
    (task,) = arrays(tmp_path / "gone", 1)
    with pytest.raises(FileNotFoundError):
        task.finish()
    with pytest.raises(FileNotFoundError):
        task.claim_merge()


def _finish_and_claim(task: ShardArray, barrier, claims) -> None:
    barrier.wait()
    claims.put(not task.finish() and task.claim_merge())


@pytest.mark.slow
def test_of_tasks_that_end_at_once_exactly_one_merges(tmp_path):
    context = multiprocessing.get_context("fork")
    for round_ in range(20):
        barrier, claims = context.Barrier(4), context.SimpleQueue()
        tasks = [
            context.Process(target=_finish_and_claim, args=(task, barrier, claims))
            for task in arrays(tmp_path, 4, f"round{round_}")
        ]
        for task in tasks:
            task.start()
        assert sorted(claims.get() for _ in tasks) == [False, False, False, True]
        for task in tasks:
            task.join()
