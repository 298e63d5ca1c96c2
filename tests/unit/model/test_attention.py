"""The attention for each setting and machine, and the proof that packed documents stay apart."""

import random
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch
import transformers
from torch.nn import functional
from transformers import AttentionInterface

from utils.config.errors import ConfigurationError
from utils.kernels.varlen import NAME, PER_DOCUMENT, AttentionNeeds, register_packed_varlen
from utils.model import attention as module
from utils.model import loss_head, probe
from utils.model.attention import (
    AttentionChoice,
    attention_choices,
    check_row_positions,
    choose_isolated_attention,
)
from utils.model.probe import build_probe_model, observe_attention, probe_config
from utils.plan import run_plan

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA_8B = SMALL | {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
# All except the first have their published sizes, which the probe reduces (more: tests/published).
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, intermediate_size=64),
    "llama_8b": lambda: transformers.LlamaConfig(**LLAMA_8B),
    "gemma2": transformers.Gemma2Config,
    "gpt2": transformers.GPT2Config,
    "gpt_oss": transformers.GptOssConfig,
    "deepseek_v3": transformers.DeepseekV3Config,
}


def config_of(name):
    config = CONFIGS[name]()
    config.use_cache = False
    return config


def check_isolation(config, name=NAME, dtype=torch.float32, *, device="cpu", kernel="", **batches):
    choice = AttentionChoice(name, kernel, "", **batches)
    device = torch.device(device)
    return module.check_isolation(probe_config(config, device), choice, device, dtype)


@pytest.fixture(autouse=True)
def _registered():
    register_packed_varlen(PER_DOCUMENT)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_varlen_keeps_documents_apart(name):
    for dtype in (torch.float32, torch.bfloat16):
        check_isolation(config_of(name), dtype=dtype)


def leaking(module, query, key, value, attention_mask=None, **kwargs):
    """Attend causally over whole rows, ignoring documents."""
    output = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=kwargs["scaling"], enable_gqa=True
    )
    return output.transpose(1, 2), None


def looking_ahead(module, query, key, value, attention_mask=None, **kwargs):
    """Attend to the whole row in both directions."""
    output = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    return output.transpose(1, 2), None


def leaking_across_rows(module, query, key, value, attention_mask=None, **kwargs):
    """Attend correctly within documents, then add a part of the other sequence's values."""
    marked = kwargs.get("cu_seq_lens_q") is not None
    right = AttentionInterface()["packed_varlen"] if marked else leaking
    output, _ = right(module, query, key, value, None, **kwargs)
    if len(output) == 1:
        return output, None
    return output + 1e-3 * output.mean(dim=1, keepdim=True).flip(0), None


def blind(module, query, key, value, attention_mask=None, **kwargs):
    """Return zeros, so that no token sees another."""
    return query.new_zeros(query.transpose(1, 2).shape), None


@pytest.mark.parametrize("attention", [leaking, looking_ahead, leaking_across_rows, blind])
def test_a_leaking_attention_and_a_probe_that_proves_nothing_are_refused(attention):
    name = attention.__name__
    AttentionInterface.register(name, attention)
    told = f"'llama' under .* {name} lets packed documents see each other"
    if attention is blind:
        told = "passes nothing on"
    with pytest.raises(ConfigurationError, match=told):
        check_isolation(config_of("llama"), name)
    # In a sequence of one document.
    alone = {looking_ahead: "see those that follow", leaking_across_rows: "see each other"}
    if attention in alone:
        with pytest.raises(ConfigurationError, match=alone[attention]):
            check_isolation(config_of("llama"), name, batches="plain")


# Models that cannot be packed (see also tests/published).
NOT_PACKED = {
    "mpt": lambda: transformers.MptConfig(d_model=64, n_heads=4),
    "small_next": lambda: transformers.Qwen3NextConfig(
        **SMALL, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2, num_experts=2,
        linear_key_head_dim=16, linear_value_head_dim=16, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
    ),
}  # fmt: skip


