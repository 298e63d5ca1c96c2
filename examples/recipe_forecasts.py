"""Write into the head of each recipe what a dry run predicts for its hardware.

    python examples/recipe_forecasts.py     # the lines `# Predicted on ...`

Models are their published sizes, without weights or tokenizers. Documents are as long as the chats
of benchmarks/workloads, and half a sequence where a recipe pretrains.
"""

import logging
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from transformers import AutoConfig, PreTrainedConfig  # noqa: E402 - the folder is not ROOT

from utils.config.arguments import FineTuneConfig  # noqa: E402
from utils.config.errors import Report  # noqa: E402
from utils.config.recipes import load_file  # noqa: E402
from utils.config.settings import (  # noqa: E402
    RunSettings,
    parse_fine_tuning,
    parse_pretraining,
)
from utils.kernels.varlen import NAME  # noqa: E402
from utils.launch.processes import LaunchFacts, requested_replicas, requested_strategy  # noqa: E402
from utils.model.adapters import plan_adapters  # noqa: E402
from utils.model.attention import UNDECIDED, AttentionChoice  # noqa: E402
from utils.model.layers import choose_compilation  # noqa: E402
from utils.model.loss_head import LossHeadChoice  # noqa: E402
from utils.plan.forecast import (  # noqa: E402
    Planner,
    make_planner,
    shown_durations,
    shown_speeds,
)
from utils.plan.memory_estimate import GIB, count_parameters  # noqa: E402
from utils.plan.memory_plan import plan_memory  # noqa: E402
from utils.plan.memory_trace import Setup  # noqa: E402
from utils.plan.run_plan import choose_optimizer_states  # noqa: E402

CHAT_TOKENS = 1090  # the length of the document that a token is in: `effective_length` of
# qwen3_600m_sft.json in benchmarks/results/gpu
HARDWARE = re.compile(r"^# Hardware: (\d+) x (\S+?)(?:, (\d+) nodes)?(?: \(.*\))?\.$", re.MULTILINE)
LINE = re.compile(r"^# Predicted on .*\n", re.MULTILINE)
# The vocabularies of the data's tokenizers, by a part of the data's name.
VOCABULARIES = {"gpt2": 50_304, "real-text": 8_192, "": 100_352}


