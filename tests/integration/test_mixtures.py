"""Several weighted datasets: as exact on resume as one, and their shares are those of the run."""

import shutil
from pathlib import Path

import pytest
import tiny
from launching import run_two_processes

import pretrain
from utils.callbacks.journal import read_journal

pytestmark = pytest.mark.slow

# Logs and saves that do not fall together; the third source runs out within the first steps.
RUN = {
    "packing": "none",
    "max_steps": 12,
    "save_steps": 6,
    "logging_steps": 4,
    "per_device_train_batch_size": 1,
}
MIXTURE = ("tokens_seen/", "tokens_share/", "epochs/")


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("sources")
    made = {"web": (90, 60, 3), "code": (60, 20, 2), "rare": (4, 30, 1)}
    return [
        f"{tiny.save(root / name, {'input_ids': tiny.documents(count, 7, longest)})}={weight}"
        for name, (count, longest, weight) in made.items()
    ]


@pytest.fixture
def start(pretraining, sources):
    def start(run: Path) -> int:
        return pretrain.main(pretraining(run, **RUN, train_data=sources))

    return start


def mixture(run: Path) -> dict[int, dict[str, float]]:
    """The figures of the sources by step."""
    return {
        line["step"]: {key: line[key] for key in line if key.startswith(MIXTURE)}
        for line in tiny.train_lines(run)
    }


def test_a_cut_mixture_resumes_exactly_and_logs_its_shares(start, tmp_path, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert start(whole) == 0
    told = "mixture: web 50.0% of the sequences (of the tokens 68.0%), code 33.3% of the sequ"
    assert told in capsys.readouterr().out, "the longest documents are those of web"
    shutil.copytree(whole, cut, ignore=shutil.ignore_patterns(".lock"))  # this process holds it
    tiny.cut(cut, step=6)
    assert start(cut) == 0
    assert f"resuming from {cut}/checkpoint-6" in capsys.readouterr().out
    tiny.assert_same_run(cut, whole)
    figures = mixture(whole)
    assert mixture(cut) == figures
    assert list(figures) == [4, 8, 12]
    last = figures[12]
    assert set(last) == {f"{key}{name}" for key in MIXTURE for name in ("web", "code", "rare")}
    samples = {name: last[f"epochs/{name}"] * count for name, count in COUNTS.items()}
    assert sum(samples.values()) == 12 * 4
    assert last["epochs/rare"] > 1, "it ran out and was gone through again"
    seen = sum(last[f"tokens_seen/{name}"] for name in COUNTS)
    assert read_journal(whole / "metrics.jsonl")[-1]["event"] == "summary"
    assert seen == tiny.train_lines(whole)[-1]["tokens_seen"]
    assert last["tokens_share/web"] == last["tokens_seen/web"] / seen


COUNTS = {"web": 90, "code": 60, "rare": 4}


def test_a_mixture_begun_by_two_ranks_resumes_on_one(pretraining, sources, start, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert start(whole) == 0
    done = run_two_processes(
        "multi_gpu", "pretrain.py", pretraining(run, **RUN, train_data=sources)
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert mixture(run) == mixture(whole), "each rank counts the global batches"
    tiny.cut(run, step=6)
    assert start(run) == 0
    assert mixture(run) == mixture(whole)
    assert tiny.losses(run) == pytest.approx(tiny.losses(whole), abs=2e-5)
