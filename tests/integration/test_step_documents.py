"""status.py --step names what training reads; skip_documents leaves documents out exactly."""

import json
import math
import re
from pathlib import Path

import datasets
import pytest
import tiny
from launching import run_processes
from recorded_run import iterate_recorded, read_step
from transformers import AutoModelForCausalLM

import prepare_data
import pretrain
import sft_train
import status
from utils.config.errors import ConfigurationError
from utils.data.loader import TrainLoader
from utils.observe.history import read_run
from utils.run.documents import documents_of_steps

pytestmark = pytest.mark.slow

RECORDED_RUN = Path(__file__).with_name("recorded_run.py")


@pytest.fixture
def recorded(tmp_path, monkeypatch) -> Path:
    """Record the documents of runs in this process in this folder."""
    (folder := tmp_path / "recorded").mkdir()
    real = TrainLoader.__iter__
    monkeypatch.setattr(TrainLoader, "__iter__", iterate_recorded(real, folder / "rank-0.jsonl"))
    return folder


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> list[str]:
    """Make two sources, of which one runs out in the first step; return train_data."""
    root = tmp_path_factory.mktemp("mixture")
    web = tiny.save(root / "web", {"input_ids": tiny.documents(90, seed=10)})
    rare = tiny.save(root / "rare" / "train", {"input_ids": tiny.documents(9, seed=11)})
    return [f"{web}=3", f"{rare}=2"]


def named(run: Path, step: int) -> list:
    """Return the sorted documents that --step names for a step, as recorded_run.py does."""
    parts = documents_of_steps(read_run(run), [step])
    return sorted([ids.tolist(), targets.tolist()] for _, ids, targets in parts)


