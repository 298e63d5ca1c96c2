"""Faults in folders of models and tokenizers, as downloads and edits leave them."""

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
    """One fault, which `apply` makes in a folder."""

    name: str
    apply: Callable[[Path], None]


def write(name: str, content: bytes, folder: Path) -> None:
    (folder / name).write_bytes(content)


def cut_short(name: str, folder: Path) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def with_mark(name: str, folder: Path) -> None:
    path = folder / name
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())


def remove(name: str, folder: Path) -> None:
    (folder / name).unlink()


def as_folder(name: str, folder: Path) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()


def as_pipe(name: str, folder: Path) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)


def as_link(name: str, target: str, folder: Path) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(target)


def unreadable(name: str, folder: Path) -> None:
    (folder / name).chmod(0)


def set_key(name: str, keys: tuple[str, ...], value: Any, folder: Path) -> None:
    content = json.loads((folder / name).read_text())
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    (folder / name).write_text(json.dumps(content))


def damaged_files(name: str) -> Iterator[Damage]:
    """Yield faults that replace, cut or delete a whole file."""
    for kind, content in CONTENTS.items():
        yield Damage(f"{name} {kind}", partial(write, name, content))
    yield Damage(f"{name} cut", partial(cut_short, name))
    yield Damage(f"{name} mark", partial(with_mark, name))
    yield Damage(f"{name} missing", partial(remove, name))
    yield Damage(f"{name} folder", partial(as_folder, name))
    yield Damage(f"{name} pipe", partial(as_pipe, name))
    yield Damage(f"{name} loop", partial(as_link, name, name))
    yield Damage(f"{name} dangling", partial(as_link, name, "nowhere"))
    yield Damage(f"{name} zeros", partial(as_link, name, "/dev/zero"))


def damaged_values(folder: Path, name: str, *inside: str) -> Iterator[Damage]:
    """Yield the faults of each value of a JSON file, or of an object in it."""
    content = json.loads((folder / name).read_text())
    for key in inside:
        content = content[key]
    for key in content:
        for kind, value in ODD.items():
            keys = (*inside, key)
            yield Damage(f"{name} {'.'.join(keys)} {kind}", partial(set_key, name, keys, value))


def rewrite_header(name: str, change: Callable[[dict[str, Any]], Any], folder: Path) -> None:
    """Change the header of a safetensors file; the tensors stay."""
    path = folder / name
    whole = path.read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + size])
    changed = json.dumps(change(header) or header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + whole[8 + size :])


def _first(header: dict[str, Any]) -> str:
    return next(name for name in header if name != "__metadata__")


def _overlap(header: dict[str, Any]) -> None:
    names = [name for name in header if name != "__metadata__"]
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]


def damaged_tensors(name: str) -> Iterator[Damage]:
    """Yield faults of a safetensors file."""
    header = partial(rewrite_header, name)
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "overlap": _overlap,
        "dtype": lambda h: h[_first(h)].update(dtype="F99"),
        "narrow": lambda h: h[_first(h)].update(dtype="I8"),
        "negative": lambda h: h[_first(h)].update(shape=[-1, 4]),
        "shape": lambda h: h[_first(h)].update(shape=[2**60, 2**10]),
        "offsets": lambda h: h[_first(h)].update(data_offsets=[0, 2**62]),
        "extra": lambda h: {
            **h,
            "odd.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]},
        },
        "renamed": lambda h: {f"x.{n}" if n == _first(h) else n: v for n, v in h.items()},
        "list": lambda _: [1],
        "metadata": lambda h: {**h, "__metadata__": {"format": "tf"}},
        "no_metadata": lambda h: {n: v for n, v in h.items() if n != "__metadata__"},
        "metadata_number": lambda h: {**h, "__metadata__": {"format": 5}},
    }
    for kind, change in changes.items():
        yield Damage(f"{name} header {kind}", partial(header, change))
    for kind, content in {
        "huge_header": struct.pack("<Q", 2**60) + b"{}",
        "short_header": struct.pack("<Q", 100) + b"{",
        "deep_header": struct.pack("<Q", DEEP) + b"[" * DEEP,
        "eight_zeros": bytes(8),
    }.items():
        yield Damage(f"{name} {kind}", partial(write, name, content))


def shard(folder: Path) -> None:
    """Split the weights over two files with an index."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size=30_000)


def damaged_indexes(folder: Path) -> Iterator[Damage]:
    """Yield faults of the index of sharded weights."""
    name = "model.safetensors.index.json"
    shards = json.loads((folder / name).read_text())["weight_map"]
    first = next(iter(shards))
    for kind, value in {
        "outside": "../../etc/passwd", "absolute": "/etc/passwd", "gone": "model-9.safetensors",
        "number": 7, "null": None, "list": [], "here": ".", "empty": "", "nul": "a\0b",
        "other": "config.json", "pickle": "pytorch_model.bin", "deep": "a/" * 5000,
    }.items():  # fmt: skip
        yield Damage(f"{name} names {kind}", partial(set_key, name, ("weight_map", first), value))
    for kind, value in ODD.items():
        yield Damage(f"{name} weight_map {kind}", partial(set_key, name, ("weight_map",), value))
        yield Damage(f"{name} metadata {kind}", partial(set_key, name, ("metadata",), value))

    def drop(target: Path) -> None:
        set_key(name, ("weight_map",), {n: f for n, f in shards.items() if n != first}, target)

    yield Damage(f"{name} lacks", drop)
    yield from damaged_files(name)
    shard_name = next(iter(shards.values()))
    yield from (Damage(f"shard {kind}", partial(change, shard_name)) for kind, change in {
        "cut": cut_short, "missing": remove, "folder": as_folder,
    }.items())  # fmt: skip


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
