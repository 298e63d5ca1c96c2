"""Small documents, tokenizers and calls that the preparation tests share."""

import copy
import json
import random
from functools import cache
from pathlib import Path

import datasets
import numpy as np

from examples.train_tokenizer import train_tokenizer
from utils.config.preparation import PreparationArguments
from utils.data.packing import Segments
from utils.data.token_dataset import TokenDataset
from utils.prepare import pipeline

CHATML = str(Path(__file__).parents[3] / "recipes" / "chat_templates" / "chatml.jinja")
WORDS = [
    *("def", "return", "value", "list", "of", "the", "a", "to", "for", "if", "in", "is", "not"),
    *("x", "y", "z", "self", "name", "path", "12", "345"),
]


def sentences(number: int, seed: int = 0) -> list[str]:
    """Return different short texts, some with line ends and letters outside ASCII."""
    choose = random.Random(seed)
    return [
        f"{i} " + " ".join(choose.choices(WORDS, k=choose.randint(3, 40))) + "\n  naïve ß\n"
        for i in range(number)
    ]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def text_source(path: Path, number: int = 200, seed: int = 0) -> Path:
    return write_jsonl(path, [{"text": text} for text in sentences(number, seed)])


def rows(folder: Path) -> list[list[int]]:
    """Return the tokens of each document of a prepared split."""
    return datasets.load_from_disk(str(folder))["input_ids"][:]


def chat(*contents: str, system: str | None = None) -> dict:
    """Return a record whose messages alternate between user and assistant."""
    opening = [{"role": "system", "content": system}] if system else []
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]
    return {"messages": [*opening, *turns]}


@cache
def _trained():
    return train_tokenizer(iter(sentences(300)), 320)


def tiny_tokenizer(chat_template: str | None = None):
    """Return a fresh tokenizer of 320 tokens, with a chat template if one is given."""
    tokenizer = copy.deepcopy(_trained())
    tokenizer.chat_template = chat_template
    return tokenizer


def chatml_tokenizer():
    return tiny_tokenizer(Path(CHATML).read_text(encoding="utf-8"))


def saved_tokenizer(folder: Path, chat_template: str | None = None) -> str:
    tokenizer = tiny_tokenizer(chat_template)
    tokenizer.save_pretrained(folder)
    return str(folder)


def arguments(sources, output_dir: Path, **settings) -> PreparationArguments:
    sources = [source if isinstance(source, dict) else str(source) for source in sources]
    return PreparationArguments(sources=sources, output_dir=str(output_dir), **settings)


def prepare(sources, output_dir: Path, **settings) -> None:
    """Prepare like prepare_data.py."""
    pipeline.prepare_datasets(arguments(sources, output_dir, **settings))


def description(split: Path) -> dict:
    """Return the stoker.json of a split."""
    return json.loads((split / "stoker.json").read_text())


def data_bytes(folder: Path) -> dict[str, bytes]:
    """Return the bytes of a preparation's files. Leave out stoker.json: it has a date and paths."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "stoker.json"
    }


def document(dataset: TokenDataset, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a document's token ids and its loss mask."""
    whole = Segments(*(np.array([n]) for n in (index, 0, dataset.lengths[index])))
    (tokens,), (mask,) = dataset.pieces(whole)
    return tokens, mask.astype(bool)
