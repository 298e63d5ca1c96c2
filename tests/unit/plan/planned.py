"""Settings, models and workloads for the tests of planning."""

import torch
from transformers import AutoConfig

from utils.config.settings import RunSettings, parse_pretraining
from utils.launch.processes import LaunchFacts
from utils.model.attention import OPEN, AttentionChoice
from utils.model.loss_head import LossHeadChoice
from utils.plan.memory_trace import Kernels, Workload

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
HEAD = LossHeadChoice("fused", "as set")
CPU = Kernels(AttentionChoice("packed_varlen", "per_document", ""), HEAD)
ELSEWHERE = Kernels(AttentionChoice("packed_varlen", OPEN, ""), HEAD, elsewhere=True)
LAUNCH = LaunchFacts(rank=0, world_size=1, strategy="single", hosts=("here",), device="cpu")


def settings(parse=parse_pretraining, **changes) -> RunSettings:
    given = {
        "train_data": "d", "sequence_length": 64, "global_batch_size": 8, "output_dir": "o",
        "model_config": "m", "use_cpu": "true",
    } | changes  # fmt: skip
    argv = [
        word
        for name, value in given.items()
        if value is not None and value != ""
        for word in (f"--{name}", str(value))
    ]
    return parse(argv, "")


def work(**changes) -> Workload:
    values = {
        "rows": 2, "sequence_length": 64, "weights": torch.float32, "autocast": None,
        "device": "cpu", "kernels": CPU,
    }  # fmt: skip
    return Workload(**(values | changes))
