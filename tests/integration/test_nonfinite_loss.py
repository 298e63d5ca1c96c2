"""A loss or gradient that is not finite: on whichever rank, it is found, named, and never kept."""

import hashlib
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from launching import before_torchruns_report, run_two_processes
from poisoned_run import POISON, compute_loss_poisoned
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import pretrain
from utils.callbacks.journal_file import read_journal
from utils.config.errors import ExitCode, NotFiniteError
from utils.data.order import SampleOrder

pytestmark = pytest.mark.slow

POISONED_RUN = Path(__file__).with_name("poisoned_run.py")
KINDS = ("nan", "inf_loss", "inf_gradient")
DOCUMENTS = 60
STEP = 4  # of 6, saved after 2, 4 and 6: the spoilt step is one of those that are saved
# One document a row, two micro-batches of two rows a step.
RUN = {"packing": "none", "save_steps": 2, "max_steps": 6, "lr_scheduler_type": "cosine"}


def order(step: int) -> np.ndarray:
    """The documents of a step (from 1), (micro-batches, rows); of two ranks (.., 2, rows)."""
    samples = np.arange((step - 1) * 4, step * 4)
    return SampleOrder([DOCUMENTS], seed=42).global_rows(samples)


BATCH = order(STEP)
SPOILT = int(BATCH[3])  # the last row of its step: micro-batch 2 of one rank, rank 1 of two


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory) -> Path:
    rows = tiny.documents(DOCUMENTS, seed=5, longest=40)
    rows[SPOILT][1] = POISON
    return tiny.save(tmp_path_factory.mktemp("poisoned") / "documents", {"input_ids": rows})


@pytest.fixture
def start(pretraining, poisoned, monkeypatch):
    """Start a run in this process whose spoilt document does what `kind` says."""
    real = Trainer.compute_loss

    def start(run: Path, kind: str | None, **changes: object) -> int:
        monkeypatch.setattr(
            Trainer, "compute_loss", compute_loss_poisoned(real, kind) if kind else real
        )
        argv = pretraining(run, **RUN | {"train_data": poisoned} | changes)
        if changes.get("save_strategy") == "no":
            place = argv.index("--save_steps")
            del argv[place : place + 2]
        return pretrain.main(argv)

    return start


def kept(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("*checkpoint-*"))


def report(run: Path, step: int = STEP) -> dict:
    return json.loads((run / f"nonfinite-step-{step}.json").read_text())


def documents(run: Path) -> set[int]:
    return {entry["document"] for entry in report(run)["documents"]}


def train_lines(run: Path) -> list[dict]:
    return [line for line in read_journal(run / "metrics.jsonl") if line["event"] == "train"]


def assert_same_moments(one: Path, other: Path) -> None:
    """The optimizer's state of each parameter is equal bit for bit, its count of steps too."""
    states = [torch.load(path / "optimizer.pt")["state"] for path in (one, other)]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(value, states[1][number][name]) for name, value in state.items())


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


