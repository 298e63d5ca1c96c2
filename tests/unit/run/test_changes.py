"""All changed settings are shown. Changes that make another run must be accepted."""

import json
import logging
import os
from pathlib import Path

import pytest
import tiny

from utils.config.errors import ConfigurationError
from utils.config.own_code import OwnCode
from utils.config.recipes import dump_yaml, load_file
from utils.config.settings import parse_fine_tuning, parse_pretraining
from utils.host.redaction import redacted
from utils.run.provenance import (
    IDENTITY,
    IN_THE_CHECKPOINT,
    NUMERICS,
    NUMERICS_OF_FSDP2,
    PER_START_SETTINGS,
    accepted_changes,
)

GIVEN = {
    "train_data": ["data/a"], "model_config": "model.yaml", "tokenizer_name_or_path": "tokenizer",
    "sequence_length": 64, "global_batch_size": 4, "per_device_train_batch_size": 1,
    "max_steps": 6, "lr_scheduler_type": "cosine",
}  # fmt: skip
MODEL = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "vocab_size": 128,
         "num_hidden_layers": 1, "num_attention_heads": 4, "rope_theta": 10000.0}  # fmt: skip
FACTS = {
    "script": "pretrain.py", "numerics": NUMERICS, "tokenizer_sha256": "tttt",
    "data": {"train": ["aaaa"], "held": ["hhhh"]}, "model_config": MODEL,
}  # fmt: skip


class Runs:
    """The starts of one run, recorded as in provenance.json."""

    def __init__(self, directory: Path, parse):
        self.directory, self.parse = directory, parse
        self.starts: list[dict] = []

    def start(self, accept=(), facts=(), derived=None, **changes):
        given = {**GIVEN, "output_dir": self.directory, **changes}
        settings = self.parse(tiny.flags(**given, accept_changes=list(accept) or None), "")
        now = {**FACTS, **dict(facts)}
        record = accepted_changes(self.directory, settings, now, derived or {})
        if not self.starts:
            (self.directory / "config.yaml").write_text(dump_yaml(settings.resolved))
        self.starts.append(json.loads(json.dumps({**now, **record})))
        content = {"run_id": "1", "starts": self.starts}
        (self.directory / "provenance.json").write_text(json.dumps(content))
        return record

    def has_checkpoint(self) -> None:
        (self.directory / "checkpoint-3").mkdir()
        (self.directory / "checkpoint-3" / "manifest.json").write_text("{}")


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    run = Runs(tmp_path, parse_pretraining)
    run.start()
    return run


@pytest.fixture
def fine_tuning(tmp_path):
    return Runs(tmp_path, parse_fine_tuning)


def refused(run, **how) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        run.start(**how)
    return caught.value.problems


