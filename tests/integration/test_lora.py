"""Adapters from start to finish: trained with default settings, resumed, merged and loaded.

QLoRA quantizes the weights on load.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from families import tiny_config, tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import chat
import sft_train
from utils.config.errors import ConfigurationError
from utils.model import weights
from utils.model.weights import packed_layers, quantized_layers
from utils.run import finish

pytestmark = pytest.mark.slow
QLORA = {"use_peft": True, "load_in_4bit": True, "use_bnb_nested_quant": True}
ADAPTER_FILE = "adapter_model.safetensors"
SHORT = {"max_steps": 3, "save_steps": 2, "lora_dropout": 0.1}
TOKENS = torch.arange(2, 42).view(2, 20)


@pytest.fixture
def argv(fine_tuning, workspace, tmp_path):
    evaluated = {"eval_data": f"heldout={workspace / 'chats_heldout'}", "eval_steps": 2}

    def command(name: str, **changes: object) -> tuple[Path, list[str]]:
        base, run = tmp_path / "base", tmp_path / "run"
        if not base.exists():
            tiny_model(tiny_config(name)).bfloat16().save_pretrained(base)
            tiny.make_tokenizer(base)
        settings = {"model_name_or_path": base} | QLORA | SHORT | evaluated
        return run, fine_tuning(run, **(settings | changes))

    return command


@pytest.fixture
def live(monkeypatch):
    """Return facts about the loaded model: predicted and measured bytes, logits after training."""
    seen, load, export = {}, weights.load_model, finish.export_final

    def loaded(settings, config, *others):
        model = load(settings, config, *others)
        layers = packed_layers(model)
        planned = quantized_layers(settings.model, config)
        assert [*layers] == planned.layers
        dtype = weights.weights_dtype(settings.model, config)
        whole = sum(weight.numel() for weight in tiny_model(config).parameters()) * dtype.itemsize
        seen["predicted"] = whole - planned.bytes_saved(settings.model, dtype)
        sizes = [weight.nbytes for weight in model.parameters()]
        states = [layer.quant_state for layer in layers.values()]
        sizes += [state.absmax.nbytes for state in states]
        sizes += [state.state2.absmax.nbytes for state in states if state.nested]
        seen["measured"] = sum(sizes)
        return model

    @torch.no_grad()
    def exported(trainer, dtype):
        assert {v.dtype for v in trainer.model.parameters() if v.requires_grad} == {torch.float32}
        export(trainer, dtype)
        trainer.model.set_attn_implementation("sdpa")  # packed_varlen needs packed documents
        seen["logits"] = trainer.model.eval()(input_ids=TOKENS, use_cache=False).logits

    monkeypatch.setattr(weights, "load_model", loaded)
    monkeypatch.setattr(finish, "export_final", exported)
    return seen


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"save_dtype": "float32", "lora_target_modules": ["q_proj", "down_proj"]}),
        ("gemma3", {"save_dtype": "float32", "use_bnb_nested_quant": False}),  # with a vision tower
        pytest.param("gpt2", {"dtype": "bfloat16"}, marks=pytest.mark.exhaustive),
        pytest.param("deepseek_v3", {"use_dora": False}, marks=pytest.mark.exhaustive),
        pytest.param("qwen3", {"use_dora": True, "bf16": True, "use_cpu": True, "dtype": "bfloat16",
                               "bnb_4bit_quant_type": "fp4"}, marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_a_run_trains_resumes_and_leaves_what_it_trained(
    name, changes, argv, live, tmp_path, capfd
):
    run, command = argv(name, **changes)
    assert sft_train.main(command) == 0
    assert "parameters are kept in" in capfd.readouterr().out
    assert live["measured"] == pytest.approx(live["predicted"], rel=0.005)
    assert all(".lora_" in key for key in load_file(run / "checkpoint-3" / ADAPTER_FILE))
    final, info = AutoModelForCausalLM.from_pretrained(run / "final", output_loading_info=True)
    assert not any(info.values())
    assert "quantization_config" not in json.loads((run / "final/config.json").read_text())
    exact = changes.get("save_dtype") == "float32"
    assert final.dtype == (torch.float32 if exact else torch.bfloat16)
    with torch.no_grad():
        found = final(input_ids=TOKENS).logits.float()
    expected = live["logits"].float()
    assert (found - expected).abs().max() < (1e-5 if exact else 0.02) * expected.abs().max()
    text = ["--prompt", "t5 t8 t11", "--max_new_tokens", "2", "--greedy"]
    assert chat.main([str(run), *text]) == 0
    whole = shutil.copytree(run, tmp_path / "whole")
    tiny.cut(run, step=2)
    assert sft_train.main(command) == 0
    tiny.assert_same_run(run, whole)


def test_a_run_does_not_resume_on_other_weights(argv):
    run, command = argv("llama", use_bnb_nested_quant=None)
    assert sft_train.main(command) == 0
    tiny.cut(run, step=2)
    same = {"use_bnb_nested_quant": None}
    for name, value in (("load_in_4bit", "false"), ("bnb_4bit_quant_type", "fp4")):
        with pytest.raises(ConfigurationError, match=f"its {name} is .* accept the new one"):
            sft_train.main(argv("llama", **same, **{name: value})[1])


def test_what_is_published_in_few_bits_is_refused(argv, tmp_path):
    _, command = argv("llama")
    path = tmp_path / "base" / "config.json"
    published = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": published}))
    with pytest.raises(ConfigurationError, match=r"quantized already \(bitsandbytes\): name the"):
        sft_train.main([*command, "--dry_run"])


@pytest.fixture
def trained(fine_tuned, tmp_path) -> Callable[..., Path]:
    """Return a function that fine-tunes a model type, from the same base each time."""

    def run(name: str, **changes: object) -> Path:
        base = tmp_path / "base_of_family"
        if not base.exists():
            tiny_model(tiny_config(name)).save_pretrained(base)
            tiny.make_tokenizer(base)
        settings = {"model_name_or_path": base, "use_peft": True, "max_steps": 3, "save_steps": 2}
        return fine_tuned(tmp_path / "run", **(settings | changes))

    return run


@pytest.mark.parametrize("name", ["gpt2", "phi3", "gpt_oss", "deepseek_v3", "gemma3"])
def test_default_targets_train_resume_and_merge(name, trained, capsys):
    run = trained(name)
    assert "LoRA: rank 16 on " in capsys.readouterr().out
    expected, losses = tiny.weights(run), tiny.losses(run)
    tiny.cut(run, step=2)
    trained(name)
    assert tiny.losses(run) == losses
    assert tiny.weights(run) == expected
    merged, info = AutoModelForCausalLM.from_pretrained(run / "final", output_loading_info=True)
    assert not any(info.values())
    before = tiny_model(tiny_config(name)).state_dict()
    moved = {key for key, value in merged.state_dict().items() if not value.equal(before[key])}
    assert moved
    assert not any("vision" in key for key in moved)
    said = merged.generate(torch.arange(2, 12)[None], max_new_tokens=3, min_new_tokens=3)
    assert said.shape == (1, 13)


@pytest.mark.parametrize("name", ["llama", "gemma"], ids=["untied", "tied"])
def test_the_last_layer_trained_whole_beside_lora(name, trained, capsys):
    run = trained(name, lora_target_modules="q_proj", lora_modules_to_save="lm_head")
    assert "for LoRA trains the last layer" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(run / "final").state_dict()
    before = tiny_model(tiny_config(name)).state_dict()
    assert not merged["lm_head.weight"].equal(before["lm_head.weight"])
    assert merged["model.embed_tokens.weight"].equal(before["model.embed_tokens.weight"])
