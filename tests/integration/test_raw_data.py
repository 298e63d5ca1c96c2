"""Raw files in train_data: prepared once beside the run, as prepare_data.py prepares them."""

import json
import shlex
from pathlib import Path

import pytest
import tiny
from launching import run_processes

import prepare_data
import pretrain
import sft_train
from utils.config.errors import Answer, ConfigurationError
from utils.config.raw_data import is_raw
from utils.run import raw_data


def pairs(path: Path, count: int, seed: int = 2) -> Path:
    """Write prompts and completions in the words of the tiny tokenizer."""
    rows = []
    for ids in tiny.documents(count, seed):
        words = [tiny.WORDS[token] for token in [*ids, *ids]]
        rows.append({"question": " ".join(words[:3]), "answer": " ".join(words[3:30])})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def content(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all token files of a preparation."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.arrow"))}


def test_a_raw_file_trains_directly_is_prepared_once_and_resumes(
    fine_tuning, tmp_path, capfd, monkeypatch
):
    raw, held = pairs(tmp_path / "my pairs.jsonl", 120), pairs(tmp_path / "held.jsonl", 20, seed=3)
    run = tmp_path / "run"
    settings = {"train_data": raw, "eval_data": f"held={held}", "eval_steps": 3}
    settings |= {"columns": ["question=prompt", "answer=completion"], "validation_fraction": 0.2}

    # The dry run and a job prepare nothing. They print the command that does.
    with pytest.raises(Answer) as answer:
        sft_train.main([*fine_tuning(run, **settings), "--dry_run"])
    command = answer.value.text.splitlines()[-1]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(ConfigurationError, match="the GPUs of a job would wait") as refused:
        sft_train.main(fine_tuning(run, **settings))
    monkeypatch.delenv("SLURM_JOB_ID")
    assert command in refused.value.problems[0]
    assert not run.exists()

    # A start prepares what that command prepares, in run/data, and evaluates both splits.
    assert sft_train.main(fine_tuning(run, **settings)) == 0
    told = capfd.readouterr().out
    assert "with [[ ]] around what is trained on" in told
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = {key for line in lines for key in line}
    assert {"eval_held_loss", "eval_validation_loss"} <= names
    made = content(run / "data")
    assert {Path(name).parts[0] for name in made} == {"train", "validation", "held"}
    words = shlex.split(command)[2:]
    words[words.index("--output_dir") + 1] = str(tmp_path / "apart")
    assert prepare_data.main(words) == 0
    assert content(tmp_path / "apart") == made

    # The next start, its dry run and a job find the data, also by the settings in config.yaml.
    before = {path: path.stat().st_mtime_ns for path in (run / "data").rglob("*")}
    capfd.readouterr()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for more in (["--dry_run"], []):
        assert sft_train.main([*fine_tuning(run, **settings, max_steps=9), *more]) == 0
        assert "is prepared in" in capfd.readouterr().out
    monkeypatch.delenv("SLURM_JOB_ID")
    saved = ["--config", str(run / "config.yaml"), "--max_steps", "9", "--dry_run"]
    assert sft_train.main(saved) == 0
    assert {path: path.stat().st_mtime_ns for path in (run / "data").rglob("*")} == before

    # The data of a run that has begun are never replaced. They can be named themselves.
    pairs(raw, 130)
    with pytest.raises(ConfigurationError, match=r"changed since the run in .* began") as changed:
        sft_train.main(fine_tuning(run, **settings, max_steps=9))
    assert f"--train_data {run}/data resumes it" in changed.value.problems[0]
    own = settings | {"train_data": run / "data", "eval_data": f"held={run}/data/held"}
    own = {name: own[name] for name in ("train_data", "eval_data", "eval_steps")}
    assert sft_train.main([*fine_tuning(run, **own, max_steps=9), "--dry_run"]) == 0
    assert content(run / "data") == made


def test_two_ranks_train_on_two_raw_files_with_derived_sizes(fine_tuning, tmp_path):
    """Rank 0 prepares, the other rank waits; the sizes are derived from the prepared data."""
    raw = [pairs(tmp_path / "a.jsonl", 60), pairs(tmp_path / "b.jsonl", 30, seed=3)]
    run, sizes = tmp_path / "run", ("sequence_length", "global_batch_size")
    settings = dict.fromkeys(sizes) | {"columns": ["question=prompt", "answer=completion"]}
    settings |= {"max_steps": 2, "save_steps": 2}
    argv = fine_tuning(run, **settings, train_data=raw)
    told = run_processes("cpu", "sft_train.py", argv).succeeded()
    assert "settings: sequence_length 128: the longest of 90 documents" in told
    assert "x 2 ranks x" in told
    assert "| `train` | 90 |" in (run / "final/README.md").read_text()

    # After a change of a file all ranks refuse. The command of the refusal resumes the run.
    pairs(raw[1], 31)
    refused = run_processes("cpu", "sft_train.py", argv)
    assert refused.codes == (2, 2)
    assert f"--train_data {run}/data resumes it" in refused.stdout
    del settings["columns"]
    own = fine_tuning(run, **settings, train_data=run / "data")
    assert sft_train.main([*own, "--dry_run"]) == 0


