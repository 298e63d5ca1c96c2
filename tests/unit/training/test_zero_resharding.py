"""ZeRO checkpoints of another number of ranks: converted aside, or a refusal that says the way."""

import pytest
import torch

from utils.checkpoints.files import Manifest, write_manifest
from utils.config.errors import StorageError
from utils.training import zero_resharding
from utils.training.zero_resharding import repair_stage_3, universal_checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "checkpoint-3"
    (directory / "global_step3").mkdir(parents=True)
    (directory / "scheduler.pt").write_text("schedule")
    facts = {
        "run_id": "run", "step": 3, "samples": 24, "tokens": 1, "world_size": 2,
        "strategy": "zero2", "global_batch_size": 8, "fingerprints": {}, "versions": {},
        "time": "now", "files": {},
    }  # fmt: skip
    write_manifest(directory, Manifest(**facts))
    return directory


@pytest.fixture
def convert(monkeypatch):
    """Stand in for DeepSpeed's converter: a program of its own process."""

    def stand_in(program: str) -> None:
        monkeypatch.setattr(zero_resharding, "CONVERTER", program)

    return stand_in


def test_other_ranks_load_from_a_directory_that_is_gone_afterwards(
    checkpoint, convert, monkeypatch
):
    """Rank 0 once took it away while others were still reading the scheduler."""
    convert("raise SystemExit('not needed')")
    with universal_checkpoint(checkpoint, 2) as directory:
        assert directory is None, "as many ranks load the checkpoint itself"
    convert("import sys, pathlib; pathlib.Path(sys.argv[4]).mkdir()")
    leftover = checkpoint.with_name("resharded.checkpoint-3")
    leftover.mkdir()
    (leftover / "of a start that was killed").touch()
    before = sorted(path.name for path in checkpoint.rglob("*"))
    there_when_all_met = []
    with universal_checkpoint(checkpoint, 4) as directory:
        assert directory == leftover
        assert sorted(path.name for path in directory.iterdir()) == ["global_step3", "scheduler.pt"]
        monkeypatch.setattr(
            zero_resharding, "gathered", lambda _: there_when_all_met.append(leftover.exists())
        )
    assert there_when_all_met == [True]
    assert not leftover.exists()
    assert sorted(path.name for path in checkpoint.rglob("*")) == before


def test_a_conversion_that_fails_says_what_continues(checkpoint, convert):
    convert("raise SystemExit('no room')")
    with (
        pytest.raises(StorageError, match=r"for 4 ranks: no room\. 2 ranks resume"),
        universal_checkpoint(checkpoint, 4),
    ):
        pass


def test_stage_3_gets_each_groups_settings_and_a_step_of_its_own(tmp_path):
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": [parameters[0]]}, {"params": [parameters[1]]}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
    shared = torch.tensor(3.0)
    for parameter in parameters:
        optimizer.state[parameter] = {"step": shared}
    saved = [{"weight_decay": 0.1, "lr": 0.5, "params": [0]}, {"weight_decay": 0.0, "lr": 0.25}]
    state = tmp_path / "global_step3" / "zero" / "optimizer_state.pt"
    state.parent.mkdir(parents=True)
    torch.save({"optimizer_state_dict": {"param_groups": saved}}, state)
    repair_stage_3(optimizer, tmp_path)
    found = [(group["weight_decay"], group["lr"]) for group in optimizer.param_groups]
    assert found == [(0.1, 0.5), (0.0, 0.25)]
    assert [group["params"][0] is own for group, own in zip(groups, parameters, strict=True)]
    optimizer.state[parameters[0]]["step"] += 1
    assert optimizer.state[parameters[1]]["step"] == 3