def chosen(config, *, whole_rows, requested="auto", device=probe.CPU):
    config.use_cache = False
    return choose_isolated_attention(
        requested, config, device, torch.float32, whole_rows=whole_rows
    )


@pytest.mark.parametrize("name", NOT_PACKED)
def test_what_cannot_be_packed_trains_one_document_a_sequence(name):
    with pytest.raises(ConfigurationError, match="set --packing none") as refusal:
        chosen(NOT_PACKED[name](), whole_rows=False)
    recurrent = name != "mpt"
    assert ("flash-linear-attention and causal-conv1d" in str(refusal.value)) == recurrent
    choice = chosen(NOT_PACKED[name](), whole_rows=True)
    assert choice.batches == "plain"
    assert choice.name in ("sdpa", "eager")


@pytest.mark.slow
def test_llama_4_is_packed_by_masks_for_its_chunks_are_in_them():
    config = transformers.Llama4TextConfig(use_cache=False)
    with pytest.raises(ConfigurationError, match="computes other logits than eager "):
        check_isolation(config)
    choice = chosen(config, whole_rows=False)
    assert (choice.name, choice.batches) == ("sdpa", "packed")
    check_row_positions(config, 8191)
    with pytest.raises(ConfigurationError, match=r"from token 8,192 of a sequence.*packing none"):
        check_row_positions(config, 8192)


TRITON = "Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)"
GPU = torch.device("cpu")  # a different object than CPU, so that tests can treat it as a GPU


def kernels_of_gpus(monkeypatch):
    """Put stand-ins for GPU kernels into Qwen3-Next. The stand-ins raise an error on a CPU.

    They take a single sequence with documents given by seq_idx or cu_seqlens. Return the list of
    the devices on which the small models were built.
    """
    devices = []
    for at in (probe, module, loss_head):
        build = at.build_probe_model

        def recorded(config, attention, device=probe.CPU, *rest, build=build):
            devices.append(device)
            return build(config, attention, device, *rest)

        monkeypatch.setattr(at, "build_probe_model", recorded)
    modeling = transformers.models.qwen3_next.modeling_qwen3_next
    conv, rule = (
        getattr(modeling, name).__wrapped__
        for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
    )

    def conv_by_document(states, weight, bias=None, activation=None, seq_idx=None, **_):
        if seq_idx is None:
            return conv(states, weight, bias, activation)
        assert seq_idx.shape == (1, states.shape[-1])
        assert seq_idx.dtype == torch.int32
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        parts = [conv(part, weight, bias, activation) for part in states.split(lengths, dim=-1)]
        return torch.cat(parts, dim=-1)

    def rule_by_document(*states, g, beta, cu_seqlens=None, **terms):
        if devices[-1] is not GPU:
            raise ValueError(TRITON)
        if cu_seqlens is None:
            return rule(*states, g=g, beta=beta, **terms)
        assert states[0].shape[0] == 1
        lengths = [length for length in cu_seqlens.diff().tolist() if length]
        parts = zip(*(tensor.split(lengths, dim=1) for tensor in (*states, g, beta)), strict=True)
        done = [rule(q, k, v, g=g, beta=b, **terms)[0] for q, k, v, g, b in parts]
        return torch.cat(done, dim=1), None

    monkeypatch.setattr(modeling, "causal_conv1d_fn", conv_by_document)
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", rule_by_document)
    return devices


def test_probes_run_on_the_device_that_trains_where_kernels_pack_recurrent_layers(monkeypatch):
    devices, config = kernels_of_gpus(monkeypatch), NOT_PACKED["small_next"]()
    choice = chosen(config, whole_rows=False, device=GPU)
    assert (choice.name, choice.batches) == ("sdpa", "flat")
    assert loss_head.choose_loss_head("fused", config, device=GPU).name == "fused"
    assert all(device is GPU for device in devices)


