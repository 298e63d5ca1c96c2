"""Speeds, measured with a simulated clock."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import TrainerControl, TrainerState

from utils.callbacks import metrics
from utils.callbacks.metrics import OwnTime, Throughput, slowest_rank
from utils.data.loader import TokenCounts
from utils.data.order import GlobalBatchSampler, SampleOrder


class Run:
    """Plays Trainer's events; step k has 1000 + k tokens."""

    def __init__(self, start_step=0, world_size=1):
        self.now = 100.0
        counts = TokenCounts(lambda step: np.array([1000 + step]), ["all"])
        self.loader = SimpleNamespace(wait_s=0.0, tokens_seen=counts)
        self.loader.batch_sampler = SimpleNamespace(grows=False)
        self.callback = Throughput(lambda: self.now)
        self.args = SimpleNamespace(device=torch.device("cpu"), world_size=world_size)
        self.state = TrainerState(global_step=start_step)
        self.control = TrainerControl()
        self.callback.on_train_begin(
            self.args, self.state, self.control, train_dataloader=self.loader
        )

    def event(self, name, seconds):
        self.now += seconds
        getattr(self.callback, name)(self.args, self.state, self.control)

    def step(self, seconds, wait_s=0.0, evaluate=False):
        self.loader.wait_s += wait_s
        self.state.global_step += 1
        self.control.should_evaluate = evaluate
        self.event("on_step_end", seconds)
        assert self.loader.tokens_seen.steps == self.state.global_step, "not while a log waits"


def test_rates_are_tokens_of_the_global_batch_over_wall_time_without_the_first_step():
    run = Run(world_size=4)
    run.step(50.0, wait_s=7.0)
    assert run.callback.metrics() == {"first_step_time_s": pytest.approx(50.0), "tokens_seen": 1000}
    for _ in range(2):
        run.step(0.5, wait_s=0.1)
    assert run.callback.metrics() == pytest.approx({
        "tokens_per_s": 2003, "tokens_per_s_per_device": 2003 / 4, "tokens_seen": 3003,
        "step_time_s": 0.5, "data_wait_s": 0.1,
    })  # fmt: skip


def test_the_remaining_time_of_a_growing_batch_goes_by_its_samples():
    """Steps 1 and 2 have two samples each, steps 3 to 10 four: after step 3, 7 x 4 are left."""
    run = Run()
    order = SampleOrder([100], seed=0)
    run.loader.batch_sampler = GlobalBatchSampler(order, {0: 2, 2: 4}, 1, 0, 1, 10)
    run.step(9.0)
    run.callback.metrics()
    run.step(1.0)
    run.step(2.0)
    assert run.callback.metrics()["remaining_s"] == pytest.approx(3.0 / 6 * 7 * 4)


class Tiny(torch.nn.Module):
    """A model with an embedding, whose forward pass takes 2 s of `clock`, backward 4 s."""

    def __init__(self, clock):
        super().__init__()
        self.embedding, self.clock = torch.nn.Embedding(3, 2), clock
        self.get_input_embeddings = lambda: self.embedding

    def forward(self, ids):
        hidden = self.embedding(ids) * 1
        if self.training:
            hidden.register_hook(lambda _: self.clock.pass_by(4))
        self.clock.pass_by(2)
        return {"loss": hidden.sum()}


def test_forward_and_backward_passes_of_training_are_a_ranks_own_time(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    clock.perf_counter = lambda: clock.now
    clock.pass_by = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(metrics, "time", clock)
    model = Tiny(clock)
    own = OwnTime(model, torch.device("cpu"))
    for _ in range(2):
        model(torch.tensor([1]))["loss"].backward()
        clock.pass_by(10)  # other ranks compute
    with torch.no_grad():
        model.eval()(torch.tensor([1]))
    assert own.take() == (12, 0)
    assert own.take() == (0, 0)


def test_sharded_ranks_time_a_product(monkeypatch):
    kind = SimpleNamespace(value="FSDP")
    monkeypatch.setattr(metrics, "PartialState", lambda: SimpleNamespace(distributed_type=kind))
    monkeypatch.setattr(metrics, "PROBE_S", 1e9)
    own = OwnTime(torch.nn.Module(), torch.device("cpu"))
    seconds, product_s = own.take()
    assert seconds == 0 < product_s
    assert own.take() == (0, product_s), "once in PROBE_S"


@pytest.mark.parametrize(
    ("ranks", "slowest", "cost"),
    [
        # For each rank, in seconds: elapsed time, wait for data, own passes, the fixed product.
        ([(10, 0.1, 6.0, 0), (10, 0.1, 7.0, 0), (10, 0.1, 6.0, 0)], 1, 0.1),
        ([(10, 2.0, 6.0, 0), (10, 0.1, 6.0, 0), (10, 0.3, 6.0, 0)], 0, 0.18),
        ([(10, 0.0, 0, 0.0020), (10, 0.0, 0, 0.0025)], 1, 0.2),
        ([(10, 1.0, 0, 0.0020), (10, 0.0, 0, 0.0020)], 0, 0.1),
    ],
)
def test_the_slowest_rank_is_the_one_with_most_to_do_by_itself(ranks, slowest, cost):
    figures = {"slowest_rank": slowest, "slowest_cost": pytest.approx(cost)}
    assert slowest_rank(ranks) == figures


def test_evaluation_and_saving_are_left_out():
    run = Run()
    run.event("on_evaluate", 11.0)  # eval_on_start
    run.step(2.0)
    run.step(0.5, evaluate=True)
    for name, seconds in (("on_evaluate", 30.0), ("on_evaluate", 20.0), ("on_save", 10.0)):
        run.event(name, seconds)
    run.step(0.5)
    figures = run.callback.metrics()
    assert figures["first_step_time_s"] == pytest.approx(2.0)
    assert figures["step_time_s"] == pytest.approx(0.5)
    # If a step has both a log and an evaluation, the log comes first.
    run.event("on_evaluate", 30.0)
    run.step(0.5)
    assert run.callback.metrics()["step_time_s"] == pytest.approx(0.5)


def test_mfu_is_the_share_of_a_known_peak_and_compilation_is_told(monkeypatch):
    run = Run(world_size=4)
    run.callback.mfu_per_rate = 0.001
    run.step(50.0)
    assert "mfu" not in run.callback.metrics()
    run.step(0.5)
    figures = run.callback.metrics()
    assert figures["mfu"] == pytest.approx(figures["tokens_per_s_per_device"] * 0.001)
    assert "graphs_compiled" not in figures

    def compile_one(factor):
        torch.compile(lambda numbers: numbers * factor, backend="eager")(torch.ones(2))

    compile_one(2)  # slows this step
    run.step(9.0)
    compile_one(3)  # in an evaluation, whose time does not count
    run.event("on_evaluate", 9.0)
    assert run.callback.metrics()["graphs_compiled"] == 1
    run.step(0.5)
    assert "graphs_compiled" not in run.callback.metrics()
