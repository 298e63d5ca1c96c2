"""Proof 3: any damage to a file of a checkpoint is found before the file is loaded."""

import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import stock_trainer
from launching import run_processes

import pretrain
import sft_train
from utils.checkpoints.discovery import resume_point
from utils.checkpoints.files import MANIFEST
from utils.checkpoints.record import RunRecord

pytestmark = pytest.mark.slow
EXHAUSTIVE = pytest.mark.exhaustive

LORA = {"use_peft": "true", "lora_r": 4, "lora_target_modules": "all-linear"}
SAVES = {"max_steps": 4, "save_steps": 2}
KINDS = ["one rank", "LoRA", "2-rank DDP", "2-rank FSDP2", "2-rank ZeRO-2"]
CONFIGS = {"2-rank DDP": "multi_gpu", "2-rank FSDP2": "fsdp2", "2-rank ZeRO-2": "zero2"}


Damage = Callable[[Path], None]


def rewritten(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def flipped_bit(share: float) -> Damage:
    """Flip one bit at the position `share` (0 to 1) of the file."""

    def flip(content: bytes) -> bytes:
        place = min(int(len(content) * share), len(content) - 1)
        return content[:place] + bytes([content[place] ^ 1 << 3]) + content[place + 1 :]

    return rewritten(flip)


def zeroed_block(content: bytes) -> bytes:
    """Zero the last 64 bytes, as if a page was lost."""
    zeros = bytes(min(64, len(content)))
    if content.endswith(zeros):
        zeros = b"\xff" * len(zeros)
    return content[: -len(zeros)] + zeros


def linked(path: Path) -> None:
    """Replace the file by a link to the same contents elsewhere."""
    elsewhere = path.parents[2] / "elsewhere"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def of_another_step(path: Path) -> None:
    """Replace the file by the same file of the previous checkpoint."""
    whole = next(parent for parent in path.parents if parent.name.startswith("checkpoint-"))
    other = next(
        folder for folder in sorted(whole.parent.glob("checkpoint-*")) if folder.name != whole.name
    )
    name = str(path.relative_to(whole)).replace(
        f"global_step{whole.name.split('-')[1]}", f"global_step{other.name.split('-')[1]}"
    )
    shutil.copyfile(other / name, path)


def swapped(path: Path) -> None:
    """Exchange the file with another file of the same checkpoint."""
    content = path.read_bytes()
    other = next(
        candidate
        for candidate in sorted(path.parent.iterdir())
        if candidate.is_file() and candidate.name != MANIFEST and candidate.read_bytes() != content
    )
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


DAMAGES: dict[str, Damage] = {
    "emptied": rewritten(lambda content: content[:0]),
    "cut in half": rewritten(lambda content: content[: len(content) // 2]),
    "a byte short": rewritten(lambda content: content[:-1]),
    "a byte long": rewritten(lambda content: content + b"\0"),
    "a bit flipped at the start": flipped_bit(0),
    "a bit flipped in the middle": flipped_bit(0.5),
    "a bit flipped at the end": flipped_bit(1),
    "a block lost": rewritten(zeroed_block),
    "deleted": Path.unlink,
    "made a link": linked,
    "taken from another step": of_another_step,
    "swapped with a neighbour": swapped,
}


def cases(checkpoint: Path) -> Iterator[tuple[str, str]]:
    """Yield (file, damage) for each file of a checkpoint and each damage that changes it.

    Another step's file is no damage if the file is equal at every step. An empty file has no bit to
    flip.
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
    """Make a run with two checkpoints in each layout."""
    kind, run = request.param, tmp_path / "trained"
    if kind == "one rank":
        pretrain.main(pretraining(run, **SAVES))
        return run
    if kind == "LoRA":
        sft_train.main(fine_tuning(run, **SAVES, **LORA))
    else:
        argv = pretraining(run, **SAVES, per_device_train_batch_size=1)
        done = run_processes(CONFIGS[kind], "pretrain.py", argv)
        assert done.returncode == 0, done.stdout[-4000:]
    return run


def test_every_damage_is_found_and_the_checkpoint_before_is_taken(
    trained, tmp_path, caplog, figures, request
):
    run_id = RunRecord(trained).run_id
    missed: list[tuple[str, str]] = []
    damages = list(cases(trained / "checkpoint-4"))
    files = {name for name, _ in damages}
    assert {MANIFEST, "trainer_state.json"} < files
    for name, kind in damages:
        copy = tmp_path / "copy" / "run"
        for step in (2, 4):
            shutil.copytree(trained / f"checkpoint-{step}", copy / f"checkpoint-{step}")
        DAMAGES[kind](copy / "checkpoint-4" / name)
        caplog.clear()
        taken = resume_point(copy, run_id)
        # A directory without a manifest is not a checkpoint. All other damage must be reported.
        aside = "incomplete" if (name, kind) == (MANIFEST, "deleted") else "damaged"
        said = f"set aside as {aside}.checkpoint-4" in caplog.text and (
            aside == "incomplete" or Path(name).name in caplog.text
        )
        if taken != copy / "checkpoint-2" or not said:
            missed.append((name, kind))
        shutil.rmtree(copy.parent)
    assert resume_point(trained, run_id) == trained / "checkpoint-4", "the undamaged one is whole"
    proof = figures("damage").setdefault(request.node.callspec.params["trained"], {})
    found = len(damages) - len(missed)
    proof |= {"files": len(files), "damages": len(damages), "found": found}
    assert not missed


@pytest.mark.parametrize("kinds", [["deleted"], pytest.param(list(DAMAGES), marks=EXHAUSTIVE)])
def test_plain_trainer_takes_the_highest_number_as_it_is(kinds, models, tmp_path, figures):
    """Count how transformers' Trainer with its own resume ends after the same damages."""
    whole = tmp_path / "whole"
    stock_trainer.make_trainer(models, whole, max_steps=4).train()
    ends = Counter({"resumed silently": 0, "next start failed": 0})
    with warnings.catch_warnings(action="ignore"):
        for name, kind in cases(whole / "checkpoint-3"):
            if kind not in kinds:
                continue
            run = tmp_path / "copy" / "run"
            for step in (2, 3):
                shutil.copytree(whole / f"checkpoint-{step}", run / f"checkpoint-{step}")
            DAMAGES[kind](run / "checkpoint-3" / name)
            trainer = stock_trainer.make_trainer(models, run, max_steps=4)
            try:
                trainer.train(resume_from_checkpoint=True)
                ends["resumed silently"] += 1
            except Exception:  # any exception counts: the user sees a traceback
                ends["next start failed"] += 1
            shutil.rmtree(run.parent)
    figures("damage")["plain Trainer"] = {"damages": ends.total(), "found": 0, **ends}
    assert ends["resumed silently"], "Trainer got better: say so where these figures are quoted"