@pytest.mark.parametrize("whole_rows", [False, True])
def test_a_host_without_the_gpu_of_the_kernels_refuses_nothing(monkeypatch, whole_rows):
    kernels_of_gpus(monkeypatch)
    config = NOT_PACKED["small_next"]()
    config.use_cache = False
    assert TRITON in run_plan._test_isolation("auto", config, whole_rows)
    head = loss_head.choose_loss_head("fused", config, device=None)
    assert head.reason.endswith("tested where the run trains")
    # If the run trains on this CPU, packing is refused, and one document per sequence is tried.
    assert loss_head.choose_loss_head("auto", config).name == "logits"
    if whole_rows:
        choice = chosen(config, whole_rows=True)
        assert choice.batches == "plain"
        assert TRITON in choice.proof
    else:
        with pytest.raises(probe.ProbeError, match=r"on cpu.*Pointer.* set --packing none"):
            chosen(config, whole_rows=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_kernels_in_triton_are_tried_on_their_gpu():
    pytest.importorskip("fla")
    pytest.importorskip("causal_conv1d")
    config, gpu = NOT_PACKED["small_next"](), torch.device("cuda")
    config.use_cache = False
    half = torch.bfloat16
    choice = choose_isolated_attention("auto", config, gpu, half, whole_rows=False)
    assert choice.batches == "flat"
    assert loss_head.choose_loss_head("fused", config, device=gpu).name == "fused"


SPARSE = SMALL | {
    "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "index_n_heads": 8, "index_head_dim": 16, "first_k_dense_replace": 1,
    "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "num_hidden_layers": 4,
}  # fmt: skip
V4 = {
    "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "q_lora_rank": 24, "o_groups": 2,
    "o_lora_rank": 16, "index_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "num_hidden_layers": 4, "initializer_range": 0.2,
}  # fmt: skip
# The shape of each model's batches if documents are packed, and with one document per sequence.
STARTS = {
    "glm_moe_dsa": (lambda: transformers.GlmMoeDsaConfig(**SPARSE), "packed", "packed"),
    "deepseek_v32": (lambda: transformers.DeepseekV32Config(**SPARSE), "packed", "packed"),
    "cwm": (lambda: transformers.CwmConfig(**SMALL, head_dim=16), "packed", "packed"),
    "deepseek_v4": (lambda: transformers.DeepseekV4Config(**V4, index_n_heads=64), None, "plain"),
    # With few heads, the choice between blocks of equal scores depends on the sequence length.
    "short_of_heads": (lambda: transformers.DeepseekV4Config(**V4, index_n_heads=1), None, None),
    "bert": (transformers.BertConfig, None, None),
    "encoder_as_decoder": (lambda: transformers.BertConfig(is_decoder=True), "packed", "packed"),
}  # fmt: skip


@pytest.mark.parametrize("name", STARTS)
def test_the_shape_of_batches_follows_from_the_model_and_a_refusal_has_advice(name):
    make, *expected = STARTS[name]
    for whole_rows, batches in zip((False, True), expected, strict=True):
        if batches is not None:
            assert chosen(make(), whole_rows=whole_rows).batches == batches
            continue
        told = {"bert": "is_decoder: true"}.get(name, "" if whole_rows else "set --packing none")
        with pytest.raises(ConfigurationError, match=f"To train it, .*{told}.*another model"):
            chosen(make(), whole_rows=whole_rows)
    with pytest.raises(ConfigurationError, match=r"To train it, .*leave --attn_implementation out"):
        chosen(make(), whole_rows=False, requested="flash_attention_2")


def test_masks_blinded_by_the_cache_and_what_cannot_be_built_are_refused():
    config = config_of("llama")
    config.use_cache = True
    with pytest.raises(ConfigurationError, match="see each other"):
        check_isolation(config, "sdpa")
    config.hidden_act = "no such activation"
    with pytest.raises(ConfigurationError, match=r"no small model could be built .*KeyError"):
        check_isolation(config, "eager")


def test_the_probe_leaves_random_numbers_and_the_config_alone():
    config = config_of("gpt2")
    before_config = config.to_dict()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    python, vector = random.getstate(), numpy.random.get_state()[1].copy()
    observe_attention(probe_config(config))
    check_isolation(config)
    assert torch.equal(torch.rand(3), expected)
    assert random.getstate() == python
    assert (numpy.random.get_state()[1] == vector).all()
    assert config.to_dict() == before_config


def test_the_probe_keeps_what_attention_sees():
    whole = transformers.Gemma3TextConfig()
    small = probe_config(whole)
    for name in ("head_dim", "sliding_window", "rope_parameters"):
        assert getattr(small, name) == getattr(whole, name)
    assert small.layer_types == ["sliding_attention", "full_attention"]
    groups = [c.num_attention_heads // c.num_key_value_heads for c in (small, whole)]
    assert groups[0] == groups[1]
    assert sum(p.numel() for p in build_probe_model(small, "eager").parameters()) < 5e6
    for name, needs in {
        "llama_8b": AttentionNeeds(128),
        "gemma2": AttentionNeeds(256, softcap=True, windows=True),
        "gpt_oss": AttentionNeeds(64, sinks=True, windows=True),
        "gpt2": AttentionNeeds(64, dropout=0.1),
    }.items():
        assert observe_attention(probe_config(config_of(name))) == needs


def test_rows_of_one_document_have_a_probe_of_their_own(monkeypatch):
    """Padding may see the document of its own sequence, but no sequence may see another one."""
    assert chosen(config_of("llama"), whole_rows=True).batches == "packed", "it can be, so it is"
    check_isolation(config_of("llama"), kernel="row_sdpa")
    logits = module._logits

    def leaking(model, batch, batches):
        found = logits(model, batch, batches)
        if len(batch.get("cu_seq_lens_q", range(9))) - 1 <= 2 * len(found):
            found[-1] += batch["input_ids"][0, 0]
        return found

    monkeypatch.setattr(module, "_logits", leaking)
    check_isolation(config_of("llama"))
    with pytest.raises(ConfigurationError, match="see each other"):
        check_isolation(config_of("llama"), kernel="row_sdpa")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ["llama", "llama_8b", "gemma2"])
def test_the_chosen_cuda_kernel_keeps_documents_apart(name):
    config, cuda = config_of(name), torch.device("cuda")
    needs = observe_attention(probe_config(config, cuda), cuda)
    choice = next(attention_choices("auto", config, needs, "cuda", torch.bfloat16))
    assert choice.name == NAME
    check_isolation(config_of(name), choice.name, torch.bfloat16, device="cuda")


FP32, BF16 = torch.float32, torch.bfloat16
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "use_cache": False}
GROUPED = {**SIZES, "num_key_value_heads": 1, "head_dim": 32}
LLAMA = transformers.LlamaConfig(**SIZES)


