"""Every kernel against attention written out, document by document."""

import re
import sys

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend

from utils.kernels import per_document, varlen
from utils.kernels.per_document import Documents, ScoreTerms, per_document_sdpa
from utils.kernels.varlen import (
    PER_DOCUMENT,
    AttentionNeeds,
    find_kernels,
    load_row_sdpa,
    load_torch_varlen,
)

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
    """Causal attention by its definition: every score of every document, in fp64."""
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
        ScoreTerms(scale=0.3),
        ScoreTerms(window=3),
        ScoreTerms(softcap=0.5),
        ScoreTerms(softcap=0.5, window=3, scale=0.4),
        ScoreTerms(sinks=torch.tensor([-1.0, 0.0, 1.0, 2.0])),
    ],
    ids=["plain", "scale", "window", "softcap", "softcap-window", "sinks"],
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
    monkeypatch.setattr(per_document, "by_onednn", lambda: True)
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


def torch_like(enable_gqa):
    """Return a stand-in for torch's varlen_attn with the signature of 2.11 or of 2.12."""

    def compute(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size):
        assert cu_seq_q is cu_seq_k
        assert max_q == max_k == max(LENGTHS)
        left, right = window_size
        assert right == 0
        terms = ScoreTerms(scale=scale, window=None if left == -1 else left + 1)
        return per_document_sdpa(query, key, value, Documents(cu_seq_q, max_q, len(query)), terms)

    def varlen_attn_211(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
        *, return_aux=None, scale=None, window_size=(-1, -1),
    ):  # fmt: skip
        assert key.shape[1] == KV_HEADS, "grouped heads must not be repeated"
        return compute(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)

    def varlen_attn_212(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
        *, return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False,
    ):  # fmt: skip
        assert enable_gqa or query.shape[1] == key.shape[1]
        assert key.shape[1] == KV_HEADS, "grouped heads must not be repeated"
        return compute(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)

    return varlen_attn_212 if enable_gqa else varlen_attn_211


@pytest.mark.parametrize("enable_gqa", [False, True], ids=["torch 2.11", "torch 2.12"])
@pytest.mark.parametrize("terms", [ScoreTerms(), ScoreTerms(scale=0.3, window=3)])
def test_torch_varlen_is_called_by_the_signature_it_has(monkeypatch, enable_gqa, terms):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", torch_like(enable_gqa))
    inputs = states(sum(LENGTHS))
    output = load_torch_varlen().run(*inputs, documents(), terms)
    torch.testing.assert_close(output, per_document_sdpa(*inputs, documents(), terms))


