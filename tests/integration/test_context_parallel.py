"""Ranks that share sequences (context_parallel) train like one process."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from launching import run_processes
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
# With a larger epsilon, Adam does not turn the rounding of tiny gradients into whole steps.
CALM = {"learning_rate": 1e-3, "adam_epsilon": 1e-4, "per_device_train_batch_size": 1}
EVALUATED = {"eval_steps": 3, "per_device_eval_batch_size": 3}
FIGURES = ("loss", "grad_norm", "aux_loss", "loss/web", "loss/code")
ROUNDING = 5e-7  # a unit in the last place of losses of about 4
EXPERTS = {
    "vocab_size": tiny.VOCABULARY, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "router_aux_loss_coef": 0.1, "max_position_embeddings": 128,
}  # fmt: skip


OWN_LOSS = """
from torch.nn.functional import cross_entropy

def weighted(logits, targets, places):
    return (cross_entropy(logits, targets, reduction="none") * (1 + places % 2) / 2).sum()
"""


def test_gradients_in_float64_equal_those_of_one_process():
    """Two groups of two ranks, and one of four. Documents cross slices and stay apart exactly.

    The loss heads compute in float32: losses by source, router counts, gradients.
    """
    shown = run_processes("cpu", HERE / "context_ranks.py", processes=4).succeeded()
    found = json.loads(shown.partition("FOUND ")[2].splitlines()[0])
    for size in (2, 4):
        inside, outside = found.pop(f"leak size={size}")
        assert inside > 1e-3
        assert outside == 0.0
    exact = {name: each for name, each in found.items() if name.startswith("float64")}
    assert len(exact) == 16
    assert max(exact.values()) < 1e-12, exact
    assert len(found) == 24
    assert max(found.values()) < ROUNDING, found


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> dict[str, object]:
    """Return settings of two weighted sources with masks, and of a held-out split."""
    root = tmp_path_factory.mktemp("sources")
    rows = {"web": tiny.documents(120, seed=5), "code": tiny.documents(80, seed=6)}
    made = {name: tiny.save(root / name / "train", tiny.masked(own)) for name, own in rows.items()}
    held = tiny.save(root / "held", tiny.masked(tiny.documents(31, seed=7)))
    weighted = [f"{made['web']}=3", f"{made['code']}=2"]
    return {"train_data": weighted, "eval_data": f"held={held}", **EVALUATED}


@pytest.fixture(scope="module")
def experts(workspace) -> Path:
    directory = workspace / "experts"
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **EXPERTS)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tiny.make_tokenizer(directory)
    return directory


def train(config: str, plan: list[dict], root: Path, processes: int) -> str:
    """Train the runs of a plan in one launch; return its output."""
    (root / "plan.json").write_text(json.dumps(plan))
    argv = [str(root / "plan.json")]
    return run_processes(config, HERE / "several_runs.py", argv, processes=processes).succeeded()


def item(script: str, argv: list[str], run: Path, cut: list | None = None) -> dict:
    return {"script": script, "argv": argv, "run": str(run), "cut": cut}


def assert_same_run(run: Path, alone: Path, within: float = ROUNDING) -> None:
    """Check for the same losses by step and by source, evaluations and weights, up to rounding."""
    for name in FIGURES:
        ours, theirs = (tiny.figures(each, name) for each in (run, alone))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=within)
    for name in ("loss", "accuracy", "tokens"):
        ours, theirs = (tiny.figures(each, f"eval_held_{name}") for each in (run, alone))
        assert len(theirs)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=ROUNDING)
    assert tiny.figures(run, "tokens_seen").tolist() == tiny.figures(alone, "tokens_seen").tolist()
    ours, theirs = (load_file(each / "final" / "model.safetensors") for each in (run, alone))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_two_ranks_under_ddp_train_as_one_process(
    pretraining, pretrained, fine_tuning, fine_tuned, mixture, experts, tmp_path
):
    """Mixtures, accumulation, recomputed and compiled layers, LoRA, and experts with their loss."""
    (own_loss := tmp_path / "own.py").write_text(OWN_LOSS)
    web = mixture["train_data"][0].rpartition("=")[0]
    (skip := tmp_path / "skip").write_text("\n".join(f"{web} {row}" for row in range(0, 40, 3)))
    lora = {"use_peft": "true", "lora_r": 4, "lora_dropout": 0, "lora_target_modules": "all-linear"}
    kinds = {
        "mixture": ("pretrain", {"activation_checkpointing": "full", "skip_documents": skip}),
        "lora": ("sft_train", lora | {"activation_checkpointing": "selective"}),
        "experts": ("sft_train", {"model_name_or_path": experts}),
        "logits": ("pretrain", {"loss_head": "logits", "per_device_train_batch_size": 2}),
        "own loss": ("pretrain", {"loss": f"{own_loss}:weighted"}),
        "compiled": ("pretrain", {"compile": True, "activation_checkpointing": "selective"}),
    }
    alone, plan = {}, []
    for name, (script, changes) in kinds.items():
        settings = CALM | mixture | changes
        alone[name] = tmp_path / "alone" / name
        argv, run = (
            (fine_tuning, fine_tuned) if script == "sft_train" else (pretraining, pretrained)
        )
        run(alone[name], **settings)
        together = tmp_path / name
        plan.append(item(script, argv(together, **settings, context_parallel=2), together))
    cut = tmp_path / "cut"
    argv = pretraining(cut, **CALM, **mixture, **kinds["mixture"][1], context_parallel=2)
    plan.append(item("pretrain", argv, cut, [str(tmp_path / "mixture"), 3]))
    shown = train("multi_gpu", plan, tmp_path, processes=2)
    assert (
        "1 sequences x 64 tokens x 2 ranks / 2 (context_parallel) x 4 accumulation = 256 tokens"
        in shown
    )
    for name, run in alone.items():
        # The load-balancing loss has sums in float32, and its rounding comes on top. So do the
        # slices of the mixture, whose skipped documents leave few loss tokens to some ranks.
        within = 2 * ROUNDING if name in ("experts", "mixture") else ROUNDING
        assert_same_run(tmp_path / name, run, within=within)
    assert tiny.starts(tmp_path / "mixture")[0]["context_parallel"] == 2
    tiny.assert_same_run(cut, tmp_path / "mixture")


def test_two_copies_of_two_shards_train_as_one_process_and_resume_in_other_groups(
    pretraining, pretrained, mixture, tmp_path
):
    """HSDP: each copy is sharded over the two ranks that share sequences. FSDP2: one group."""
    settings, two = CALM | mixture, {"dp_shard": 2, "context_parallel": 2}
    alone = pretrained(tmp_path / "alone", **settings)
    run, cut, other = (tmp_path / name for name in ("run", "cut", "other"))
    plan = [
        item("pretrain", pretraining(run, **settings, **two), run),
        item("pretrain", pretraining(cut, **settings, **two), cut, [str(run), 3]),
    ]
    shown = train("hsdp", plan, tmp_path, processes=4)
    assert "64 tokens x 4 ranks / 2 (context_parallel) x 2 accumulation = 256 tokens" in shown
    # Sums over four ranks round differently than those of one process.
    assert_same_run(run, alone, within=2 * ROUNDING)
    tiny.assert_same_run(cut, run)
    argv = pretraining(other, **settings, context_parallel=4)
    shown = train("fsdp2", [item("pretrain", argv, other, [str(run), 3])], tmp_path, processes=4)
    assert "context_parallel: 2 -> 4" in shown
    assert_same_run(other, run, within=2 * ROUNDING)