CAUSES = {
    "nan": "step 4: the loss of rank 0 in micro-batch 2 is NaN",
    "inf_loss": "step 4: the loss of rank 0 in micro-batch 2 is infinite",
    "inf_gradient": "step 4: the gradient norm is (NaN|infinite), though the losses are finite",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_ends_before_anything_of_a_spoilt_step_is_kept(kind, start, tmp_path, poisoned):
    run = tmp_path / "run"
    with pytest.raises(NotFiniteError, match=CAUSES[kind]) as caught:
        start(run, kind)
    assert caught.value.exit_code == 78
    assert kept(run) == ["checkpoint-2"]
    assert not (run / "final").exists()
    expected = set(BATCH.tolist()) if kind == "inf_gradient" else set(BATCH[2:].tolist())
    assert documents(run) == expected
    named = ", ".join(map(str, sorted(expected)))
    assert f"{named} of {poisoned} (all of them: {run}/nonfinite-step-4.json)" in str(caught.value)
    for help_ in ("--accept_changes train_data", "--on_nonfinite skip", "--learning_rate"):
        assert help_ in str(caught.value)
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    assert last["step"] == STEP
    assert (last["loss"] in ("NaN", "Infinity")) == (kind != "inf_gradient")


def test_the_same_command_meets_the_batch_again_and_can_then_skip_it(start, tmp_path):
    run, through = tmp_path / "run", tmp_path / "through"
    with pytest.raises(NotFiniteError):
        start(run, "nan")
    with pytest.raises(NotFiniteError, match="step 4: the loss"):
        start(run, "nan")
    assert start(run, "nan", on_nonfinite="skip") == ExitCode.DONE
    assert start(through, "nan", on_nonfinite="skip") == ExitCode.DONE
    for name in ("final", "checkpoint-6"):
        weights = f"{name}/model.safetensors"
        assert (run / weights).read_bytes() == (through / weights).read_bytes()


def test_a_skipped_step_leaves_weights_and_optimizer_bit_for_bit(start, tmp_path, capsys):
    run = tmp_path / "run"
    assert start(run, "nan", on_nonfinite="skip", save_steps=1, save_total_limit=6) == 0
    assert (
        "step 4 skipped (1 of at most 3), weights and optimizer left as they were: the loss of "
        "rank 0 in micro-batch 2 is NaN" in capsys.readouterr().out
    )
    before, after = run / "checkpoint-3", run / "checkpoint-4"
    assert sha256(before / "model.safetensors") == sha256(after / "model.safetensors")
    assert_same_moments(before, after)  # the file holds the learning rate as well
    assert sha256(after / "model.safetensors") != sha256(run / "checkpoint-5/model.safetensors")
    rates = [torch.load(path / "scheduler.pt")["_last_lr"] for path in (before, after)]
    assert rates[0] != rates[1], "the schedule goes on with the steps"
    lines = train_lines(run)
    assert [math.isfinite(line["loss"]) for line in lines] == [True] * 3 + [False] + [True] * 2
    assert [line["nonfinite_steps"] for line in lines] == [0, 0, 0, 1, 1, 1]
    (summary,) = (line for line in read_journal(run / "metrics.jsonl") if "train_loss" in line)
    finite = [line["loss"] for line in lines if math.isfinite(line["loss"])]
    assert summary["train_loss"] == pytest.approx(sum(finite) / 5)


@pytest.mark.parametrize("kind", KINDS)
def test_skipping_equals_a_run_whose_optimizer_does_nothing_at_that_step(
    kind, start, tmp_path, monkeypatch
):
    run, reference = tmp_path / "run", tmp_path / "reference"
    assert start(run, kind, on_nonfinite="skip") == ExitCode.DONE
    step, calls = torch.optim.AdamW.step, 0

    def all_steps_but_one(self, closure=None):
        nonlocal calls
        calls += 1
        return None if calls == STEP else step(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", all_steps_but_one)
    assert start(reference, None) == ExitCode.DONE
    assert calls == 6
    weights = "final/model.safetensors"
    assert (run / weights).read_bytes() == (reference / weights).read_bytes()
    assert_same_moments(run / "checkpoint-6", reference / "checkpoint-6")
    assert documents(run) >= {SPOILT}


def test_the_limit_of_skipped_steps_holds_over_the_starts_of_a_run(start, tmp_path, workspace):
    rows = tiny.documents(DOCUMENTS, seed=5, longest=40)
    for document in (SPOILT, int(order(6)[0])):
        rows[document][1] = POISON
    data = tiny.save(tmp_path / "twice", {"input_ids": rows})
    settings = {"train_data": data, "on_nonfinite": "skip", "nonfinite_limit": 1}
    run = tmp_path / "run"
    for _start in range(2):  # the second one goes on after the skipped step
        with pytest.raises(NotFiniteError, match="1 step was skipped before, and nonfinite_lim"):
            start(run, "nan", **settings)
        assert kept(run) == ["checkpoint-2", "checkpoint-4"]
    assert tiny.starts(run)[1]["resumed_from"].endswith("checkpoint-4")
    assert report(run, 6)["step"] == 6
    assert start(run, "nan", **settings | {"nonfinite_limit": 2}) == ExitCode.DONE
    last = train_lines(run)[-1]
    assert (last["step"], last["nonfinite_steps"]) == (6, 2)


@pytest.mark.parametrize("step", [STEP, 6])
def test_weights_that_an_update_spoils_are_not_saved_or_exported(
    step, start, tmp_path, monkeypatch
):
    """At a step that is saved; and at the last one, which is exported, without a save."""
    real = torch.optim.AdamW.step

    def overflow(self, closure=None):
        real(self, closure)
        weight = self.param_groups[0]["params"][0]
        if self.state[weight]["step"] == step:
            with torch.no_grad():
                weight.view(-1)[3] = math.inf

    monkeypatch.setattr(torch.optim.AdamW, "step", overflow)
    run = tmp_path / "run"
    changes = {} if step == STEP else {"save_strategy": "no"}
    with pytest.raises(
        NotFiniteError, match=rf"step {step}: 1 of the weights are not finite after it \(model\."
    ):
        start(run, None, **changes)
    assert kept(run) == (["checkpoint-2"] if step == STEP else [])
    assert not (run / "final").exists()
    assert {entry["document"] for entry in report(run, step)["documents"]} == set(order(step))


def test_an_evaluation_waits_for_the_verdict(start, tmp_path, workspace, capsys):
    """Two ranks would learn of the spoilt step only a step later."""
    from utils.callbacks.nonfinite import NonFiniteGuard

    settings = {
        "eval_data": f"heldout={workspace / 'heldout'}", "eval_strategy": "steps", "eval_steps": 4,
        "save_steps": 5,
    }  # fmt: skip
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        real = NonFiniteGuard.settle
        patch.setattr(
            NonFiniteGuard, "settle", lambda self, *args: (asked.append(1), real(self, *args))
        )
        with pytest.raises(NotFiniteError):
            start(tmp_path / "run", "nan", **settings)
    assert len(asked) == 1
    assert "eval heldout" not in capsys.readouterr().out


def test_two_ranks_skip_what_one_of_them_finds_and_end_together(pretraining, tmp_path):
    """The loss of rank 1 is infinite, the gradient finite: only the agreement tells rank 0."""
    run, again = tmp_path / "run", int(order(6)[2])
    rows = tiny.documents(DOCUMENTS, seed=5, longest=40)
    for document in (SPOILT, again):
        rows[document][1] = POISON
    data = tiny.save(tmp_path / "twice", {"input_ids": rows})
    settings = {
        "train_data": data, "on_nonfinite": "skip", "nonfinite_limit": 1, "save_steps": 1,
        "save_total_limit": 6, "per_device_train_batch_size": 1,
    }  # fmt: skip
    shown = spoil_two_ranks("multi_gpu", "inf_loss", pretraining(run, **RUN | settings))
    assert shown.count("step 4 skipped (1 of at most 1), weights and optimizer left as they") == 1
    assert "the loss of rank 1 in micro-batch 2 is infinite" in shown
    assert "step 6: the loss of rank 0 in micro-batch 2 is infinite; 1 step was skipped" in shown
    assert documents(run) == {SPOILT}
    assert {entry["document"] for entry in report(run, 6)["documents"]} == {again}
    assert kept(run) == [f"checkpoint-{step}" for step in range(1, 6)]
    weights = [load_file(run / f"checkpoint-{step}/model.safetensors") for step in (3, 4, 5)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[1][name], weights[2][name]) for name in weights[1])
    assert_same_moments(run / "checkpoint-3", run / "checkpoint-4")


@pytest.mark.parametrize(
    ("config", "kind", "cause"),
    [
        ("fsdp2", "inf_loss", "step 4: the loss of rank 1 in micro-batch 2 is infinite"),
        ("zero2", "inf_gradient", "step 4: the gradient norm is [a-zA-Z ]*, though the losses"),
    ],
)
def test_sharded_models_are_watched_too(config, kind, cause, pretraining, poisoned, tmp_path):
    """Nothing is saved at the step and the next one: the ranks learn of it at begins of steps."""
    run = tmp_path / "run"
    settings = {"train_data": poisoned, "per_device_train_batch_size": 1, "save_steps": 3}
    shown = spoil_two_ranks(config, kind, pretraining(run, **RUN | settings))
    assert len(re.findall(cause, shown)) == 1, shown[-3000:]
    assert documents(run) == ({SPOILT} if kind == "inf_loss" else set(BATCH.tolist()))
    assert kept(run) == ["checkpoint-3"]
    assert not (run / "final").exists()
    assert train_lines(run)[-1]["step"] == STEP + 1


def spoil_two_ranks(config: str, kind: str, argv: list[str]) -> str:
    """Run until both ranks end with 78; return what they say."""
    done = run_two_processes(config, POISONED_RUN, argv, env={"STOKER_TEST_POISON": kind})
    assert done.stdout.count("exitcode  : 78") == 2, done.stdout[-4000:]
    assert done.stdout.count("not finite (1 problem):") == 1
    return before_torchruns_report(done.stdout)


def test_what_the_plain_trainer_does_with_such_a_batch(workspace, tmp_path, capsys):
    """For the record: it logs 0 or NaN, and saves and exports weights that are NaN."""
    rows = torch.tensor(
        [row[:30] for row in tiny.documents(200, seed=5, longest=60) if len(row) > 30]
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(workspace / "model.json"))
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "plain"), max_steps=6, save_steps=2, logging_steps=1,
        per_device_train_batch_size=4, use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip

    class Poisoned(Trainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * math.nan if self.state.global_step == STEP - 1 else loss

    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Poisoned(model=model, args=arguments, train_dataset=data)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    spoilt = [
        path.name
        for path in sorted((tmp_path / "plain").glob("checkpoint-*"))
        if not all(
            value.isfinite().all() for value in load_file(path / "model.safetensors").values()
        )
    ]
    with capsys.disabled():
        print(
            f"\nplain Trainer, a NaN loss at step 4: logs {logged}, NaN weights saved in {spoilt}"
        )
    assert spoilt == ["checkpoint-4", "checkpoint-6"]
