"""A GPU that runs at half its speed says so."""

import logging
from types import SimpleNamespace

import pytest

from utils.cluster.launch import LaunchFacts
from utils.config.errors import ConfigurationError
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


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CC", "CXX", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(variable, raising=False)


def to_be_compiled(**run):
    return SimpleNamespace(model=SimpleNamespace(compile=True), run=SimpleNamespace(**run))


@pytest.mark.usefixtures("no_compiler")
def test_a_dry_run_on_a_login_node_needs_no_compiler(caplog):
    launch = LaunchFacts(0, 1, "single", ("n",), "cpu")
    with caplog.at_level(logging.INFO, "utils.planning.plan"):
        assert _compiled(to_be_compiled(dry_run=True), launch)
    assert "the compute node needs a C++ compiler" in caplog.text


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(("dry_run", "device"), [(False, "cpu"), (True, "cuda")])
def test_where_it_trains_a_compiler_is_needed(dry_run, device):
    with pytest.raises(ConfigurationError, match=r"needs a C\+\+ compiler"):
        _compiled(to_be_compiled(dry_run=dry_run), LaunchFacts(0, 1, "single", ("n",), device))
