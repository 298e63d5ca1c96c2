"""Attention out of float32 products, some queries at a time, against its definition in float64."""

import pytest
import torch

from utils.kernels import blocked_attention as module
from utils.kernels import per_document
from utils.kernels.blocked_attention import blocked_attention, filled_length
from utils.kernels.per_document import ScoreTerms, attend_by_lengths

HEADS, DIM = 4, 8
# Whole rows that lie end to end; all that is filled up, in several groups of documents and blocks
# of queries; rows of no tokens.
PACKED = {"rows": [32] * 3, "one": [1], "mixed": [5, 40, 64, 1, 16, 0, 33, 70, 9, 40]}
SCALE = DIM**-0.5


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "QUERIES", 16)
    monkeypatch.setattr(module, "SCORES", 2 * HEADS * 16 * 64)
    monkeypatch.setattr(module, "by_onednn", lambda: True)


def states(lengths, dtype=torch.float32, key_heads=HEADS):
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), heads, DIM) for heads in (HEADS, key_heads, key_heads)]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    return [one.to(dtype).requires_grad_() for one in made]


def written_out(query, key, value, lengths, scale=SCALE):
    outputs = []
    for parts in zip(*(one.split(lengths) for one in (query, key, value)), strict=True):
        q, k, v = (one.transpose(0, 1) for one in parts)
        k, v = (one.repeat_interleave(len(q) // len(one), dim=0) for one in (k, v))
        hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.mT * scale).masked_fill(hidden, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


def with_gradients(attend, inputs):
    output = attend(*inputs)
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(output.shape, generator=generator).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, given)]


def far(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm().clamp(min=1e-3)).item()


@pytest.mark.parametrize("lengths", PACKED.values(), ids=PACKED.keys())
@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"]
)
def test_values_and_gradients_are_those_of_the_definition(lengths, key_heads, dtype, tolerance):
    inputs = states(lengths, dtype, key_heads)
    exact = [one.detach().double().requires_grad_() for one in inputs]
    expected = with_gradients(lambda *given: written_out(*given, lengths), exact)
    # In autocast, as training is, whose products in bf16 nothing here may become.
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(lambda *given: blocked_attention(*given, lengths, SCALE), inputs)
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.dtype == dtype
        assert far(actual, wanted) < tolerance


def test_a_scale_of_the_model_is_taken():
    lengths = PACKED["mixed"]
    inputs = states(lengths)
    expected = with_gradients(lambda *given: written_out(*given, lengths, 0.7), inputs)
    terms = ScoreTerms(scale=0.7)
    found = with_gradients(lambda *given: attend_by_lengths(*given, lengths, terms), inputs)
    for actual, wanted in zip(found, expected, strict=True):
        assert far(actual, wanted.double()) < 2e-6


def test_a_document_is_the_same_to_the_bit_whatever_is_in_the_others():
    lengths = PACKED["mixed"]
    inputs = states(lengths)

    def attend(*given):
        return blocked_attention(*given, lengths, SCALE)

    before = with_gradients(attend, inputs)
    kept = slice(5, 45)
    with torch.no_grad():
        for one in inputs:
            one[45:] += 1
            one[:5] -= 1
    after = with_gradients(attend, inputs)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[kept], other[kept])
    assert not torch.equal(before[0][45:], after[0][45:])


def test_it_is_an_operator_of_torch():
    """Opaque where layers are compiled or counted; what it says of shapes and gradients holds."""
    lengths = PACKED["mixed"]
    torch.library.opcheck(blocked_attention, (*states(lengths), lengths, SCALE))


def test_there_are_few_shapes():
    found = {filled_length(length) for length in range(1, module.LONGEST + 1)}
    assert found == {16, 32, *range(64, module.LONGEST + 1, 64)}
    assert all(filled_length(length) >= length for length in range(1, module.LONGEST + 1))
    groups = [*module._groups([40] * 7 + [64], HEADS)]
    assert [len(group.begins) for group in groups] == [2, 2, 2, 2]
    assert [len(group.begins) for group in module._groups([16] * 7, HEADS)] == [4, 2, 1]


@pytest.mark.parametrize(
    ("lengths", "terms", "blocked"),
    [
        ([30, 20], ScoreTerms(), [30, 20]),
        ([30, 20], ScoreTerms(window=30), [30, 20]),
        ([30, 20], ScoreTerms(window=25), [20]),
        ([30, 20], ScoreTerms(dropout=0.1), None),
        ([30, 20], ScoreTerms(softcap=5.0), None),
        ([30, 33, 7], ScoreTerms(), [30, 7]),
        ([33, 33], ScoreTerms(), None),
    ],
)
def test_it_is_taken_for_short_documents_without_more(lengths, terms, blocked, monkeypatch):
    monkeypatch.setattr(module, "LONGEST", 32)
    calls = []
    plain = per_document.blocked_attention
    monkeypatch.setattr(
        per_document, "blocked_attention", lambda *given: calls.append(given[3]) or plain(*given)
    )
    inputs = [one.detach() for one in states(lengths)]
    torch.manual_seed(0)
    found = attend_by_lengths(*inputs, lengths, terms)
    assert calls == ([] if blocked is None else [blocked])
    monkeypatch.setattr(module, "by_onednn", lambda: False)
    torch.manual_seed(0)
    expected = attend_by_lengths(*inputs, lengths, terms)
    assert len(calls) == (blocked is not None), "where MKL multiplies torch's kernel is taken"
    assert far(found, expected.double()) < 2e-6