def warned(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


OTHER_VALUES = {
    "sequence_length": 32, "packing": "concat", "global_batch_size": 8, "seed": 7,
    "tokenizer_name_or_path": None, "dtype": "float32", "warmup_steps": 2,
    "lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": '{"num_cycles": 2}',
}  # fmt: skip


def test_changes_that_make_it_another_run_must_be_accepted(runs, caplog):
    facts = {"tokenizer_sha256": None}
    first, *problems = refused(runs, **OTHER_VALUES, facts=facts)
    assert first.endswith("holds another run: for a new run add --output_dir NAME.")
    assert len(problems) == len(OTHER_VALUES), "all of them at once"
    rules = IDENTITY | IN_THE_CHECKPOINT.keys()
    assert rules <= load_file(runs.directory / "config.yaml").keys(), "all of them exist"
    for name in OTHER_VALUES:
        (problem,) = [problem for problem in problems if f"run: its {name} is " in problem]
        assert f"--accept_changes {name})," in problem
    record = runs.start(**OTHER_VALUES, accept=list(OTHER_VALUES), facts=facts)
    assert record["accepted"] == sorted(OTHER_VALUES)
    assert record["changed"].keys() == OTHER_VALUES.keys()
    caplog.clear()
    assert runs.start(**OTHER_VALUES, facts=facts) == {}, "what was accepted is in force"
    assert warned(caplog) == []
    assert refused(runs), "and so the first value is a change again"
    caplog.clear()
    runs.start(**OTHER_VALUES, max_steps=12, logging_steps=3, facts=facts)
    assert warned(caplog) == [
        f"changed since the last start in {runs.directory}:\n"
        "  max_steps: 6 -> 12 (the cosine_with_restarts schedule takes its new curve)\n"
        "  logging_steps: 10 -> 3"
    ]


def test_a_dry_run_for_other_gpus_only_warns_of_what_a_start_refuses(runs, caplog):
    runs.start(**OTHER_VALUES, dry_run="true", assume="8xH100-80GB")
    assert warned(caplog)[-1].startswith("a start would be refused: ")
    assert f"{runs.directory} holds another run" in warned(caplog)[-1]
    refused(runs, seed=8)


@pytest.mark.parametrize(
    ("name", "value"), [("learning_rate", 1e-3), ("adam_beta2", 0.9), ("optim", "adafactor")]
)
def test_what_the_optimizer_brings_along_cannot_be_accepted(name, value, runs, caplog):
    runs.start(**{name: value})  # at step 0 there is no checkpoint with the old value
    assert name in warned(caplog)[0]
    runs.has_checkpoint()
    (problem,) = refused(runs, accept=[name])
    assert "cannot resume: its " + name in problem
    assert "but its checkpoints hold the optimizer's" in problem
    if name != "optim":
        runs.start(**{name: value}, optim="adamw_torch")  # the same optimizer, not fused


def test_fp8_is_switched_by_name_and_muon_never(tmp_path):
    run = Runs(tmp_path, parse_pretraining)
    first = {"bf16": "true", "use_cpu": "true"}
    run.start(**first)
    run.has_checkpoint()
    for name, text, before in (
        ("fp8", "true", "false"),
        ("fp8", "tensorwise", "false"),
        ("ddp_comm_hook", "bf16", "null"),
    ):
        (problem,) = refused(run, **first, **{name: text})
        assert f"its {name} is {before}, now it is " in problem
        assert f"accept the new one (--accept_changes {name})" in problem
        record = run.start(**first, **{name: text}, accept=[name])
        assert record["accepted"] == [name]
        (problem,) = refused(run, **first)
        assert f"--accept_changes {name})" in problem
        run.start(**first, accept=[name])
    for given, was in (("muon", "adamw_torch_fused"), ("adamw_torch_fused", "muon")):
        new = Runs(tmp_path / given, parse_pretraining)
        new.directory.mkdir()
        new.start(**first, optim=was)
        new.has_checkpoint()
        (problem,) = refused(new, **first, optim=given, accept=["optim"])
        assert f"its optim is {was}, now it is {given}" in problem
        assert "take its weights into a new run: --init_from with another --output_dir" in problem


def test_data_is_compared_by_its_contents(runs, caplog):
    record = runs.start(train_data=["elsewhere/a"])
    assert warned(caplog)[0].endswith("  train_data: data/a -> elsewhere/a (the same contents)")
    altered = ["train_data"]
    assert record == {
        "changed": {"train_data": ["elsewhere/a"]}, "accepted": [], "altered": altered,
    }  # fmt: skip
    moved = {"train_data": ["elsewhere/a"]}
    facts = {"data": {"train": ["bbbb"], "held": ["iiii"]}}
    caplog.clear()
    (problem,) = refused(runs, **moved, facts=facts)
    assert "its train_data: content fingerprint is aaaa, now it is bbbb" in problem
    assert "eval_data: held: hhhh -> iiii" in warned(caplog)[0], "logged and not refused"
    facts["versions"] = {"torch": "2.13.0", "peft": None}
    assert runs.start(**moved, accept=["train_data"], facts=facts)["accepted"] == ["train_data"]
    assert runs.start(**moved, facts=facts) == {}
    assert refused(runs, **moved), "the first contents are a change again"
    facts["versions"] = {"torch": "2.13.1", "peft": None}
    assert runs.start(**moved, facts=facts)["accepted"] == []
    assert warned(caplog)[-1].endswith("  versions: torch: 2.13.0 -> 2.13.1")
    (problem,) = refused(runs, train_data=["elsewhere/a=3"], facts=facts)
    assert "its train_data is elsewhere/a, now it is elsewhere/a=3" in problem, "weights count"


def test_tokenizer_and_model_configuration_go_by_their_contents(runs, caplog):
    (problem,) = refused(runs, facts={"tokenizer_sha256": "uuuu"})
    assert "its tokenizer_name_or_path: SHA-256 is tttt, now it is uuuu" in problem
    assert "--accept_changes tokenizer_name_or_path)," in problem
    caplog.clear()
    copies = {"tokenizer_name_or_path": "copy", "model_config": "copy.yaml"}
    assert runs.start(**copies)["accepted"] == []
    assert "tokenizer -> copy (the same contents)" in warned(caplog)[0]
    assert "model_config: model.yaml -> copy.yaml (the same contents)" in warned(caplog)[0]
    other = {"model_config": {**MODEL, "rope_theta": 500000.0}}
    (problem,) = refused(runs, **copies, facts=other)
    assert "its model_config: rope_theta is 10000, now it is 500000" in problem
    runs.has_checkpoint()
    runs.start(**copies, facts=other, accept=["model_config"])
    assert runs.start(**copies, facts=other) == {}
    wider = {"model_config": {**MODEL, "hidden_size": 48}}
    (problem, *_) = refused(runs, **copies, facts=wider, accept=["model_config"])
    assert "cannot resume: its model_config: hidden_size is 32, now it is 48" in problem
    assert "was (128, 32) and would be (128, 48)" in problem


def test_another_model_matters_where_its_weights_do(fine_tuning, caplog):
    base, other = ({"model_config": None, "model_name_or_path": path} for path in ("base", "other"))
    fine_tuning.start(**base)
    (problem,) = refused(fine_tuning, **other)
    assert "its model_name_or_path is base, now it is other" in problem
    fine_tuning.has_checkpoint()
    caplog.clear()
    fine_tuning.start(**other)
    assert "the run resumes from weights of its own" in warned(caplog)[0]
    narrower = {"model_config": {**MODEL, "rope_theta": 5.0}}
    (problem,) = refused(fine_tuning, **base, facts=narrower)
    assert "its model_name_or_path: rope_theta is" in problem, "a harmless path hides nothing"


BASE = {"model_config": None, "model_name_or_path": "base", "use_peft": "true"}
SHARDS = {"model-1.safetensors": "1111", "model-2.safetensors": "2222"}


def weights(**known):
    return {"base_weights": known, "model_config": None}


def test_other_weights_under_adapters_are_refused_until_accepted(fine_tuning, caplog):
    adapters = fine_tuning
    adapters.start(**BASE)  # an earlier version, which did not record base weights
    assert adapters.start(**BASE, facts=weights(sha256=SHARDS)) == {}
    adapters.has_checkpoint()
    moved = {**BASE, "model_name_or_path": "copy"}
    assert adapters.start(**moved, facts=weights(sha256=SHARDS))["accepted"] == []
    assert "model_name_or_path: base -> copy (the same contents)" in warned(caplog)[0]
    other = weights(sha256={**SHARDS, "model-2.safetensors": "3333"})
    (problem,) = refused(adapters, **moved, facts=other)
    assert "its model_name_or_path: model-2.safetensors is 2222, now it is 3333" in problem
    assert "--accept_changes model_name_or_path)," in problem
    accepted = adapters.start(**moved, facts=other, accept=["model_name_or_path"])
    names = ["model_name_or_path"]
    assert accepted == {"changed": {}, "accepted": names, "altered": names}
    assert adapters.start(**moved, facts=other) == {}
    (problem,) = refused(adapters, **moved, facts=other, lora_r=4, accept=["lora_r"])
    assert "its checkpoints hold other tensors" in problem
    (problem,) = refused(adapters, **moved, facts=other, lora_alpha=64)
    assert "--accept_changes lora_alpha)," in problem


def test_a_branch_of_the_hub_that_moved_on_is_refused(fine_tuning):
    first, second = (weights(commit=letter * 40) for letter in "ab")
    fine_tuning.start(**BASE, facts=first)
    (problem,) = refused(fine_tuning, **BASE, facts=second)
    assert f"model_name_or_path: commit is {'a' * 40}, now it is {'b' * 40}" in problem
    pinned = {**BASE, "model_revision": "a" * 40}
    assert fine_tuning.start(**pinned, facts=first)["accepted"] == [], "the way out"
    (problem, _) = refused(fine_tuning, **{**pinned, "model_revision": "main"}, facts=second)
    assert "its model_revision is" in problem


JUDGED = {
    "eval_data": ["held=data/held", "other=data/other"], "eval_strategy": "steps", "eval_steps": 3,
    "metric_for_best_model": "eval_held_loss",
}  # fmt: skip


def test_the_best_value_of_one_metric_is_compared_with_no_other(runs):
    runs.start(**{**JUDGED, "metric_for_best_model": None})
    runs.has_checkpoint()
    runs.start(**JUDGED)  # a metric may be added later
    runs.start(
        **{**JUDGED, "metric_for_best_model": "held_loss"}
    )  # another name of the same metric
    for metric in ("other_loss", None):
        changed = {**JUDGED, "metric_for_best_model": metric}
        (problem,) = refused(runs, **changed, accept=["metric_for_best_model"])
        assert "cannot resume: its metric_for_best_model is " in problem


def test_a_masked_secret_is_no_change(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MY_SECRET", "quo\"te's \\ and: more")
    run = Runs(tmp_path, parse_pretraining)
    given = {
        "run_name": f"run {os.environ['MY_SECRET']}", "hub_model_id": "me/hf_" + "c" * 30,
        "report_to": "tensorboard", "push_to_hub": True,
    }  # fmt: skip
    run.start(**given)
    for text in (dump_yaml(redacted(load_plain(tmp_path))), dump_yaml(load_plain(tmp_path))):
        (tmp_path / "config.yaml").write_text(text)  # in the current and in an older format
        assert run.start(**given) == {}
    assert warned(caplog) == []
    record = run.start(**{**given, "run_name": f"another {os.environ['MY_SECRET']}"})
    assert record["changed"] == {"run_name": "another ***"}


def load_plain(run: Path) -> dict:
    return {name: value for name, (value, _) in load_file(run / "config.yaml").items()}


def test_a_missing_setting_and_a_broken_config(runs):
    path = runs.directory / "config.yaml"
    lines = [line for line in path.read_text().splitlines() if not line.startswith("seed:")]
    path.write_text("\n".join(lines))
    assert runs.start() == {}, "a setting that an older version did not have had its default"
    assert refused(runs, seed=7)
    path.write_text("seed: [")
    (problem,) = refused(runs)
    assert "config.yaml is not as the first start wrote it" in problem


def test_a_setting_that_was_given_a_derived_default_is_no_change_with_the_same_value(runs, caplog):
    """A run of an older version has the old default in its config.yaml, a later start has null."""
    file = runs.directory / "config.yaml"
    older = {name: value for name, (value, _) in load_file(file).items()}
    file.write_text(dump_yaml(older | {"dataloader_num_workers": 0, "compile": False}))
    same = {"dataloader_num_workers": 0, "compile": False}
    assert runs.start(derived=same) == {}
    assert warned(caplog) == []
    runs.start(derived={"dataloader_num_workers": 2, "compile": False})
    assert warned(caplog)[0].endswith(f"in {runs.directory}:\n  dataloader_num_workers: 0 -> null")


def test_other_gpus_of_a_shared_node_are_no_change_but_their_number_is(runs, caplog):
    def start(gpus):
        facts = {"environment": [f"CUDA_VISIBLE_DEVICES={gpus}", "NCCL_P2P_DISABLE=1"]}
        caplog.clear()
        runs.start(facts=facts)
        return warned(caplog)

    assert start("0,1") == []
    assert start("5,3") == []
    assert start("MIG-1/2/0,GPU-a8c1") == []
    (line,) = start("2")
    assert "CUDA_VISIBLE_DEVICES has 2 NCCL_P2P_DISABLE=1 -> CUDA_VISIBLE_DEVICES has 1" in line
    (line,) = start("")
    assert "CUDA_VISIBLE_DEVICES= NCCL" in line


def test_a_run_of_a_version_with_other_last_bits_is_refused_until_accepted(runs):
    older = {"numerics": NUMERICS - 1}
    runs.start(facts=older, accept=["seed"])
    (problem,) = refused(runs)
    assert "version of the sums (their last bits) is 3, now it is 4" in problem
    runs.start(accept=["seed"])
    assert runs.start() == {}
    # FSDP2 has a version of its own, because only its sums changed.
    sharded = {"facts": {"numerics": NUMERICS_OF_FSDP2}}
    (problem,) = refused(runs, **sharded)
    assert "version of the sums (their last bits) is 4, now it is 5" in problem


def test_a_changed_strategy_is_shown_but_dry_run_settings_are_not(runs, caplog):
    runs.has_checkpoint()  # the checkpoint's layout decides, see utils/checkpoints/files.py
    runs.start(strategy="fsdp2")
    assert warned(caplog) == [
        f"changed since the last start in {runs.directory}:\n  strategy: auto -> fsdp2"
    ]
    assert {"assume", "suggest"} <= PER_START_SETTINGS


def test_own_code_is_compared_by_its_digest(runs, caplog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("my.py", "moved.py"):
        (tmp_path / name).write_text("")

    def start(accept=(), loss="my:f", callback="my:C"):
        own = {"loss": loss, "callbacks": callback}
        facts = {"own_code": OwnCode([callback], loss).digests()}
        runs.start(accept, facts=facts, **own)

    start(["loss"])
    (tmp_path / "my.py").write_text("# edited")
    caplog.clear()
    start(loss="moved:f")
    (line,) = warned(caplog)
    first, second = line.splitlines()[1:]
    assert first == "  loss: my:f -> moved:f (the same contents)"
    assert second.startswith("  callbacks: my:C: e3b0c442")
    for loss in ("moved:g", "my:f"):  # another function of the file, and another file
        with pytest.raises(ConfigurationError, match="--accept_changes loss"):
            start(loss=loss)
    (tmp_path / "moved.py").write_text("# edited")
    with pytest.raises(ConfigurationError, match=r"SHA-256 of f is .*--accept_changes loss"):
        start(loss="moved:f")
