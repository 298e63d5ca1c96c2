"""Of a job array's tasks exactly one merges, whoever ends last and however often it restarts."""

import multiprocessing
from pathlib import Path

import pytest

from utils.data.prepare.workspace import WORKSPACE, Workspace


def workspace(output_dir: Path) -> Workspace:
    (output_dir / WORKSPACE).mkdir(parents=True, exist_ok=True)
    return Workspace(output_dir, "digest")


def test_one_task_merges_and_resumes_after_a_requeue(tmp_path):
    shared = workspace(tmp_path)
    assert not shared.is_last_of_array("7", 0, 2)
    assert shared.is_last_of_array("7", 1, 2)
    assert not shared.is_last_of_array("7", 0, 2)
    assert shared.is_last_of_array("7", 1, 2), "requeued while it merged"
    assert not shared.is_last_of_array("8", 0, 2), "another array counts anew"
    assert shared.is_last_of_array("8", 1, 2)
    shared.remove()
    assert not shared.is_last_of_array("8", 1, 2), "merged meanwhile"


def _finish(output_dir: Path, array: str, task: int, barrier, claims) -> None:
    barrier.wait()
    claims.put(workspace(output_dir).is_last_of_array(array, task, 4))


@pytest.mark.slow
def test_of_tasks_that_end_at_once_exactly_one_merges(tmp_path):
    context = multiprocessing.get_context("fork")
    for round_ in range(20):
        barrier, claims = context.Barrier(4), context.SimpleQueue()
        tasks = [
            context.Process(
                target=_finish, args=(tmp_path, f"round{round_}", task, barrier, claims)
            )
            for task in range(4)
        ]
        for task in tasks:
            task.start()
        assert sorted(claims.get() for _ in tasks) == [False, False, False, True]
        for task in tasks:
            task.join()