def _sizes(
    kind: str, sizes: tuple[int, ...], *, tied: bool = False, head_dim: int | None = None,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """`sizes` are those of states, MLP, layers, heads, heads of keys, words."""
    width, inner, layers, heads, kv_heads, words = sizes
    return {
        "model_type": kind, "hidden_size": width, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "vocab_size": words, "tie_word_embeddings": tied, "head_dim": head_dim or width // heads,
        "max_position_embeddings": 131072, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": None, **more,
    }  # fmt: skip


def _qwen3(width: int, inner: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return _sizes("qwen3", (width, inner, layers, heads, 8, 151936), tied=tied, head_dim=128)


def _qwen3_5(
    sizes: tuple[int, ...], *, value_heads: int, kind: str = "qwen3_5_text", **more: Any
) -> dict[str, Any]:
    """Return a model in which three of four layers are gated DeltaNets."""
    layers = (["linear_attention"] * 3 + ["full_attention"]) * (sizes[2] // 4)
    return _sizes(
        kind, sizes, head_dim=256, layer_types=layers, linear_num_key_heads=16,
        linear_num_value_heads=value_heads, linear_key_head_dim=128, linear_value_head_dim=128,
        **more,
    )  # fmt: skip


QWEN3_5_MOE = _qwen3_5(
    (2048, 512, 40, 16, 2, 248320), value_heads=32, kind="qwen3_5_moe_text", num_experts=256,
    num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
)  # fmt: skip


def _gemma4(sizes: tuple[int, ...], local: int = 5, **more: Any) -> dict[str, Any]:
    """Return a model in which each full-attention layer follows `local` layers with a window."""
    layers = (["sliding_attention"] * local + ["full_attention"]) * (sizes[2] // (local + 1))
    return _sizes(
        "gemma4_text", (*sizes, 262144), tied=True, head_dim=256, global_head_dim=512,
        layer_types=layers, **more,
    )  # fmt: skip


GEMMA4_SMALL: dict[str, Any] = {"hidden_size_per_layer_input": 256, "sliding_window": 512}
GEMMA4_LARGE: dict[str, Any] = {
    "hidden_size_per_layer_input": 0, "sliding_window": 1024, "attention_k_eq_v": True,
}  # fmt: skip
EXPERTS_OF_MISTRAL4: dict[str, Any] = {
    "n_routed_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 2048,
    "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}  # fmt: skip
EXPERTS_OF_GLM4_LITE: dict[str, Any] = {
    "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536,
    "kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "v_head_dim": 256, "mlp_layer_types": ["dense"] + ["sparse"] * 46,
}  # fmt: skip
STATE_OF_NEMOTRON: dict[str, Any] = {
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "chunk_size": 128, "mamba_head_dim": 64, "mamba_num_heads": 64, "n_groups": 8,
    "ssm_state_size": 128, "moe_intermediate_size": 1856, "n_routed_experts": 128,
    "moe_shared_expert_intermediate_size": 3712, "num_experts_per_tok": 6,
}  # fmt: skip
GRANITE_TINY: dict[str, Any] = {
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, "mamba_n_heads": 48,
    "mamba_d_state": 128, "num_local_experts": 64, "num_experts_per_tok": 6,
    "shared_intermediate_size": 1024, "position_embedding_type": "nope",
}  # fmt: skip
GRANITE_MICRO: dict[str, Any] = {
    "layer_types": ["attention"] * 40, "num_local_experts": 0, "num_experts_per_tok": 0,
    "shared_intermediate_size": 8192, "position_embedding_type": "rope",
}  # fmt: skip
LFM: dict[str, Any] = {
    "layer_types": [
        "full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)
    ],
    "block_ff_dim": 12288,
}  # fmt: skip
# The sizes of config.json on the Hub, typed; ten are checked by their numbers of parameters.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, tied=False),
    "Qwen/Qwen3-8B-Base": _qwen3(4096, 12288, 36, 32, tied=False),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40, tied=False),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64, tied=False),
    "Qwen/Qwen3-30B-A3B": _sizes(
        "qwen3_moe", (2048, 6144, 48, 32, 4, 151936), head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768,
    ),
    "Qwen/Qwen3-4B-Instruct-2507": _qwen3(2560, 9728, 36, 32, tied=True),
    # Qwen3.5: the README and __init__ of torchtitan/models/qwen3_5. Qwen3.6 has the same sizes.
    "Qwen/Qwen3.5-2B": _qwen3_5((2048, 6144, 24, 8, 2, 248320), value_heads=16, tied=True),
    "Qwen/Qwen3.5-4B": _qwen3_5((2560, 9216, 32, 16, 4, 248320), value_heads=32, tied=True),
    "Qwen/Qwen3.5-9B": _qwen3_5((4096, 12288, 32, 16, 4, 248320), value_heads=32),
    "Qwen/Qwen3.5-27B": _qwen3_5((5120, 17408, 64, 24, 4, 248320), value_heads=48),
    "Qwen/Qwen3.6-27B": _qwen3_5((5120, 17408, 64, 24, 4, 248320), value_heads=48),
    "Qwen/Qwen3.5-35B-A3B": QWEN3_5_MOE,
    "Qwen/Qwen3.6-35B-A3B": QWEN3_5_MOE,
    "meta-llama/Llama-3.1-8B-Instruct": _sizes("llama", (4096, 14336, 32, 32, 8, 128256)),
    "meta-llama/Llama-3.1-8B": _sizes("llama", (4096, 14336, 32, 32, 8, 128256)),
    "meta-llama/Llama-3.3-70B-Instruct": _sizes("llama", (8192, 28672, 80, 64, 8, 128256)),
    "HuggingFaceTB/SmolLM2-135M": _sizes(
        "llama", (576, 1536, 30, 9, 3, 49152), tied=True
    ),
    "HuggingFaceTB/SmolLM2-360M": _sizes(
        "llama", (960, 2560, 32, 15, 5, 49152), tied=True
    ),
    "HuggingFaceTB/SmolLM2-1.7B": _sizes(
        "llama", (2048, 8192, 24, 32, 32, 49152), tied=True
    ),
    "HuggingFaceTB/SmolLM3-3B": _sizes("smollm3", (2048, 11008, 36, 16, 4, 128256), tied=True),
    "google/gemma-3-1b-it": _sizes(
        "gemma3_text", (1152, 6912, 26, 4, 1, 262144), tied=True, head_dim=256, sliding_window=512
    ),
    "google/gemma-3-4b-it": _sizes(
        "gemma3_text", (2560, 10240, 34, 8, 4, 262208), tied=True, head_dim=256, sliding_window=1024
    ),
    "google/gemma-3-12b-it": _sizes(
        "gemma3_text", (3840, 15360, 48, 16, 8, 262208), tied=True, head_dim=256,
        sliding_window=1024,
    ),
    "allenai/Olmo-3-7B-Instruct": _sizes(
        "olmo3", (4096, 11008, 32, 32, 32, 100278), sliding_window=4096
    ),
    # Gemma 4: maxtext's checkpoint_conversion/utils/hf_model_configs.py.
    "google/gemma-4-E2B-it": _gemma4(
        (1536, 6144, 35, 8, 1), local=4, num_kv_shared_layers=20, use_double_wide_mlp=True,
        **GEMMA4_SMALL,
    ),
    "google/gemma-4-E4B-it": _gemma4(
        (2560, 10240, 42, 8, 2), num_kv_shared_layers=18, **GEMMA4_SMALL
    ),
    "google/gemma-4-26B-A4B-it": _gemma4(
        (2816, 2112, 30, 16, 8), num_global_key_value_heads=2, enable_moe_block=True,
        num_experts=128, top_k_experts=8, moe_intermediate_size=704, **GEMMA4_LARGE,
    ),
    "google/gemma-4-31B-it": _gemma4(
        (5376, 21504, 60, 32, 16), num_global_key_value_heads=4, **GEMMA4_LARGE
    ),
    # Ministral 3: Megatron-Bridge's Ministral3ModelProvider3B, 8B and 14B.
    "mistralai/Ministral-3-3B-Instruct-2512-BF16": _sizes(
        "ministral3", (3072, 9216, 26, 32, 8, 131072), tied=True, head_dim=128
    ),
    "mistralai/Ministral-3-8B-Instruct-2512-BF16": _sizes(
        "ministral3", (4096, 14336, 34, 32, 8, 131072), head_dim=128
    ),
    "mistralai/Ministral-3-14B-Instruct-2512-BF16": _sizes(
        "ministral3", (5120, 16384, 40, 32, 8, 131072), head_dim=128
    ),
    # transformers' Mistral4Config and Glm4MoeLiteConfig, whose defaults are these models.
    "axolotl-ai-co/Mistral-Small-4-119B-2603-BF16": _sizes(
        "mistral4", (4096, 12288, 36, 32, 32, 131072), **EXPERTS_OF_MISTRAL4
    ),
    "zai-org/GLM-4.7-Flash": _sizes(
        "glm4_moe_lite", (2048, 10240, 47, 20, 20, 154880), **EXPERTS_OF_GLM4_LITE
    ),
    # Nemotron and gpt-oss-120b: aiconfigurator's model_configs.
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _sizes(
        "nemotron_h", (2688, 1856, 52, 32, 2, 131072), head_dim=128, **STATE_OF_NEMOTRON
    ),
    "LiquidAI/LFM2.5-1.2B-Instruct": _sizes(
        "lfm2", (2048, 12288, 16, 32, 8, 65536), tied=True, **LFM
    ),
    "ibm-granite/granite-4.0-micro": _sizes(
        "granitemoehybrid", (2560, 8192, 40, 40, 8, 100352), tied=True, **GRANITE_MICRO
    ),
    "ibm-granite/granite-4.0-h-tiny": _sizes(
        "granitemoehybrid", (1536, 512, 40, 12, 4, 100352), tied=True, **GRANITE_TINY
    ),
    "openai/gpt-oss-120b": _sizes(
        "gpt_oss", (2880, 2880, 36, 64, 8, 201088), head_dim=64, num_local_experts=128,
        num_experts_per_tok=4, sliding_window=128,
    ),
    "openai/gpt-oss-20b": _sizes(
        "gpt_oss", (2880, 2880, 24, 64, 8, 201088), head_dim=64, num_local_experts=32,
        num_experts_per_tok=4, sliding_window=128,
    ),
}  # fmt: skip


def recipes() -> list[Path]:
    """Return the training recipes that name GPUs."""
    paths = [path for kind in ("sft", "pretrain") for path in (ROOT / "recipes" / kind).glob("*")]
    return sorted(path for path in paths if path.is_file() and HARDWARE.search(path.read_text()))


def hardware(text: str) -> str:
    """Return the GPUs of a recipe as `--assume` takes them."""
    found = HARDWARE.search(text)
    assert found is not None
    count, gpu, nodes = int(found[1]), found[2], int(found[3] or 1)
    return f"{nodes}x{count // nodes}x{gpu}"


def model_config(settings: RunSettings) -> PreTrainedConfig:
    """Return the configuration of a recipe's model, or of the model of its earlier stage."""
    model = settings.model
    if model.model_name_or_path:
        return AutoConfig.for_model(**MODELS[model.model_name_or_path])
    file = model.model_config or "recipes/model/llama_1b_32k.yaml"
    values = {name: value for name, (value, _) in load_file(ROOT / file).items()}
    (data,) = settings.data.train_data
    words = next(size for part, size in VOCABULARIES.items() if part in data)
    return AutoConfig.for_model(**{"vocab_size": words, **values})


def planner_of(path: Path) -> Planner:
    """Return the planner of a recipe on its hardware."""
    parse = parse_fine_tuning if path.parent.name == "sft" else parse_pretraining
    argv = ["--config", str(path), "--dry_run", "--assume", hardware(path.read_text())]
    settings = parse(argv, "")
    ranks, environment = settings.values.world_size, settings.values.environment
    strategy, replicas = requested_strategy(environment, ranks), requested_replicas(environment)
    launch = LaunchFacts(0, ranks, strategy, (), "cpu", replicas)
    config = model_config(settings)
    choose_optimizer_states(settings, config, launch)
    adapters = plan_adapters(settings.model, config)
    if adapters is not None:
        settings = replace(settings, model=adapters.model)
    compiled, _ = choose_compilation(settings, config, launch, elsewhere=True)
    fine_tuning = isinstance(settings.training, FineTuneConfig)
    seen = CHAT_TOKENS if fine_tuning else settings.data.sequence_length / 2
    attention, head = (AttentionChoice(NAME, UNDECIDED, ""), LossHeadChoice("fused", "taken to be"))
    counts = count_parameters(settings.model, config)
    setup = Setup(settings, config, launch, attention, head, counts, compiled, elsewhere=True)
    return make_planner(setup, seen)


def predicted_line(path: Path) -> str:
    """Return the line of a recipe; raises ConfigurationError where it does not fit."""
    planner = planner_of(path)
    setup, settings = planner.setup, planner.setup.settings
    choice = plan_memory(setup, Report()).choice
    found = planner.candidate(setup.launch.name, setup.micro_batch, choice)
    step_tokens = settings.run.global_batch_size * settings.data.sequence_length
    tokens = settings.training.max_steps * step_tokens
    whole = f"{shown_durations(tokens, found.speeds)} for {tokens / 1e9:,.3g} B tokens"
    a_billion = f"{shown_durations(1e9, found.speeds)} for a billion tokens"
    memory_line = f"{found.total_bytes / GIB:.0f} GiB a GPU"
    if not found.counted:
        memory_line = f"over {memory_line} without activations"
    gpus = replace(planner.gpus, nodes=1, per_node=planner.gpus.world_size)
    return (
        f"# Predicted on {gpus}: {memory_line}, "
        f"{shown_speeds(found.speeds)} tokens/s, "
        f"{whole if tokens > 0 else a_billion}.\n"
    )


def with_prediction(text: str, line: str) -> str:
    """Return a recipe with this line below its hardware."""
    text = LINE.sub("", text)
    found = HARDWARE.search(text)
    assert found is not None
    return f"{text[: found.end() + 1]}{line}{text[found.end() + 1 :]}"


def main() -> None:
    """Rewrite all recipes."""
    logging.basicConfig(level=logging.ERROR)
    os.chdir(ROOT)
    for path in recipes():
        path.write_text(with_prediction(path.read_text(), predicted_line(path)))


if __name__ == "__main__":
    main()
