"""Proof 3: whatever happens to a file of a checkpoint is found, and nothing of it is loaded."""

import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import stock_trainer
from launching import run_two_processes
from resumed_runs import add_models

import pretrain
import sft_train
from utils.checkpoints.discovery import resume_point
from utils.checkpoints.files import MANIFEST, known_run_id

pytestmark = pytest.mark.slow
EXHAUSTIVE = pytest.mark.exhaustive

LORA = {"use_peft": "true", "lora_r": 4, "lora_target_modules": "all-linear"}
SAVES = {"max_steps": 4, "save_steps": 2}
KINDS = ["one rank", "LoRA", "2-rank DDP", "2-rank FSDP2", "2-rank ZeRO-2"]
CONFIGS = {"2-rank DDP": "multi_gpu", "2-rank FSDP2": "fsdp2", "2-rank ZeRO-2": "zero2"}


Damage = Callable[[Path], None]


def truncated_to(share: float) -> Damage:
    return lambda path: os.truncate(path, int(path.stat().st_size * share))


def shorter_by_one(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def longer_by_one(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


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
    "deleted": Path.unlink,
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


@pytest.fixture(params=[KINDS[0], *(pytest.param(kind, marks=EXHAUSTIVE) for kind in KINDS[1:])])
def trained(request, pretraining, fine_tuning, tmp_path) -> Path:
    """A run with two checkpoints, of each kind of layout."""
    kind, run = request.param, tmp_path / "trained"
    if kind == "one rank":
        pretrain.main(pretraining(run, **SAVES))
        return run
    if kind == "LoRA":
        sft_train.main(fine_tuning(run, **SAVES, **LORA))
    else:
        argv = pretraining(run, **SAVES, per_device_train_batch_size=1)
        done = run_two_processes(CONFIGS[kind], "pretrain.py", argv)
        assert done.returncode == 0, done.stdout[-4000:]
    return run


def test_every_damage_is_found_and_the_checkpoint_before_is_taken(
    trained, tmp_path, caplog, figures, request
):
    run_id = known_run_id(trained / "provenance.json")
    found: list[tuple[str, str]] = []
    missed: list[tuple[str, str]] = []
    files = {name for name, _ in cases(trained / "checkpoint-4")}
    assert {MANIFEST, "trainer_state.json"} < files
    for name, kind in cases(trained / "checkpoint-4"):
        copy = tmp_path / "copy" / "run"
        for step in (2, 4):
            shutil.copytree(trained / f"checkpoint-{step}", copy / f"checkpoint-{step}")
        DAMAGES[kind](copy / "checkpoint-4" / name)
        caplog.clear()
        taken = resume_point(copy, run_id)
        # Without its manifest it is no checkpoint; all else is damage, and named.
        aside = "incomplete" if (name, kind) == (MANIFEST, "deleted") else "damaged"
        said = f"set aside as {aside}.checkpoint-4" in caplog.text and (
            aside == "incomplete" or Path(name).name in caplog.text
        )
        right = taken == copy / "checkpoint-2" and said
        (found if right else missed).append((name, kind))
        shutil.rmtree(copy.parent)
    assert resume_point(trained, run_id) == trained / "checkpoint-4", "the undamaged one is whole"
    proof = figures("damage").setdefault(request.node.callspec.params["trained"], {})
    proof |= {"files": len(files), "damages": len(found) + len(missed), "found": len(found)}
    assert not missed


@pytest.mark.parametrize("kinds", [["deleted"], pytest.param(list(DAMAGES), marks=EXHAUSTIVE)])
def test_plain_trainer_takes_the_highest_number_as_it_is(
    kinds, workspace, base_model, tmp_path, figures
):
    """What the same damages do to transformers' Trainer, resumed with its own search."""
    add_models(workspace, base_model)
    whole = tmp_path / "whole"
    trainer = stock_trainer.make_trainer(workspace, whole, max_steps=4)
    trainer.train()
    ends = Counter({"went on in silence": 0, "next start failed": 0})
    with warnings.catch_warnings(action="ignore"):
        for name, kind in cases(whole / "checkpoint-3"):
            if kind not in kinds:
                continue
            run = tmp_path / "copy" / "run"
            for step in (2, 3):
                shutil.copytree(whole / f"checkpoint-{step}", run / f"checkpoint-{step}")
            DAMAGES[kind](run / "checkpoint-3" / name)
            trainer = stock_trainer.make_trainer(workspace, run, max_steps=4)
            try:
                trainer.train(resume_from_checkpoint=True)
                ends["went on in silence"] += 1
            except Exception:  # which one is its own affair: the user sees a traceback
                ends["next start failed"] += 1
            shutil.rmtree(run.parent)
    figures("damage")["plain Trainer"] = {"damages": ends.total(), "found": 0, **ends}
    assert ends["went on in silence"], "Trainer got better: say so where these figures are quoted"
