"""ZeRO checkpoints that another number of ranks wrote are converted, or refused with advice."""

from types import SimpleNamespace

import pytest
import torch

from utils.checkpoints.files import Manifest, write_manifest
from utils.config.errors import StorageError
from utils.training import zero_resharding
from utils.training.zero_resharding import loadable_checkpoint, repair_stage_3


def trainer_of(world_size: int) -> SimpleNamespace:
    """Return a stand-in for a Trainer with DeepSpeed's engine at stage 2."""
    plugin = SimpleNamespace(deepspeed_config={})
    return SimpleNamespace(
        is_deepspeed_enabled=True,
        args=SimpleNamespace(world_size=world_size),
        accelerator=SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)),
        model_wrapped=SimpleNamespace(_config=SimpleNamespace(), zero_optimization_stage=lambda: 2),
    )


def test_other_ranks_load_from_a_directory_that_is_gone_afterwards(tmp_path, monkeypatch):
    """Rank 0 once deleted the directory while other ranks were still reading the scheduler."""
    checkpoint = tmp_path / "checkpoint-3"
    (checkpoint / "global_step3").mkdir(parents=True)
    (checkpoint / "scheduler.pt").write_text("schedule")
    write_manifest(checkpoint, Manifest("run", 2, "zero2", 8, step=3, samples=24, tokens=1))
    monkeypatch.setattr(zero_resharding, "CONVERTER", "raise SystemExit('no room')")
    with loadable_checkpoint(trainer_of(2), str(checkpoint)) as loadable:
        assert loadable == str(checkpoint), "as many ranks load the checkpoint itself"
    with (
        pytest.raises(StorageError, match=r"for 4 ranks: no room\. 2 ranks resume"),
        loadable_checkpoint(trainer_of(4), str(checkpoint)),
    ):
        pass
    program = "import sys, pathlib; pathlib.Path(sys.argv[4]).mkdir()"  # in place of DeepSpeed's
    monkeypatch.setattr(zero_resharding, "CONVERTER", program)
    scratch = checkpoint.with_name("resharded.checkpoint-3")
    (scratch / "of a start that was killed").touch()
    before = sorted(path.name for path in checkpoint.rglob("*"))
    trainer, there_when_all_met = trainer_of(4), []
    config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    with loadable_checkpoint(trainer, str(checkpoint)) as loadable:
        assert loadable == str(scratch)
        assert sorted(path.name for path in scratch.iterdir()) == ["global_step3", "scheduler.pt"]
        assert config["checkpoint"]["load_universal"]
        assert trainer.model_wrapped._config.load_universal_checkpoint
        monkeypatch.setattr(
            zero_resharding, "gathered", lambda _: there_when_all_met.append(scratch.exists())
        )
    assert there_when_all_met == [True]
    assert not scratch.exists()
    assert not config["checkpoint"]["load_universal"]
    assert sorted(path.name for path in checkpoint.rglob("*")) == before


def test_stage_3_gets_each_groups_settings_and_a_step_of_its_own(tmp_path):
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": [one]} for one in parameters], weight_decay=0.1)
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
    assert [group["params"][0] for group in optimizer.param_groups] == parameters
    optimizer.state[parameters[0]]["step"] += 1
    assert optimizer.state[parameters[1]]["step"] == 3
