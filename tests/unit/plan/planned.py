"""Settings, models and setups for the tests of planning."""

from dataclasses import replace

import tiny
from transformers import AutoConfig

from utils.config.settings import RunSettings, parse_pretraining
from utils.launch.processes import LaunchFacts
from utils.model.attention import AttentionChoice
from utils.model.loss_head import LossHeadChoice
from utils.plan.memory_estimate import count_parameters
from utils.plan.memory_trace import Setup

LLAMA = AutoConfig.for_model(
    "llama", hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=512,
)  # fmt: skip
# Every second layer has sliding-window attention.
GEMMA = AutoConfig.for_model(
    "gemma2", hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, vocab_size=512, sliding_window=16,
)  # fmt: skip
MIXTRAL = AutoConfig.for_model(
    "mixtral", hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=512, num_local_experts=4,
)  # fmt: skip
ATTENTION = AttentionChoice("packed_varlen", "per_document", "")
HEAD = LossHeadChoice("fused", "as set")
LAUNCH = LaunchFacts(rank=0, world_size=1, strategy="single", hosts=("here",), device="cpu")


def settings(parse=parse_pretraining, **changes) -> RunSettings:
    given = {
        "train_data": "d", "sequence_length": 64, "global_batch_size": 8, "output_dir": "o",
        "model_config": "m", "use_cpu": "true", "bf16": "false",
    } | changes  # fmt: skip
    return parse(tiny.flags(**given), "")


def setup(config=LLAMA, given=None, parameters=None, elsewhere=False, compiled=False, **launch):
    """Return the setup of a model, by default two sequences of 64 tokens on a CPU."""
    given = given or settings(per_device_train_batch_size=2)
    parameters = parameters or count_parameters(given.model, config)
    facts = replace(LAUNCH, **launch)
    return Setup(given, config, facts, ATTENTION, HEAD, parameters, compiled, elsewhere)
