"""Every kernel equals attention by its definition, document by document."""

import functools
import sys
import types

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend

from utils.kernels import per_document, varlen
from utils.kernels.per_document import Documents, ScoreTerms, per_document_sdpa
from utils.kernels.ulysses import ContextGroup
from utils.kernels.varlen import CUDNN, PER_DOCUMENT, AttentionNeeds, find_kernels, load_row_sdpa

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
LENGTHS = (5, 1, 9, 5, 4)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def documents(lengths=LENGTHS, padding=2, device="cpu"):
    ends = torch.tensor([0, *lengths, *[0] * padding]).cumsum(0, dtype=torch.int32)
    return Documents(ends.to(device), max(lengths), sum(lengths))


def states(tokens, kv_heads=KV_HEADS, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    shapes = [(tokens, heads, HEAD_DIM) for heads in (HEADS, kv_heads, kv_heads)]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    return [each.to(device, dtype).requires_grad_() for each in made]


def written_out(query, key, value, lengths, terms):
    """Compute causal attention by its definition: every score of every document, in fp64."""
    repeats = query.shape[1] // key.shape[1]
    outputs = []
    for q, k, v in zip(
        *(part.double().split(lengths) for part in (query, key, value)), strict=True
    ):
        scale = terms.scale or HEAD_DIM**-0.5
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(repeats, dim=1)) * scale
        if terms.softcap:
            scores = terms.softcap * torch.tanh(scores / terms.softcap)
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None, :]
        hidden = (distance < 0) | (distance >= (terms.window or len(q)))
        exponents = scores.masked_fill(hidden.to(scores.device), -torch.inf).exp()
        total = exponents.sum(-1, keepdim=True)
        if terms.sinks is not None:
            total = total + terms.sinks.double().exp()[:, None, None]
        outputs.append(
            torch.einsum("hqk,khd->qhd", exponents / total, v.repeat_interleave(repeats, 1))
        )
    return torch.cat(outputs)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(
    "terms",
    [
        ScoreTerms(),
        ScoreTerms(scale=0.3, window=3),
        ScoreTerms(softcap=0.5, window=3, scale=0.4),
        ScoreTerms(sinks=torch.tensor([-1.0, 0.0, 1.0, 2.0])),
    ],
)
def test_per_document_sdpa_is_attention_by_its_definition(terms, kv_heads):
    assert_as_written_out(terms, kv_heads, LENGTHS)


def assert_as_written_out(terms, kv_heads, lengths):
    inputs = states(sum(lengths), kv_heads)
    output = per_document_sdpa(*inputs, documents(lengths), terms)
    gradients = torch.autograd.grad(output.sin().sum(), inputs)
    twins = [each.detach().clone().requires_grad_() for each in inputs]
    expected = written_out(*twins, list(lengths), terms)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6)
    expected_gradients = torch.autograd.grad(expected.sin().sum(), twins)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lengths", [(7, 300, 129, 300, 1, 1100, 64), (256, 256)])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_products_by_onednn_are_attention_by_its_definition(monkeypatch, lengths, kv_heads):
    monkeypatch.setattr(per_document, "uses_onednn", lambda: True)
    monkeypatch.setattr(per_document, "SCORES", 2**17)
    blocks = []
    plain = per_document._attend_in_blocks
    monkeypatch.setattr(
        per_document, "_attend_in_blocks", lambda *a: blocks.append(len(a[1])) or plain(*a)
    )
    assert_as_written_out(ScoreTerms(0.3), kv_heads, lengths)
    assert blocks == ([2, 1, 1, 1, 1] if len(lengths) > 2 else [1, 1]), "all but 1,100 tokens"


@pytest.mark.parametrize("terms", [ScoreTerms(dropout=0.5), ScoreTerms(dropout=0.5, softcap=50.0)])
def test_dropout_drops_weights_and_keeps_the_mean(terms):
    query, key, value = states(200)
    ones = torch.ones_like(value)
    output = per_document_sdpa(query, key, ones, documents((200,)), terms)
    assert output.std() > 0.01
    assert abs(output.mean() - 1) < 0.05


def attended(query, key, value, ends, longest, terms):
    """Compute attention in place of a real kernel. The functions below call this one."""
    assert key.shape[1] == KV_HEADS, "grouped heads must not be repeated"
    assert longest == max(LENGTHS)
    return per_document_sdpa(query, key, value, Documents(ends, longest, len(query)), terms)


