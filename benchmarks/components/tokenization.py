"""From JSONL to a saved dataset of token ids, on all cores: the standard library's source."""

import itertools
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

TITLE = (
    "Tokenization of Python source, BPE of 8,192 tokens, from JSONL to a saved dataset, by size of "
    "the source in MB"
)
UNIT = "MB"
SIZES = (10, 100)
VOCABULARY = 8192
SAMPLE_MB = 2  # that the tokenizer is trained on


@cache
def _sources() -> list[str]:
    paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in paths)
    return [text for text in texts if text]


def _texts(megabytes: int) -> Iterator[str]:
    """Yield whole files, from the first one again when all are out, until there are enough."""
    left = megabytes * 10**6
    for text in itertools.cycle(_sources()):
        yield text
        left -= len(text.encode())
        if left <= 0:
            return


def _saved(megabytes: int) -> Path:
    """Write corpus.jsonl and tokenizer/, and return where."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    directory = Path(tempfile.mkdtemp(prefix="stoker-benchmark-"))
    with (directory / "corpus.jsonl").open("w") as corpus:
        for text in _texts(megabytes):
            corpus.write(json.dumps({"text": text}) + "\n")
    bpe: Any = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        _texts(SAMPLE_MB), vocab_size=VOCABULARY, special_tokens=["<eos>"], show_progress=False
    )
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<eos>").save_pretrained(
        directory / "tokenizer"
    )
    return directory


def stoker(megabytes: int, backend: str = "auto") -> tuple[Callable[[], object], int]:
    """Run prepare_data.py; as documented it takes gigatoken, which the tests' environment has."""
    import prepare_data

    directory = _saved(megabytes)
    output = directory / "prepared"
    settings = {
        "sources": directory / "corpus.jsonl",
        "tokenizer_name_or_path": directory / "tokenizer",
        "tokenizer_backend": backend,
        "num_proc": os.cpu_count() or 1,
        "output_dir": output,
    }
    argv = [word for name, value in settings.items() for word in (f"--{name}", str(value))]

    def call() -> None:
        shutil.rmtree(output, ignore_errors=True)
        assert prepare_data.main(argv) == 0

    return call, megabytes


def mapped(megabytes: int) -> tuple[Callable[[], object], int]:
    """Load, map and save with datasets, as its documentation does."""
    import datasets
    from transformers import AutoTokenizer

    directory = _saved(megabytes)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory / "tokenizer")
    datasets.disable_progress_bars()

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = tokenizer(batch["text"], return_attention_mask=False)["input_ids"]
        return {"input_ids": [[*one, tokenizer.eos_token_id] for one in ids]}

    def call() -> None:
        for made in ("cache", "saved"):
            shutil.rmtree(directory / made, ignore_errors=True)
        corpus: Any = datasets.load_dataset(
            "json",
            data_files=str(directory / "corpus.jsonl"),
            split="train",
            cache_dir=str(directory / "cache"),
        )
        tokens = corpus.map(
            tokenize, batched=True, remove_columns=["text"], num_proc=os.cpu_count()
        )
        tokens.save_to_disk(str(directory / "saved"))

    return call, megabytes


BASELINES = {
    "Stoker": stoker,
    "Stoker, without gigatoken": partial(stoker, backend="tokenizers"),
    "datasets.map": mapped,
}
