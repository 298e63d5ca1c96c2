"""Ranks that would compute in different types are refused, with the hosts that differ."""

from types import SimpleNamespace

import pytest

from utils.cluster.launch import LaunchFacts
from utils.config.errors import UnfitClusterError
from utils.runs import startup

LAUNCH = LaunchFacts(rank=0, world_size=2, strategy="ddp", hosts=("n1", "n2"), device="cpu")


def settings(bf16: bool, why: str) -> SimpleNamespace:
    values = {"bf16": bf16}
    return SimpleNamespace(values=type("Values", (dict,), {"sources": {"bf16": why}})(values))


@pytest.mark.parametrize("other", ["False (this CPU has no AMX)", "True (this CPU has AMX)"])
def test_hosts_that_decide_differently_are_refused(monkeypatch, other):
    own = settings(True, "this CPU has AMX")
    monkeypatch.setattr(startup, "gathered", lambda value: [value, other])
    if other.startswith("True"):
        startup.check_same_precision(own, LAUNCH)
        return
    message = r"bf16 is True \(this CPU has AMX\) on n1 .* False \(this CPU has no AMX\) on n2"
    with pytest.raises(UnfitClusterError, match=message):
        startup.check_same_precision(own, LAUNCH)
