"""Background checkpoints of two ranks under every strategy, and the time that they save."""

import signal
import statistics
from pathlib import Path

import pytest
import tiny
from forked_ranks import Launched
from kill_scenes import committed
from launching import run_processes

import pretrain
from utils.config.errors import ExitCode
from utils.host.journal_file import read_journal

pytestmark = pytest.mark.slow
EXHAUSTIVE = pytest.mark.exhaustive

TROUBLED = Path(__file__).with_name("troubled_copies.py")
SETTINGS = {"per_device_train_batch_size": 1, "save_steps": 2}


@pytest.mark.parametrize(
    "strategy",
    ["multi_gpu", *(pytest.param(name, marks=EXHAUSTIVE) for name in ("fsdp2", "zero2", "zero3"))],
)
def test_a_rank_that_is_killed_or_fails_in_the_background_loses_no_checkpoint(
    strategy, pretraining, tmp_path
):
    """Kill a rank while it copies a checkpoint. Fill the disk in the next start, then finish."""
    whole, run, memory = (tmp_path / name for name in ("whole", "run", "memory"))
    memory.mkdir()
    background = pretraining(run, **SETTINGS, async_save="true")

    def troubled(trouble: str, argv: list[str] = background) -> Launched:
        env = {"STOKER_TEST_COPY": trouble, "STOKER_TEST_MEMORY": str(memory)}
        return run_processes(strategy, TROUBLED, argv, env)

    done = troubled("none:0:0", pretraining(whole, **SETTINGS))
    assert set(done.codes) == {0}, done.stdout[-4000:]

    done = troubled("kill:1:4")
    assert -signal.SIGKILL in done.codes, done.stdout[-4000:]
    assert committed(run) == [2]
    assert list(memory.iterdir()), "the killed rank could not remove what it had staged"

    done = troubled("full:1:6")
    assert f"resuming from {run}/checkpoint-2" in done.stdout, done.stdout[-4000:]
    assert f"{run}/checkpoint-4 was not committed" in done.stdout
    assert done.stdout.count("was left in memory by a run that was killed: removed") >= 1
    assert "storage error" in done.stdout
    assert set(done.codes) == {ExitCode.STORAGE}
    assert committed(run) == [2, 4]

    done = troubled("none:0:0")
    assert set(done.codes) == {0}, done.stdout[-4000:]
    assert f"resuming from {run}/checkpoint-4" in done.stdout
    assert committed(run) == committed(whole) == [2, 4, 6]
    assert not list(memory.iterdir()), "the memory is given back"
    tiny.assert_same_run(run, whole)


def test_a_data_worker_that_is_killed_during_a_copy_costs_no_checkpoint(pretraining, tmp_path):
    """The rank ends with 76 (restart) after both ranks have committed the checkpoint."""
    whole, run, memory = (tmp_path / name for name in ("whole", "run", "memory"))
    memory.mkdir()
    settings = SETTINGS | {"async_save": "true", "dataloader_num_workers": 1, "max_steps": 40}
    settings |= {"save_total_limit": "null", "dataloader_prefetch_factor": 1}

    def troubled(trouble: str, folder: Path) -> Launched:
        env = {"STOKER_TEST_COPY": trouble, "STOKER_TEST_MEMORY": str(memory)}
        return run_processes("multi_gpu", TROUBLED, pretraining(folder, **settings), env)

    done = troubled("none:0:0", whole)
    assert set(done.codes) == {0}, done.stdout[-4000:]
    done = troubled("worker:1:4", run)
    assert done.codes[1] == ExitCode.LOST_RANK, done.stdout[-4000:]
    assert 4 in committed(run), done.stdout[-4000:]
    assert not list(memory.iterdir())
    last = committed(run)[-1]
    done = troubled("none:0:0", run)
    assert set(done.codes) == {0}, done.stdout[-4000:]
    assert f"resuming from {run}/checkpoint-{last}" in done.stdout
    tiny.assert_same_run(run, whole)


@EXHAUSTIVE
def test_what_a_save_in_the_background_spares(figures, pretraining, tmp_path):
    """Measure stalls and step times with a checkpoint of 200 MB every two steps (medians of five).

    Here copying and hashing compete with training for the cores. In training on GPUs most cores are
    idle.
    """
    size = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 5}
    model = tiny.make_model_config(tmp_path / "model.json", **size, num_key_value_heads=4)
    found = figures("async_save")
    for name, background in (("sync", "false"), ("async", "true")):
        run = tmp_path / name
        argv = pretraining(
            run, model_config=model, max_steps=12, save_steps=2, save_total_limit=2,
            async_save=background,
        )  # fmt: skip
        assert pretrain.main(argv) == ExitCode.DONE
        lines = read_journal(run / "metrics.jsonl")
        saves = [line for line in lines if line["event"] == "save"]
        steps = {line["step"]: line["time"] for line in lines if line["event"] == "train"}
        found[f"{name}_steps_3_to_12_s"] = round(steps[12] - steps[2], 1)
        assert len(saves) == 6
        found["checkpoint_mb"] = round(saves[0]["size_bytes"] / 1e6)
        for key in ("stall_s", "write_s"):
            # Leave out the first save, which creates files that later saves reuse, and the last
            # save, which no step follows.
            values = [save[key] for save in saves[1:]]
            found[f"{name}_{key}"] = round(statistics.median(values), 3)
    assert found["async_stall_s"] < found["sync_stall_s"]
