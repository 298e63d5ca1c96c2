"""Averaged weights and noisy embeddings follow their formula under every strategy and resume."""

import pytest
import tiny
import torch
from launching import run_processes
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

from utils.config.errors import ConfigurationError
from utils.config.settings import parse_fine_tuning
from utils.launch.processes import LaunchFacts
from utils.plan.run_plan import choose_optimizer_states
from utils.training.smoothing import EmbeddingNoise

pytestmark = pytest.mark.slow

DECAY = 0.5
LORA = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.1}
BF16 = {"dtype": "bfloat16", "stochastic_rounding": True}


def final_weights(run) -> dict[str, torch.Tensor]:
    return load_file(run / "final" / "model.safetensors")


def averaged(start, run, steps: int) -> dict[str, torch.Tensor]:
    """Return the expected average of the weights after all steps, in float64."""
    first = load_file(start / "model.safetensors")
    average = {name: value.double() for name, value in first.items()}
    for step in range(1, steps + 1):
        weights = load_file(run / f"checkpoint-{step}" / "model.safetensors")
        decay = min(DECAY, (1 + step) / (10 + step))
        for name, value in average.items():
            value.mul_(decay).add_(weights[name].double(), alpha=1 - decay)
    return average


def test_final_holds_the_average_of_the_weights_however_they_were_sharded(
    fine_tuning, fine_tuned, base_model, tmp_path, capsys
):
    settings = {"ema_decay": DECAY, "per_device_train_batch_size": 1, "save_steps": 1}
    settings["save_total_limit"] = "null"
    alone = fine_tuned(tmp_path / "alone", **settings)
    said = "step 6, averaged (ema_decay 0.5; checkpoints have the others), in float32"
    shown = capsys.readouterr().out
    assert said in shown
    # transformers also prints its warnings to stdout if the variable CI is set.
    warned = [line for line in shown.splitlines() if "WARNING" in line]
    assert [line for line in warned if "The tokenizer has new" not in line] == []
    found, expected = final_weights(alone), averaged(base_model, alone, steps=6)
    last = load_file(alone / "checkpoint-6" / "model.safetensors")
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(found["model.norm.weight"], last["model.norm.weight"], atol=1e-4)
    for strategy, resumed_on in (("multi_gpu", 2), ("fsdp2", 2), ("fsdp2", 4)):
        whole, cut = tmp_path / strategy, tmp_path / f"{strategy}-{resumed_on}"
        if not whole.exists():
            argv = fine_tuning(whole, **settings)
            run_processes(strategy, "sft_train.py", argv).succeeded()
        argv = fine_tuning(tiny.copied(whole, cut, step=3), **settings)
        run_processes(strategy, "sft_train.py", argv, processes=resumed_on).succeeded()
        if resumed_on == 2:
            tiny.assert_same_run(cut, whole)
        torch.testing.assert_close(final_weights(cut), found, rtol=0, atol=1e-4)
    zero = LaunchFacts(0, 2, "zero2", (), "cpu")
    refused = parse_fine_tuning(fine_tuning(tmp_path / "zero", **settings), "")
    with pytest.raises(ConfigurationError, match=r"ema_decay 0\.5 .* multi_gpu or fsdp2"):
        choose_optimizer_states(refused, AutoConfig.from_pretrained(base_model), zero)


@pytest.mark.parametrize("kind", [LORA, BF16], ids=["lora", "bf16"])
def test_a_resumed_run_averages_and_adds_noise_as_the_uninterrupted_one(
    kind, fine_tuned, chats_heldout, tmp_path
):
    """The best checkpoint is compared as well. Checkpoints are saved in the background."""
    settings = {
        **kind, **chats_heldout, "ema_decay": 0.9, "neftune_noise_alpha": 5, "async_save": True,
        "load_best_model_at_end": True,
    }  # fmt: skip
    whole = fine_tuned(tmp_path / "whole", **settings)
    cut = fine_tuned(tiny.copied(whole, tmp_path / "cut", step=3), **settings)
    tiny.assert_same_run(cut, whole)
    plain = fine_tuned(tmp_path / "plain", **settings | {"ema_decay": "null"})
    assert tiny.losses(plain) == tiny.losses(whole), "evaluated and trained are the weights"
    assert tiny.weights(plain) != tiny.weights(whole)


def test_noise_goes_with_compiled_layers_and_leaves_no_trace(fine_tuned, tmp_path):
    settings = {"max_steps": 3, "learning_rate": 1e-3}
    silent = fine_tuned(tmp_path / "silent", **settings)
    settings |= {"neftune_noise_alpha": 15, "activation_checkpointing": "selective"}
    noisy = fine_tuned(tmp_path / "noisy", **settings)
    compiled = fine_tuned(tmp_path / "compiled", **settings, compile=True)
    assert tiny.losses(noisy) == pytest.approx(tiny.losses(compiled), abs=1e-4)
    assert tiny.losses(noisy) != pytest.approx(tiny.losses(silent), abs=1e-3)
    assert final_weights(silent).keys() == final_weights(noisy).keys()
    configs = [(run / "final" / "config.json").read_text() for run in (silent, noisy)]
    assert configs[0] == configs[1]


def test_noise_is_as_loud_as_the_document_is_short():
    """A document gets the noise that transformers gives to a batch of this document alone."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(4, 1024)

        def get_input_embeddings(self):
            return self.embedding

    model = Model()
    noise = EmbeddingNoise(model, alpha=5)
    ids, ends = torch.zeros(2, 8, dtype=torch.int64), torch.tensor([0, 2, 8, 16], dtype=torch.int32)
    noise.set_lengths(ends, 16)
    added = (model.embedding(ids) - model.embedding.weight[0]).detach().abs().view(16, -1)
    for start, stop in ((0, 2), (2, 8), (8, 16)):
        loudest = 5 / ((stop - start) * 1024) ** 0.5
        assert 0.98 * loudest < added[start:stop].max() <= loudest * 1.001
        assert added[start:stop].mean().item() == pytest.approx(loudest / 2, rel=0.05)
    model.eval()
    assert torch.equal(model.embedding(ids)[0, 0], model.embedding.weight[0])
