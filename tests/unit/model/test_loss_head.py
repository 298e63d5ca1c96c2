"""The loss head chosen for each architecture. A fused head is proved before it is used."""

import pytest
import torch
import transformers

from utils.config.errors import ConfigurationError
from utils.kernels.linear_cross_entropy import LogitTerms
from utils.model import loss_head as fused_head
from utils.model.loss_head import LossHeadChoice, RouterTerm, choose_loss_head
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
    assert "proved equal" in choice.reason


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
