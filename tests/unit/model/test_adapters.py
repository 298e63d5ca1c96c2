"""The layers that LoRA adapts by default in every model family, and refusals of wrong names."""

import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from families import DENSE, EXPERTS, INSIDE, names, tiny_config, tiny_model
from peft import PromptTuningConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from utils.config.arguments import ModelArguments
from utils.config.errors import ConfigurationError
from utils.model.adapters import (
    freeze_by_settings,
    freeze_unused,
    frozen_lines,
    linear_and_experts,
    load_adapter,
    plan_adapters,
    with_adapters,
)
from utils.model.probe import build_probe_model, probe_config


def asked(**given) -> SimpleNamespace:
    model = ModelArguments(model_name_or_path="m", use_peft=True, lora_r=2, **given)
    return SimpleNamespace(model=model, values=SimpleNamespace(given=given))


def adapted_names(model: nn.Module) -> set[str]:
    """Return the modules and parameters that have adapters."""
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            own = getattr(module, "parameter_name", None)
            clean = name.removeprefix("base_model.model.").replace(".base_layer", "")
            found.add(f"{clean}.{own}" if own else clean)
    return found


FAST = ("llama", "gpt2", "phi3", "qwen3_moe", "gpt_oss", "phi4_multimodal")
ALL = [
    pytest.param(name, marks=[] if name in FAST else pytest.mark.slow)
    for name in names(DENSE, EXPERTS, INSIDE)
]


@pytest.mark.parametrize("name", ALL)
def test_lora_adapts_linear_layers_and_experts_by_default(name):
    config = tiny_config(name)
    settings = asked()
    plan = plan_adapters(settings.model, config)
    plain = tiny_model(config)
    head, text = plain.get_output_embeddings(), config.get_text_config()
    inside = "model.language_model." if hasattr(plain.base_model, "language_model") else ""
    expected = {
        path
        for path, module in plain.named_modules()
        if type(module) in (nn.Linear, Conv1D)
        and module is not head
        and path.startswith(inside)
        # Phi-4 has towers in its embedding; Llama 3.2 Vision has layers that only images use.
        and ".embed_tokens_extend." not in path
        and not (name == "mllama" and ".layers.1." in path)
    }
    if name in EXPERTS or name == "kimi_k25":
        named = plain.named_parameters()
        experts = {path for path, value in named if value.ndim == 3 and path.startswith(inside)}
        assert len(experts) >= 2
        expected |= experts
    assert plan.trains_head is False
    adapted = with_adapters(tiny_model(config), plan.model).train()
    linear = {path.removesuffix(".weight") for path in adapted_names(adapted)}
    assert linear == {path.removesuffix(".weight") for path in expected}
    tokens = torch.arange(2, 2 + 2 * 40).view(2, 40) % (text.vocab_size - 2)
    loss = adapted(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    trained = {path: value for path, value in adapted.named_parameters() if value.requires_grad}
    assert all(value.grad is not None for value in trained.values())
    assert all(value.grad.any() for path, value in trained.items() if "lora_B" in path)


def test_experts_take_no_dropout_and_the_log_says_so():
    settings = asked(lora_dropout=0.1)
    plan = plan_adapters(settings.model, tiny_config("qwen3_moe"))
    dropout, trained = plan.report
    assert dropout == "lora_dropout: 0, not 0.1: experts (gate_up_proj, down_proj) take none"
    assert "LoRA: rank 2 on q_proj, k_proj, v_proj, o_proj, experts' gate_up_proj" in trained
    assert plan.model.lora_dropout == 0
    assert settings.model.lora_dropout == 0.1, "what was parsed stays"
    settings = asked(lora_dropout=0.1, lora_target_modules=["q_proj", "v_proj"])
    plan = plan_adapters(settings.model, tiny_config("qwen3_moe"))
    assert plan.model.lora_target_parameters is None
    assert plan.model.lora_dropout == 0.1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"lora_target_modules": ["q_prj", "v_proj"]}, "q_prj: nothing in the model .*q_proj, k"),
        ({"lora_target_modules": [r"(.*q_proj"]}, "nor does it match as a pattern"),
        ({"lora_target_modules": ["input_layernorm"]}, "LoRA does not fit llama"),
        ({"lora_modules_to_save": ["lm_heat"]}, "lora_modules_to_save lm_heat.*lm_head"),
        ({"lora_target_parameters": ["q_proj.weigth"]}, "lora_target_parameters q_proj.weigth"),
        ({"lora_target_modules": ["q_proj", "lm_head"]}, "whole by --lora_modules_to_save lm_head"),
    ],
)
def test_wrong_names_are_refused(given, told):
    with pytest.raises(ConfigurationError, match=told):
        plan_adapters(asked(**given).model, tiny_config("llama"))


@pytest.mark.parametrize(
    ("name", "given", "count"),
    [
        ("llama", [r".*layers\.1\..*(q|k)_proj"], 2),
        ("llama", ["model.layers.0.mlp.up_proj", "embed_tokens"], 2),
        # Names of experts' layers before transformers 5.
        ("qwen3_moe", ["q_proj", "gate_proj", "up_proj", "down_proj"], 6),
        ("mixtral", ["w2"], 2),
        ("deepseek_v3", ["gate_proj", "up_proj", "down_proj"], 8),
    ],
)
def test_names_and_patterns(name, given, count):
    plan = plan_adapters(asked(lora_target_modules=given).model, tiny_config(name))
    assert plan.trains_head is False
    adapted = with_adapters(tiny_model(tiny_config(name)), plan.model)
    assert len(adapted_names(adapted)) == count


