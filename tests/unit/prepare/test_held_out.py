"""Held-out documents are chosen only by content, and stay whole."""

import json
import random

import preparation_samples as samples

from utils.prepare.rows import ChatDocument
from utils.prepare.units import content_digest
from utils.prepare.values import Location


def prepared_texts(tmp_path, prepare, name, texts, **settings):
    """Prepare texts into a folder with the given name."""
    path = samples.write_jsonl(tmp_path / f"{name}.jsonl", [{"text": text} for text in texts])
    return prepare(name, sources=[path], **settings)


def vocabulary(folder):
    return json.loads((folder / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]


def test_the_held_out_split_depends_on_content_alone(tmp_path, prepare):
    texts = samples.sentences(300)
    shuffled = random.Random(3).sample([*texts, *texts[:100]], 400)
    held_out = []
    for name, order in (("a", texts), ("b", shuffled)):
        out = prepared_texts(tmp_path, prepare, name, order, validation_fraction=0.25)
        held_out.append({tuple(row) for row in samples.rows(out / "validation")})
        train = {tuple(row) for row in samples.rows(out / "train")}
        assert not train & held_out[-1]
        assert len(train | held_out[-1]) == 300
    assert held_out[0] == held_out[1]
    assert 45 < len(held_out[0]) < 105


def test_the_order_of_the_keys_of_a_chat_does_not_count():
    messages = samples.chat("q", "a")["messages"]
    chats = messages, [dict(reversed(turn.items())) for turn in messages], messages[:1]
    one, same, other = (content_digest(ChatDocument(c, Location("a")), 0) for c in chats)
    assert one == same != other
