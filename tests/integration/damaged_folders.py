"""Faults in folders of models and tokenizers, as downloads and edits leave them."""

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Change = Callable[[Path], object]  # damages a file

DEEP = 100_000
# Replacements for a value, by mistake or by malice.
ODD: dict[str, Any] = {
    "null": None, "text": "64", "minus": -1, "zero": 0, "huge": 10**9, "fraction": 0.5,
    "list": [], "object": {}, "class": "os.system", "path": "../../etc/passwd", "true": True,
}  # fmt: skip
# Replacements for a whole file.
CONTENTS: dict[str, bytes] = {
    "list": b"[]", "null": b"null", "string": b'""', "object": b"{}", "number": b"7",
    "empty": b"", "binary": bytes(range(256)), "latin": b'{"name": "caf\xe9"}',
    "deep": b"[" * DEEP, "deep_object": b'{"a":' * DEEP, "nan": b'{"vocab_size": NaN}',
    "text": b"<html>404: Not Found</html>", "digits": b'{"vocab_size": ' + b"9" * 5000 + b"}",
}  # fmt: skip


@dataclass(frozen=True)
class Damage:
    """One fault of a file in a folder."""

    name: str
    file: str
    change: Change

    def apply(self, folder: Path) -> None:
        self.change(folder / self.file)


def replaced(content: bytes) -> Change:
    return lambda path: path.write_bytes(content)


def turned_into(make: Change) -> Change:
    """Return a change that deletes the file and makes something else of its name."""

    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


def edited(keys: tuple[str, ...], value: Any) -> Change:
    """Return a change of one value in a JSON file."""

    def change(path: Path) -> None:
        content = inner = json.loads(path.read_text())
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        path.write_text(json.dumps(content))

    return change


FILE_CHANGES: dict[str, Change] = {kind: replaced(content) for kind, content in CONTENTS.items()}
FILE_CHANGES |= {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "mark": lambda path: path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes()),
    "missing": Path.unlink,
    "folder": turned_into(Path.mkdir),
    "pipe": turned_into(os.mkfifo),
    "loop": turned_into(lambda path: path.symlink_to(path.name)),
    "dangling": turned_into(lambda path: path.symlink_to("nowhere")),
    "zeros": turned_into(lambda path: path.symlink_to("/dev/zero")),
}


def damaged_files(file: str) -> list[Damage]:
    """Return faults that replace, cut or delete a whole file."""
    return [Damage(f"{file} {kind}", file, change) for kind, change in FILE_CHANGES.items()]


def damaged_values(folder: Path, file: str, *inside: str) -> Iterator[Damage]:
    """Yield the faults of each value of a JSON file, or of an object in it."""
    content = json.loads((folder / file).read_text())
    for key in inside:
        content = content[key]
    for key in content:
        for kind, value in ODD.items():
            keys = (*inside, key)
            yield Damage(f"{file} {'.'.join(keys)} {kind}", file, edited(keys, value))


def rewritten(change_header: Callable[[dict[str, Any], str, str], Any]) -> Change:
    """Return a change of a safetensors file's header; the function gets two tensors' names."""

    def change(path: Path) -> None:
        whole = path.read_bytes()
        (size,) = struct.unpack("<Q", whole[:8])
        header = json.loads(whole[8 : 8 + size])
        first, second, *_ = (name for name in header if name != "__metadata__")
        made = json.dumps(change_header(header, first, second) or header).encode()
        path.write_bytes(struct.pack("<Q", len(made)) + made + whole[8 + size :])

    return change


EMPTY_TENSOR = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
TENSOR_CHANGES: dict[str, Change] = {
    f"header {kind}": rewritten(change)
    for kind, change in {
        "overlap": lambda h, a, b: h[b].update(data_offsets=h[a]["data_offsets"]),
        "dtype": lambda h, a, _: h[a].update(dtype="F99"),
        "narrow": lambda h, a, _: h[a].update(dtype="I8"),
        "negative": lambda h, a, _: h[a].update(shape=[-1, 4]),
        "shape": lambda h, a, _: h[a].update(shape=[2**60, 2**10]),
        "offsets": lambda h, a, _: h[a].update(data_offsets=[0, 2**62]),
        "extra": lambda h, *_: h | {"odd.weight": EMPTY_TENSOR},
        "renamed": lambda h, a, _: {f"x.{n}" if n == a else n: v for n, v in h.items()},
        "list": lambda *_: [1],
        "metadata": lambda h, *_: h | {"__metadata__": {"format": "tf"}},
        "no_metadata": lambda h, *_: {n: v for n, v in h.items() if n != "__metadata__"},
        "metadata_number": lambda h, *_: h | {"__metadata__": {"format": 5}},
    }.items()
} | {
    "huge_header": replaced(struct.pack("<Q", 2**60) + b"{}"),
    "short_header": replaced(struct.pack("<Q", 100) + b"{"),
    "deep_header": replaced(struct.pack("<Q", DEEP) + b"[" * DEEP),
    "eight_zeros": replaced(bytes(8)),
}


