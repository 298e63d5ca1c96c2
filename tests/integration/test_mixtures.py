"""Shares and losses of the sources of a mixture, and accuracy of held-out splits.

The losses are compared with those of a plain loop.

There are three sources. One sequence has no loss token, and one source runs out. Logs, saves and
the interruption are at different steps.
"""

from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from families import tiny_config, tiny_model
from launching import run_processes
from torch.nn import functional
from transformers import AutoModelForCausalLM

from utils.data.loader import PackedDataset
from utils.data.order import SampleOrder
from utils.data.packing import plan_packing
from utils.data.token_dataset import open_token_dataset
from utils.host.journal_file import read_journal

pytestmark = pytest.mark.slow

WEIGHTS = {"web": 3, "code": 2, "rare": 1}
COUNTS = {"web": 60, "code": 40, "rare": 4}
FIGURES = ("loss", "perplexity", "accuracy", "tokens")
MIXTURE = ("tokens_seen/", "tokens_share/", "epochs/")
STEPS, BATCH = 6, 8
RUN = {
    "packing": "none", "max_steps": STEPS, "save_steps": 3, "logging_steps": 2,
    "global_batch_size": BATCH, "per_device_train_batch_size": 2, "adam_epsilon": 1e-4,
}  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """Make masked documents of sources with different patterns; one of "rare" has no loss token."""
    root, made = tmp_path_factory.mktemp("sources"), {}
    for seed, (name, count) in enumerate(COUNTS.items()):
        columns = tiny.masked(tiny.documents(count, seed=10 + seed))
        if name == "rare":
            columns["completion_mask"][0] = [0] * len(columns["input_ids"][0])
        made[name] = tiny.save(root / name / "train", columns)
    return made


@pytest.fixture
def settings(sources, workspace) -> dict[str, object]:
    heldout = tiny.masked(tiny.documents(31, seed=1))
    data = workspace / "masked_heldout"
    return RUN | {
        "train_data": [f"{path}={WEIGHTS[name]}" for name, path in sources.items()],
        "eval_data": f"held={data if data.exists() else tiny.save(data, heldout)}",
        "eval_steps": STEPS, "max_eval_sequences": 11,
    }  # fmt: skip


def starting(run: Path, *prefixes: str) -> list[dict[str, float]]:
    """Return the figures whose names start so, by training log."""
    return [
        {key: value for key, value in line.items() if key.startswith(prefixes)}
        for line in tiny.train_lines(run)
    ]


def by_source(run: Path) -> list[dict[str, float]]:
    return starting(run, "loss")


def mixture(run: Path) -> list[dict[str, float]]:
    return starting(run, *MIXTURE)


def evaluation(run: Path) -> dict[str, float]:
    lines = read_journal(run / "metrics.jsonl")
    (found,) = (line for line in lines if line["event"] == "eval")
    return {name: found[f"eval_held_{name}"] for name in FIGURES}


def assert_alike(run: Path, other: Path) -> None:
    """Check that the lines of two runs have the same keys, and figures equal up to rounding."""
    assert mixture(run) == mixture(other), "each rank counts the global batches"
    assert len(by_source(run)) == STEPS // 2
    for own, wanted in zip(by_source(run), by_source(other), strict=True):
        assert own == pytest.approx(wanted, rel=2e-5)
    assert evaluation(run) == pytest.approx(evaluation(other), rel=2e-5)
    for name in ("accuracy", "tokens"):
        assert evaluation(run)[name] == evaluation(other)[name]


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("source_losses")


@pytest.fixture
def whole(shared, settings, pretrained) -> Path:
    """Run once without an interruption on one rank."""
    run = shared / "whole"
    return run if run.exists() else pretrained(run, **settings)


def test_the_shares_hold_over_the_whole_run(settings, pretrained, whole, tmp_path, capsys):
    """A resume counts the tokens before it; the smallest source runs out and is repeated."""
    cut = pretrained(tiny.copied(whole, tmp_path / "cut", step=3), **settings)
    out = capsys.readouterr().out
    assert "mixture: web 50.0% of the sequences (of the tokens " in out
    assert mixture(cut) == mixture(whole)
    last = mixture(whole)[-1]
    assert set(last) == {f"{key}{name}" for key in MIXTURE for name in COUNTS}
    samples = {name: last[f"epochs/{name}"] * count for name, count in COUNTS.items()}
    assert sum(samples.values()) == STEPS * BATCH
    assert last["epochs/rare"] > 1
    assert f"its 4 are each seen {last['epochs/rare']:.2f} times" in out
    seen = sum(last[f"tokens_seen/{name}"] for name in COUNTS)
    assert seen == tiny.train_lines(whole)[-1]["tokens_seen"]
    assert last["tokens_share/web"] == last["tokens_seen/web"] / seen
    tiny.assert_same_run(cut, whole)
    assert by_source(cut) == by_source(whole)


