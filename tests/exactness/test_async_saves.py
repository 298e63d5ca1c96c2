"""Checkpoints written in the background, by two ranks and every strategy, and what they spare."""

import re
import signal
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny
from kernel_calls import Starts
from launching import run_two_processes

import pretrain
from utils.callbacks.journal import read_journal
from utils.checkpoints.files import MANIFEST
from utils.config.errors import ExitCode

pytestmark = pytest.mark.slow

TROUBLED = Path(__file__).with_name("troubled_copies.py")
SETTINGS = {"per_device_train_batch_size": 1, "save_steps": 2}


def committed(run: Path) -> set[str]:
    return {path.parent.name for path in run.glob(f"checkpoint-*/{MANIFEST}")}


@dataclass(frozen=True)
class End:
    """How two ranks ended, and what they printed."""

    exit_codes: set[int]
    said: str


def launched(strategy: str, script: Path, argv: list[str], environment: dict[str, str]) -> End:
    """Start two ranks by accelerate's launcher, which names the exit code of the first to fail."""
    done = run_two_processes(strategy, script, argv, environment)
    codes = map(int, re.findall(r"exitcode  : (-?\d+)", done.stdout))
    return End(set(codes) or {done.returncode}, done.stdout)


def forked(starts: Starts, argv: list[str], environment: dict[str, str]) -> End:
    """Start two ranks under DDP from a process that has imported everything."""
    with starts.ranks(argv, environment=environment, one_thread=False) as ranks:
        pass
    return End(
        {rank.ending.exit_code for rank in ranks}, "".join(rank.ending.output for rank in ranks)
    )


def test_a_rank_that_is_killed_or_fails_in_the_background_loses_no_checkpoint(
    pretraining, tmp_path
):
    starts = Starts(tmp_path)
    trouble_in_the_background(
        lambda argv, environment: forked(starts, argv, environment), pretraining, tmp_path
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["multi_gpu", "fsdp2", "zero2", "zero3"])
def test_neither_under_any_strategy(strategy, pretraining, tmp_path):
    trouble_in_the_background(
        lambda argv, environment: launched(strategy, TROUBLED, argv, environment),
        pretraining,
        tmp_path,
    )


def trouble_in_the_background(
    start: Callable[[list[str], dict[str, str]], End], pretraining, directory: Path
) -> None:
    """Kill a rank while it copies a checkpoint, fill the storage for one, and let the run end."""
    whole, run, memory = (directory / name for name in ("whole", "run", "memory"))
    memory.mkdir()
    background = pretraining(run, **SETTINGS, async_save="true")

    def troubled(trouble: str, argv: list[str] = background) -> End:
        return start(argv, {"STOKER_TEST_COPY": trouble, "STOKER_TEST_MEMORY": str(memory)})

    done = troubled("none:0:0", pretraining(whole, **SETTINGS))
    assert done.exit_codes == {0}, done.said[-4000:]

    done = troubled("kill:1:4")
    assert -signal.SIGKILL in done.exit_codes, done.said[-4000:]
    assert committed(run) == {"checkpoint-2"}
    assert list(memory.iterdir()), "the killed rank could not remove what it had staged"

    done = troubled("full:1:6")
    assert f"resuming from {run}/checkpoint-2" in done.said, done.said[-4000:]
    assert f"{run}/checkpoint-4 was not committed" in done.said
    assert done.said.count("was left in memory by a run that was killed: removed") >= 1
    assert "storage error" in done.said
    assert done.exit_codes == {ExitCode.STORAGE}
    assert committed(run) == {"checkpoint-2", "checkpoint-4"}

    done = troubled("none:0:0")
    assert done.exit_codes == {0}, done.said[-4000:]
    assert f"resuming from {run}/checkpoint-4" in done.said
    assert committed(run) == committed(whole) == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    assert not list(memory.iterdir()), "the memory is given back"
    tiny.assert_same_run(run, whole)


@pytest.mark.exhaustive
def test_what_a_save_in_the_background_spares(figures, pretraining, tmp_path):
    """A checkpoint of 200 MB, one every two steps: medians of five, and what the steps took in all.

    Copying and hashing want the cores that train here; beside GPUs the cores are idle.
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
            # The last one is not followed by a step; the first makes what later ones reuse.
            values = [save[key] for save in saves[1:]]
            found[f"{name}_{key}"] = round(statistics.median(values), 3)
    assert found["async_stall_s"] < found["sync_stall_s"]