def ask(capsys, run: Path, *flags: str) -> list[str]:
    """Return the lines that status.py prints, without log lines of runs in this process."""
    capsys.readouterr()
    assert status.main([str(run), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if not re.match(r"\d\d:\d\d:\d\d  ", line)]


def check(run: Path, folder: Path, steps=range(1, 7), first: int = 1, accumulation: int = 2):
    for step in steps:
        assert named(run, step) == read_step(folder, step - first + 1, accumulation), step


CASES = {
    "best_fit": {},
    "another seed": {"seed": 7},
    "cut documents": {"packing": "concat", "seed": 3},
    "split documents": {"sequence_length": 16, "global_batch_size": 8, "seed": 11},
    "in order, several epochs": {
        "order": "sequential", "global_batch_size": 40, "per_device_train_batch_size": 20,
    },
    "shuffled, several epochs": {"global_batch_size": 60, "per_device_train_batch_size": 30},
}  # fmt: skip


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_the_documents_of_each_step_are_those_that_training_read(
    settings, pretrained, recorded, tmp_path
):
    run = pretrained(tmp_path / "run", **settings)
    micro = settings.get("per_device_train_batch_size", 2)
    check(run, recorded, accumulation=settings.get("global_batch_size", 4) // micro)


def test_the_documents_of_a_growing_batch(pretrained, recorded, tmp_path):
    run = pretrained(tmp_path / "run", global_batch_size='{"0": 2, "3": 4}')
    check(run, recorded, range(1, 4), accumulation=1)
    lines = (recorded / "rank-0.jsonl").read_text().splitlines(keepends=True)
    (recorded / "rank-0.jsonl").write_text("".join(lines[3:]))
    check(run, recorded, range(4, 7), first=4)


def test_a_mixture_on_two_ranks_that_resumes_on_one_after_a_change(
    pretraining, mixture, recorded, tmp_path
):
    (folder := tmp_path / "two").mkdir()
    run, settings = tmp_path / "run", {"train_data": mixture, "per_device_train_batch_size": 1}
    argv = [str(folder), *pretraining(run, **settings)]
    run_processes("multi_gpu", RECORDED_RUN, argv).succeeded()
    assert len(list(folder.iterdir())) == 2
    check(run, folder)
    tiny.cut(run, 3)
    settings |= {"seed": 5, "accept_changes": "seed"}
    assert pretrain.main(pretraining(run, **settings)) == 0
    check(run, folder, range(1, 4))
    check(run, recorded, range(4, 7), first=4, accumulation=4)


def test_a_run_whose_dataset_has_grown_keeps_its_documents(
    pretraining, workspace, recorded, tmp_path, capsys
):
    words = ["--output_dir", str(tmp_path / "data"), "--sources"]
    tokenizer = ["--tokenizer_name_or_path", str(workspace / "tokenizer")]
    for seed, more in ((5, tokenizer), (6, ["--append", "true"])):
        rows = [" ".join(tiny.WORDS[token] for token in each) for each in tiny.documents(80, seed)]
        source = tmp_path / f"{seed}.jsonl"
        source.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        prepare_data.main([*words, str(source), *more])
        run = tmp_path / "run"
        prepared = {"train_data": tmp_path / "data", "tokenizer_name_or_path": None}
        if seed == 5:
            assert pretrain.main(pretraining(run, **prepared)) == 0
        check(run, recorded)
    rows = [json.loads(line) for line in ask(capsys, run, "--step", "6", "--json")]
    for row in rows:
        file, _, line = row["source"].rpartition(":")
        text = json.loads(Path(file).read_text().splitlines()[int(line) - 1])["text"]
        assert row["text"].removesuffix("<eos>").strip() == text
    assert f", from {rows[0]['source']}" in ask(capsys, run, "--step", "6")[1]
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    tiny.save(tmp_path / "data", {"input_ids": tiny.documents(80, seed=9)})
    with pytest.raises(ConfigurationError, match="not the data that these steps trained on"):
        status.main([str(run), "--step", "6"])


def test_each_document_has_the_loss_of_the_checkpoint_before(
    fine_tuned, recorded, workspace, tmp_path, capsys
):
    run = fine_tuned(tmp_path / "run", save_steps=2)
    check(run, recorded)
    assert ask(capsys, run, "--step", "4")[0].endswith("losses under checkpoint-2 on cpu")
    rows = [json.loads(line) for line in ask(capsys, run, "--step", "4", "--json")]
    chats = tiny.masked(tiny.documents(120, seed=2))
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoint-2")
    for row in rows:
        own = {name: [column[row["document"]]] for name, column in chats.items()}
        assert row["loss"] == pytest.approx(tiny.plain_loss(model, own), abs=1e-5)
        assert (row["dataset"], row["step"]) == (str(workspace / "chats"), 4)
        assert row["loss_tokens"] == sum(own["completion_mask"][0][1:])
        assert row["text"] == " ".join(tiny.WORDS[token] for token in own["input_ids"][0])
    assert [row["loss"] for row in rows] == sorted((row["loss"] for row in rows), reverse=True)
    head, first, *_ = ask(capsys, run, "--step", "1-2")
    assert head.endswith("documents, no losses: there is no checkpoint before step 1")
    assert first.startswith(f"        -  {workspace / 'chats'} ")
    lora = {"use_peft": "true", "lora_r": 4, "lora_target_modules": "all-linear"}
    adapted = fine_tuned(tmp_path / "adapted", save_steps=2, **lora)
    assert ask(capsys, adapted, "--step", "3")[0].endswith("losses under checkpoint-2 on cpu")
    for faulty in ("7", "0", "a", "3-2", "2-x"):
        with pytest.raises(ConfigurationError, match=r"give a step, as 61, .* has 6 steps"):
            status.main([str(run), "--step", faulty])
    with pytest.raises(ConfigurationError, match="is no run directory"):
        status.main([str(tmp_path), "--spikes"])
    for words in (["--spikes"], [str(run), "--step", "1", "--watch"]):
        with pytest.raises(SystemExit):
            status.main(words)


def documents_of_step_2(run: Path, file: Path, capsys, count: int = 3) -> list[dict]:
    """Write the first documents of step 2 into a file for skip_documents; return them."""
    lines = ask(capsys, run, "--step", "2", "--json", "--no_loss")[:count]
    file.write_text("\n".join(lines))
    return [json.loads(line) for line in lines]


def without_loss(source: Path, rows: set[int], target: Path) -> Path:
    """Save a copy of documents in which some have no loss token."""
    documents = datasets.load_from_disk(source)["input_ids"]
    masks = [[int(row not in rows)] * len(each) for row, each in enumerate(documents)]
    return tiny.save(target, {"input_ids": documents, "completion_mask": masks})


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_skipped_documents_train_as_documents_without_loss_tokens(
    packing, pretrained, mixture, tmp_path, capsys
):
    """Losses, gradient norms and weights have the same bits; so has a resumed run.

    Unpacked, each micro-batch has one document, and those of step 2 have no loss token.
    """
    shared = {"per_device_train_batch_size": 1, "packing": packing}
    run = pretrained(tmp_path / "run", **shared, train_data=mixture)
    skip = tmp_path / "skip.jsonl"
    rows = documents_of_step_2(run, skip, capsys)
    sources = [Path(entry.rpartition("=")[0]) for entry in mixture]
    masked = []
    for number, (source, weight) in enumerate(zip(sources, (3, 2), strict=True)):
        own = {
            row["document"] for row in rows if row["dataset"] in (str(source), f"{source}/train")
        }
        path = source if (source / "state.json").exists() else source / "train"
        masked.append(f"{without_loss(path, own, tmp_path / f'masked-{number}')}={weight}")
    expected = pretrained(tmp_path / "expected", **shared, train_data=masked)
    without = pretrained(tmp_path / "without", **shared, train_data=mixture, skip_documents=skip)
    tiny.assert_same_run(without, expected)
    norms = [tiny.figures(each, "grad_norm").tolist() for each in (without, expected)]
    assert norms[0] == norms[1]
    assert tiny.losses(without)[0] == tiny.losses(run)[0]
    assert tiny.losses(without)[1] != tiny.losses(run)[1]
    assert all(map(math.isfinite, tiny.losses(without)))
    lines = ask(capsys, without, "--step", "2", "--json", "--no_loss")
    assert sum(json.loads(line)["skipped"] for line in lines) == len(rows)
    cut = tiny.copied(without, tmp_path / "cut", step=3)
    pretrained(cut, **shared, train_data=mixture, skip_documents=skip)
    tiny.assert_same_run(cut, without)


def test_a_resumed_run_refuses_another_file_unless_it_is_accepted(
    fine_tuning, fine_tuned, tmp_path, capsys
):
    run = fine_tuned(tmp_path / "run")
    skip, moved = tmp_path / "skip.jsonl", tmp_path / "moved.jsonl"
    rows = documents_of_step_2(run, skip, capsys)
    tiny.cut(run, 3)
    with pytest.raises(ConfigurationError, match=r"its skip_documents is null, now it is .*skip"):
        fine_tuned(run, skip_documents=skip)
    fine_tuned(run, skip_documents=skip, accept_changes="skip_documents")
    assert tiny.starts(run)[-1]["skip_documents"]["documents"] == 3
    tiny.cut(run, 3)
    moved.write_text(skip.read_text())
    fine_tuned(run, skip_documents=moved)
    assert "(the same contents)" in capsys.readouterr().out
    tiny.cut(run, 3)
    moved.write_text(f"{rows[0]['dataset']} {rows[0]['document']}")
    with pytest.raises(ConfigurationError, match="its skip_documents: documents is 3, now it is 1"):
        fine_tuned(run, skip_documents=moved)
    with pytest.raises(ConfigurationError, match=r"its skip_documents is .*, now it is null"):
        sft_train.main(fine_tuning(run))
    elsewhere = tmp_path / "elsewhere"
    fine_tuned(
        elsewhere, skip_documents=moved, accept_changes="skip_documents",
        resume_from_checkpoint=run / "checkpoint-3",
    )  # fmt: skip
    assert tiny.starts(elsewhere)[-1]["skip_documents"]["documents"] == 1


def test_spikes_are_listed_with_the_commands_to_type(pretrained, tmp_path, capsys):
    run = pretrained(tmp_path / "run")
    assert ask(capsys, run, "--spikes") == [f"{run}: no spikes in 6 logs"]
    journal = run / "metrics.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    train = next(line for line in lines if line["event"] == "train")
    usual = [train | {"step": 7 + number, "loss": 2.0, "grad_norm": 1.0} for number in range(40)]
    usual[30] |= {"loss": 5.0, "grad_norm": 4.0}
    journal.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *usual]))
    shown = ask(capsys, run, "--spikes")
    step = f"python status.py {run} --step 37"
    assert shown[0].startswith("step 37: grad_norm 4, usually 1: ")
    assert shown[2].startswith("step 37: loss 5, usually 2: 91.6 deviations above the median")
    assert shown[1] == shown[3] == f"  {step}"
    assert (
        shown[6]
        == f"those that stand out, such as the first 4: {step} --json | head -n 4 >>skip.jsonl"
    )
    spikes = json.loads("".join(ask(capsys, run, "--spikes", "--json")))
    assert [spike["steps"] for spike in spikes] == ["37", "37"]
