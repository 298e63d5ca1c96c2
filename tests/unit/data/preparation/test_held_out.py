"""What is held out: by content alone, whole, and unseen by the tokenizer."""

import json
import random

import preparation_samples as samples
import pytest

from utils.data.prepare import documents
from utils.data.token_dataset import open_token_dataset

pytestmark = pytest.mark.usefixtures("small_units")


def test_the_held_out_split_depends_on_content_alone(tmp_path, tokenizer):
    records = [{"text": text} for text in samples.sentences(300)]
    shuffled = [*records, *records[:100]]
    random.Random(3).shuffle(shuffled)
    held_out = []
    for name, order in (("a", records), ("b", shuffled)):
        samples.prepare(
            sources=[samples.write_jsonl(tmp_path / f"{name}.jsonl", order)],
            output_dir=tmp_path / name,
            tokenizer_name_or_path=tokenizer,
            validation_fraction=0.25,
        )
        held_out.append({tuple(row) for row in samples.rows(tmp_path / name / "validation")})
        train = {tuple(row) for row in samples.rows(tmp_path / name / "train")}
        assert not train & held_out[-1]
        assert len(train | held_out[-1]) == 300
    assert held_out[0] == held_out[1]
    assert 45 < len(held_out[0]) < 105


def test_a_very_long_text_stays_whole_in_one_split_and_its_parts_are_counted(
    tmp_path, tokenizer, monkeypatch
):
    monkeypatch.setattr(documents, "LARGEST_DOCUMENT_BYTES", 64)
    texts = [f"name{number:03d}\n" * 40 for number in range(20)]
    samples.prepare(
        sources=[samples.write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])],
        output_dir=tmp_path / "out",
        tokenizer_name_or_path=tokenizer,
        validation_fraction=0.4,
    )
    plain = samples.tiny_tokenizer()
    found = {}
    for split in ("train", "validation"):
        parts = [plain.decode(row[:-1]) for row in samples.rows(tmp_path / "out" / split)]
        assert all(part.endswith("\n") for part in parts)
        found[split] = "".join(parts)
        for text in texts:
            assert found[split].count(text[:8]) in (0, 40)
    assert all(text in found["train"] or text in found["validation"] for text in texts)
    assert found["validation"]
    content = json.loads((tmp_path / "out" / "train" / "stoker.json").read_text())["preparation"]
    assert content["sources"]["continued"] == 20 * 4


def test_the_tokenizer_never_sees_held_out_documents(tmp_path):
    # The odd word is in one document; it is held out with some seed and trained on with another.
    texts = [*samples.sentences(300), "Xylophon " * 400]
    source = samples.write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    knows = {}
    for seed in range(4):
        out = tmp_path / f"{seed}"
        samples.prepare(
            sources=[source],
            output_dir=out,
            train_tokenizer=300,
            validation_fraction=0.5,
            seed=seed,
        )
        vocabulary = json.loads((out / "tokenizer" / "tokenizer.json").read_text())["model"]
        longest = max(open_token_dataset(out / "validation").lengths)
        knows[bool(longest > 400)] = any("Xylo" in token for token in vocabulary["vocab"])
    assert knows == {True: False, False: True}


def test_the_tokenizer_is_trained_on_a_sample_of_every_unit(tmp_path):
    # Every work unit (2000 bytes) begins with words of its own; only its beginning is read.
    lines = []
    for unit in range(6):
        lines += [{"text": f"opening{unit} " * 30}, {"text": f"closing{unit} " * 150}]
    source = samples.write_jsonl(tmp_path / "a.jsonl", lines)
    knows = {}
    for sample_bytes in (600, 100_000):
        out = tmp_path / f"{sample_bytes}"
        samples.prepare(
            sources=[source],
            output_dir=out,
            train_tokenizer=266,
            tokenizer_sample_bytes=sample_bytes,
        )
        vocabulary = json.loads((out / "tokenizer" / "tokenizer.json").read_text())["model"]
        merged = "".join(token for token in vocabulary["vocab"] if len(token) > 1)
        knows[sample_bytes] = ("pen" in merged, "los" in merged)
    assert knows[600] == (True, False)
    assert knows[100_000][1]
