"""A source of short texts and a tokenizer for most tests of preparation."""

import preparation_samples as samples
import pytest
from stand_in_hub import Preparer, publish_all, stand_in_hub

from utils.prepare import units, work_plan


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Make work units small, so that few documents give several units."""
    monkeypatch.setattr(work_plan, "SMALLEST_UNIT_BYTES", 2000)


@pytest.fixture
def source(tmp_path):
    return samples.text_source(tmp_path / "texts.jsonl")


@pytest.fixture
def tokenizer(tmp_path):
    return samples.saved_tokenizer(tmp_path / "tokenizer")


@pytest.fixture
def two(tmp_path):
    """Make two sources of texts with a language and a score."""
    for name in ("a", "b"):
        rows = [
            {"text": f"{name} {i} " + "word " * 8, "language": ("en", "de")[i % 2], "score": i % 5}
            for i in range(200)
        ]
        samples.write_jsonl(tmp_path / f"{name}.jsonl", rows)
    return str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")


@pytest.fixture
def prepare(tmp_path, tokenizer):
    """Prepare into a folder of tmp_path, with the small tokenizer unless another is given."""

    def prepared(name, **settings):
        settings = {"tokenizer_name_or_path": tokenizer, **settings}
        samples.prepare(output_dir=tmp_path / name, **settings)
        return tmp_path / name

    return prepared


@pytest.fixture
def workers_for_little(monkeypatch):
    """Start worker processes even for few documents."""
    worth = dict.fromkeys(units.LEAST_BYTES_A_WORKER, 1)
    monkeypatch.setattr(units, "LEAST_BYTES_A_WORKER", worth)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Run a stand-in for the Hub with the datasets of the recipes."""
    with stand_in_hub() as served:
        publish_all(served, tmp_path_factory.mktemp("qwen3"))
        yield served


@pytest.fixture(scope="module")
def preparer(hub, tmp_path_factory):
    """Start a process that runs prepare_data.py with that Hub. Its HF_HOME is `preparer.home`."""
    home = tmp_path_factory.mktemp("home")
    process = Preparer(hub.url, home, HF_HUB_OFFLINE="0")  # without the test of the connection
    process.home = home
    yield process
    process.close()
