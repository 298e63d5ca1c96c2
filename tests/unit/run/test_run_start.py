"""Starts without progress, and ranks that would compute in different types, are refused."""

from types import SimpleNamespace

import pytest

from utils.config.errors import (
    ConfigurationError,
    ExitCode,
    NoProgressError,
    UnfitClusterError,
)
from utils.config.own_code import OwnCode
from utils.config.precision import CHOSEN
from utils.launch.processes import LaunchFacts
from utils.run import preflight
from utils.run.preflight import check_progress
from utils.run.start import report_strategy

JOB = {"job_id": "42", "cluster": "c", "restart_count": "3"}


def start(checkpoint, **changes):
    return {"resumed_from": checkpoint, "slurm": JOB | changes}


AT_10 = [start("/old/name/checkpoint-10", restart_count=str(count)) for count in range(3)]


def test_three_starts_at_one_checkpoint_are_enough():
    with pytest.raises(
        NoProgressError, match=r"job 42 began 3 times at checkpoint-10 .*--time.*save_steps"
    ) as caught:
        check_progress(AT_10, "/run/checkpoint-10", JOB)
    assert caught.value.exit_code == ExitCode.NO_PROGRESS

    with pytest.raises(NoProgressError, match="at step 0"):
        check_progress([start(None)] * 3, None, JOB)


def test_others_may_start():
    for starts, job in (
        ([*AT_10[:2], start("/run/checkpoint-9")], JOB),
        ([*AT_10[:2], start("/run/checkpoint-10", job_id="41")], JOB),
        ([*AT_10[:2], {"resumed_from": "/run/checkpoint-10", "slurm": None}], JOB),
        (AT_10, JOB | {"job_id": "43", "restart_count": "0"}),
        ([*AT_10[:2], start("checkpoint-10", restart_in_job="1")], JOB),
        (AT_10, JOB | {"restart_in_job": "1"}),
        (AT_10, None),
    ):
        check_progress(starts, "/run/checkpoint-10", job)


LAUNCH = LaunchFacts(rank=0, world_size=2, strategy="ddp", hosts=("n1", "n2"), device="cpu")


def settings(bf16: bool, shown: str) -> SimpleNamespace:
    values = type("Values", (dict,), {"shown": lambda _, name: {"bf16": shown}.get(name, name)})
    own_code = OwnCode([], "my.py:f")
    return SimpleNamespace(values=values(bf16=bf16, activation_checkpointing=None),
                           own_code=own_code)  # fmt: skip


def test_ranks_that_decide_differently_or_have_other_own_code_are_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text("")
    amx, no_amx = settings(True, "bf16 True (fast)"), settings(False, "bf16 False (slow)")
    auto = {"activation_checkpointing": ("auto", "activation_checkpointing auto")}

    def check(own: SimpleNamespace, values: dict | None = None, digests: dict | None = None):
        """Let the second rank have the settings of no_amx, with these changes."""
        theirs = {name: (no_amx.values[name], no_amx.values.shown(name)) for name in CHOSEN}
        other = theirs | (values or {}), {**own.own_code.digests(), **(digests or {})}
        monkeypatch.setattr(preflight, "gathered", lambda value: [value, other])
        preflight.check_same_start(own, LAUNCH)

    check(no_amx)
    check(settings(False, "bf16 False (default)"))
    message = r"bf16 True \(fast\) on n1, bf16 False \(slow\) on n2"
    with pytest.raises(UnfitClusterError, match=message):
        check(amx)
    with pytest.raises(UnfitClusterError, match="activation_checkpointing auto on n2: set "):
        check(no_amx, auto)
    with pytest.raises(ConfigurationError, match="n2 and n1 have different files"):
        check(no_amx, digests={"loss": {}})


def test_where_the_launch_is_not_as_the_recipe_says_one_line_says_so(caplog):
    caplog.set_level("INFO")

    def said(strategy: str, launched: str, ranks: int, copies=1, **environment: str) -> str:
        caplog.clear()
        shown = f"strategy {strategy} (a.yaml:3)"
        values = SimpleNamespace(shown=lambda _: shown, environment=environment)
        settings = SimpleNamespace(run=SimpleNamespace(strategy=strategy), values=values)
        report_strategy(settings, LaunchFacts(0, ranks, launched, (), "cpu", copies))
        return "".join(f"{each.levelname} {each.getMessage()}" for each in caplog.records)

    assert said("auto", "ddp", 2) == said("fsdp2", "fsdp2", 2) == said("multi_gpu", "ddp", 2) == ""
    assert said("single_gpu", "single", 1) == said("cpu", "ddp", 2) == ""
    path = "accelerate_configs/zero3.yaml"
    for strategy in ("fsdp2", path):
        assert said(strategy, "ddp", 2) == (
            f"WARNING strategy {strategy} (a.yaml:3) has no effect: the launch decides, by ddp"
        )
    assert said(path, "zero3", 2) == ""
    assert said("fsdp2", "single", 1) == (
        "INFO strategy fsdp2 (a.yaml:3) has no effect: there is one process"
    )
    assert said("hsdp", "fsdp2", 16).endswith("has no effect: the launch decides, by fsdp2")
    hybrid = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "LOCAL_WORLD_SIZE": "4"}
    hybrid["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    line = "INFO hsdp: 4 x the states, each sharded over 4 ranks"
    assert said("hsdp", "fsdp2", 16, 4, **hybrid) == line
    assert said("fsdp2", "fsdp2", 16, 4, **hybrid).endswith("the launch decides, by hsdp")
    assert said("hsdp", "fsdp2", 4, **hybrid).endswith("4 ranks, as with fsdp2: there is one copy")
    over = said("hsdp", "fsdp2", 16, 2, **hybrid)
    assert "WARNING dp_shard 8: a node has 4 GPUs, so each layer's weights cross the net" in over
