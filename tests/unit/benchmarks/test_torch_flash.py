"""torch's FlashAttention 2 in place of the package's: transformers takes it, and it is right."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, modeling_flash_attention_utils
from transformers.modeling_utils import PreTrainedModel

from benchmarks.baselines import torch_flash
from utils.kernels.per_document import Documents, ScoreTerms, per_document_sdpa

LENGTHS = (1, 130, 64, 300)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def test_transformers_takes_it(monkeypatch):
    for owner, name in [
        (modeling_flash_attention_utils, "_lazy_imports"),
        (modeling_flash_attention_utils, "_loaded_implementation"),
        (PreTrainedModel, "_flash_attn_import_error"),
    ]:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    torch_flash.stand_in_for_flash_attn()
    called = []
    monkeypatch.setattr(
        torch_flash, "_varlen", lambda query, *_, **__: called.append(query.shape) or query
    )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, dtype="bfloat16")
    model = LlamaForCausalLM._from_config(config, attn_implementation="flash_attention_2")
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    model(torch.arange(5)[None], position_ids=positions, use_cache=False)
    assert called == [(5, 4, 8)] * 2


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_it_agrees_with_attention_document_by_document(kv_heads):
    torch.manual_seed(0)
    shapes = [(sum(LENGTHS), heads, 64) for heads in (4, kv_heads, kv_heads)]
    states = [torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes]
    ends = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    expected = per_document_sdpa(*states, Documents(ends, max(LENGTHS), sum(LENGTHS)), ScoreTerms())
    wanted = torch.autograd.grad(expected.sin().sum(), states)
    halves = [one.detach().bfloat16().requires_grad_() for one in states]
    found = torch_flash.flash_attn_varlen_func(
        *halves, ends, ends, max(LENGTHS), max(LENGTHS), causal=True
    )
    torch.testing.assert_close(found.float(), expected, rtol=3e-2, atol=3e-2)
    gradients = torch.autograd.grad(found.float().sin().sum(), halves)
    for gradient, one in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient.float(), one, rtol=6e-2, atol=6e-2)
    whole = torch_flash.flash_attn_func(*(one[None] for one in halves), causal=True)
    total = sum(LENGTHS)
    row = Documents(torch.tensor([0, total], device="cuda").int(), total, total)
    expected = per_document_sdpa(*states, row, ScoreTerms())
    torch.testing.assert_close(whole[0].float(), expected, rtol=3e-2, atol=3e-2)