FLASH2, FLASH3 = "flash_attention_2", "flash_attention_3"


def version_2(q, k, v, dropout_p=0.0, softcap=0.0, window_size=(-1, -1)):
    """Stand in for FlashAttention 2's function."""


def version_3(q, k, v, softcap=0.0, window_size=(-1, -1)):
    """Stand in for FlashAttention 3's function, which has no dropout."""


STAND_INS = {"flash_attn": version_2, "flash_attn_interface": version_3}


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that pretends that there is a GPU with flash packages."""

    def pretend(capability=(9, 0), packages=tuple(STAND_INS)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        for package, function in STAND_INS.items():
            module = SimpleNamespace(flash_attn_varlen_func=function)
            monkeypatch.setitem(sys.modules, package, module if package in packages else None)

    return pretend


GPT2 = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2)  # with dropout
SINKS = transformers.GptOssConfig(**GROUPED)
CAPS = transformers.Gemma2Config(**GROUPED)


def first_choice(requested, config, gpu, device="cuda", dtype=BF16, **machine):
    """Return the first attention on a pretended machine."""
    gpu(**machine)
    needs = observe_attention(probe_config(config))
    return next(attention_choices(requested, config, needs, device, dtype))


NO_FLASH = (
    "FlashAttention 2: no module named flash_attn; torch's varlen_attn lacks attention dropout"
)


@pytest.mark.parametrize(
    ("requested", "config", "machine", "kernel", "why"),
    [
        (None, LLAMA, {"device": "cpu", "dtype": FP32}, "per_document_sdpa", "SDPA (CPU)"),
        ("auto", CAPS, {}, FLASH3, "through FlashAttention 3 (CUDA)"),
        ("auto", SINKS, {}, "per_document_sdpa", "lacks attention sinks"),
        ("auto", GPT2, {"packages": ()}, "per_document_sdpa", NO_FLASH),
        ("sdpa", LLAMA, {}, "sdpa", "sdpa: as requested; transformers builds a block mask"),
        ("eager", LLAMA, {}, "eager", "eager: as requested; transformers builds a block mask"),
        (FLASH2, LLAMA, {}, FLASH2, "through FlashAttention 2"),
        (FLASH3, LLAMA, {}, FLASH3, "through FlashAttention 3"),
        ("cudnn", LLAMA, {}, "cudnn", "through cuDNN's SDPA of each document"),
        ("flex_attention", LLAMA, {}, "flex_attention", "flex_attention: as requested"),
    ],
)
def test_the_best_kernel_that_computes_what_the_model_needs_or_the_requested_one_is_taken(
    gpu, requested, config, machine, kernel, why
):
    choice = first_choice(requested, config, gpu, **machine)
    assert choice.name == (NAME if kernel not in ("sdpa", "eager", "flex_attention") else kernel)
    assert choice.kernel == kernel
    assert why in choice.reason


@pytest.mark.parametrize(
    ("requested", "config", "machine", "told"),
    [
        (FLASH2, LLAMA, {"device": "cpu"}, "cannot run on cpu here: it needs an NVIDIA GPU"),
        ("cudnn", LLAMA, {"device": "cpu"}, "cannot run on cpu here: it needs an NVIDIA GPU"),
        ("cudnn", LLAMA, {"dtype": FP32}, "flash kernels: computed in float32.: .*--bf16 true"),
        ("flex_attention", LLAMA, {"device": "cpu"}, "computes its gradients on a GPU only"),
        ("flex_attention", transformers.MambaConfig(hidden_size=64, num_hidden_layers=2), {},
         "MambaForCausalLM does not support it"),
        (FLASH2, LLAMA, {"packages": ()}, r"no module named flash_attn.: it needs .* its package"),
        (FLASH3, LLAMA, {"capability": (8, 0)}, "not a Hopper GPU"),
        (FLASH2, LLAMA, {"dtype": FP32}, "flash kernels: computed in float32.: .*--bf16 true"),
        (FLASH3, GPT2, {}, r"FlashAttention 3 lacks attention dropout \(0.1\)"),
        (FLASH2, SINKS, {}, "FlashAttention 2 lacks attention sinks"),
        ("sdpa", CAPS, {}, "Gemma2ForCausalLM does not support it"),
        (NAME, transformers.MambaConfig(hidden_size=64, num_hidden_layers=2), {},
         "MambaForCausalLM does not support it: Mamba.*AttentionInterface"),
        ("auto", transformers.ViTConfig(), {}, "model type 'vit' .* no causal language model"),
    ],
)  # fmt: skip
def test_what_cannot_train_here_is_refused_and_nothing_is_fetched(
    gpu, monkeypatch, requested, config, machine, told
):
    def fetch(*_, **__):
        raise AssertionError("reached for the Hub")

    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", fetch)
    with pytest.raises(ConfigurationError, match=told):
        first_choice(requested, config, gpu, **machine)
