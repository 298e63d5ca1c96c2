"""The fused loss head agrees with an fp64 cross-entropy of all logits."""

import gc
import weakref

import pytest
import torch
from tiny import compiled_graphs
from torch.nn import functional

from utils.kernels import linear_cross_entropy as module
from utils.kernels.linear_cross_entropy import (
    IGNORED,
    PLAIN,
    TILE_SIZES,
    LogitTerms,
    linear_cross_entropy,
)

TOKENS, WIDTH, VOCABULARY = 50, 24, 301
LAYOUTS = ["of a CPU", "of a GPU", "compiled"]
CAP = 5.0


@pytest.fixture(autouse=True, params=LAYOUTS)
def layout(monkeypatch, request):
    """Make chunks and blocks small, so that there are several and the last one is shorter.

    In the layout of a GPU the logits have padding columns. "compiled" runs the function that a GPU
    compiles, without compiling it.
    """
    words = TILE_SIZES["cpu" if request.param == "of a CPU" else "cuda"].words
    sizes = TILE_SIZES["cpu"]._replace(rows=21, tile=1, block=5 * VOCABULARY, words=words)
    monkeypatch.setitem(TILE_SIZES, "cpu", sizes)
    if request.param == "compiled":
        monkeypatch.setattr(module, "_compiled_log_sum_exp", lambda: module._log_sum_exp)
        compile_on_a_cpu(monkeypatch)


def compile_on_a_cpu(monkeypatch):
    monkeypatch.setattr(module, "COMPILED_ROWS", 21)
    plain = module._LinearCrossEntropy.apply
    monkeypatch.setattr(
        module._LinearCrossEntropy, "apply", lambda *arguments: plain(*arguments[:-1], True)
    )


def made(dtype=torch.float32, with_bias=False):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64) * 0.7
    bias = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    targets[[0, 20, 21, 49]] = IGNORED
    tensors = [hidden, weight, *([bias] if with_bias else [])]
    return [tensor.to(dtype).requires_grad_() for tensor in tensors], targets


def reference(tensors, targets, terms=PLAIN):
    """Return the loss and the gradients of all logits at once, in fp64."""
    tensors = [tensor.detach().double().requires_grad_() for tensor in tensors]
    logits = functional.linear(*tensors) * terms.scale
    if terms.softcap:
        logits = terms.softcap * torch.tanh(logits / terms.softcap)
    loss = functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return loss, torch.autograd.grad(loss / 7, tensors)


def fused(tensors, targets, **options):
    bias = tensors[2] if len(tensors) == 3 else None
    loss, *_ = linear_cross_entropy(*tensors[:2], targets, bias=bias, **options)
    return loss, torch.autograd.grad(loss / 7, tensors)


def far(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "terms"),
    [
        (torch.float32, LogitTerms()),
        (torch.float32, LogitTerms(1.7, CAP)),
        (torch.bfloat16, LogitTerms()),
    ],
)
def test_loss_and_gradients_are_those_of_all_logits_in_fp64(dtype, terms, with_bias):
    tensors, targets = made(dtype, with_bias)
    expected, expected_gradients = reference(tensors, targets, terms)
    loss, gradients = fused(tensors, targets, terms=terms)
    half = dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert far(loss, expected) < (1e-3 if half else 1e-6)
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        assert actual.dtype == dtype
        assert far(actual, wanted) < (1e-2 if half else 2e-6)


@pytest.mark.parametrize("terms", [PLAIN, LogitTerms(1.7, CAP)], ids=["plain", "both"])
def test_losses_and_hits_of_the_tokens_are_those_of_all_logits(terms):
    """A third of the targets have the largest logit; ignored tokens do not count as hits."""
    (hidden, weight), targets = made()
    likely = (hidden @ weight.T).argmax(-1)
    trained = targets != IGNORED
    targets[::3] = likely[::3].where(trained[::3], torch.tensor(IGNORED))
    logits = (hidden @ weight.T).detach().double() * terms.scale
    if terms.softcap:
        logits = terms.softcap * torch.tanh(logits / terms.softcap)
    expected = functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    total, losses, hits = linear_cross_entropy(hidden, weight, targets, terms=terms)
    assert hits is None, "gradients took the logits' place"
    assert far(losses, expected) < 1e-6
    assert not losses.requires_grad
    with torch.no_grad():
        alone, again, hits = linear_cross_entropy(hidden, weight, targets, terms=terms)
    assert alone.equal(total.detach())
    assert again.equal(losses)
    assert hits.equal((likely == targets) & trained)
    assert 10 < hits.sum() < 20


