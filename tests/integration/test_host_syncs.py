"""No step between two log lines reads a value from the device: this would wait for a GPU.

On a CPU nothing waits, but the same operations read values: `_local_scalar_dense` (the operation
behind `.item()`, `bool(tensor)` and `float(tensor)`), operations with a result whose length depends
on values, and copies to the host. With our settings Trainer reads nothing; with its own it would
read each loss, to filter NaN, and each step's loss tokens.
"""

import ast
import traceback
from pathlib import Path

import pytest
import tiny
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.trainer_callback import CallbackHandler

from utils.callbacks.metrics import MixtureShares

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
READING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"}
COPYING = {"tolist", "numpy", "cpu"}
# Allowed reads: values already on the host (a loader's batch, figures that have arrived), and the
# attention that only CPUs use.
ON_THE_HOST = {
    ("loader.py", "model_inputs"), ("nonfinite.py", "_read"),
    ("per_document.py", "per_document_sdpa"),
}  # fmt: skip
# Functions that may wait for the device: before evaluations and saves, around a profile, in logs.
WAITING = {
    "utils/callbacks/metrics.py: on_step_end", "utils/callbacks/nonfinite.py: _read",
    "utils/callbacks/profiler.py: _wait", "utils/callbacks/metrics.py: _product_s",
}  # fmt: skip
# Four micro-batches per step, and one log at the end.
SETTINGS = {"global_batch_size": 8, "logging_steps": 100, "save_steps": 100, "max_grad_norm": 1.0}


class Readings(TorchDispatchMode):
    """Records where values are read, from the end of step 1 to the end of the last step but one."""

    def __init__(self, steps: int):
        super().__init__()
        self.first, self.last, self.step = 1, steps - 1, 0
        self.places: list[str] = []
        self.names: list[str] = []

    def note(self, name: str) -> None:
        stack = traceback.extract_stack(limit=14)[:-2]
        known = {(Path(frame.filename).name, frame.name) for frame in stack[-2:]} & ON_THE_HOST
        if self.first <= self.step < self.last and not known:
            self.names.append(name)
            self.places.append("".join(traceback.format_list(stack)))

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        if name in READING or (name.startswith("index") and _has_mask(args)):
            self.note(name)
        return operation(*args, **(kwargs or {}))


def _has_mask(args) -> bool:
    """Check for a boolean tensor as index: the length of the result then depends on values."""
    indices = args[1] if isinstance(args[1], (list, tuple)) else []
    return any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)


class Copies(TorchFunctionMode):
    """Reports copies to the host to `readings`; on a CPU, copies run no operation of torch."""

    def __init__(self, readings: Readings):
        super().__init__()
        self.readings = readings

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        awaited = name == "to" and args[1:2] == ("cpu",) and not kwargs.get("non_blocking")
        if name in COPYING or awaited:
            self.readings.note(name)
        return function(*args, **kwargs)


@pytest.fixture
def readings(monkeypatch):
    found = Readings(steps=6)
    on_step_end = CallbackHandler.on_step_end

    def watched(handler, args, state, control):
        control = on_step_end(handler, args, state, control)
        found.step = state.global_step
        return control

    monkeypatch.setattr(CallbackHandler, "on_step_end", watched)
    with Copies(found), found:
        yield found


CASES = {"pretraining": {"ema_decay": 0.9}, "fine-tuning": {}, "lora": {"use_peft": True}}


@pytest.mark.parametrize("case", CASES)
def test_a_step_reads_nothing(case, pretrained, fine_tuned, workspace, tmp_path, readings):
    settings, train = SETTINGS | CASES[case], fine_tuned
    if case == "pretraining":
        settings["train_data"] = [f"{workspace}/documents=2", f"{workspace}/heldout=1"]
        train = pretrained
    train(tmp_path / "run", **settings)
    assert readings.step == 6
    assert not readings.places, readings.places[0]


def test_the_device_is_waited_for_at_known_places_alone():
    """Compare the functions that wait with a list, because no CPU test runs them."""
    found = set()
    for path in sorted((ROOT / "utils").rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and any(
                isinstance(node, ast.Attribute) and node.attr == "synchronize"
                for node in ast.walk(function)
            ):
                found.add(f"{path.relative_to(ROOT)}: {function.name}")
    assert found == WAITING


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("train", ["pretrained", "fine_tuned"])
@pytest.mark.parametrize("asked", [{}, {"compile": False}], ids=["compiled by default", "eager"])
def test_a_gpu_is_not_waited_for(asked, train, request, tmp_path, monkeypatch):
    """Let the driver raise at any wait from the end of step 1 to the end of step 5."""
    on_step_end = CallbackHandler.on_step_end

    def watched(handler, args, state, control):
        control = on_step_end(handler, args, state, control)
        if state.global_step in (1, 5):
            mode = "error" if state.global_step == 1 else "default"
            torch.cuda.set_sync_debug_mode(mode)
        return control

    monkeypatch.setattr(CallbackHandler, "on_step_end", watched)
    try:
        request.getfixturevalue(train)(tmp_path / "run", **SETTINGS, bf16=True, **asked)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tiny.starts(tmp_path / "run")[0]["compiled"] is (not asked)


def test_what_reads_is_found(pretrained, tmp_path, readings, monkeypatch):
    """Find the reads of Trainer's NaN filter (two per micro-batch) and those of a callback."""

    def reads(self, *_, **__):
        """Read a value once in each of the steps 2 to 5."""
        value = torch.ones(2)
        value[0].item(), value.tolist(), value.cpu(), value.to("cpu"), value.nonzero()
        assert value[value > 2].numel() == 0

    monkeypatch.setattr(MixtureShares, "on_step_end", reads)
    pretrained(tmp_path / "run", **SETTINGS, logging_nan_inf_filter=True)
    counted = {name: readings.names.count(name) for name in readings.names}
    assert counted.pop("_local_scalar_dense") >= 4 * 4 + 4
    assert counted == dict.fromkeys(("tolist", "cpu", "to", "nonzero", "index"), 4)
