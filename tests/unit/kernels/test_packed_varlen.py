"""Packed forward and backward passes equal those of single documents, on real architectures."""

import pytest
import torch
import transformers

from utils.config.errors import ConfigurationError
from utils.kernels.per_document import per_document_sdpa
from utils.kernels.varlen import PER_DOCUMENT, VarlenKernel, packed_varlen, register_packed_varlen

VOCABULARY = 61
ROWS = ((7, 5, 9, 3), (4, 13, 7))
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "use_cache": False,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
UNDROPPED = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=16),
    "mistral-window": lambda: transformers.MistralConfig(**GROUPED, sliding_window=4),
    "gemma2-softcap": lambda: transformers.Gemma2Config(
        **GROUPED, head_dim=8, sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
    ),
    "gemma3-mixed": lambda: transformers.Gemma3TextConfig(
        **GROUPED, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": lambda: transformers.GPT2Config(**SIZES, **UNDROPPED),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES),
    "gpt_oss-sinks": lambda: transformers.GptOssConfig(
        **GROUPED, head_dim=8, num_local_experts=2, num_experts_per_tok=2, sliding_window=4
    ),
}
# transformers' gpt-oss ignores position_ids in its masks, so only packed_varlen can pack.
MASKED = [name for name in CONFIGS if "gpt_oss" not in name]


@pytest.fixture(autouse=True)
def _registered():
    register_packed_varlen(PER_DOCUMENT)


def build(name, attention, dtype=torch.float32):
    config = CONFIGS[name]()
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        # Large weights, so that a leak changes the logits.
        torch.nn.init.normal_(parameter, std=0.2)
    return model.to(dtype).train()


def packed_batch():
    tokens = torch.randint(1, VOCABULARY, (len(ROWS), sum(ROWS[0])), generator=generator(3))
    lengths = [length for row in ROWS for length in row]
    ends = torch.tensor([0, *lengths, 0, 0, 0]).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths]).view_as(tokens)
    batch = {"input_ids": tokens, "position_ids": positions}
    for side in "qk":
        batch |= {f"cu_seq_lens_{side}": ends, f"max_length_{side}": tokens.shape[1]}
    return batch


def generator(seed):
    return torch.Generator().manual_seed(seed)


def one_by_one(model, tokens):
    """Return the logits of each document alone, in the layout of the packed sequences."""
    rows = []
    for row, lengths in zip(tokens, ROWS, strict=True):
        parts = [model(input_ids=part[None]).logits[0] for part in row.split(list(lengths))]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def loss(logits):
    weights = torch.randn(logits.shape, generator=generator(5))
    return (logits.float() * weights).mean()


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, "packed_varlen") for name in CONFIGS]
    + [(name, "eager") for name in MASKED]
    + [(name, "sdpa") for name in MASKED if name != "gemma2-softcap"],
)
def test_packed_equals_one_by_one(name, attention):
    packed_model, single_model = build(name, attention), build(name, "eager")
    batch = packed_batch()
    packed = packed_model(**batch).logits
    single = one_by_one(single_model, batch["input_ids"])
    torch.testing.assert_close(packed, single, rtol=1e-5, atol=1e-5 * single.abs().max().item())
    loss(packed).backward()
    loss(single).backward()
    for (key, ours), theirs in zip(
        packed_model.named_parameters(), single_model.parameters(), strict=True
    ):
        if theirs.grad is None:
            assert ours.grad is None, key
            continue
        scale = theirs.grad.abs().max().item()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5 * scale + 1e-9)


def test_autocast_computes_attention_in_its_dtype():
    seen = []

    def spy(query, key, value, *rest):
        seen.append({query.dtype, key.dtype, value.dtype})
        return per_document_sdpa(query, key, value, *rest)

    kernel = VarlenKernel("spy", "spy", PER_DOCUMENT.features, spy, on_cuda_only=False)
    register_packed_varlen(kernel)
    with torch.autocast("cpu", torch.bfloat16):
        build("llama", "packed_varlen")(**packed_batch())
    assert seen == [{torch.bfloat16}] * 2


def states(length=6):
    return [torch.randn(1, heads, length, 8, generator=generator(heads)) for heads in (4, 2, 2)]


class Attention(torch.nn.Module):
    is_causal = True


def test_what_it_cannot_compute_is_refused():
    model, batch = build("llama", "packed_varlen"), packed_batch()
    for _ in ("training", "evaluating"):
        with pytest.raises(ConfigurationError, match="cu_seq_lens_q: False"):
            model(input_ids=batch["input_ids"])
        model.eval()
    with pytest.raises(ConfigurationError, match=r"4 queries for .*set_attn_implementation\('sdpa"):
        model.generate(batch["input_ids"][:, :4], max_new_tokens=3, use_cache=True)
    with pytest.raises(ConfigurationError, match="causal: True, a mask: True"):
        packed_varlen(Attention(), *states(), torch.ones(1, 1, 6, 6))
    with pytest.raises(ConfigurationError, match="causal: False, a mask: False"):
        packed_varlen(Attention(), *states(), is_causal=False)
    bare = VarlenKernel("bare", "bare kernel", frozenset(), per_document_sdpa, on_cuda_only=False)
    lacking = r"logit soft caps, attention dropout \(0.1\), .*bare kernel .*_implementation eager"
    terms = {"softcap": 5.0, "dropout": 0.1, "cu_seq_lens_q": torch.tensor([0, 6])}
    with pytest.raises(ConfigurationError, match=lacking):
        packed_varlen(Attention(), *states(), kernel=bare, **terms)


def test_a_cuda_kernel_gives_way_on_the_cpu():
    kernel = VarlenKernel("fast", "fast kernel", frozenset(), None)
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    output, _ = packed_varlen(Attention(), *states(), kernel=kernel, cu_seq_lens_q=ends)
    expected, _ = packed_varlen(Attention(), *states(), cu_seq_lens_q=ends)
    torch.testing.assert_close(output, expected)