def test_under_autocast_the_float32_weight_keeps_a_float32_gradient():
    tensors, targets = made()
    rounded = [tensor.detach().bfloat16() for tensor in tensors]
    _, expected = reference(rounded, targets)
    with torch.autocast("cpu", torch.bfloat16):
        _, gradients = fused(tensors, targets)
        logits = functional.linear(*tensors).float()
    plain = functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    plain_gradients = torch.autograd.grad(plain / 7, tensors)
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 2
    for actual, usual, wanted in zip(gradients, plain_gradients, expected, strict=True):
        assert far(actual, wanted) < 1.2 * far(usual, wanted)


@pytest.mark.parametrize("tokens", [0, 4], ids=["none at all", "all ignored"])
def test_tokens_without_loss_give_zero_and_zero_gradients(tokens):
    (hidden, weight), _ = made()
    targets = torch.full((tokens,), IGNORED)
    loss, *_ = linear_cross_entropy(hidden[:tokens], weight, targets)
    loss.backward()
    assert loss.item() == 0
    assert not weight.grad.any()
    assert not hidden.grad.any()


@pytest.mark.parametrize("layout", LAYOUTS[:1], indirect=True)  # no padding, so no view
def test_a_tied_embedding_adds_in_place_and_buffers_are_gone_when_the_call_is(monkeypatch):
    pointers, works = [], []
    plain = module.ChunkedHead.gradients

    def watched(work):
        pointers.append(work.weight_gradient.data_ptr())
        works.append(weakref.ref(work))
        return plain(work)

    monkeypatch.setattr(module.ChunkedHead, "gradients", watched)
    (_, weight), targets = made()
    hidden = functional.embedding(targets.clamp(min=0), weight)
    gc.disable()  # the collector must not hide a reference cycle
    try:
        loss, *_ = linear_cross_entropy(hidden, weight, targets)
        assert [work() for work in works] == [None]
    finally:
        gc.enable()
    loss.backward()
    assert weight.grad.data_ptr() == pointers[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS[1:2], indirect=True)
def test_compiled_it_is_the_same_in_one_graph(monkeypatch):
    compile_on_a_cpu(monkeypatch)
    (hidden, weight), targets = made()
    expected, expected_gradients = reference([hidden, weight], targets)
    before = compiled_graphs()
    for tokens in (TOKENS, 30, TOKENS):
        loss, *_ = linear_cross_entropy(hidden[:tokens], weight, targets[:tokens], compiled=True)
    assert compiled_graphs() == before + 1, "short chunks too"
    assert far(loss, expected) < 1e-6
    gradients = torch.autograd.grad(loss / 7, [hidden, weight])
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        assert far(actual, wanted) < 2e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("terms", [LogitTerms(), LogitTerms(1.7, CAP)], ids=["plain", "both"])
@pytest.mark.parametrize("layout", ["of a CPU"], indirect=True)  # the layout concerns only CPUs
def test_a_gpu_computes_the_same(compiled, terms):
    tensors, targets = made()
    rounded = [tensor.detach().bfloat16() for tensor in tensors]
    expected, expected_gradients = reference(rounded, targets, terms)
    on_gpu = [tensor.detach().cuda().requires_grad_() for tensor in tensors]
    with torch.autocast("cuda", torch.bfloat16):
        loss, gradients = fused(on_gpu, targets.cuda(), terms=terms, compiled=compiled)
    assert far(loss.cpu(), expected) < 1e-2
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        assert actual.dtype == torch.float32
        assert far(actual.cpu(), wanted) < 2e-2
