"""DDP with gradients exchanged in bfloat16: a reference's numbers, near those of float32."""

from pathlib import Path

import pytest
import tiny
from launching import run_processes

from utils.config.errors import ConfigurationError
from utils.config.settings import parse_pretraining

HOOK = {"ddp_comm_hook": "bf16", "per_device_train_batch_size": 1}


@pytest.mark.slow
def test_gradients_are_rounded_before_the_sum_and_a_resume_is_exact(
    pretraining, pretrained, tmp_path
):
    child = Path(__file__).with_name("comm_hook_child.py")
    shown = run_processes("multi_gpu", child).succeeded()
    assert {"rank 0: as the reference", "rank 1: as the reference"} <= set(shown.splitlines())
    whole, alone = tmp_path / "whole", tmp_path / "alone"
    run_processes("multi_gpu", "pretrain.py", pretraining(whole, **HOOK)).succeeded()
    cut = tiny.copied(whole, tmp_path / "cut", step=3)
    run_processes("multi_gpu", "pretrain.py", pretraining(cut, **HOOK)).succeeded()
    tiny.assert_same_run(cut, whole)
    pretrained(alone, **HOOK)  # one process exchanges nothing
    assert tiny.losses(whole) != pytest.approx(tiny.losses(alone), abs=2e-5)
    assert tiny.losses(whole) == pytest.approx(tiny.losses(alone), abs=2e-2)


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED"])
def test_other_strategies_refuse_it(name, pretraining, tmp_path, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(ConfigurationError, match=f"bf16 .*: {name} sums .* multi_gpu"):
        parse_pretraining(pretraining(tmp_path / "run", **HOOK), "")


def test_one_process_says_that_it_exchanges_nothing(pretraining, tmp_path):
    notes = parse_pretraining(pretraining(tmp_path / "run", **HOOK), "").values.notes
    assert "ddp_comm_hook bf16 (--ddp_comm_hook) has no effect on one process" in notes
