"""The loss head is proved before it is used; the load-balancing loss equals transformers'."""

import pytest
import torch
import transformers
from families import EXPERTS, tiny_config, tiny_model
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from utils.config.errors import ConfigurationError
from utils.kernels.linear_cross_entropy import LogitTerms
from utils.model import loss_head as fused_head
from utils.model.architecture import has_experts, without_weights
from utils.model.loss_head import (
    LossHeadChoice,
    RouterTerm,
    balance_loss,
    choose_loss_head,
    router_term,
)
from utils.model.probe import build_probe_model, probe_config

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "use_cache": False}
GROUPED = {**SIZES, "num_key_value_heads": 1, "head_dim": 32}
LLAMA = transformers.LlamaConfig(**SIZES)
CAPPED = transformers.Gemma2Config(**GROUPED)  # its logits have a soft cap
FUSED = LossHeadChoice("fused", "")
ROUTED = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    "config",
    [
        transformers.Qwen3Config(**GROUPED, tie_word_embeddings=True),
        CAPPED,
        transformers.GraniteConfig(**SIZES, logits_scaling=8.0),
        transformers.CohereConfig(**SIZES, logit_scale=0.1),
        transformers.PhiConfig(**SIZES),  # its last layer has a bias
    ],
    ids=lambda config: config.model_type,
)
def test_auto_fuses_what_it_has_proved(config):
    choice = choose_loss_head("auto", config)
    assert choice.name == "fused"
    assert choice.reason.startswith("auto: fused")
    assert "tested where the run trains" not in choice.reason, "it is tested here"


def test_what_a_model_does_to_its_logits_is_missed_by_the_proof(monkeypatch):
    monkeypatch.setattr(fused_head, "_logit_terms", lambda _: LogitTerms())
    for config in (CAPPED, transformers.GraniteConfig(**SIZES, logits_scaling=8.0)):
        choice = choose_loss_head("auto", config)
        assert choice.name == "logits"
        assert "loss is not the cross-entropy of its last layer alone" in choice.reason


@pytest.mark.parametrize("given", [None, RouterTerm(0.5, 2)], ids=["no term", "term"])
def test_the_experts_term_is_fused_too_and_its_coefficient_is_the_settings(given):
    config = transformers.MixtralConfig(**ROUTED, router_aux_loss_coef=0.02)
    choice = choose_loss_head("fused", config, router=given)
    assert (choice.name, choice.router) == ("fused", given)


def test_a_fused_head_that_cannot_be_is_refused(monkeypatch):
    monkeypatch.setattr(fused_head, "body_of", lambda model: model)
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM does not run without its last"):
        choose_loss_head("fused", LLAMA)


def test_the_proof_leaves_the_random_numbers_alone_and_a_fused_model_answers_as_before():
    before = torch.get_rng_state()
    choose_loss_head("auto", LLAMA)
    assert torch.equal(before, torch.get_rng_state())
    model = build_probe_model(probe_config(LLAMA), "sdpa")
    tokens = torch.arange(1, 9)[None]
    labels = torch.where(tokens % 3 == 0, -100, tokens)
    expected = model(tokens, labels=labels)
    FUSED.install(model)
    assert torch.equal(model(tokens).logits, expected.logits)
    generated = model.generate(tokens, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert generated.shape == (1, 10)
    mean = model(tokens, labels=labels).loss.item()  # without num_items_in_batch it is a mean
    assert mean == pytest.approx(expected.loss.item(), abs=1e-6)


WITH_TERM = [
    name for name in EXPERTS if router_term(tiny_config(name), fine_tuning=True) is not None
]


def gradients(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("head", ["fused", "logits"])
@pytest.mark.parametrize("name", WITH_TERM)
def test_three_micro_batches_are_transformers_loss_of_the_whole_batch(name, head):
    config = tiny_config(name, output_router_logits=True)
    term = router_term(config, fine_tuning=False)
    tokens = torch.randint(2, 120, (4, 16), generator=torch.Generator().manual_seed(1))
    model = tiny_model(config)
    whole = model(input_ids=tokens, labels=tokens, use_cache=False)
    whole.loss.backward()
    expected = gradients(model)

    model = tiny_model(config)
    LossHeadChoice(head, "", term).install(model)
    parts = [
        {"input_ids": rows, "labels": rows, "sequence_tokens": torch.full((len(rows),), 16)}
        for rows in (tokens[:1], tokens[1:2], tokens[2:])
    ]
    with torch.no_grad():
        counts = [model(**part, use_cache=False, count_only=True) for part in parts]
    assignments = torch.stack([one.assignments for one in counts]).sum(dim=0)
    total = torch.zeros(())
    for part in parts:
        made = model(**part, use_cache=False, num_items_in_batch=4 * 15)
        rows = made.layers * tokens.numel()
        own = balance_loss(assignments, made.probabilities, rows)
        loss = made.loss + term.coefficient * own
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(total, whole.loss.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("head", ["fused", "logits"])
def test_padding_is_left_out_and_a_loss_without_rows_has_no_term(head):
    config = tiny_config("qwen3_moe", output_router_logits=True)
    term = router_term(config, fine_tuning=False)
    model = tiny_model(config)
    tokens = torch.arange(2, 26).view(2, 12)
    real = torch.tensor([12, 7])
    mask = (torch.arange(12) < real[:, None]).long()
    plain = model(input_ids=tokens, labels=tokens, use_cache=False, output_router_logits=False).loss
    logits = model(input_ids=tokens, use_cache=False, output_router_logits=True).router_logits
    expected = load_balancing_loss_func(logits, 8, 2, mask)
    LossHeadChoice(head, "", term).install(model)
    made = model(input_ids=tokens, labels=tokens, use_cache=False, sequence_tokens=real)
    actual = balance_loss(made.assignments, made.probabilities, made.layers * real.sum())
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made.loss, plain, rtol=1e-6, atol=1e-6)
    evaluated = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    torch.testing.assert_close(evaluated, plain, rtol=1e-6, atol=1e-6)


def test_who_gets_the_term():
    experts, dense = tiny_config("qwen3_moe"), tiny_config("llama")
    assert router_term(experts, fine_tuning=True).coefficient == 0.001
    assert router_term(experts, fine_tuning=True, given=0.1).coefficient == 0.1
    assert router_term(experts, fine_tuning=True, given=0.0) is None
    assert router_term(experts, fine_tuning=False) is None, "its configuration does not ask for it"
    assert router_term(dense, fine_tuning=True) is None
    # Small hybrids have a coefficient but no experts.
    hybrid = tiny_config("granitemoeshared", num_local_experts=0)
    assert router_term(hybrid, fine_tuning=True) is None
    # This model's settings name experts and routing, but the model has neither.
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_experts": 16}
    for is_moe in (False, True):
        doge = transformers.DogeConfig(**sizes, is_moe=is_moe)
        assert (router_term(doge, fine_tuning=True) is not None) == is_moe
        assert has_experts(without_weights(doge)) == is_moe
    dense = tiny_config("qwen3_moe", mlp_only_layers=[0, 1])
    assert router_term(dense, fine_tuning=True) is None
    assert not has_experts(without_weights(dense))
    missing = {"deepseek_v2", "deepseek_v3", "glm4_moe", "dots1", "llama4_text", "hunyuan_v1_moe"}
    assert set(WITH_TERM) == set(EXPERTS) - missing
    for config in (dense, tiny_config("deepseek_v3")):
        with pytest.raises(ConfigurationError, match="has no load-balancing loss"):
            router_term(config, fine_tuning=True, given=0.01)
