"""A thousand ranks on one CPU: groups, samples and shards, by torch's fake process group."""

import planned
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig

from benchmarks.cells.shapes import LLAMA_8B
from utils.config.errors import ConfigurationError, Report
from utils.config.strategy import assumed_gpus
from utils.data.order import GlobalBatchSampler, SampleOrder
from utils.plan import ranks
from utils.plan.memory_estimate import GIB, estimate_memory
from utils.plan.ranks import data_parallel_mesh, fake_group, group_of, reduced_model, report_ranks

RANKS, BATCH = 1024, 4096
LLAMA_70B = AutoConfig.for_model(**LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8,
})  # fmt: skip
EXPERTS = AutoConfig.for_model(
    "qwen3_moe", vocab_size=4096, hidden_size=1024, num_hidden_layers=4, moe_intermediate_size=256,
    num_experts=128, num_attention_heads=8, num_key_value_heads=4, head_dim=128,
)  # fmt: skip
GIVEN = {"use_cpu": None, "dry_run": "true", "assume": "128x8xH100-80GB", "sequence_length": 4096,
         "bf16": "true", "global_batch_size": BATCH, "per_device_train_batch_size": 2}  # fmt: skip


def setup(config=LLAMA_70B, replicas=128, strategy="fsdp2", **changes):
    given = planned.settings(**GIVEN | changes)
    launch = {"world_size": RANKS, "strategy": strategy, "replicas": replicas}
    return planned.setup(config, given, elsewhere=True, **launch)


def sampler(rank=0, order=None):
    return GlobalBatchSampler(order or SampleOrder([100_000], 1), BATCH, 2, rank, RANKS, 3)


def told(run, gpus="128x8xH100-80GB"):
    report_ranks(run, assumed_gpus(gpus), sampler(), report := Report())
    return [text for _, text in report]


def test_all_ranks_together_have_each_sample_of_a_global_batch_once():
    order = SampleOrder([100_000], 1)
    by_rank = [list(sampler(rank, order)) for rank in range(RANKS)]
    assert {len(batches) for batches in by_rank} == {3 * BATCH // (2 * RANKS)}
    for step in range(3):
        seen = [number for own in by_rank for batch in own[2 * step : 2 * step + 2]
                for number in batch]  # fmt: skip
        assert len(set(seen)) == len(seen) == BATCH
        assert sorted(seen) == sorted(sampler(0, order).sequences_of_step(step))


def test_three_ranks_of_a_thousand_are_laid_out_on_one_cpu():
    lines = told(setup())
    assert len(lines) == 3
    assert lines[0].startswith(
        "rank 0 of 1,024: shares a copy with 0 to 7, sums gradients with 0 to 1,016 by 8, 32.85 GiB"
    )
    assert "rank 512 of 1,024: shares a copy with 512 to 519, sums" in lines[1]
    assert "with 1,016 to 1,023, sums gradients with 7 to 1,023 by 8, " in lines[2]
    assert lines[1].endswith(f"first sequences: {next(iter(sampler(512)))}")
    (all_of_them, *_) = told(setup(replicas=1))
    assert "shares a copy with 0 to 1,023, sums gradients with no other" in all_of_them
    (ddp, *_) = told(setup(strategy="ddp", replicas=1))
    assert "shares a copy with no other, sums gradients with 0 to 1,023, 262.8" in ddp
    middle = told(setup(context_parallel=4))[1]
    assert "shares a copy with 512 to 519, sequences with 512 to 515, sums gradients with" in middle
    in_groups = GlobalBatchSampler(SampleOrder([100_000], 1), BATCH, 2, 128, RANKS // 4, 1)
    assert middle.endswith(f"first sequences: {next(iter(in_groups))}")
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("replicas", "changes", "states_gib"),
    [
        (128, {}, 131.4), (32, {}, 32.9), (1, {}, 1.03),
        (128, {"bf16": "false", "dtype": "bfloat16", "optim_states": "int8",
               "stochastic_rounding": "true"}, 49.5),
    ],
)  # fmt: skip
def test_the_shards_have_the_bytes_that_the_planner_predicts(replicas, changes, states_gib):
    run = setup(replicas=replicas, **changes)
    predicted, model = estimate_memory(run, "full"), reduced_model(run)
    held = []
    for rank in (0, 512, 1023):
        with fake_group(rank, RANKS):
            held.append(model.weight_bytes(data_parallel_mesh(run.launch)))
    # Over 1,024 ranks the last ones hold less, because torch rounds rows up.
    assert max(held) == pytest.approx(predicted.weights, rel=0.02)
    assert min(held) == pytest.approx(predicted.weights, rel=0.02 if replicas > 1 else 0.04)
    states = (predicted.weights + predicted.gradients + predicted.optimizer) / GIB
    assert states == pytest.approx(states_gib, rel=0.005)


def test_one_layer_of_each_kind_stands_for_all():
    run = setup(EXPERTS, replicas=256)
    with fake_group(5, RANKS):
        mesh = data_parallel_mesh(run.launch)
        with torch.device("meta"):
            whole = ranks.causal_lm_class(EXPERTS)(EXPERTS)
        for part in (*ranks.marked_layers(whole), whole):
            fully_shard(part, mesh=mesh)
        assert reduced_model(run).weight_bytes(mesh) == ranks.own_bytes(whole)
        assert group_of(mesh, "dp_shard") == (4, 5, 6, 7)


def test_tensors_that_are_shorter_than_the_ranks_are_a_warning():
    *_, line = told(setup(EXPERTS, replicas=1))
    assert line.startswith("memory: a rank holds")
    assert "times an even share" in line
    assert line.endswith("shorter than 1,024 ranks. Set strategy: hsdp and a smaller dp_shard.")
    assert len(told(setup(EXPERTS))) == 3, "128 experts divide over 8 ranks"


def test_what_torch_cannot_lay_out_is_refused(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no such mesh\nmore")

    monkeypatch.setattr(ranks, "fully_shard", fail)
    with pytest.raises(ConfigurationError, match=r"hsdp on 1,024 ranks: .*no such mesh\W+give"):
        told(setup())
    assert not torch.distributed.is_initialized()
    assert told(setup(strategy="zero3", replicas=1)) == [], "DeepSpeed is left out"
    assert told(setup(), "8xH100-80GB") == [], "a node is"
