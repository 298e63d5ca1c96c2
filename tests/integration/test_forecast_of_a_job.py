"""submit.sh --when reads the plan, the speed and the remaining steps from real dry runs."""

import re

import pytest
from launching import run_fork

import pretrain
from utils.config.errors import ConfigurationError
from utils.submit import when
from utils.submit.when import STARTUP_S, work_left

pytestmark = pytest.mark.slow


def output_of_fork(command, env):
    _, script, *argv = command
    return run_fork(script, argv, env).stdout.strip()


def test_the_work_left_is_forecast_then_measured_and_refusals_are_passed_on(
    pretraining, tmp_path, monkeypatch, capsys
):
    for name in ("STOKER_PROCESSES_PER_NODE", "STOKER_GPU_MEMORY_GIB"):
        monkeypatch.delenv(name, raising=False)
    # Dry runs are forks. tests/slurm/test_full_queue.py starts them as a user's command does.
    monkeypatch.setattr(when, "command_output", output_of_fork)
    run = tmp_path / "a run"
    flags = {"global_batch_size": 16, "per_device_train_batch_size": 1, "save_steps": 4}

    def dry_run(steps: int, **more: object) -> list[str]:
        argv = pretraining(run, max_steps=steps, **(flags | more))
        return ["pretrain.py", *argv, "--dry_run"]

    run_s, startup_s, how, training = work_left(dry_run(1000), 2, 8, "H100-80GB")
    assert (startup_s, how) == (STARTUP_S, "forecast, without evaluations and saves; "
                                "start-up 5m00s (assumed)")  # fmt: skip
    pretrain.main([*dry_run(1000)[1:], "--assume", "2x8xH100-80GB"])
    said = capsys.readouterr().out
    slowest = int(re.findall(r"forecast: ([\d,]+)", said)[0].replace(",", ""))
    tokens = int(re.findall(r"= ([\d,]+) tokens with padding", said)[0].replace(",", ""))
    assert run_s == tokens / slowest
    assert training == (1000, tokens)
    assert work_left(dry_run(1000), 1, 8, "H100-80GB")[3] == training
    others = [work_left(dry_run(1000, global_batch_size=None), nodes, 8, "H100-80GB")[3]
              for nodes in (1, 2)]  # fmt: skip
    assert others[0] != others[1], "the micro-batch times the ranks is the global batch"
    assert work_left(dry_run(2000), 2, 8, "H100-80GB")[0] == 2 * run_s
    with pytest.raises(ConfigurationError, match="64 ranks"):
        work_left(dry_run(1000), 8, 8, "H100-80GB")
    with pytest.raises(ConfigurationError, match="name the GPU"):
        work_left(dry_run(1000, use_cpu=True), 2, 0, "")
    # Eight steps are trained, four of 12 are left. A second node halves the time.
    trained = pretraining(run, max_steps=8, **flags)
    assert pretrain.main(trained) == 0
    one, two = (work_left(dry_run(12, use_cpu=True), nodes, 0, "")[0] for nodes in (1, 2))
    assert one == 2 * two > 0
    with pytest.raises(ConfigurationError, match="nothing is left"):
        work_left(dry_run(8, use_cpu=True), 1, 0, "")
