"""Runs in fp8, emulated on the CPU: two processes and one."""

import pytest
import tiny
from launching import run_processes

pytest.importorskip("torchao")
pytestmark = pytest.mark.slow
FP8 = {"fp8": "true", "bf16": True, "use_cpu": True, "learning_rate": 1e-3}
ONE_ROW = {"per_device_train_batch_size": 1}


# FSDP2 gathers weights in bf16, so one more rounding comes before that to fp8.
@pytest.mark.parametrize(("name", "within"), [("fsdp2", 1e-3), ("multi_gpu", 1e-5)])
def test_two_processes_equal_one(name, within, pretraining, pretrained, tmp_path):
    settings = FP8 | ONE_ROW
    alone, run = pretrained(tmp_path / "alone", **settings), tmp_path / "run"
    shown = run_processes(name, "pretrain.py", pretraining(run, **settings)).succeeded()
    assert "fp8: rowwise, 7 linear layers; in bf16: the last layer; 7 of the first" in shown
    assert ("FSDP2 gathers weights in bf16" in shown) == (name == "fsdp2")
    assert tiny.losses(run) == pytest.approx(tiny.losses(alone), abs=within)
