"""Committed checkpoints of a run without a model."""

import json
from pathlib import Path

from utils.checkpoints.files import Manifest
from utils.checkpoints.store import Checkpoints

RUN = "run-1"
FACTS = Manifest(
    run_id=RUN,
    world_size=1,
    strategy="single",
    global_batch_size=8,
    fingerprints={"data": {"train": ["abc"]}},
    versions={"torch": "2", "flash-attn": None},
)
FILES = {
    "model.safetensors": b"weights" * 1000,
    "optimizer.pt": b"moments" * 2000,
    "trainer_state.json": b'{"global_step": 0}',
    "pytorch_model_fsdp_0/__0_0.distcp": b"shard",
}


def store(output_dir: Path) -> Checkpoints:
    return Checkpoints(output_dir, FACTS, 0, keep=None, estimated_bytes=1000)


def write_files(output_dir: Path, step: int, best: int | None = None) -> Path:
    """Write an uncommitted checkpoint as Trainer does."""
    directory = output_dir / f"checkpoint-{step}"
    for name, content in FILES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content + str(step).encode())
    if best is not None:
        state = {"best_model_checkpoint": f"/moved/run/checkpoint-{best}"}
        (directory / "trainer_state.json").write_text(json.dumps(state))
    return directory


def commit(output_dir: Path, *steps: int, best: int | None = None) -> None:
    checkpoints = store(output_dir)
    for step in steps:
        write_files(output_dir, step, best)
        checkpoints.commit(step, tokens=100 * step)


def names(output_dir: Path) -> list[str]:
    return sorted(path.name for path in output_dir.iterdir())
