"""A global batch has the same loss in any division into micro-batches and ranks.

The tests cover dense models and experts with their load-balancing loss, pretraining, fine-tuning
and LoRA, and ranks without a loss token.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from families import EXPERTS, SIZES, tiny_config, tiny_model
from launching import run_processes
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import pretrain
import sft_train
from utils.data.loader import PackedDataset
from utils.data.order import SampleOrder
from utils.data.packing import plan_packing
from utils.data.token_dataset import open_token_dataset

pytestmark = pytest.mark.slow

MAINS = {"pretrain": pretrain.main, "sft": sft_train.main, "lora": sft_train.main}
COEFFICIENT = 0.1
RUN = {
    "global_batch_size": 8,
    "max_steps": 4,
    "save_steps": 4,
    # Adam divides by the gradient's size. With a small epsilon, a gradient of mere rounding errors
    # would give a full step of a random sign.
    "adam_epsilon": 1e-4,
}


def figures(run: Path) -> torch.Tensor:
    names = ("loss", "grad_norm", "aux_loss")
    return torch.tensor([[line.get(name, 0.0) for name in names] for line in tiny.train_lines(run)])


@pytest.fixture(scope="module")
def experts(tmp_path_factory, workspace) -> Path:
    """Make a model with experts. Its config.json enables the load-balancing loss in pretraining."""
    directory = tmp_path_factory.mktemp("experts")
    values = {"router_aux_loss_coef": COEFFICIENT, "output_router_logits": True}
    tiny_model(tiny_config("qwen3_moe", **values)).save_pretrained(directory)
    tiny.make_tokenizer(directory)
    made = SIZES | EXPERTS["qwen3_moe"] | values | {"model_type": "qwen3_moe"}
    made.pop("head_dim")  # the model derives it
    (directory / "recipe.json").write_text(json.dumps(made))
    return directory


@pytest.fixture
def command(experts, pretraining, fine_tuning):
    def argv(kind: str, model: str, run: Path, **changes: object) -> list[str]:
        if kind == "pretrain":
            path = {"model_config": experts / "recipe.json"} if model == "experts" else {}
            return pretraining(run, **(RUN | path | changes))
        path = {"model_name_or_path": experts} if model == "experts" else {}
        adapters = {"use_peft": True, "lora_dropout": 0} if kind == "lora" else {}
        return fine_tuning(run, **(RUN | path | adapters | changes))

    return argv


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("in_one_micro_batch")


@pytest.fixture
def expected(command, kept) -> Callable[[str, str], Path]:
    """Return a function for the run with one micro-batch per step; each is made once."""

    def run(kind: str, model: str) -> Path:
        made = kept / f"{kind}_{model}"
        if not made.exists():
            assert MAINS[kind](command(kind, model, made, per_device_train_batch_size=8)) == 0
        return made

    return run


def compare(run: Path, expected: Path, steps: int = 4) -> None:
    assert len(tiny.train_lines(run)) == steps
    torch.testing.assert_close(figures(run), figures(expected), rtol=1e-5, atol=1e-6)
    ours, others = (load_file(each / "final" / "model.safetensors") for each in (run, expected))
    torch.testing.assert_close(ours, others, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", ["dense", "experts"])
@pytest.mark.parametrize("kind", MAINS)
def test_accumulation(kind, model, command, expected, tmp_path):
    run = tmp_path / "run"
    assert MAINS[kind](command(kind, model, run, per_device_train_batch_size=1)) == 0
    compare(run, expected(kind, model))
    assert ("aux_loss" in tiny.train_lines(run)[0]) == (model == "experts")


LORA = pytest.param("lora", "multi_gpu", 2, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("kind", "config", "rows"), [("pretrain", "multi_gpu", 4), ("sft", "fsdp2", 2), LORA]
)
def test_two_ranks_of_experts(kind, config, rows, command, expected, tmp_path):
    script = "pretrain.py" if kind == "pretrain" else "sft_train.py"
    argv = command(kind, "experts", tmp_path / "run", per_device_train_batch_size=rows)
    run_processes(config, script, argv).succeeded()
    compare(tmp_path / "run", expected(kind, "experts"))


def test_the_loss_is_that_of_tokens_plus_the_term(command, expected, tmp_path):
    """TRL enables the load-balancing loss in the configuration, but not in the exported one."""
    run = tmp_path / "run"
    argv = command("sft", "experts", run, max_steps=1, router_aux_loss_coef=0)
    assert sft_train.main(argv) == 0
    (without,), (with_term, *_) = map(tiny.train_lines, (run, expected("sft", "experts")))
    term = COEFFICIENT * with_term["aux_loss"]
    assert with_term["aux_loss"] > 1
    assert with_term["loss"] == pytest.approx(without["loss"] + term, rel=1e-6)
    config = json.loads((run / "final" / "config.json").read_text())
    assert config["router_aux_loss_coef"] == COEFFICIENT
    assert config["output_router_logits"] is True


def test_the_term_of_steps_not_logged_yet_outlives_a_stop(command, tmp_path, capsys):
    whole = tmp_path / "whole"
    changes = {"per_device_train_batch_size": 4, "logging_steps": 99, "save_steps": 3}
    assert pretrain.main(command("pretrain", "experts", whole, **changes)) == 0
    cut = tiny.copied(whole, tmp_path / "cut", step=3)
    assert pretrain.main(command("pretrain", "experts", cut, **changes)) == 0
    assert "resum" in capsys.readouterr().out
    (first,), (again,) = tiny.train_lines(whole), tiny.train_lines(cut)
    assert first["step"] == 4, "the last step is always logged"
    assert [first["loss"], first["aux_loss"]] == [again["loss"], again["aux_loss"]]


def test_a_text_model_inside_a_multimodal_one_on_two_ranks(fine_tuning, fine_tuned, tmp_path):
    """As in Gemma 3 4B, DDP would wait for gradients of the vision tower."""
    base, run = tmp_path / "base", tmp_path / "run"
    tiny_model(tiny_config("gemma3")).save_pretrained(base)
    tiny.make_tokenizer(base)
    settings = RUN | {"model_name_or_path": base}
    alone = fine_tuned(tmp_path / "alone", **settings, per_device_train_batch_size=8)
    argv = fine_tuning(run, **settings, per_device_train_batch_size=2)
    shown = run_processes("multi_gpu", "sft_train.py", argv).succeeded()
    assert shown.count("frozen: model.vision_tower, model.multi_modal_projector") == 1
    compare(run, alone)
    merged, info = AutoModelForCausalLM.from_pretrained(run / "final", output_loading_info=True)
    assert not any(info.values())
    before = tiny_model(tiny_config("gemma3")).state_dict()
    moved = {key for key, value in merged.state_dict().items() if not value.equal(before[key])}
    assert moved
    assert not any("vision" in key or "projector" in key for key in moved)


STEPS = 8
GAPS = RUN | {
    "packing": "concat", "per_device_train_batch_size": 1, "max_steps": STEPS,
    "save_steps": STEPS, "global_batch_size": 4,
}  # fmt: skip


def test_ranks_without_a_loss_token_change_nothing(fine_tuning, fine_tuned, request, tmp_path):
    """Documents of 60 tokens have loss alternately at their beginning and at their end.

    So 114 consecutive tokens have no loss. This is more than a sequence of 64 tokens.
    """
    rows = [(tiny.documents(40, seed=seed, longest=61)[0] * 60)[:60] for seed in range(60)]
    masks = [[0] + [1] * 3 + [0] * 56, [0] * 57 + [1] * 3] * 30
    data = tiny.save(tmp_path / "gaps", {"input_ids": rows, "completion_mask": masks})
    tokens = open_token_dataset(data)
    packed = PackedDataset([tokens], [plan_packing(tokens.lengths, 64, "concat")])
    order = SampleOrder([len(packed)], seed=42).sequences(np.arange(STEPS * 4))
    loss_mask = np.asarray(packed.__getitems__(order.tolist())["loss_mask"])
    counts = loss_mask.sum(axis=1).reshape(STEPS, 2, 2)  # (steps, micro-batches, ranks)
    assert (counts == 0).any()
    assert (counts.sum(axis=1) == 0).any(), "a rank without any of a whole step"
    assert (counts.sum(axis=(1, 2)) > 0).all(), "that is the next test"
    one = GAPS | {"train_data": data, "per_device_train_batch_size": 4}
    alone = fine_tuned(tmp_path / "alone", **one)
    exhaustive = request.config.getoption("--exhaustive")
    for config in ("fsdp2", "multi_gpu", "zero2") if exhaustive else ("fsdp2",):
        run = tmp_path / config
        argv = fine_tuning(run, **GAPS, train_data=data)
        run_processes(config, "sft_train.py", argv).succeeded()
        compare(run, alone, STEPS)


def test_a_global_batch_without_a_loss_token_moves_no_gradient(pretrained, tmp_path):
    """Pretraining on masked data can have such batches; fine-tuning refuses such documents."""
    columns = tiny.masked(tiny.documents(40, seed=4))
    for document in SampleOrder([40], seed=42).sequences(np.arange(4, 8)).tolist():
        columns["completion_mask"][document] = [0] * len(columns["input_ids"][document])
    data = tiny.save(tmp_path / "masked", columns)
    run = pretrained(tmp_path / "run", train_data=data, packing="none", max_steps=4, save_steps=4)
    lines = tiny.train_lines(run)
    assert (lines[1]["loss"], lines[1]["grad_norm"]) == (0, 0)
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert all(line["loss"] > 1 for line in lines[2:])


def test_a_model_data_and_a_directory_are_enough_on_any_number_of_ranks(
    base_model, tmp_path, capsys
):
    """The derived sizes stay those of the first start, also on two ranks and in a dry run."""
    data = tiny.save(tmp_path / "data", tiny.masked(tiny.documents(1700, seed=5)))
    whole, run = tmp_path / "whole", tmp_path / "run"
    argv = tiny.flags(model_name_or_path=base_model, train_data=data)
    short = tiny.flags(max_steps=4, save_steps=2, logging_steps=1, bf16=False)
    assert sft_train.main([*argv, *short, "--output_dir", str(whole)]) == 0
    shown = capsys.readouterr().out
    assert "settings: sequence_length 128: the longest of 1,700 documents has 59 tokens" in shown
    assert "settings: global_batch_size 2: about 405 sequences, 1 rank, so 203 steps an" in shown
    assert "settings: per_device_train_batch_size 2: at most 8,192 tokens at once" in shown
    assert shown.count("settings: ") == 3
    tiny.copied(whole, run, step=2)
    resumed = [*argv, *short, "--output_dir", str(run)]
    assert sft_train.main([*resumed, "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert f"settings: global_batch_size 2: as the run in {run} began" in shown
    changed = shown.partition("changed since the last start")[2]
    assert not re.search(
        "  (sequence_length|global_batch_size|per_device_train_batch_size): ", changed
    )
    done = run_processes("cpu", "sft_train.py", resumed).succeeded()
    assert "checkpoint-2" in done
    assert "x 2 ranks" in done
    assert tiny.losses(run) == pytest.approx(tiny.losses(whole), abs=1e-5)
