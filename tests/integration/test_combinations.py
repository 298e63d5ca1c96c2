"""Features of long runs together, each combination beside one process; others are refused."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from launching import run_processes
from safetensors.torch import load_file

import sft_train
from utils.config.errors import ConfigurationError

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
# With a larger epsilon, Adam does not turn the rounding of tiny gradients into whole steps.
CALM = {"learning_rate": 1e-3, "adam_epsilon": 1e-4, "per_device_train_batch_size": 1}
MUON = {"optim": "muon", "adam_epsilon": None, "ema_decay": 0.9}
GROWING = {"global_batch_size": '{"0": 4, "2": 8}', "max_steps": None, "max_tokens": 2400}
LORA = {"use_peft": "true", "lora_r": 4, "lora_dropout": 0, "lora_target_modules": "all-linear"}
FP8 = {"fp8": "true", "bf16": True, "use_cpu": True}


def together(config: str, runs: list[tuple], root: Path, processes: int) -> str:
    """Train runs (script, argv, folder, cut) in one launch; return its output."""
    plan = [
        {"script": script, "argv": argv, "run": str(run), "cut": cut}
        for script, argv, run, cut in runs
    ]
    (root / "plan.json").write_text(json.dumps(plan))
    argv = [str(root / "plan.json")]
    return run_processes(config, HERE / "several_runs.py", argv, processes=processes).succeeded()


def assert_same(run: Path, alone: Path, within: float, of_weights: float) -> None:
    assert tiny.losses(run) == pytest.approx(tiny.losses(alone), abs=within)
    evaluated, expected = (tiny.evaluations(each, "heldout") for each in (run, alone))
    assert evaluated == pytest.approx(expected, abs=within)
    ours, theirs = (load_file(each / "final" / "model.safetensors") for each in (run, alone))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=of_weights)


def test_two_ranks_that_share_sequences_and_use_other_features(
    pretraining, pretrained, fine_tuning, fine_tuned, workspace, heldout, tmp_path
):
    (skip := tmp_path / "skip").write_text(
        "\n".join(f"{workspace / 'documents'} {row}" for row in range(0, 40, 3))
    )
    judged = heldout | {
        "sample_prompts": ["t1 t2"], "sample_max_new_tokens": 4, "load_best_model_at_end": "true",
        "early_stopping_patience": 1, "early_stopping_threshold": 5.0, "max_steps": 12,
    }  # fmt: skip
    kinds = {  # script, settings, differences of losses and weights
        "Muon, EMA": ("pretrain", CALM | MUON, 2e-6, 1e-6),
        "batch warm-up, max_tokens, skipped documents, background saves": (
            "pretrain", CALM | GROWING | {"skip_documents": skip, "async_save": True}, 1e-6, 1e-6
        ),
        "early stopping, best model, samples": ("pretrain", CALM | judged, 2e-6, 1e-6),
        "LoRA, states in bfloat16": (
            "sft_train", CALM | LORA | {"optim_states": "bfloat16"}, 1e-6, 1e-4
        ),
        "padded to the longest": ("sft_train", CALM | {"packing": "none"}, 1e-6, 1e-6),
        "frozen layer, gradients in bf16": (
            "pretrain", CALM | {"freeze": "model.layers.0.*", "ddp_comm_hook": "bf16"}, 1e-4, 2e-3
        ),
        "fp8": ("pretrain", CALM | FP8, 1e-3, 2e-3),
    }  # fmt: skip
    alone, plan = {}, []
    for name, (script, settings, *_) in kinds.items():
        tuning = script == "sft_train"
        argv, run = (fine_tuning, fine_tuned) if tuning else (pretraining, pretrained)
        alone[name] = run(tmp_path / "alone" / name, **settings)
        folder = tmp_path / name
        plan.append((script, argv(folder, **settings, context_parallel=2), folder, None))
    together("multi_gpu", plan, tmp_path, processes=2)
    for name, (*_, within, of_weights) in kinds.items():
        assert_same(tmp_path / name, alone[name], within, of_weights)
    stopped = tmp_path / "early stopping, best model, samples"
    assert len(tiny.losses(stopped)) == 6, "the second evaluation brought no improvement of 5"


def test_copies_of_shards_with_other_features_resume_elsewhere(
    pretraining, pretrained, heldout, tmp_path
):
    """HSDP 2x2 begins; FSDP2 on two ranks and shared sequences resume; DDP is refused."""
    kinds = {
        "states in 8 bits, batch warm-up": (
            CALM | heldout | GROWING | {"optim_states": "int8", "async_save": True}, 1e-3, 2e-3
        ),
        "Muon, EMA": (CALM | MUON | heldout, 2e-6, 1e-6),
    }  # fmt: skip
    alone = {name: pretrained(tmp_path / "alone" / name, **one[0]) for name, one in kinds.items()}

    def runs(kind: str, from_hsdp: bool, **changes) -> list[tuple]:
        made = []
        for name, (settings, *_) in kinds.items():
            folder = tmp_path / kind / name
            folder.parent.mkdir(exist_ok=True)
            cut = [str(tmp_path / "hsdp" / name), 3] if from_hsdp else None
            made.append(("pretrain", pretraining(folder, **settings, **changes), folder, cut))
        return made

    together("hsdp", runs("hsdp", False, dp_shard=2), tmp_path, processes=4)
    together("hsdp", runs("again", True, dp_shard=2), tmp_path, processes=4)
    together("fsdp2", runs("fsdp2", True, context_parallel=2), tmp_path, processes=2)
    for name, (settings, within, of_weights) in kinds.items():
        tiny.assert_same_run(tmp_path / "again" / name, tmp_path / "hsdp" / name)
        for kind in ("hsdp", "fsdp2"):
            assert_same(tmp_path / kind / name, alone[name], within, of_weights)
        argv = pretraining(tmp_path / "fsdp2" / name, **settings)
        refused = run_processes("multi_gpu", "pretrain.py", argv)
        assert set(refused.codes) == {2}, refused.stdout[-3000:]
        assert "written under fsdp2 and cannot be loaded under ddp" in refused.stdout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (LORA | FP8 | {"freeze": "model.layers.0.*"}, r"freeze .* has no effect: use_peft true"),
        (LORA | FP8 | {"load_in_4bit": "true"}, "fp8 true .* does not go with load_in_4bit true"),
        (MUON | {"dtype": "bfloat16", "stochastic_rounding": "true"}, "has no effect: optim muon"),
    ],
)
def test_what_does_not_go_together_is_refused_before_the_start(
    settings, message, fine_tuning, tmp_path
):
    with pytest.raises(ConfigurationError, match=message):
        sft_train.main(fine_tuning(tmp_path / "run", **settings))
