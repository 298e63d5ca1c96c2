"""The fused loss head against an fp64 cross-entropy of all logits."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from utils.config.errors import ConfigurationError
from utils.kernels import linear_cross_entropy as head_sizes
from utils.kernels import linear_cross_entropy as module
from utils.kernels import linear_cross_entropy as softmax_derivative
from utils.kernels.linear_cross_entropy import (
    IGNORED,
    PLAIN,
    LogitTerms,
    linear_cross_entropy,
    working_bytes,
)
from utils.model.compilation import compiled_graphs

TOKENS, WIDTH, VOCABULARY = 50, 24, 301
WHOLE_TILES = 304  # words, where a GPU's tile is asked for
LAYOUTS = ["(V, tokens)", "(tokens, V)", "(tokens, V) on a GPU", "(tokens, V) at once"]
CAP = 5.0


@pytest.fixture(autouse=True, params=LAYOUTS)
def layout(monkeypatch, request):
    """How logits lie on CPUs and on a GPU; several chunks and blocks, the last a short one.

    A GPU's have some columns more than there are words.
    """
    monkeypatch.setitem(head_sizes.CHUNK_ROWS, "cpu", 21)
    monkeypatch.setitem(head_sizes.TILE_ROWS, "cpu", 1)
    monkeypatch.setattr(head_sizes, "PRODUCT_WORDS", 100)
    monkeypatch.setattr(head_sizes, "BY_WORDS_ELEMENTS", 17 * 40)
    monkeypatch.setattr(head_sizes, "has_amx", lambda: request.param == "(V, tokens)")
    monkeypatch.setitem(head_sizes.BLOCK_ELEMENTS, "cpu", 5 * VOCABULARY)
    if request.param in LAYOUTS[:2]:
        return request.param
    for name in (head_sizes, module):
        monkeypatch.setattr(name, "softmax_buffers", lambda *_: 2)
    monkeypatch.setitem(head_sizes.WORDS_TILE, "cpu", head_sizes.WORDS_TILE["cuda"])
    if request.param == "(tokens, V) at once":  # what is compiled, as it is
        monkeypatch.setattr(head_sizes, "COMPILED_CHUNK_ROWS", 21)
        plainly = softmax_derivative._normalize
        monkeypatch.setattr(softmax_derivative, "_compiled", lambda: plainly)
        plain = module._LinearCrossEntropy.apply
        monkeypatch.setattr(
            module._LinearCrossEntropy,
            "apply",
            lambda *arguments: plain(*arguments[:-1], replace(arguments[-1], compiled=True)),
        )
    return request.param


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
    loss = linear_cross_entropy(*tensors[:2], targets, bias=bias, **options)
    return loss, torch.autograd.grad(loss / 7, tensors)


def far(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


def assert_as_in_fp64(tensors, targets, terms, **tolerances):
    expected, expected_gradients = reference(tensors, targets, terms)
    loss, gradients = fused(tensors, targets, terms=terms)
    assert loss.dtype == torch.float32
    assert far(loss, expected) < tolerances["loss"]
    for tensor, actual, wanted in zip(tensors, gradients, expected_gradients, strict=True):
        assert actual.dtype == tensor.dtype
        assert far(actual, wanted) < tolerances["gradients"]


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    "terms",
    [LogitTerms(), LogitTerms(scale=0.3), LogitTerms(softcap=CAP), LogitTerms(1.7, CAP)],
    ids=["plain", "scaled", "capped", "both"],
)
def test_loss_and_gradients_are_those_of_all_logits_in_fp64(terms, with_bias):
    assert_as_in_fp64(*made(with_bias=with_bias), terms, loss=1e-6, gradients=2e-6)


def test_in_half_precision_the_loss_is_still_summed_in_float32():
    assert_as_in_fp64(*made(torch.bfloat16), PLAIN, loss=1e-3, gradients=1e-2)


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


def test_a_frozen_weight_has_no_gradient_and_takes_no_product(monkeypatch):
    tensors, targets = made()
    expected = reference(tensors, targets)[1][0]
    monkeypatch.delattr(module._Work, "_add_weight_gradient")
    hidden, weight = tensors
    loss = linear_cross_entropy(hidden, weight.detach(), targets)
    (loss / 7).backward()
    assert far(hidden.grad, expected) < 2e-6


def test_a_frozen_body_still_trains_the_head():
    tensors, targets = made()
    expected = reference(tensors, targets)[1][1]
    hidden, weight = tensors
    (linear_cross_entropy(hidden.detach(), weight, targets) / 7).backward()
    assert far(weight.grad, expected) < 2e-6


def test_without_gradients_only_the_loss_is_computed(monkeypatch):
    tensors, targets = made()
    expected, _ = reference(tensors, targets)
    products = []
    plain = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, **k: products.append(a) or plain(*a, **k))
    with torch.no_grad():
        loss = linear_cross_entropy(*tensors, targets)
    assert far(loss, expected) < 1e-6
    assert len(products) == 3, "one for each chunk"


@pytest.mark.parametrize("layout", LAYOUTS[2:], indirect=True)
def test_a_gpu_is_given_rows_of_whole_16_bytes(monkeypatch):
    tensors, targets = made(torch.bfloat16, with_bias=True)
    strides = []
    plain = torch.mm

    def watched(left, right, **options):
        strides.extend(max(one.stride()) * one.element_size() for one in (left, right))
        return plain(left, right, **options)

    monkeypatch.setattr(torch, "mm", watched)
    _, gradients = fused(tensors, targets)
    assert strides
    assert {stride % 16 for stride in strides} == {0}
    assert [len(gradient) for gradient in gradients] == [TOKENS, VOCABULARY, VOCABULARY]


@pytest.mark.parametrize("layout", LAYOUTS[2:3], indirect=True)
def test_a_vocabulary_of_whole_tiles_is_taken_as_it_is():
    (hidden, weight), _ = made()
    way = module._Way(PLAIN, gradients=True, compiled=False)
    work = module._Work(hidden, weight[: WHOLE_TILES - 8], None, way, (True, True, False))
    assert work.weight.data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("tokens", [0, 4], ids=["none at all", "all ignored"])
def test_tokens_without_loss_give_zero_and_zero_gradients(tokens):
    (hidden, weight), _ = made()
    targets = torch.full((tokens,), IGNORED)
    loss = linear_cross_entropy(hidden[:tokens], weight, targets)
    loss.backward()
    assert loss.item() == 0
    assert not weight.grad.any()
    assert not hidden.grad.any()


def test_far_logits_do_not_overflow():
    (hidden, weight), targets = made()
    loss, gradients = fused([hidden * 1e4, weight], targets)
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("layout", LAYOUTS[:2], indirect=True)
def test_a_cpu_is_given_whole_tiles_of_tokens(monkeypatch):
    monkeypatch.setitem(head_sizes.TILE_ROWS, "cpu", 8)
    tensors, targets = made(torch.bfloat16, with_bias=True)
    tokens = set()
    plain = torch.mm

    def watched(left, right, **options):
        tokens.update({*left.shape, *right.shape} - {WIDTH, VOCABULARY, 100, 1})
        return plain(left, right, **options)

    monkeypatch.setattr(torch, "mm", watched)
    assert_as_in_fp64(tensors, targets, PLAIN, loss=1e-3, gradients=1e-2)
    assert tokens == {16, 8}, "50 in three chunks of at most 21, the last a short one"


@pytest.mark.parametrize("layout", LAYOUTS[:2], indirect=True)  # no words of zeros, so no view
def test_the_gradient_of_a_tied_embedding_is_added_in_place(monkeypatch):
    made_by_head = []
    plain = module._Work.gradients

    def watched(work):
        made_by_head.append(work.weight_gradient.data_ptr())
        return plain(work)

    monkeypatch.setattr(module._Work, "gradients", watched)
    (_, weight), targets = made()
    hidden = functional.embedding(targets.clamp(min=0), weight)
    linear_cross_entropy(hidden, weight, targets).backward()
    assert weight.grad.data_ptr() == made_by_head[0]


def test_a_second_backward_pass_is_refused_for_the_gradients_are_gone():
    tensors, targets = made()
    loss = linear_cross_entropy(*tensors, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="its gradients are gone"):
        loss.backward()


def test_buffers_are_gone_when_the_call_is(monkeypatch):
    tensors, targets = made()
    works = []
    plain = module._Work.__init__
    monkeypatch.setattr(
        module._Work,
        "__init__",
        lambda self, *arguments: works.append(weakref.ref(self)) or plain(self, *arguments),
    )
    gc.disable()  # a cycle would keep them until it happens to run
    try:
        linear_cross_entropy(*tensors, targets)
        assert [work() for work in works] == [None]
    finally:
        gc.enable()


def test_the_memory_said_is_the_memory_taken(monkeypatch, layout):
    buffers_and_gradient = dict(zip(LAYOUTS, (2, 2, 3, 1), strict=True))[layout]
    taken = []
    for name in ("zeros", "empty"):
        plain = getattr(torch, name)

        def counted(*shape, plain=plain, **options):
            tensor = plain(*shape, **options)
            taken.append(tensor.nbytes)
            return tensor

        monkeypatch.setattr(torch, name, counted)
    tensors, targets = made()
    linear_cross_entropy(*tensors, targets)
    at_once = layout == "(tokens, V) at once"
    words = VOCABULARY if layout in LAYOUTS[:2] else WHOLE_TILES
    logits = (21 if at_once else 17) * words * 4  # 50 tokens in three chunks
    copied = 0 if words == VOCABULARY else words * WIDTH * 4
    buffers = sum(taken[:buffers_and_gradient]) + logits + copied
    said = working_bytes(TOKENS, VOCABULARY, WIDTH, "cpu", 4)
    assert buffers < said if at_once else buffers == said
    assert sum(taken[buffers_and_gradient:]) < 0.01 * buffers, "losses and sums of tokens"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS[2:3], indirect=True)
def test_compiled_it_is_the_same_in_one_graph(monkeypatch):
    monkeypatch.setattr(head_sizes, "COMPILED_CHUNK_ROWS", 21)
    monkeypatch.setattr(module, "can_be_compiled", lambda _: True)
    (hidden, weight), targets = made()
    expected, expected_gradients = reference([hidden, weight], targets)
    before = compiled_graphs()
    for tokens in (TOKENS, 30, TOKENS):
        loss = linear_cross_entropy(hidden[:tokens], weight, targets[:tokens], compiled=True)
    assert compiled_graphs() == before + 1, "short chunks too"
    assert far(loss, expected) < 1e-6
    gradients = torch.autograd.grad(loss / 7, [hidden, weight])
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        assert far(actual, wanted) < 2e-6


@pytest.mark.parametrize("layout", ["(tokens, V) at once"], indirect=True)
@pytest.mark.parametrize("place", ["losses", "derivatives"])
def test_what_is_compiled_wrongly_is_refused(place, monkeypatch):
    monkeypatch.setattr(softmax_derivative, "_proved", set())
    tensors, targets = made()
    fused(tensors, targets)  # what is right

    def wrong(logits, *arguments):
        normalizer = softmax_derivative._normalize(logits, *arguments)
        (normalizer if place == "losses" else logits)[3] *= 1.1
        return normalizer

    monkeypatch.setattr(softmax_derivative, "_compiled", lambda: wrong)
    fused(tensors, targets)  # proved once
    softmax_derivative._proved.clear()
    with pytest.raises(ConfigurationError, match="compiles the softmax of the loss wrongly"):
        fused(tensors, targets)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("terms", [LogitTerms(), LogitTerms(1.7, CAP)], ids=["plain", "both"])
@pytest.mark.parametrize("layout", ["(V, tokens)"], indirect=True)  # a GPU's own all the same
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
