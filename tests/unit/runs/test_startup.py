"""Ranks that would compute in different types are refused, with the hosts that differ."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from utils.config.errors import UnfitClusterError
from utils.launch.processes import LaunchFacts
from utils.runs import start as startup

LAUNCH = LaunchFacts(rank=0, world_size=2, strategy="ddp", hosts=("n1", "n2"), device="cpu")


NO_AMX = (False, "bf16 False (this CPU has no AMX)")
AMX = (True, "bf16 True (this CPU has AMX)")


def settings(bf16: bool, shown: str) -> SimpleNamespace:
    values = type("Values", (dict,), {"shown": lambda _, name: {"bf16": shown}[name]})
    return SimpleNamespace(values=values(bf16=bf16))


def test_hosts_that_decide_differently_are_refused(monkeypatch):
    monkeypatch.setattr(startup, "gathered", lambda value: [value, NO_AMX])
    message = r"bf16 True \(this CPU has AMX\) on n1 .* False \(this CPU has no AMX\) on n2"
    with pytest.raises(UnfitClusterError, match=message):
        startup.check_same_precision(settings(*AMX), LAUNCH)
    startup.check_same_precision(settings(False, "bf16 False (default)"), LAUNCH)
    monkeypatch.setattr(startup, "gathered", lambda value: 1 / len(value[:0]))
    startup.check_same_precision(settings(*AMX), replace(LAUNCH, world_size=1, hosts=("n1",)))
