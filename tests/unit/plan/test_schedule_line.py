"""The log line on schedule and optimizer, for every schedule of transformers."""

import pytest
import torch
from planned import LLAMA, settings
from transformers import SchedulerType

from utils.config.errors import Report
from utils.plan.rehearsal import rehearse

KIND, KWARGS = "lr_scheduler_type", "lr_scheduler_kwargs"
SAID = {
    "linear": "linear: warmup 10 of 100 steps; optimizer: adamw_torch_fused, "
    "learning rate 0.01, 0.000111 in the last step",
    "cosine": "cosine: warmup 10 of 100 steps; ",
    "cosine_with_restarts": "cosine_with_restarts: warmup 10 of 100 steps (num_cycles 2); ",
    "polynomial": "polynomial: warmup 10 of 100 steps (lr_end 0.001, power 1.0); optimizer: muon, ",
    "constant": "constant of 100 steps; optimizer: muon, learning rate 0.01, 0.01 in the last step",
    "constant_with_warmup": "constant_with_warmup: warmup 10 of 100 steps; ",
    "inverse_sqrt": "inverse_sqrt: warmup 10 of 100 steps; ",
    "reduce_lr_on_plateau": "reduce_lr_on_plateau of 100 steps (factor 0.5); optimizer: muon, "
    "learning rate 0.01, then as the evaluations decide",
    "cosine_with_min_lr": "cosine_with_min_lr: warmup 10 of 100 steps (min_lr 0.001); optimizer: "
    "muon, learning rate 0.01, 0.001 in the last step",
    "cosine_warmup_with_min_lr": "cosine_warmup_with_min_lr: warmup 10 of 100 steps (min_lr_rate "
    "0.1); ",
    # The decay of one step does not lower any rate: the last step has the full one.
    "warmup_stable_decay": "warmup_stable_decay: warmup 10, stable 89, decay 1 of 100 steps; "
    "optimizer: muon, learning rate 0.01, 0.01 in the last step",
    "greedy": "greedy of 100 steps; ",
}
OPTIONS = {
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"lr_end": 0.001, "power": 1.0},
    "reduce_lr_on_plateau": {"factor": 0.5},
    "cosine_with_min_lr": {"min_lr": 0.001},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 1},
}


@pytest.mark.parametrize("kind", [each.value for each in SchedulerType])
def test_the_plan_shows_schedule_and_optimizer(kind):
    given = {KIND: kind, "warmup_steps": 10, "learning_rate": 0.01}
    if kind != "linear":
        given["optim"] = "muon"
    if kind in ("constant", "reduce_lr_on_plateau", "greedy"):
        del given["warmup_steps"]
    if kind in ("reduce_lr_on_plateau", "greedy"):
        given |= {"eval_data": "x", "eval_strategy": "steps", "eval_steps": 10}
        given |= {"metric_for_best_model": "eval_x_loss"}
    given |= {f"{KWARGS}.{name}": value for name, value in OPTIONS.get(kind, {}).items()}
    report = Report()
    rehearse(settings(**given), LLAMA, False, 100, torch.device("cpu"), report)
    (line,) = (text for _, text in report if text.startswith("schedule: "))
    assert line.startswith(f"schedule: {SAID[kind]}")
