"""New sources for finished datasets (prepare_data.py --append), and versions of grown datasets."""

import fcntl
import logging
import os
import shutil
from pathlib import Path

import datasets
import preparation_samples as samples
import pytest

from utils.config.errors import ConfigurationError
from utils.config.preparation import (
    PreparationArguments,
    check_preparation,
    parse_preparation,
)
from utils.data.token_dataset import open_token_dataset
from utils.prepare.append import APPEND, append
from utils.prepare.pipeline import begin_preparation


@pytest.fixture
def grown(tmp_path, source, prepare, tokenizer):
    """Prepare a dataset with a held-out split; return it and the arguments of an append."""
    out = prepare("out", sources=[source], validation_fraction=0.1)
    more = samples.text_source(tmp_path / "more.jsonl", 120, seed=7)
    return out, samples.arguments([more], out, tokenizer_name_or_path=tokenizer, append=True)


def states(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Return content, time and inode of each Arrow file and of the held-out split's files."""
    files = [
        *folder.glob("train/*.arrow"),
        *folder.glob("validation/*"),
        *folder.glob("tokenizer/*"),
    ]
    return {
        str(file.relative_to(folder)): (
            file.read_bytes(),
            file.stat().st_mtime_ns,
            file.stat().st_ino,
        )
        for file in files
    }


def test_old_files_stay_and_the_new_documents_follow_as_if_prepared_alone(
    grown, prepare, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    out, given = grown
    old, files = samples.rows(out / "train"), states(out)
    before = open_token_dataset(out / "train").description
    append(given)
    assert files.items() <= states(out).items()
    alone = samples.rows(prepare("alone", sources=given.sources) / "train")
    assert samples.rows(out / "train") == old + alone, "as `datasets` reads it"
    opened = open_token_dataset(out)
    assert [samples.document(opened, row)[0].tolist() for row in (0, len(old))] == [
        old[0],
        alone[0],
    ]
    assert len(opened) == len(old) + len(alone)
    again = open_token_dataset(out, known=["other", before.fingerprint])
    assert (len(again), again.description.statistics) == (len(old), before.statistics)
    assert "keeps its first" in caplog.text
    assert (
        "the new sources are not compared with validation: a document in both would be"
        in caplog.text
    )
    assert not (out / APPEND).exists()
    # One preparation of both sources has the same documents, in another order.
    both = prepare("both", sources=[str(tmp_path / "texts.jsonl"), *given.sources])
    held_out = samples.rows(out / "validation")
    assert sorted(samples.rows(both / "train")) == sorted([*old, *alone, *held_out])
    # Workers open the files of their version, whatever is appended later.
    third = samples.text_source(tmp_path / "third.jsonl", 30, seed=9)
    append(samples.arguments([third], out, append=True,
                             tokenizer_name_or_path=given.tokenizer_name_or_path))  # fmt: skip
    make, parts = opened.__reduce__()
    assert len(make(*parts)) == len(opened) < len(open_token_dataset(out))
    for version in (before.fingerprint, opened.description.fingerprint):
        assert open_token_dataset(out, known=[version]).description.fingerprint == version
    caplog.clear()
    append(given)
    assert "appended already" in caplog.text
    assert files.items() <= states(out).items()


def test_what_cannot_join_is_refused_and_leaves_nothing(grown, tmp_path, prepare):
    out, given = grown
    kept = states(out), samples.description(out / "train")

    def refused(message: str, folder: Path = out, **changes) -> None:
        fields = vars(given) | {"output_dir": str(folder)} | changes
        with pytest.raises(ConfigurationError, match=message):
            append(PreparationArguments(**fields))
        assert not (folder / APPEND).exists()

    refused(r"holds \S+texts\.jsonl already", sources=[str(tmp_path / "texts.jsonl")])
    copy = str(shutil.copy(tmp_path / "texts.jsonl", tmp_path / "renamed.jsonl"))
    refused(r"holds \S+renamed\.jsonl already", sources=[copy, *given.sources])
    other = samples.saved_tokenizer(tmp_path / "other", "{{ messages }}")
    tokenizer = samples.tiny_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "longer")
    refused("another tokenizer than", tokenizer_name_or_path=str(tmp_path / "longer"))
    pairs = samples.write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "a", "completion": "b"}] * 5)
    refused("documents of the kind text, and these are", sources=[str(pairs)])
    chats = samples.write_jsonl(tmp_path / "chats.jsonl", [samples.chat("x y", "z")] * 60)
    chat_out = prepare("chats", sources=[chats], chat_template=samples.CHATML)
    more = samples.write_jsonl(tmp_path / "more_chats.jsonl", [samples.chat("z", "y x")] * 9)
    refused("another template", chat_out, sources=[str(more)], tokenizer_name_or_path=other)
    refused("needs datasets that prepare_data.py finished", tmp_path / "nothing")
    (chat_out / "train/stoker.json").unlink()
    refused("needs datasets that prepare_data.py finished", chat_out)
    assert kept == (states(out), samples.description(out / "train"))
    flags = ["--sources", "a", "--output_dir", "o", "--append", "true"]
    assert parse_preparation(flags).tokenizer_name_or_path == "o/tokenizer"
    with pytest.raises(ConfigurationError, match="append adds to the datasets in output_dir, and"):
        check_preparation(PreparationArguments(**vars(given) | {"overwrite": True}))


