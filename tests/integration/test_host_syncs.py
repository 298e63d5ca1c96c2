"""No step between two log lines reads a value from the device: a GPU would be waited for.

On a CPU nothing waits, but the same operation reads: `_local_scalar_dense`, which is what
`.item()`, `bool(tensor)` and `float(tensor)` come down to.
"""

import traceback

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.trainer_callback import CallbackHandler

import pretrain
import sft_train

pytestmark = pytest.mark.slow

READING = torch.ops.aten._local_scalar_dense.default
# Four micro-batches a step, one log at the end.
SETTINGS = {"global_batch_size": 8, "logging_steps": 100, "save_steps": 100, "max_grad_norm": 1.0}


class Readings(TorchDispatchMode):
    """Where values are read from the end of the first step to that of the last but one."""

    def __init__(self, steps: int):
        super().__init__()
        self.first, self.last, self.step = 1, steps - 1, 0
        self.places: list[str] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is READING and self.first <= self.step < self.last:
            self.places.append("".join(traceback.format_stack(limit=12)[:-1]))
        return operation(*args, **(kwargs or {}))


@pytest.fixture
def readings(monkeypatch):
    found = Readings(steps=6)
    on_step_end = CallbackHandler.on_step_end

    def watched(handler, args, state, control):
        control = on_step_end(handler, args, state, control)
        found.step = state.global_step
        return control

    monkeypatch.setattr(CallbackHandler, "on_step_end", watched)
    return found


CASES = {"pretraining": {}, "fine-tuning": {}, "lora": {"use_peft": True}}


@pytest.mark.parametrize("case", CASES)
def test_a_step_reads_nothing(case, pretraining, fine_tuning, tmp_path, readings):
    argv_of, script = (pretraining, pretrain) if case == "pretraining" else (fine_tuning, sft_train)
    with readings:
        assert script.main(argv_of(tmp_path / "run", **SETTINGS, **CASES[case])) == 0
    assert readings.step == 6
    assert not readings.places, readings.places[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("script", ["pretraining", "fine_tuning"])
@pytest.mark.parametrize("asked", [{}, {"compile": False}], ids=["compiled by default", "eager"])
def test_a_gpu_is_not_waited_for(asked, script, request, tmp_path, monkeypatch):
    """The driver's own word: what would wait raises, from the end of step 1 to that of step 5."""
    on_step_end = CallbackHandler.on_step_end

    def watched(handler, args, state, control):
        control = on_step_end(handler, args, state, control)
        if state.global_step in (1, 5):
            mode = "error" if state.global_step == 1 else "default"
            torch.cuda.set_sync_debug_mode(mode)
        return control

    monkeypatch.setattr(CallbackHandler, "on_step_end", watched)
    main = {"pretraining": pretrain.main, "fine_tuning": sft_train.main}[script]
    argv = request.getfixturevalue(script)(tmp_path / "run", **SETTINGS, bf16=True, **asked)
    try:
        assert main(argv) == 0
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tiny.starts(tmp_path / "run")[0]["compiled"] is (not asked)


def test_what_reads_is_found(pretraining, tmp_path, readings):
    """Trainer's filter of NaN losses reads each micro-batch's: 4 steps of 4, two values each."""
    argv = pretraining(tmp_path / "run", **SETTINGS, logging_nan_inf_filter=True)
    with readings:
        assert pretrain.main(argv) == 0
    assert len(readings.places) >= 4 * 4