def damaged_tensors(file: str) -> list[Damage]:
    """Return faults of a safetensors file."""
    return [Damage(f"{file} {kind}", file, change) for kind, change in TENSOR_CHANGES.items()]


def shard(folder: Path) -> None:
    """Split the weights over two files with an index."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size=30_000)


def damaged_indexes(folder: Path) -> Iterator[Damage]:
    """Yield faults of the index of sharded weights, and of a shard."""
    file = "model.safetensors.index.json"
    shards = json.loads((folder / file).read_text())["weight_map"]
    first, shard_file = next(iter(shards.items()))
    for kind, value in {
        "outside": "../../etc/passwd", "absolute": "/etc/passwd", "gone": "model-9.safetensors",
        "number": 7, "null": None, "list": [], "here": ".", "empty": "", "nul": "a\0b",
        "other": "config.json", "pickle": "pytorch_model.bin", "deep": "a/" * 5000,
    }.items():  # fmt: skip
        yield Damage(f"{file} names {kind}", file, edited(("weight_map", first), value))
    for key in ("weight_map", "metadata"):
        for kind, value in ODD.items():
            yield Damage(f"{file} {key} {kind}", file, edited((key,), value))
    rest = {name: place for name, place in shards.items() if name != first}
    yield Damage(f"{file} lacks", file, edited(("weight_map",), rest))
    yield from damaged_files(file)
    for kind in ("cut", "missing", "folder"):
        yield Damage(f"shard {kind}", shard_file, FILE_CHANGES[kind])


TEMPLATES = {
    "division": "{{ 1/0 }}",
    "syntax": "{% if %}",
    "undefined": "{{ nothing.at.all }}",
    "macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "text": "{{ 'x' * 10**10 }}",
    "number": "{{ 10 ** 10 ** 8 }}",
    "wide": "{{ 'x'.center(10**10) }}",
    "range": "{{ range(10**9) | list }}",
    "attribute": "{{ ''.__class__.__mro__ }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'x' as x %}",
    "extends": "{% extends 'base' %}",
    "nested": "{% for a in messages %}" * 30 + "{% endfor %}" * 30,
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "format": "{{ '%1000000000d' % 1 }}",
    "mutates": "{{ messages.append(1) }}",
    "raises": "{{ raise_exception('never') }}",
    "nul": "\x00",
    "filter": "{{ messages | nofilter }}",
    "lookup": "{{ messages[99].content }}",
    "strftime": "{{ strftime_now(7) }}",
    "tojson": "{{ raise_exception | tojson }}",
    "surrogate": "{{ '\\ud800' }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
    "prints": "{% for a in range(99999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}",
}
# Wrong settings of an adapter, and the part of their refusal after the file's name.
ADAPTERS: dict[str, tuple[dict[str, Any], str]] = {
    "huge": ({"r": 10**9}, "takes 476.8 GiB, .* other sizes are right"),
    "huge for a layer": ({"rank_pattern": {"q_proj": 10**9}}, "this adapter takes"),
    "beyond integers": ({"r": 10**30}, "Overflow"),
    "huge prompt": (
        {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 10**9},
        "this adapter takes",
    ),
    "another rank": ({"r": 3}, "it does not fit its weights, .* size mismatch"),
    "another layer": ({"target_modules": ["v_proj"]}, "its weights, its base.*: Found missing"),
    "text": ({"r": "64"}, "its base or this version of PEFT: "),
    "number": ({"target_modules": 5, "bias": 7}, "it does not fit"),
    "not a number": ({"lora_dropout": float("nan"), "r": -1}, "positive integer value but"),
    "unknown kind": ({"peft_type": "NOPE"}, "this version of PEFT: KeyError 'NOPE'"),
    "endless start": ({"init_lora_weights": "pissa_niter_999999999"}, "would compute for hours"),
    "endless pattern": ({"target_modules": "(.+)+x"}, "takes more than 2 s of CPU time"),
    "code": ({"megatron_config": {"x": 1}, "megatron_core": "antigravity"}, "is not run"),
}  # fmt: skip
