"""The splits as they are written: what opens them, and what describes them."""

import datasets
import numpy as np
import preparation_samples as samples
import pytest

from utils.data.columns import open_columns
from utils.data.prepare.pipeline import decoded_example
from utils.data.token_dataset import open_token_dataset

pytestmark = pytest.mark.usefixtures("small_units")


def test_load_from_disk_opens_every_split_with_the_smallest_type(tmp_path, source, prepare):
    more = samples.text_source(tmp_path / "more.jsonl", 20, seed=5)
    out = prepare("out", sources=[source], eval_sources=[f"more={more}"], validation_fraction=0.1)
    counts, fingerprints = {}, set()
    for split in ("train", "validation", "more"):
        dataset = datasets.load_from_disk(str(out / split))
        assert dataset.features == {"input_ids": datasets.List(datasets.Value("uint16"))}
        opened = open_token_dataset(out / split)
        assert opened.statistics.documents == len(dataset)
        assert samples.document(opened, 0)[0].tolist() == dataset[0]["input_ids"]
        counts[split] = len(dataset)
        fingerprints.add(dataset._fingerprint)
    assert counts["train"] + counts["validation"] == 200
    assert counts["more"] == 20
    assert len(fingerprints) == 3  # datasets keys its caches by them
    assert not (out / ".shards").exists()


def test_the_description_holds_the_figures_of_the_report(source, prepare):
    train = prepare("out", sources=[source]) / "train"
    content = samples.description(train)
    preparation = content["preparation"]
    lengths = [len(row) for row in samples.rows(train)]
    assert preparation["tokens"] == content["statistics"]["tokens"] == sum(lengths)
    assert preparation["loss_token_share"] == 1.0
    percentiles = preparation["length_percentiles_tokens"]
    assert percentiles.pop("max") == max(lengths)
    for name, length in percentiles.items():
        assert length == np.percentile(lengths, float(name[1:]), method="inverted_cdf")
    text_bytes = sum(len(text.encode()) for text in samples.sentences(200))
    assert preparation["bytes_per_token"] == pytest.approx(text_bytes / sum(lengths))
    assert content["tokenizer"]["vocabulary_size"] == 320


def test_an_example_marks_what_is_trained_on_and_escapes_what_steers_a_terminal(tmp_path):
    tokenizer = samples.tiny_tokenizer()
    prompt = tokenizer("say \x1b[31m")["input_ids"]
    answer = tokenizer("red\n\u202e<|im_end|>")["input_ids"]
    mask = [0] * len(prompt) + [1] * len(answer)
    columns = {"input_ids": [prompt + answer], "completion_mask": [mask]}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "train")
    shown = decoded_example(open_columns(tmp_path / "train"), tokenizer)
    assert shown == "say \\x1b[31m[[red\n\\u202e<|im_end|>]]"
