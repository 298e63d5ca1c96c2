"""The efficiency of a speed on a device, and the result for an unknown device."""

import pytest

from benchmarks.cells.gpu import GPU_CELLS
from benchmarks.cells.kinds import TrainingCell
from benchmarks.hardware.device import data_sheet_peak
from benchmarks.hardware.efficiency import Device, efficiency
from benchmarks.hardware.flops import model_size
from benchmarks.hardware.roofline import Peaks
from benchmarks.recording.job import Outcome

CELLS = {cell.name: cell for cell in GPU_CELLS}
H200 = Device("NVIDIA H200", 989e12, Peaks(700e12, 4e12))


def outcome(cell: TrainingCell, step_s: float) -> Outcome:
    timed = cell.steps - cell.warmup_steps
    tokens = timed * cell.micro_batch_size * cell.workload.sequence_length
    return Outcome(
        window_s=timed * step_s,
        window_tokens=tokens,
        window_loss_tokens=tokens // 4,
        step_s=[9.0] * (cell.warmup_steps - 1) + [step_s] * timed,
        losses=[4.0] * cell.steps,
        first_step_s=9.0,
        peak_memory_bytes=2**30,
    )


def test_shares_of_the_peaks():
    cell = CELLS["llama_1b_pretrain"]
    found = efficiency(cell, [outcome(cell, 0.4)], H200)
    flops = model_size(cell.workload.model).flops(8192)
    speed = 2 * 8192 / 0.4
    assert found["model_flops_per_token"] == flops
    assert found["mfu"] == pytest.approx(speed * flops / 989e12, abs=1e-4)
    assert found["mfu_of_probed_peak"] == pytest.approx(speed * flops / 700e12, abs=1e-4)
    assert found["causal_mfu"] < found["mfu"]
    bounds = found["roofline_tokens_per_second"]
    assert found["roofline_share"] == pytest.approx(speed / max(bounds.values()), abs=1e-4)
    assert found["loss_tokens_per_second"] == pytest.approx(speed / 4)
    assert found["step_median_s"] == found["step_p99_s"] == 0.4  # without the warm-up


def test_nothing_is_made_up_for_an_unknown_device():
    cell = CELLS["llama_1b_pretrain"]
    found = efficiency(cell, [outcome(cell, 0.4)], Device())
    assert found["roofline_tokens_per_second"] == {}
    for name in ("mfu", "causal_mfu", "mfu_of_probed_peak", "roofline_share"):
        assert found[name] is None
    assert data_sheet_peak("NVIDIA A100-SXM4-80GB") is None