def test_one_append_at_a_time(grown, tmp_path):
    out, given = grown
    (out / APPEND).mkdir()
    lock = os.open(out / APPEND, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)  # as a shard of a job array
    with pytest.raises(ConfigurationError, match="another process is appending"):
        append(given)
    append(PreparationArguments(**vars(given) | {"shard": "0/2"}))
    os.close(lock)
    third = samples.text_source(tmp_path / "third.jsonl", 30, seed=9)
    with pytest.raises(ConfigurationError, match="unfinished append of other sources"):
        append(PreparationArguments(**vars(given) | {"sources": [str(third)]}))
    append(PreparationArguments(**vars(given) | {"shard": "1/2"}))
    append(PreparationArguments(**vars(given) | {"merge": 2}))
    assert len(open_token_dataset(out)) > 300


def test_a_source_that_had_a_bad_row_joins_once_it_is_repaired(grown, tmp_path):
    out, given = grown
    rows = len(open_token_dataset(out))
    bad = samples.write_jsonl(tmp_path / "bad.jsonl", [{"text": "a b"}, {"text": 3}])
    of_bad = PreparationArguments(**vars(given) | {"sources": [str(bad)]})
    with pytest.raises(ConfigurationError, match="must be a string"):
        append(of_bad)
    samples.write_jsonl(bad, [{"text": "a b"}, {"text": "b a b"}])
    append(of_bad)
    assert len(open_token_dataset(out)) == rows + 2


def test_what_another_append_added_in_the_meantime_is_found(grown, tmp_path, monkeypatch):
    """The other append ends after this one has planned its work."""
    out, given = grown
    third = samples.text_source(tmp_path / "third.jsonl", 30, seed=9)
    both = PreparationArguments(**vars(given) | {"sources": [*given.sources, str(third)]})
    begin = begin_preparation

    def append_another(arguments):
        monkeypatch.undo()
        planned = begin(arguments)
        append(given)
        return planned

    monkeypatch.setattr("utils.prepare.append.begin_preparation", append_another)
    with pytest.raises(ConfigurationError, match=r"holds \S+more\.jsonl already"):
        append(both)
    # ... or while this one waits for the folder.
    real_open = os.open

    def open_and_append(*args):
        monkeypatch.undo()
        lock = real_open(*args)
        append(PreparationArguments(**vars(given) | {"sources": [str(third)]}))
        return lock

    monkeypatch.setattr("utils.prepare.append.os.open", open_and_append)
    fourth = samples.text_source(tmp_path / "fourth.jsonl", 30, seed=11)
    of_fourth = PreparationArguments(**vars(given) | {"sources": [str(fourth)]})
    with pytest.raises(ConfigurationError, match="another append has just ended: repeat"):
        append(of_fourth)
    assert not (out / APPEND).exists()
    append(of_fourth)


def test_other_lengths_and_a_source_that_grew_are_warnings(grown, tmp_path, caplog):
    _, given = grown
    append(given)
    assert not [line for line in caplog.messages if "contents" in line or "length" in line]
    samples.text_source(tmp_path / "more.jsonl", 130, seed=7)  # the same rows and ten new ones
    append(PreparationArguments(**vars(given) | {"sequence_length": 2048}))
    assert "more.jsonl had other contents when it was prepared before: rows that" in caplog.text
    assert "sequence_length: None for the first documents, 2048 for these" in caplog.text


class Killed(BaseException):
    """Ends a process in the place of SIGKILL."""


def test_an_append_that_is_killed_leaves_the_old_or_the_new_dataset(grown, tmp_path, monkeypatch):
    """Die before each rename and removal, with half of a removed folder gone."""
    out, given = grown
    old = open_token_dataset(out).description.fingerprint
    whole = Path(shutil.copytree(out, tmp_path / "whole"))
    append(PreparationArguments(**vars(given) | {"output_dir": str(whole)}))
    new = open_token_dataset(whole).description.fingerprint
    left, real_replace, real_rmtree = 0, Path.replace, shutil.rmtree

    def count() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed

    def replace(self, target):
        count()
        return real_replace(self, target)

    def rmtree(folder, **how):
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        for path in files[: len(files) // 2]:
            path.unlink()
        count()
        real_rmtree(folder, **how)

    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    found, moments = [], 0
    pristine = Path(shutil.copytree(out, tmp_path / "pristine"))
    while True:
        left = 10**9
        real_rmtree(out)
        shutil.copytree(pristine, out, copy_function=shutil.copy2)
        left = moments
        try:
            append(given)
            break
        except Killed:
            left = 10**9
        moments += 1
        found.append(open_token_dataset(out).description.fingerprint)
        listed = len(datasets.load_from_disk(str(out / "train")))
        append(given)
        assert open_token_dataset(out).description.fingerprint == new
        assert samples.rows(out / "train") == samples.rows(whole / "train")
        assert listed in (len(samples.rows(pristine / "train")), len(samples.rows(out / "train")))
        assert not (out / APPEND).exists()
    first_new = found.index(new)
    assert moments > 8
    assert set(found[:first_new]) == {old}
    assert set(found[first_new:]) == {new}