@pytest.mark.parametrize("name", [*INSIDE, "llama", "gpt_oss"])
def test_what_text_does_not_go_through_is_frozen(name):
    """All other parameters get a gradient, for which DDP waits. A text model has none frozen."""
    model = tiny_model(tiny_config(name)).train()
    frozen = freeze_unused(model)
    tokens = torch.arange(2, 42).view(2, 20)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    trained = {path for path, value in model.named_parameters() if value.requires_grad}
    assert trained == {path for path, value in model.named_parameters() if value.grad is not None}
    assert {path for path, _ in model.named_parameters()} == trained | set(frozen)
    assert bool(frozen) == (name in INSIDE)


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4", "big_bird"])
def test_what_the_loss_does_not_reach_is_frozen_and_not_adapted(name):
    """Sparse attention takes only indices from its indexers. Nothing uses BERT's pooler."""
    config = AutoConfig.for_model(name, is_decoder=True)
    model = build_probe_model(probe_config(config), "eager").train()
    frozen = freeze_unused(model)
    assert frozen
    assert all(".indexer." in path or ".pooler." in path for path in frozen)
    tokens = (torch.arange(256) % 60 + 1).view(1, 256)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    without = {path for path, value in model.named_parameters() if value.grad is None}
    assert without == set(frozen)
    layers = linear_and_experts(model)[0]
    assert layers
    assert not {f"{layer}.weight" for layer in layers} & without


def test_the_size_of_an_adapter_is_judged_without_the_tokenizer_that_it_names(tmp_path):
    """An adapter of prompts that began as a text names the tokenizer on its author's machine."""
    prompts = PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, prompt_tuning_init="TEXT",
        prompt_tuning_init_text="Answer briefly:", tokenizer_name_or_path=str(tmp_path / "none"),
    )  # fmt: skip
    model = tiny_model(tiny_config("llama"))
    adapted = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    adapted.save_pretrained(tmp_path)
    prompts.inference_mode = True
    prompts.save_pretrained(tmp_path)
    load_adapter(tiny_model(tiny_config("llama")), str(tmp_path), tmp_path / "adapter_config.json")


@pytest.mark.parametrize(
    ("freeze", "train_only", "frozen"),
    [
        (["embed_tokens"], [], r"model\.embed_tokens\..*"),
        (["layers.1"], [], r"model\.layers\.1\..*"),  # not layers.10
        ([r"model\.layers\.[2-9]"], [], r"model\.layers\.[2-9]\..*"),
        (["layers.1.mlp", "norm"], [], r"model\.(layers\.1\.mlp|norm)\..*"),
        ([], ["lm_head", "layers.11"], r"(?!lm_head|model\.layers\.11\.).*"),
        (["q_proj"], ["self_attn"], r"(?!.*self_attn).*|.*q_proj.*"),
    ],
)
def test_named_layers_are_frozen(freeze, train_only, frozen):
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=12, num_attention_heads=2,
        vocab_size=16, tie_word_embeddings=False,
    )  # fmt: skip
    built = LlamaForCausalLM(config)
    freeze_by_settings(built, ModelArguments(freeze=freeze, train_only=train_only))
    for name, weight in built.named_parameters():
        assert weight.requires_grad != bool(re.fullmatch(frozen, name)), name
    tied = LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "tie_word_embeddings": True}))
    freeze_by_settings(tied, ModelArguments(train_only=["lm_head"]))
    (trained,) = (name for name, weight in tied.named_parameters() if weight.requires_grad)
    assert trained == "model.embed_tokens.weight", "it is the weight of the head, too"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, []),
        (
            {"freeze": ["embed_tokens"]},
            ["frozen: 128 of 5,832 parameters: model.embed_tokens"],
        ),
        (
            {"freeze": ["layers.1.mlp", "layers.0.mlp", "norm"]},
            [
                "frozen: 392 of 5,832 parameters: model.layers.0.mlp to model.layers.1.mlp (2), "
                "model.norm"
            ],
        ),
        (
            {"train_only": ["lm_head", "layers.11"]},
            [
                "frozen: 5,240 of 5,832 parameters: model.embed_tokens, model.layers.0 to "
                "model.layers.10 (11), model.norm"
            ],
        ),
    ],
)
def test_the_plan_names_what_is_frozen(given, said):
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=12, num_attention_heads=2,
        vocab_size=16, tie_word_embeddings=False,
    )  # fmt: skip
    assert frozen_lines(ModelArguments(**given), config) == said
    config.tie_word_embeddings = True
    (line,) = frozen_lines(ModelArguments(freeze=["embed_tokens"]), config)
    assert line.endswith(
        ": model.embed_tokens, lm_head; model.embed_tokens.weight and lm_head.weight are one "
        "weight (tied), so both are frozen"
    )


def test_pefts_warning_on_tied_weights_comes_once(recwarn):
    config = AutoConfig.for_model(
        "llama", hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = ModelArguments(use_peft=True, lora_modules_to_save=["lm_head"])
    plan = plan_adapters(model, config)
    for _ in range(2):
        with warnings.catch_warnings():  # as the libraries do: Python then forgets what it showed
            with_adapters(tiny_model(config), plan.model)
    told = [each for each in recwarn if "tie_word_embeddings" in str(each.message)]
    assert len(told) == 1
