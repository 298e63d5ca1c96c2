"""What a device reaches at best, asked of this CPU."""

import pytest

from benchmarks.hardware import probes


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(probes, "SHORTEST_S", 0.0)
    monkeypatch.setattr(probes, "AGAIN_S", 0.0)


def test_the_peak_is_that_of_the_best_shape():
    shapes = [(8, 8, 8), (256, 256, 256)]
    found = probes.probe_products(shapes, "cpu")
    assert found["shape"] == [256, 256, 256]  # a call costs more than the smaller product
    assert found["flops_per_second"] > 0
    assert [row[:3] for row in found["shapes"]] == [list(shape) for shape in shapes]


def test_flops_and_bytes_are_counted_once_for_each_call(monkeypatch):
    monkeypatch.setattr(probes, "per_call", lambda _call, _shortest_s: 0.5)
    found = probes.probe_products([(2, 3, 4)], "cpu")
    assert found["flops_per_second"] == 2 * 2 * 3 * 4 / 0.5
    assert probes.probe_copy(1000, "cpu")["bytes_per_second"] == 2 * 1000 / 0.5
