"""Weights of zeros: a model that transformers loads, in a file that takes no room."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.cells.shapes import LLAMA_1B, LLAMA_8B
from benchmarks.cells.toy import toy_shape
from benchmarks.workloads.initial_weights import save_random_weights, save_zero_weights


def test_zeros_load_as_any_weights(tmp_path):
    for shape in (toy_shape(LLAMA_1B), toy_shape(LLAMA_8B)):  # tied and not
        config = AutoConfig.for_model(**shape)
        save_zero_weights(config, torch.bfloat16, tmp_path / "zeros")
        save_random_weights(config, torch.bfloat16, 1, tmp_path / "random")
        loaded, information = AutoModelForCausalLM.from_pretrained(
            tmp_path / "zeros", dtype=torch.bfloat16, output_loading_info=True
        )
        assert not any(information.values()), information
        other = AutoModelForCausalLM.from_pretrained(tmp_path / "random", dtype=torch.bfloat16)
        tensors, others = loaded.state_dict(), other.state_dict()
        assert {name: one.shape for name, one in tensors.items()} == {
            name: one.shape for name, one in others.items()
        }
        assert not any(one.any() for one in tensors.values())


def test_zeros_take_no_room(tmp_path):
    save_zero_weights(AutoConfig.for_model(**LLAMA_8B), torch.bfloat16, tmp_path)
    file = (tmp_path / "model.safetensors").stat()
    assert file.st_size > 2 * 8_030_261_248
    assert file.st_blocks * 512 < 2**20
