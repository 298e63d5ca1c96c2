"""A run with Muon: one process and several give the same numbers, and it resumes bit for bit."""

import pytest
import tiny
import torch
from launching import run_processes
from safetensors.torch import load_file

import pretrain
from utils.config.errors import ConfigurationError

pytestmark = pytest.mark.slow

MUON = {"optim": "muon", "optim_args": "ns_steps=4", "per_device_train_batch_size": 1}
# Experts are stacked in one tensor. Each rank of two or four has whole experts.
EXPERTS = {
    "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
    "intermediate_size": 48,
}  # fmt: skip


@pytest.fixture
def training(pretraining, tmp_path):
    """Return the command line of a small pretraining run with Muon, of a model with experts."""
    config = tiny.make_model_config(tmp_path / "experts.json", **EXPERTS)
    return lambda output_dir, **changes: pretraining(
        output_dir, model_config=config, **MUON | changes
    )


def final_weights(run):
    return load_file(run / "final" / "model.safetensors")


def test_any_number_of_ranks_trains_alike_and_resumes_exactly(training, tmp_path, capfd):
    alone = tmp_path / "alone"
    pretrain.main(training(alone))
    assert (
        "Muon for 12 matrices (or stacks of experts), AdamW for 9 other" in capfd.readouterr().out
    )
    cut = tiny.copied(alone, tmp_path / "cut", step=3)
    with pytest.raises(ConfigurationError, match="its optim is muon, now it is adamw_torch_fused"):
        pretrain.main(training(cut, optim="adamw_torch_fused", optim_args=None))
    pretrain.main(training(cut))
    tiny.assert_same_run(cut, alone)
    ways = ("multi_gpu", None), ("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4)
    for strategy, resumed_on in ways:  # checkpoints of FSDP2 resume under HSDP
        whole = tmp_path / ("multi_gpu" if strategy == "multi_gpu" else "fsdp2")
        if not whole.exists():
            run_processes(strategy, "pretrain.py", training(whole)).succeeded()
        if resumed_on is not None:
            cut = tiny.copied(whole, tmp_path / f"{strategy}-{resumed_on}", step=3)
            argv = training(cut, dp_shard=2 if strategy == "hsdp" else None)
            run_processes(strategy, "pretrain.py", argv, processes=resumed_on).succeeded()
            if resumed_on == 2:
                tiny.assert_same_run(cut, whole)
            whole = cut
        assert tiny.losses(whole) == pytest.approx(tiny.losses(alone), abs=2e-5)
        torch.testing.assert_close(final_weights(whole), final_weights(alone), rtol=0, atol=1e-4)
