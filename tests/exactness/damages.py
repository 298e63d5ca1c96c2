"""What can happen to a file of a checkpoint between its writing and its reading."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

Damage = Callable[[Path], None]


def truncated_to(share: float) -> Damage:
    def damage(path: Path) -> None:
        os.truncate(path, int(path.stat().st_size * share))

    return damage


def shorter_by_one(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def longer_by_one(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def flipped_bit(share: float) -> Damage:
    """One bit, `share` of the way through the file."""

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[min(int(len(content) * share), len(content) - 1)] ^= 1 << 3
        path.write_bytes(content)

    return damage


def zeroed_block(path: Path) -> None:
    """The last 64 bytes: what a lost page looks like."""
    content = path.read_bytes()
    zeros = bytes(min(64, len(content)))
    if content[-len(zeros) :] == zeros:
        zeros = b"\xff" * len(zeros)
    path.write_bytes(content[: -len(zeros)] + zeros)


def deleted(path: Path) -> None:
    path.unlink()


def linked(path: Path) -> None:
    """A link to the same contents, which may change under it."""
    elsewhere = path.parents[2] / "elsewhere"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def of_another_step(path: Path) -> None:
    """The file of that name from the checkpoint before."""
    whole = next(parent for parent in path.parents if parent.name.startswith("checkpoint-"))
    other = next(
        folder for folder in sorted(whole.parent.glob("checkpoint-*")) if folder.name != whole.name
    )
    name = str(path.relative_to(whole)).replace(
        f"global_step{whole.name.split('-')[1]}", f"global_step{other.name.split('-')[1]}"
    )
    shutil.copyfile(other / name, path)


def swapped(path: Path) -> None:
    """Contents exchanged with another file of the same checkpoint, sizes and all."""
    other = next(
        candidate
        for candidate in sorted(path.parent.iterdir())
        if candidate.is_file()
        and candidate.name != "manifest.json"
        and candidate.read_bytes() != path.read_bytes()
    )
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


DAMAGES: dict[str, Damage] = {
    "emptied": truncated_to(0),
    "cut in half": truncated_to(0.5),
    "a byte short": shorter_by_one,
    "a byte long": longer_by_one,
    "a bit flipped at the start": flipped_bit(0),
    "a bit flipped in the middle": flipped_bit(0.5),
    "a bit flipped at the end": flipped_bit(1),
    "a block lost": zeroed_block,
    "deleted": deleted,
    "made a link": linked,
    "taken from another step": of_another_step,
    "swapped with a neighbour": swapped,
}


def cases(checkpoint: Path) -> Iterator[tuple[str, str]]:
    """Yield (file, damage) for each file of a checkpoint and all that changes it.

    A file that is the same at every step is not changed by taking it from another one, and an
    empty one has no bit to lose.
    """
    for path in sorted(checkpoint.rglob("*")):
        if not path.is_file():
            continue
        name = path.relative_to(checkpoint).as_posix()
        for kind in DAMAGES:
            empty = path.stat().st_size == 0
            if empty and kind not in ("a byte long", "deleted", "made a link"):
                continue
            if kind == "taken from another step" and not _differs_from_other_steps(path):
                continue
            yield name, kind


def _differs_from_other_steps(path: Path) -> bool:
    before = path.read_bytes()
    of_another_step(path)
    differs = path.read_bytes() != before
    path.write_bytes(before)
    return differs
