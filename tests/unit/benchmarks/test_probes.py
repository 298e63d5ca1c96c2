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
