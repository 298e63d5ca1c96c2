"""A run with damaged records resumes bit for bit, or prints a command that works."""

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

import chat
import pretrain
from utils.checkpoints.files import CONFIG, PROVENANCE, read_manifest, write_manifest
from utils.checkpoints.store import Checkpoints
from utils.config.errors import ConfigurationError
from utils.host import run_lock
from utils.observe.run_state import read_status

pytestmark = pytest.mark.slow

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(pretrained, tmp_path_factory) -> Path:
    """Run six uninterrupted steps with checkpoints at the third and the last."""
    return pretrained(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def killed(whole, tmp_path, monkeypatch) -> Path:
    """Make a copy of the same run that looks killed after its third step, with its lock."""
    monkeypatch.setattr(run_lock, "WATCH_S", 0.1)
    return tiny.cut(shutil.copytree(whole, tmp_path / "run"), 3)


def changed(name: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda run: (run / name).write_bytes(change((run / name).read_bytes()))


def entry(**fields: object) -> Damage:
    """Change fields in the first start of provenance.json."""

    def change(content: bytes) -> bytes:
        record = json.loads(content)
        record["starts"][0] |= fields
        return json.dumps(record).encode()

    return changed(PROVENANCE, change)


def gone(name: str) -> Damage:
    return lambda run: (run / name).unlink(missing_ok=True)


def directory(name: str) -> Damage:
    return lambda run: (gone(name)(run), (run / name / "x").mkdir(parents=True))


# Each kind of damage, and the log's message about it.
DAMAGES: dict[str, tuple[list[Damage], list[str]]] = {
    "cut off": (
        [changed(name, lambda content: content[:-9]) for name in (PROVENANCE, "metrics.jsonl")],
        ["provenance.json is not as earlier", "metrics.jsonl: 1 damaged line skipped"],
    ),
    "gone": (
        [gone(PROVENANCE), gone(CONFIG), gone("metrics.jsonl")],
        ["provenance.json cannot be read (No such", "config.yaml cannot be read (No such"],
    ),
    "zeros": (
        [changed(name, lambda _: bytes(512)) for name in (PROVENANCE, CONFIG, ".lock/owner-1")]
        + [changed("metrics.jsonl", lambda content: content[:100] + bytes(900) + content[1000:])],
        ["provenance.json is not as earlier", "config.yaml is not as the first", "line skipped"],
    ),
    "directories": (
        [directory(name) for name in (PROVENANCE, CONFIG, "metrics.jsonl", "STOP")]
        + [directory(".lock/owner-1")],
        ["Is a directory", "STOP is a directory", "damaged.metrics.jsonl"],
    ),
    "a bit of the id": (
        [changed(PROVENANCE, lambda content: content.replace(b'"run_id": "', b'"run_id": "x'))],
        ["provenance.json is not as earlier starts wrote it"],
    ),
    "other values": (
        [entry(script="pretrail.py", tokenizer_sha256="0"),
         changed(CONFIG, lambda content: content.replace(b"learning_rate: 0.01", b"seed: 1"))],
        ["provenance.json is not as earlier", "config.yaml is not as the first"],
    ),
    "other types": (
        [entry(launch=[1], slurm="job", argv={"a": 1}, time=7),
         changed(CONFIG, lambda _: b"[1, 2]")],
        ["provenance.json is not as earlier", "config.yaml is not as the first"],
    ),
    "odd locks": (
        [changed(".lock/owner-1", lambda _: b'{"owner": [], "left": 1}'),
         changed("metrics.jsonl", lambda content: b"\xff\n[1]\n" + content + b'{"event": "tr')],
        ["a process that left no name", "metrics.jsonl: 3 damaged lines skipped"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_run_with_damaged_files_resumes_to_the_bit(
    name, whole, killed, pretraining, pretrained, caplog
):
    damages, said = DAMAGES[name]
    config = (killed / CONFIG).read_bytes()
    first = tiny.starts(killed)[0]
    for damage in damages:
        damage(killed)
    read_status(killed, {})
    assert pretrain.main(pretraining(killed, dry_run="true")) == 0
    pretrained(killed)
    for words in said:
        assert words in caplog.text
    assert tiny.weights(killed) == tiny.weights(whole)
    assert tiny.losses(killed)[-3:] == tiny.losses(whole)[-3:]
    assert (killed / CONFIG).read_bytes() == config
    restored, last = tiny.starts(killed)
    assert (restored, last["resumed_from"]) == (first, f"{killed}/checkpoint-3")
    assert read_status(killed, {}).state == "finished"
    again = json.loads((killed / PROVENANCE).read_text())["run_id"]
    assert again == json.loads((whole / PROVENANCE).read_text())["run_id"]


def test_a_save_restores_the_record_before_it_copies_it(pretrained, tmp_path, monkeypatch, caplog):
    """Otherwise a file that was damaged during training would replace its last intact copy."""
    run, commit = tmp_path / "run", Checkpoints.commit

    def commit_and_damage(checkpoints: Checkpoints, step: int, *, tokens: int) -> None:
        commit(checkpoints, step, tokens=tokens)
        if step == 3:
            (run / CONFIG).write_bytes(b"\0\0")
            (run / PROVENANCE).write_bytes(b"{")

    monkeypatch.setattr(Checkpoints, "commit", commit_and_damage)
    pretrained(run)
    assert caplog.text.count("It is restored") == 2
    for step in (3, 6):
        copies = run / f"checkpoint-{step}" / "run"
        assert (copies / CONFIG).read_bytes() == (run / CONFIG).read_bytes()
        assert (copies / PROVENANCE).read_bytes() == (run / PROVENANCE).read_bytes()


def without_copies(checkpoint: Path) -> None:
    """Make a checkpoint look like one of an older version, without copies of the records."""
    shutil.rmtree(checkpoint / "run")
    manifest = read_manifest(checkpoint)
    kept = {name: file for name, file in manifest.files.items() if not name.startswith("run/")}
    write_manifest(checkpoint, dataclasses.replace(manifest, files=kept))


def advice(argv: list[str], pattern: str, said: str, main=pretrain.main) -> str:
    """Return what a refusal advises: the group of `pattern` in its message."""
    with pytest.raises(ConfigurationError, match=said) as refused:
        main(argv)
    found = re.search(pattern, str(refused.value))
    assert found is not None, refused.value
    return found[1]


@pytest.mark.parametrize("name", [PROVENANCE, CONFIG])
def test_what_the_message_says_works_where_there_is_no_copy(
    name, killed, pretraining, pretrained, tmp_path
):
    (killed / name).write_bytes(b"{")
    without_copies(killed / "checkpoint-3")
    argv, said = pretraining(killed), "no checkpoint here has a whole copy"
    weights = advice(argv, r"--init_from (\S+) with another --output_dir", said)
    pretrained(tmp_path / "fresh", init_from=weights, model_config=None, max_steps=1)
    shutil.rmtree(killed / "checkpoint-3")
    subprocess.run(shlex.split(advice(argv, "`(mv .*?)`", said)), check=True)
    pretrained(killed, max_steps=1)


def test_a_damaged_final_is_written_again_as_the_message_says(
    whole, pretraining, pretrained, tmp_path
):
    run = shutil.copytree(whole, tmp_path / "my run")
    weights = tiny.weights(run)
    (run / "final" / "config.json").write_bytes(b"{")
    (run / "final" / "model.safetensors").write_bytes(weights[:-9])
    asked = [str(run), "--prompt", "t1", "--device", "cpu"]
    next_run = pretraining(tmp_path / "next", init_from=run, model_config=None, dry_run="true")
    for argv, main in ((asked, chat.main), (next_run, pretrain.main)):
        command = advice(argv, "`(rm .*?)`", "start the run again", main)
    subprocess.run(shlex.split(command), check=True)
    assert tiny.weights(pretrained(run)) == weights
