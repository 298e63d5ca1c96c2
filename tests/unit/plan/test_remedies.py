"""Each change that a refusal for memory suggests makes the run fit, by the same prediction."""

from dataclasses import replace

import pytest
from planned import ELSEWHERE, LAUNCH, settings
from transformers import AutoConfig

from utils.config.errors import ConfigurationError
from utils.config.settings import parse_fine_tuning, parse_pretraining
from utils.plan import memory_plan
from utils.plan.memory_plan import plan_memory

MIB = 2**20
MODEL = AutoConfig.for_model(
    "llama", hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, vocab_size=1024,
)  # fmt: skip
LEAST = "per_device_train_batch_size: 1, activation_checkpointing: full"


def given(parse, **changes):
    model = {"model_config": None, "model_name_or_path": "m"} if parse is parse_fine_tuning else {}
    return settings(
        parse, use_cpu=None, dry_run="true", assume="4xA100-40GB", bf16="true",
        global_batch_size=32, **model, **changes,
    )  # fmt: skip


# Weights, gradients and AdamW's states of the 2.1 M parameters take 32.5 MiB.
@pytest.mark.parametrize(
    ("parse", "ranks", "strategy", "mib", "named"),
    [
        (parse_pretraining, 1, "single", 80,
         "this fits: per_device_train_batch_size: 1; or activation_checkpointing: full"),
        (parse_pretraining, 1, "single", 50, f"this fits: {LEAST}"),
        (parse_pretraining, 1, "single", 20, f"this fits: GPUs: 8, strategy: fsdp2, {LEAST}"),
        (parse_fine_tuning, 1, "single", 26, f"; or use_peft: true, dtype: bfloat16, {LEAST}"),
        (parse_pretraining, 4, "ddp", 30, f"this fits: strategy: fsdp2, {LEAST}"),
        (parse_pretraining, 1, "single", 1, "take a smaller model"),
    ],
)  # fmt: skip
def test_what_a_refusal_names(parse, ranks, strategy, mib, named, monkeypatch):
    launch = replace(LAUNCH, world_size=ranks, strategy=strategy)
    monkeypatch.setattr(memory_plan, "WORKSPACE_BYTES", 0)
    monkeypatch.setattr(memory_plan, "planned_device", lambda *_: (mib * MIB, mib * MIB))
    run = given(
        parse, per_device_train_batch_size=4, sequence_length=512, activation_checkpointing="none"
    )
    with pytest.raises(ConfigurationError) as refusal:
        plan_memory(run, MODEL, launch, ELSEWHERE)
    (text,) = refusal.value.problems
    assert [line.partition(":")[0] for _, line in refusal.value.report][-2:] == [
        "memory", "activation checkpointing",
    ]  # fmt: skip
    assert text.endswith(named)