def test_losses_by_source_change_nothing(settings, pretrained, whole, tmp_path, monkeypatch):
    """Training without losses by source is bit-equal."""
    names = {"loss", "loss/web", "loss/code", "loss/rare"}
    assert {key for line in by_source(whole) for key in line} == names
    monkeypatch.setattr("utils.run.finish.SourceLosses", lambda *_: None)
    without = pretrained(tmp_path / "without", **settings)
    tiny.assert_same_run(without, whole)
    assert all(set(line) == {"loss"} for line in by_source(without))


@pytest.mark.parametrize("config", ["multi_gpu", "fsdp2"])
def test_two_ranks_log_what_one_does(config, settings, pretraining, pretrained, whole, tmp_path):
    """Each rank has one micro-batch per step; after a resume one rank logs the sums of both."""
    run = tmp_path / "run"
    argv = pretraining(run, **settings | {"per_device_train_batch_size": 4})
    run_processes(config, "pretrain.py", argv).succeeded()
    assert_alike(run, whole)
    if config == "multi_gpu":
        pretrained(tiny.cut(run, step=3), **settings)
        assert_alike(run, whole)


def test_experts_term_is_no_part_of_them(settings, fine_tuned, tmp_path):
    model, lines = tmp_path / "experts", []
    tiny_model(tiny_config("qwen3_moe")).save_pretrained(model)
    tiny.make_tokenizer(model)
    settings |= {"model_name_or_path": model, "max_steps": 1, "logging_steps": 1, "eval_steps": 1}
    settings["train_data"] = settings["train_data"][:2]
    for coefficient in (0, 1):
        run = fine_tuned(tmp_path / str(coefficient), **settings, router_aux_loss_coef=coefficient)
        lines.append(by_source(run)[0])
    assert lines[1].pop("loss") > lines[0].pop("loss") + 1
    assert lines[1] == lines[0] != {}


def plain_losses(model: torch.nn.Module, tokens: Path, sequence: int) -> tuple[torch.Tensor, ...]:
    """Return a document's losses at its loss tokens, and whether each token is the most likely."""
    columns = open_token_dataset(tokens)
    packed = PackedDataset([columns], [plan_packing(columns.lengths, 64, "none")])
    batch = packed.__getitems__([sequence])
    length = int(batch["sequence_tokens"][0])
    ids, mask = batch["input_ids"][:, :length].long(), batch["loss_mask"][0, :length]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1]
    losses = functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    return losses[mask[1:]], (logits.argmax(-1) == ids[0, 1:])[mask[1:]]


def test_they_are_the_cross_entropy_of_the_documents(settings, fine_tuned, sources, tmp_path):
    """Compare with constant weights, with LoRA without dropout, and with a head of all logits."""
    runs = tmp_path / "fused", tmp_path / "logits"
    changes = {"learning_rate": 1e-30, "use_peft": True, "lora_dropout": 0, "logging_steps": 1}
    changes |= {"max_eval_sequences": None, "train_data": settings["train_data"][:2]}
    for run in runs:
        fine_tuned(run, **settings | changes, loss_head=run.name)
    model = AutoModelForCausalLM.from_pretrained(runs[0] / "final", dtype=torch.float64)
    names = list(sources)[:2]
    counts = [COUNTS[name] for name in names]
    order = SampleOrder(counts, seed=42, weights=[WEIGHTS[name] for name in names])
    first = np.cumsum([0, *counts])
    for step, line in enumerate(by_source(runs[0])):
        wanted, every = {}, []
        for number in order.sequences(np.arange(step * BATCH, (step + 1) * BATCH)).tolist():
            source = int(np.searchsorted(first, number, side="right")) - 1
            losses, _ = plain_losses(model, sources[names[source]], number - first[source])
            wanted.setdefault(f"loss/{names[source]}", []).append(losses)
            every.append(losses)
        wanted = {key: torch.cat(losses).mean().item() for key, losses in wanted.items()}
        assert line == pytest.approx(wanted | {"loss": torch.cat(every).mean().item()}, rel=1e-5)
    held = Path(str(settings["eval_data"]).partition("=")[2])
    hits = torch.cat([plain_losses(model, held, number)[1] for number in range(31)])
    found = [evaluation(run) for run in runs]
    assert found[0]["accuracy"] == hits.double().mean().item() > 0
    assert found[0]["tokens"] == len(hits)
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert all(set(line) == {"loss"} for line in by_source(runs[1])), "no losses of single tokens"
