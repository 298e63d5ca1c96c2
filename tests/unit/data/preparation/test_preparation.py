"""A preparation writes the same bytes whichever way it went: in parts, interrupted, by workers."""

from pathlib import Path

import preparation_samples as samples
import pytest

from utils.data.prepare.workspace import Workspace

pytestmark = pytest.mark.usefixtures("small_units")


@pytest.mark.slow
@pytest.mark.usefixtures("workers_for_little")
def test_a_mixture_is_the_same_however_the_work_is_divided(tmp_path, prepare, two):
    shards = 15  # more than there are work units
    other = samples.text_source(tmp_path / "other.jsonl", 40, seed=9)
    given = {
        "sources": [
            {"path": two[0], "weight": 1.5, "max_tokens": 2000},
            {"path": two[1], "filter": {"language": "en"}},
        ],
        "eval_sources": [f"other={other}"],
        "validation_fraction": 0.1,
    }
    one = samples.data_bytes(prepare("one", **given))
    for shard in reversed(range(shards)):
        prepare("parts", shard=f"{shard}/{shards}", **given)
    assert one == samples.data_bytes(prepare("parts", merge=shards, **given))
    assert one == samples.data_bytes(prepare("workers", num_proc=2, **given))


def test_an_interrupted_preparation_is_continued(prepare, source, monkeypatch):
    whole = prepare("whole", sources=[source])
    finish, finished = Workspace.finish, []

    def interrupted(self, unit, counts):
        if len(finished) == 4:
            assert self.unit_file(unit, "train").exists()
            finished.append(None)
            raise KeyboardInterrupt
        finished.append(unit)
        finish(self, unit, counts)

    monkeypatch.setattr(Workspace, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare("out", sources=[source])
    resumed = prepare("out", sources=[source])
    assert finished[:6] == [0, 1, 2, 3, None, 4]
    assert samples.data_bytes(whole) == samples.data_bytes(resumed)


@pytest.mark.parametrize("last", ["data-00003", ".shards.finished"])
def test_an_interrupted_assembly_is_continued(tmp_path, prepare, source, last, monkeypatch):
    settings = {"sources": [source], "train_tokenizer": 300, "validation_fraction": 0.3}
    whole = prepare("whole", **settings)
    original = Path.replace

    def interrupted(self, target):
        if Path(target).name.startswith(last):
            raise KeyboardInterrupt
        return original(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare("out", **settings)
    assert (tmp_path / "out" / "tokenizer").exists() == (last == ".shards.finished")
    assert samples.data_bytes(whole) == samples.data_bytes(prepare("out", **settings))
