"""A GPU that runs at half its speed says so."""

import logging
from types import SimpleNamespace

import pytest

from utils.cluster.launch import LaunchFacts
from utils.planning.plan import _compiled


@pytest.mark.parametrize(
    ("device", "strategy", "said"),
    [("cuda", "ddp", True), ("cuda", "zero3", False), ("cpu", "ddp", False)],
)
def test_what_is_not_compiled_is_said_where_it_could_be(device, strategy, said, caplog):
    settings = SimpleNamespace(model=SimpleNamespace(compile=False))
    with caplog.at_level(logging.INFO, "utils.planning.plan"):
        assert not _compiled(settings, LaunchFacts(0, 1, strategy, ("n",), device))
    assert ("--compile true is far faster" in caplog.text) == said