def flash_like(result=lambda output: output):
    """Return a stand-in for `flash_attn_varlen_func` of FlashAttention 2."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        deterministic=False,
    ):  # fmt: skip
        assert causal
        assert cu_seqlens_q is cu_seqlens_k
        assert deterministic == torch.are_deterministic_algorithms_enabled()
        window = None if window_size[0] == -1 else window_size[0] + 1
        terms = ScoreTerms(softmax_scale, dropout_p, window, softcap or None)
        where = Documents(cu_seqlens_q, max_seqlen_q, len(q))
        return result(per_document_sdpa(q, k, v, where, terms))

    return flash_attn_varlen_func


def install(monkeypatch, module, function):
    """Put a module with a `flash_attn_varlen_func` where an import finds it."""
    fake = type(torch)(module)
    fake.flash_attn_varlen_func = function
    monkeypatch.setitem(sys.modules, module, fake)


@pytest.mark.parametrize("result", [lambda out: out, lambda out: (out, None)], ids=["FA2", "FA3"])
@pytest.mark.parametrize("terms", [ScoreTerms(), ScoreTerms(0.3, 0.0, 3, 0.5)])
def test_flash_attention_is_given_the_terms_in_use(monkeypatch, result, terms):
    install(monkeypatch, "flash_attn", flash_like(result))
    kernel = varlen.load_flash_attention(2)
    assert kernel.features == {"softcap", "dropout"}
    inputs = states(sum(LENGTHS))
    output = kernel.run(*inputs, documents(), terms)
    torch.testing.assert_close(output, per_document_sdpa(*inputs, documents(), terms))


@pytest.mark.parametrize(
    ("capability", "installed", "expected"),
    [
        ((9, 0), ("flash_attn", "flash_attn_interface"), "flash_attention_3"),
        ((8, 0), ("flash_attn", "flash_attn_interface"), "flash_attention_2"),
        ((9, 0), (), "torch_varlen"),
        ((10, 0), ("flash_attn_interface",), "torch_varlen"),
        ((7, 5), ("flash_attn",), "per_document_sdpa"),
    ],
)
def test_the_best_kernel_that_runs_comes_first(monkeypatch, capability, installed, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    for module in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in installed:
        install(monkeypatch, module, flash_like())
    usable, _ = find_kernels("cuda", torch.bfloat16, AttentionNeeds(64))
    assert usable[0].name == expected
    assert usable[-1] is PER_DOCUMENT


@pytest.mark.parametrize(
    ("dtype", "needs", "why"),
    [
        (torch.float32, AttentionNeeds(64), "computed in float32"),
        (torch.bfloat16, AttentionNeeds(64, softcap=True), "varlen_attn lacks logit soft caps"),
        (torch.bfloat16, AttentionNeeds(64, sinks=True), "varlen_attn lacks attention sinks"),
        (
            torch.bfloat16,
            AttentionNeeds(64, dropout=0.1),
            r"varlen_attn lacks attention dropout \(0.1\)",
        ),
        (torch.bfloat16, AttentionNeeds(288), "lacks a head dimension of 288"),
    ],
)
def test_a_kernel_that_lacks_what_the_model_needs_is_passed_over(monkeypatch, dtype, needs, why):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for module in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    usable, refusals = find_kernels("cuda", dtype, needs)
    assert usable == [PER_DOCUMENT]
    assert re.search(why, "; ".join(refusals))


@pytest.fixture
def hopper(monkeypatch):
    """Return a function that makes this machine look like one with a Hopper GPU."""

    def pretend(backend=SDPBackend.CUDNN_ATTENTION, capability=(9, 0), installed=()):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(varlen, "sdpa_backend", lambda _: backend)
        for module in ("flash_attn", "flash_attn_interface"):
            monkeypatch.setitem(sys.modules, module, None)
        for module in installed:
            install(monkeypatch, module, flash_like())

    return pretend


@pytest.mark.parametrize(
    ("machine", "needs", "expected"),
    [
        ({}, AttentionNeeds(64), "row_sdpa"),
        ({"installed": ("flash_attn_interface",)}, AttentionNeeds(64), "flash_attention_3"),
        ({"capability": (8, 0)}, AttentionNeeds(64), "torch_varlen"),
        ({"backend": SDPBackend.FLASH_ATTENTION}, AttentionNeeds(64), "torch_varlen"),
        ({}, AttentionNeeds(64, windows=True), "torch_varlen"),
        ({}, AttentionNeeds(64, sinks=True), "per_document_sdpa"),
    ],
)
def test_where_each_row_is_one_document_hopper_takes_cudnn(hopper, machine, needs, expected):
    hopper(**machine)
    usable, refusals = find_kernels("cuda", torch.bfloat16, needs, whole_rows=True)
    assert usable[0].name == expected
    if expected == "torch_varlen" and machine.get("capability", (9, 0)) == (9, 0):
        assert "SDPA by row: " in "; ".join(refusals)
    packed, _ = find_kernels("cuda", torch.bfloat16, needs)
    assert packed[0].name != "row_sdpa"
    assert find_kernels("cuda", torch.float32, needs, whole_rows=True)[0] == [PER_DOCUMENT]


def row_sdpa(needs=None):
    kernel = load_row_sdpa(needs or AttentionNeeds(HEAD_DIM), packed=PER_DOCUMENT)
    assert not isinstance(kernel, str), kernel
    return kernel


def assert_rows_are_documents(kernel, dtype, device, tolerance):
    """Two rows of 24: a document with padding behind it, and one that fills its row."""
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


def test_by_row_documents_are_attended_to_as_alone(hopper):
    hopper()
    assert_rows_are_documents(row_sdpa(), torch.float32, "cpu", 1e-5)


def test_batches_of_several_documents_a_row_do_not_go_by_row(hopper):
    hopper()
    inputs = states(sum(LENGTHS) * 2)
    packed = documents(LENGTHS * 2)._replace(max_length=sum(LENGTHS))
    expected = per_document_sdpa(*inputs, packed, ScoreTerms())
    torch.testing.assert_close(row_sdpa().run(*inputs, packed, ScoreTerms()), expected)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_by_row_a_gpu_computes_the_same(dtype):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    assert_rows_are_documents(row_sdpa(), dtype, "cuda", 3e-2)


def test_a_broken_flash_attention_is_told_from_a_missing_one(monkeypatch, tmp_path):
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
    monkeypatch.setattr(
        functional,
        "scaled_dot_product_attention",
        lambda query, *rest, **options: (
            seen.append((query.shape[2], query.dtype, torch.is_autocast_enabled("cpu")))
            or plain(query, *rest, **options)
        ),
    )
    lengths = (256, 257)
    ends = torch.tensor([0, 256, 513], dtype=torch.int32)
    states = [torch.randn(sum(lengths), 2, 8).bfloat16().requires_grad_() for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = per_document_sdpa(*states, Documents(ends, 257, 513), ScoreTerms())
    output.sum().backward()
    assert seen == [(256, torch.float32, False), (257, torch.bfloat16, autocast)]
    assert output.dtype == torch.bfloat16
    assert states[0].grad is not None
    assert states[0].grad.dtype == torch.bfloat16