def test_raw_files_with_weights_become_a_dataset_each(fine_tuning, tmp_path):
    files = [
        pairs(tmp_path / name, 60, seed) for seed, name in enumerate(("a b.jsonl", "B-2.jsonl"))
    ]
    run, settings = tmp_path / "run", {"columns": ["question=prompt", "answer=completion"]}
    settings |= {"train_data": [f"{files[0]}=1", f"{files[1]}=3"], "logging_steps": 1}
    assert sft_train.main(fine_tuning(run, **settings, max_steps=2, save_steps=2)) == 0
    assert {Path(name).parts[0] for name in content(run / "data")} == {"train", "b_2"}
    settings["eval_data"] = f"b_2={files[1]}"  # the name of a split
    with pytest.raises(ConfigurationError, match="is given for both"):
        sft_train.main(fine_tuning(tmp_path / "other", **settings))
    del settings["eval_data"]
    assert sft_train.main(fine_tuning(run, **settings, max_steps=4)) == 0
    assert [start["resumed_from"] for start in tiny.starts(run)] == [None, f"{run}/checkpoint-2"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {"tokens_share/train", "tokens_share/b_2"} <= {key for line in lines for key in line}

    # After a change of a file the command of the refusal resumes the run.
    pairs(files[1], 70)
    with pytest.raises(ConfigurationError, match=r"changed since the run in .* began") as changed:
        sft_train.main(fine_tuning(run, **settings, max_steps=6))
    own = [f"{run}/data/train=1", f"{run}/data/b_2=3"]
    assert f"--train_data {' '.join(own)} resumes it" in changed.value.problems[0]
    del settings["columns"]
    assert sft_train.main(fine_tuning(run, **{**settings, "train_data": own}, max_steps=6)) == 0


def test_data_are_prepared_again_if_they_changed_before_the_run_began(
    pretraining, tmp_path, capfd, monkeypatch
):
    folder, run = tmp_path / "texts", tmp_path / "run"
    folder.mkdir()
    monkeypatch.setattr(raw_data, "LARGEST_RAW_BYTES", 50_000)
    for number in range(2):
        texts = [" ".join(tiny.WORDS[token] for token in ids) for ids in tiny.documents(60, number)]
        rows = [json.dumps({"text": text}) for text in texts]
        (folder / f"{number}.jsonl").write_text("\n".join(rows))
        if number == 0:
            with pytest.raises(ConfigurationError, match="fewer than global_batch_size 4,000,000"):
                pretrain.main(pretraining(run, train_data=folder, global_batch_size=4_000_000))
            first = content(run / "data")
    capfd.readouterr()
    assert pretrain.main(pretraining(run, train_data=folder)) == 0
    told = capfd.readouterr().out
    assert "the files or their settings have changed: prepared again" in told
    assert content(run / "data") != first
    assert sorted(path.name for path in run.glob("*data*")) == ["data"]

    monkeypatch.setattr(raw_data, "LARGEST_RAW_BYTES", 100)
    with pytest.raises(ConfigurationError, match="more than the 1 GB that a run prepares") as large:
        pretrain.main(pretraining(tmp_path / "other", train_data=folder))
    assert f"--sources {folder} " in large.value.problems[0]


def test_what_cannot_be_prepared_beside_the_run_is_refused(pretraining, workspace, tmp_path):
    one, two = pairs(tmp_path / "one.jsonl", 9), pairs(tmp_path / "two.jsonl", 9)
    tokens = workspace / "documents"
    for changes, problem in (
        (
            {"train_data": [f"{one}=1", f"{two}=2"], "validation_fraction": 0.1},
            "name held-out files in eval_data",
        ),
        ({"eval_data": f"held={one}"}, "one.jsonl: a file, not a token dataset"),
        ({"columns": "a=text"}, "has no effect: no raw file is in train_data"),
        ({"columns": "a=text", "train_data": f"{one}l"}, f"(did you mean {one}?)"),
        ({"train_data": one, "eval_data": f"held={two}l"}, f"(did you mean {two}?)"),
        ({"train_data": one}, "no known format"),
        ({"train_data": one, "tokenizer_name_or_path": None}, "give --tokenizer_name_or_path"),
    ):
        with pytest.raises(ConfigurationError) as refused:
            pretrain.main([*pretraining(tmp_path / "run", **changes), "--dry_run"])
        assert problem in str(refused.value), changes
    assert not (tmp_path / "run").exists()
    assert is_raw(str(one))
    assert is_raw(str(tmp_path))
    assert not any(map(is_raw, (str(tokens), str(tokens.parent), str(workspace / "missing"))))
    (tmp_path / "damaged/train").mkdir(parents=True)
    (tmp_path / "damaged/train/data-00000-of-00001.arrow").touch()
    assert not is_raw(str(tmp_path / "damaged"))
