"""A preparation writes the same bytes whichever way it went: in parts, interrupted, by workers."""

import gzip
from pathlib import Path

import datasets
import preparation_samples as samples
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from utils.data.prepare.workspace import Workspace

pytestmark = pytest.mark.usefixtures("small_units")


def test_shards_merged_are_the_undivided_preparation(tmp_path, source, tokenizer):
    shards = 15  # more than there are work units
    settings = {
        "sources": [source],
        "eval_sources": [f"other={samples.text_source(tmp_path / 'other.jsonl', 40, seed=9)}"],
        "tokenizer_name_or_path": tokenizer,
        "validation_fraction": 0.2,
    }
    samples.prepare(**settings, output_dir=tmp_path / "whole")
    for shard in reversed(range(shards)):
        samples.prepare(**settings, output_dir=tmp_path / "parts", shard=f"{shard}/{shards}")
    samples.prepare(**settings, output_dir=tmp_path / "parts", merge=shards)
    assert samples.data_bytes(tmp_path / "whole") == samples.data_bytes(tmp_path / "parts")


def test_an_interrupted_preparation_is_continued(tmp_path, source, tokenizer, monkeypatch):
    settings = {"sources": [source], "tokenizer_name_or_path": tokenizer}
    samples.prepare(**settings, output_dir=tmp_path / "whole")
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
        samples.prepare(**settings, output_dir=tmp_path / "out")
    samples.prepare(**settings, output_dir=tmp_path / "out")
    assert finished[:6] == [0, 1, 2, 3, None, 4]
    assert samples.data_bytes(tmp_path / "whole") == samples.data_bytes(tmp_path / "out")


@pytest.mark.parametrize("last", ["data-00003", ".shards.finished"])
def test_an_interrupted_assembly_is_continued(tmp_path, source, last, monkeypatch):
    settings = {"sources": [source], "train_tokenizer": 300, "validation_fraction": 0.3}
    samples.prepare(**settings, output_dir=tmp_path / "whole")
    original = Path.replace

    def interrupted(self, target):
        if Path(target).name.startswith(last):
            raise KeyboardInterrupt
        return original(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        samples.prepare(**settings, output_dir=tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer").exists() == (last == ".shards.finished")
    monkeypatch.setattr(Path, "replace", original)
    samples.prepare(**settings, output_dir=tmp_path / "out")
    assert samples.data_bytes(tmp_path / "whole") == samples.data_bytes(tmp_path / "out")


def test_every_source_kind_gives_the_same_rows(tmp_path, tokenizer):
    records = [{"text": text} for text in samples.sentences(60)]
    plain = samples.write_jsonl(tmp_path / "a.jsonl", records)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(plain.read_bytes()))
    table = pa.Table.from_pylist(records)
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=7)
    # Written in another order, which its indices mapping puts right.
    backwards = datasets.Dataset.from_list(records[::-1])
    backwards.select(range(59, -1, -1)).save_to_disk(str(tmp_path / "e"))
    (tmp_path / "f").mkdir()
    for number, record in enumerate(records):
        (tmp_path / "f" / f"{number:03d}.txt").write_text(record["text"], encoding="utf-8")
    found = []
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e", "f"):
        samples.prepare(
            sources=[tmp_path / name],
            output_dir=tmp_path / f"out-{name}",
            tokenizer_name_or_path=tokenizer,
        )
        found.append(samples.rows(tmp_path / f"out-{name}" / "train"))
    assert len(found[0]) == 60
    assert all(other == found[0] for other in found[1:])