def torch_211(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    """Stand in for varlen_attn of torch 2.11."""
    assert cu_q is cu_k
    assert max_q == max_k
    left, right = window_size
    assert right == 0
    return attended(q, k, v, cu_q, max_q, ScoreTerms(scale, 0.0, None if left == -1 else left + 1))


def torch_212(*arguments, enable_gqa=False, **options):
    """Stand in for varlen_attn of torch 2.12, which needs enable_gqa for grouped heads."""
    assert enable_gqa
    return torch_211(*arguments, **options)


def flash_like(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False,
):  # fmt: skip
    """Stand in for `flash_attn_varlen_func` of FlashAttention 2."""
    assert causal
    assert cu_seqlens_q is cu_seqlens_k
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    window = None if window_size[0] == -1 else window_size[0] + 1
    terms = ScoreTerms(softmax_scale, dropout_p, window, softcap or None)
    return attended(q, k, v, cu_seqlens_q, max_seqlen_q, terms)


@functools.wraps(flash_like)
def flash_3_like(*arguments, **options):
    return flash_like(*arguments, **options), None


@pytest.fixture
def pretend(monkeypatch):
    """Return a function that pretends that there is a GPU with flash kernels."""

    def pretend(capability=(9, 0), backend=SDPBackend.CUDNN_ATTENTION, **installed):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(varlen, "sdpa_backend", lambda _: backend)
        for module in ("flash_attn", "flash_attn_interface"):
            fake = None
            if module in installed:
                fake = types.ModuleType(module)
                fake.flash_attn_varlen_func = installed[module]
            monkeypatch.setitem(sys.modules, module, fake)

    return pretend


@pytest.mark.parametrize("terms", [ScoreTerms(), ScoreTerms(scale=0.3, window=3)])
def test_kernels_are_called_by_the_signature_they_have(monkeypatch, pretend, terms):
    kernels = []
    for function in (torch_211, torch_212):
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
        kernels.append((varlen.load_torch_varlen(), terms))
    for function in (flash_like, flash_3_like):
        pretend(flash_attn=function)
        kernel = varlen.load_flash_attention(2)
        assert kernel.features == {"softcap", "dropout"}
        kernels += [(kernel, terms), (kernel, terms._replace(softcap=0.5))]
    inputs = states(sum(LENGTHS))
    for kernel, its_terms in kernels:
        output = kernel.run(*inputs, documents(), its_terms)
        torch.testing.assert_close(output, per_document_sdpa(*inputs, documents(), its_terms))


BOTH = {"flash_attn": flash_like, "flash_attn_interface": flash_like}


@pytest.mark.parametrize(
    ("machine", "needs", "expected", "by_row"),
    [
        (BOTH, {}, "flash_attention_3", "flash_attention_3"),
        ({"capability": (8, 0), **BOTH}, {}, "flash_attention_2", "flash_attention_2"),
        ({"flash_attn": flash_like}, {}, "flash_attention_2", "row_sdpa"),
        ({}, {}, "torch_varlen", "row_sdpa"),
        ({}, {"windows": True}, "torch_varlen", "torch_varlen"),
        ({"backend": SDPBackend.FLASH_ATTENTION}, {}, "torch_varlen", "torch_varlen"),
        ({"capability": (10, 0), **BOTH}, {}, "flash_attention_2", "flash_attention_2"),
        ({"capability": (7, 5), **BOTH}, {}, "per_document_sdpa", "per_document_sdpa"),
    ],
)
def test_the_best_kernel_that_runs_comes_first(pretend, machine, needs, expected, by_row):
    """If each sequence is one document, cuDNN's kernel (`by_row`) comes first on Hopper."""
    pretend(**machine)
    for whole_rows, name in ((False, expected), (True, by_row)):
        usable, _ = find_kernels("cuda", torch.bfloat16, AttentionNeeds(64, **needs), whole_rows)
        assert usable[0].name == name
        assert usable[-2:] == [PER_DOCUMENT, CUDNN]  # cuDNN's kernel only by its name


@pytest.mark.parametrize(
    ("dtype", "needs", "why"),
    [
        (torch.float32, {}, "computed in float32"),
        (torch.bfloat16, {"sinks": True}, "varlen_attn lacks attention sinks"),
        (torch.bfloat16, {"dropout": 0.1}, "varlen_attn lacks attention dropout (0.1)"),
        (torch.bfloat16, {"head_dim": 288}, "lacks a head dimension of 288"),
    ],
)
def test_a_kernel_without_a_needed_feature_is_skipped(pretend, dtype, needs, why):
    pretend()
    for whole_rows in (False, True):
        needed = AttentionNeeds(**{"head_dim": 64, **needs})
        usable, refusals = find_kernels("cuda", dtype, needed, whole_rows)
        assert [kernel for kernel in usable if kernel is not CUDNN] == [PER_DOCUMENT]
        assert why in "; ".join(refusals)


def assert_rows_are_documents(kernel, dtype, device, tolerance):
    """Check two sequences of 24 tokens: a document with padding, and a document without."""
    ends = torch.tensor([0, 17, 24, 48, 48], dtype=torch.int32, device=device)
    real = torch.tensor([*range(17), *range(24, 48)], device=device)
    results = []
    for run, made in ((PER_DOCUMENT.run, torch.float32), (kernel.run, dtype)):
        inputs = states(48, dtype=made, device=device)
        where = Documents(ends, 24, row_length=24)
        output = run(*inputs, where, ScoreTerms(scale=0.3))[real].float()
        gradients = torch.autograd.grad(output.sin().sum(), inputs)
        results.append([output, *(gradient.float()[real] for gradient in gradients)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_by_row_documents_are_attended_to_as_alone(pretend):
    """Batches with several documents per sequence use the other kernel."""
    pretend()
    kernel = load_row_sdpa(AttentionNeeds(HEAD_DIM), packed=PER_DOCUMENT)
    assert_rows_are_documents(kernel, torch.float32, "cpu", 1e-5)
    inputs = states(sum(LENGTHS) * 2)
    packed = documents(LENGTHS * 2)._replace(row_length=sum(LENGTHS))
    expected = per_document_sdpa(*inputs, packed, ScoreTerms())
    torch.testing.assert_close(kernel.run(*inputs, packed, ScoreTerms()), expected)


def test_documents_that_cudnn_refuses_are_computed_by_torch():
    """cuDNN refuses documents of one token on a GPU, and all documents on a CPU."""
    inputs = states(sum(LENGTHS))
    output = CUDNN.run(*inputs, documents(LENGTHS), ScoreTerms())
    expected = per_document_sdpa(*inputs, documents(LENGTHS), ScoreTerms())
    torch.testing.assert_close(output, expected)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_by_row_a_gpu_computes_the_same(dtype):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    kernel = load_row_sdpa(AttentionNeeds(HEAD_DIM), packed=PER_DOCUMENT)
    assert kernel is not None, f"torch takes {varlen.sdpa_backend(HEAD_DIM)}"
    assert_rows_are_documents(kernel, dtype, "cuda", 3e-2)


def test_a_broken_flash_attention_differs_from_a_missing_one(monkeypatch, tmp_path):
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    assert "installed but broken (undefined symbol" in varlen.load_flash_attention(2)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    assert "no module named flash_attn_interface" in varlen.load_flash_attention(3)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("terms", [ScoreTerms(), ScoreTerms(scale=0.3), ScoreTerms(window=17)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_cuda_kernel_agrees_with_per_document_sdpa(dtype, terms, kv_heads):
    lengths = (1, 130, 64, 7, 300)
    usable, refusals = find_kernels("cuda", dtype, AttentionNeeds(HEAD_DIM))
    assert len(usable) > 1, refusals
    reference = states(sum(lengths), kv_heads, torch.float32, "cuda")
    expected = per_document_sdpa(*reference, documents(lengths, device="cuda"), terms)
    expected_gradients = torch.autograd.grad(expected.sin().sum(), reference)
    for kernel in usable:
        inputs = states(sum(lengths), kv_heads, dtype, "cuda")
        output = kernel.run(*inputs, documents(lengths, device="cuda"), terms)
        gradients = torch.autograd.grad(output.float().sin().sum(), inputs)
        torch.testing.assert_close(output.float(), expected, rtol=2e-2, atol=2e-2)
        for gradient, wanted in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(gradient.float(), wanted, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("autocast", [False, True])
def test_short_documents_in_bf16_are_computed_in_float32_on_a_cpu(monkeypatch, autocast):
    seen = []
    plain = functional.scaled_dot_product_attention

    def watched(query, *rest, **options):
        seen.append((query.shape[2], query.dtype, torch.is_autocast_enabled("cpu")))
        return plain(query, *rest, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    inputs = states(513, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = per_document_sdpa(*inputs, documents((256, 257)), ScoreTerms())
    output.sum().backward()
    assert seen == [(256, torch.float32, False), (257, torch.bfloat16, autocast)]
    assert output.dtype == inputs[0].grad.dtype == torch.bfloat16


def test_slices_and_outputs_of_ranks_that_share_sequences_are_contiguous():
    """Models call view on them. With one head per rank a copy is not made by itself."""
    context = ContextGroup(size=2, rank=1)
    ids = torch.arange(16).view(2, 8)
    assert context.slice_of(ids).view(-1).tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
    output = context.own_tokens(torch.randn(2, 8, 1, 4))
    assert output.shape == (2, 4, 2, 4)
    assert output.view(2, 4, -1).shape == (2, 4, 8)
