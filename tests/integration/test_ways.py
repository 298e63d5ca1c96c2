"""The way of a chat in the architecture names every file whose functions work on the chat."""

import json
import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from transformers import AutoTokenizer

import prepare_data

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WORDS, TOKEN = "t119 t118", 119  # they occur in one chat only
MOST = 100  # values of an array or list that may be chats; the vocabulary is longer


def holds(value: Any, depth: int = 0) -> bool:
    """Return whether a value holds the chat: its words, or its token in an array or list."""
    if isinstance(value, str):
        return WORDS in value
    if isinstance(value, np.ndarray):
        return value.size < MOST and value.dtype.kind in "iu" and bool((value == TOKEN).any())
    if isinstance(value, dict):
        value = list(value.values())
    elif type(value).__module__.startswith("utils.") and hasattr(value, "__dict__"):
        value = list(vars(value).values())
    if not isinstance(value, (list, tuple)) or depth > 3 or len(value) > MOST:
        return False
    if all(type(one) is int for one in value):
        return TOKEN in value
    return any(holds(one, depth + 1) for one in value)


@contextmanager
def files_that_hold_it(last: str) -> Iterator[set[str]]:
    """Yield the files of `utils` with a function that takes or returns the chat.

    Recording ends when the function `last` was called with the chat.
    """
    found: set[str] = set()

    def look(frame: types.FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(f"{ROOT}/utils/"):
            return
        sys.setprofile(None)
        values = [result]
        if event == "call":
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            values = [frame.f_locals[name] for name in names if name != "self"]
        if any(map(holds, values)):
            found.add(str(Path(code.co_filename).relative_to(ROOT)))
            if code.co_name == last:
                return
        sys.setprofile(look)

    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)


def test_a_chat_from_its_record_to_disk(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny.make_tokenizer(tmp_path / "tokenizer"))
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    chats = [
        [{"role": "user", "content": f"t{place} t5"}, {"role": "assistant", "content": "t7 t8"}]
        for place in range(6)
    ]
    chats[5][1]["content"] = f"t3 {WORDS} t4"
    records = tmp_path / "chats.jsonl"
    records.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    settings = {
        "sources": records, "tokenizer_name_or_path": tmp_path / "tokenizer", "num_proc": 1,
        "chat_template": ROOT / "recipes" / "chat_templates" / "chatml.jinja",
        "output_dir": tmp_path / "data",
    }  # fmt: skip
    with files_that_hold_it(last="append") as found:
        assert prepare_data.main(tiny.flags(**settings)) == 0
    page = (ROOT / "docs" / "internals" / "architecture.md").read_text()
    way = page.partition("\n## A chat, from")[2].partition("\n## ")[0]
    files = set(re.findall(r"^\| `(\S+\.py)` \|", way, flags=re.MULTILINE))
    assert files - found == {"prepare_data.py", "utils/prepare/pipeline.py"}, "they make the steps"
    assert found <= files
