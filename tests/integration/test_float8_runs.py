"""Runs in fp8, emulated on the CPU: refused, in two processes, resumed, with adapters."""

import pytest
import tiny
import torch
from launching import run_processes
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import pretrain
from utils.config.errors import ConfigurationError

pytestmark = pytest.mark.slow
FP8 = {"fp8": "true", "bf16": True, "use_cpu": True, "learning_rate": 1e-3}
ONE_ROW = {"per_device_train_batch_size": 1}


# FSDP2 gathers weights in bf16, so one more rounding comes before that to fp8.
@pytest.mark.parametrize(("name", "within"), [("fsdp2", 1e-3), ("multi_gpu", 1e-5)])
def test_two_processes_equal_one(name, within, pretraining, pretrained, tmp_path):
    settings = FP8 | ONE_ROW
    alone, run = pretrained(tmp_path / "alone", **settings), tmp_path / "run"
    settings |= {"activation_checkpointing": "selective"}  # does not change the numbers
    shown = run_processes(name, "pretrain.py", pretraining(run, **settings)).succeeded()
    assert "fp8: rowwise, 7 linear layers; in bf16: the last layer; 7 of the first" in shown
    assert ("weights are gathered in bf16" in shown) == (name == "fsdp2")
    assert tiny.losses(run) == pytest.approx(tiny.losses(alone), abs=within)


def test_a_run_resumes_exactly_and_its_files_are_those_of_bf16(pretraining, pretrained, tmp_path):
    bf16 = pretrained(tmp_path / "bf16", **FP8 | {"fp8": "false"})
    whole = pretrained(tmp_path / "whole", **FP8)
    assert tiny.losses(whole) != tiny.losses(bf16)
    assert tiny.losses(whole) == pytest.approx(tiny.losses(bf16), abs=0.02)
    for file in ("checkpoint-3/model.safetensors", "final/model.safetensors"):
        shapes = [
            {name: (one.shape, one.dtype) for name, one in load_file(run / file).items()}
            for run in (whole, bf16)
        ]
        assert shapes[0] == shapes[1]
    loaded, info = AutoModelForCausalLM.from_pretrained(whole / "final", output_loading_info=True)
    assert not any(info.values())
    assert {type(layer) for layer in loaded.modules() if isinstance(layer, torch.nn.Linear)} == {
        torch.nn.Linear
    }
    cut = tiny.copied(whole, tmp_path / "cut", step=3)
    other = pretraining(cut, **FP8 | {"fp8": "tensorwise"})
    with pytest.raises(ConfigurationError, match=r"its fp8 is true, now it is .*tensorwise"):
        pretrain.main(other)
    assert pretrain.main(pretraining(cut, **FP8)) == 0
    tiny.assert_same_run(cut, whole)


def test_adapters_train_beside_layers_in_fp8(fine_tuned, base_model, tmp_path):
    lora = {"use_peft": True, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}
    run = fine_tuned(tmp_path / "run", **FP8 | lora | {"fp8": "tensorwise", "learning_rate": 1e-2})
    assert tiny.losses(run)[-1] < tiny.losses(run)[0]
    base = AutoModelForCausalLM.from_pretrained(base_model)
    merged = PeftModel.from_pretrained(base, run / "adapter").merge_and_unload().state_dict()
    final = AutoModelForCausalLM.from_pretrained(run / "final").state_dict()
    torch.testing.assert_close(final, merged, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bf16": False}, "needs --bf16 true"),
        (
            {"sequence_length": 60, **ONE_ROW},
            "60 x per_device_train_batch_size 1 must be one of 16: set .*64",
        ),
        ({"model_config_overrides": '{"num_hidden_layers": 1}'}, "no layer of llama fits"),
        ({"use_cpu": None, "assume": "1xA100-80GB"}, "not A100-80GB: leave it out"),
    ],
)
def test_what_cannot_work_is_refused_before_the_start(settings, message, pretraining, tmp_path):
    argv = pretraining(tmp_path / "run", **FP8 | settings)
    with pytest.raises(ConfigurationError, match=message):
        pretrain.main([*argv, "--dry_run"])
