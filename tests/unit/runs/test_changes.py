"""Changed settings are shown at once; those that make another run are refused unless accepted."""

import json
import logging
from pathlib import Path

import pytest

from utils.config.errors import ConfigurationError
from utils.config.recipes import dump_yaml
from utils.config.settings import parse_fine_tuning, parse_pretraining
from utils.runs.changes import (
    CPU_ROUNDING,
    IDENTITY,
    IN_THE_CHECKPOINT,
    OTHER_TENSORS,
    accepted_changes,
)

GIVEN = {
    "train_data": ["data/a"],
    "model_config": "model.yaml",
    "tokenizer_name_or_path": "tokenizer",
    "sequence_length": 64,
    "global_batch_size": 4,
    "per_device_train_batch_size": 1,
    "max_steps": 6,
    "lr_scheduler_type": "cosine",
}
MODEL = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "vocab_size": 128,
         "num_hidden_layers": 1, "num_attention_heads": 4, "rope_theta": 10000.0}  # fmt: skip
FACTS = {
    "script": "pretrain.py",
    "cpu_rounding": CPU_ROUNDING,
    "data": {"train": ["aaaaaaaaaaaa"], "held": ["hhhhhhhhhhhh"]},
    "tokenizer_sha256": "tttttttttttt",
    "model_config": MODEL,
}


class Runs:
    """The starts of one run, as provenance.json would keep them."""

    def __init__(self, directory: Path, parse):
        self.directory, self.parse = directory, parse
        self.starts: list[dict] = []

    def start(self, accept=(), facts=(), cwd: str | None = None, **changes):
        given = {**GIVEN, "output_dir": self.directory, **changes}
        argv = []
        for name, value in given.items():
            if value is not None:
                values = value if isinstance(value, list) else [value]
                argv += [f"--{name}", *map(str, values)]
        if accept:
            argv += ["--accept_changes", *accept]
        settings = self.parse(argv, "")
        now = {**FACTS, "cwd": cwd or str(self.directory), **dict(facts)}
        record = accepted_changes(self.directory, settings, now)
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
    run = Runs(tmp_path, parse_fine_tuning)
    run.start(model_config=None, model_name_or_path="base")
    return run


def refused(run, **how) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        run.start(**how)
    return caught.value.problems


def warned(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_same_settings_are_no_change(runs, caplog):
    assert runs.start() == {}
    assert warned(caplog) == []


def test_all_changes_are_logged_in_one_message(runs, caplog):
    runs.start(max_steps=12, logging_steps=3, output_dir=runs.directory)
    (line,) = warned(caplog)
    assert line == (
        f"changed since the last start in {runs.directory}:\n"
        "  max_steps: 6 -> 12 (the cosine schedule takes its new curve)\n"
        "  logging_steps: 10 -> 3"
    )


@pytest.mark.parametrize(("size", "words"), [(8, "some are left out"), (2, "some come again")])
def test_another_global_batch_moves_the_data(size, words, runs, caplog):
    runs.start(global_batch_size=size, accept=["global_batch_size"])
    assert "after step k" not in caplog.text, "nothing was trained yet"
    runs.start(accept=["global_batch_size"])
    runs.has_checkpoint()
    caplog.clear()
    runs.start(global_batch_size=size, accept=["global_batch_size"])
    assert f"continues at sample {size} k, not 4 k: {words}" in warned(caplog)[0]


OTHER_VALUES = {
    "sequence_length": 32,
    "packing": "concat",
    "global_batch_size": 8,
    "seed": 7,
    "tokenizer_name_or_path": None,
    "dtype": "float32",
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": '{"num_cycles": 2}',
    "warmup_steps": 2,
}


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_what_makes_another_run_is_refused_until_it_is_accepted(name, runs, caplog):
    changed = {name: OTHER_VALUES[name]}
    facts = {"tokenizer_sha256": None} if name == "tokenizer_name_or_path" else {}
    (problem,) = refused(runs, **changed, facts=facts)
    assert f"holds another run: its {name} is " in problem
    assert f"--accept_changes {name}." in problem
    record = runs.start(**changed, accept=[name], facts=facts)
    assert record["accepted"] == [name]
    assert list(record["changed"]) == [name]
    caplog.clear()
    assert runs.start(**changed, facts=facts) == {}, "what was accepted is in force"
    assert warned(caplog) == []
    assert refused(runs), "and so the first value is a change again"


def test_every_setting_that_the_rules_name_exists():
    given = {**GIVEN, "output_dir": "run", "train_data": "data/a"}
    argv = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    assert set(parse_pretraining(argv, "").values) >= IDENTITY | IN_THE_CHECKPOINT | OTHER_TENSORS


def test_all_refusals_come_at_once(runs):
    problems = refused(runs, seed=7, sequence_length=32, logging_steps=3)
    assert {problem.split("its ")[1].split()[0] for problem in problems} == {
        "sequence_length",
        "seed",
    }


@pytest.mark.parametrize(
    ("name", "value"), [("learning_rate", 1e-3), ("weight_decay", 0.1), ("adam_beta2", 0.9)]
)
def test_what_the_optimizer_brings_along_cannot_be_accepted(name, value, runs, caplog):
    runs.start(**{name: value})  # at step 0 nothing is brought along
    assert name in warned(caplog)[0]
    runs.has_checkpoint()
    (problem,) = refused(runs, accept=[name])
    assert "cannot resume: its " + name in problem
    assert f"--init_from {runs.directory}/checkpoint-3, with --init_optimizer true" in problem


def test_the_kind_of_optimizer_cannot_change_but_for_its_implementation(runs):
    runs.has_checkpoint()
    (problem,) = refused(runs, optim="adafactor", accept=["optim"])
    assert "hold the state of adamw_torch" in problem
    runs.start(optim="adamw_torch")


def test_lora_cannot_change_its_shapes(fine_tuning):
    base = {"model_config": None, "model_name_or_path": "base", "use_peft": "true"}
    fine_tuning.start(**base, lora_alpha=16, accept=["lora_alpha"])
    fine_tuning.has_checkpoint()
    (problem,) = refused(fine_tuning, **base, lora_alpha=16, lora_r=4, accept=["lora_r"])
    assert "Its checkpoints hold other tensors" in problem
    (problem,) = refused(fine_tuning, **base, lora_alpha=64)
    assert "--accept_changes lora_alpha." in problem


def test_data_that_moved_is_logged_and_not_refused(runs, caplog):
    record = runs.start(train_data=["elsewhere/a"])
    assert warned(caplog)[0].endswith("  train_data: data/a -> elsewhere/a (the same contents)")
    assert record == {"changed": {"train_data": ["elsewhere/a"]}, "accepted": []}


def test_data_of_other_contents_is_refused_though_its_path_is_the_same(runs):
    facts = {"data": {**FACTS["data"], "train": ["bbbbbbbbbbbb"]}}
    (problem,) = refused(runs, facts=facts)
    assert "its train_data (content fingerprint) is aaaaaaaa, now it is bbbbbbbb" in problem
    assert runs.start(accept=["train_data"], facts=facts)["accepted"] == ["train_data"]
    assert runs.start(facts=facts) == {}
    assert refused(runs), "the first contents are a change again"


def test_weights_of_the_data_make_another_run(tmp_path):
    run = Runs(tmp_path, parse_pretraining)
    facts = {"data": {"train": ["aaaa", "bbbb"]}}
    run.start(train_data=["a=1", "b=1"], facts=facts)
    (problem,) = refused(run, train_data=["a=1", "b=3"], facts=facts)
    assert "its train_data is a=1 b=1, now it is a=1 b=3" in problem


def test_other_evaluation_data_is_logged_and_not_refused(runs, caplog):
    runs.start(facts={"data": {**FACTS["data"], "held": ["iiiiiiiiiiii"]}})
    assert "eval_data held (content fingerprint): hhhhhhhh -> iiiiiiii" in warned(caplog)[0]


def test_another_tokenizer_is_refused_wherever_it_is(runs, caplog):
    (problem,) = refused(runs, facts={"tokenizer_sha256": "uuuuuuuuuuuu"})
    assert "its tokenizer_name_or_path (SHA-256) is tttttttt, now it is uuuuuuuu" in problem
    assert "--accept_changes tokenizer_name_or_path." in problem
    caplog.clear()
    runs.start(tokenizer_name_or_path="copy")
    assert "tokenizer -> copy (the same tokenizer)" in warned(caplog)[0]


@pytest.mark.parametrize(
    "spelled", ["{}/data/a", "data/a/", "./data/a", "data/../data/a", "{}/link/a"]
)
def test_a_path_spelled_in_another_way_is_no_change(spelled, runs, caplog):
    (runs.directory / "data" / "a").mkdir(parents=True)
    (runs.directory / "link").symlink_to("data")
    facts = {"data": {"train": []}}  # nothing is known but the path
    assert runs.start(train_data=[spelled.format(runs.directory)], facts=facts) == {}
    assert warned(caplog) == []


def test_relative_paths_are_of_the_directory_they_were_given_in(runs, caplog):
    facts = {"data": {"train": []}}
    absolute = f"{runs.directory}/data/a"
    assert runs.start(train_data=[absolute], facts=facts, cwd="/elsewhere") == {}
    assert refused(runs, train_data=["/elsewhere/data/a"], facts=facts, cwd="/elsewhere")
    runs.start(train_data=["data/b"], facts=facts, cwd="/elsewhere", accept=["train_data"])
    assert runs.start(train_data=["/elsewhere/data/b"], facts=facts) == {}


def test_the_model_configuration_goes_by_its_contents(runs, caplog):
    assert runs.start(model_config="copy.yaml")["accepted"] == []
    assert "model_config: model.yaml -> copy.yaml (the same contents)" in warned(caplog)[0]
    other = {"model_config": {**MODEL, "rope_theta": 500000.0}}
    (problem,) = refused(runs, model_config="copy.yaml", facts=other)
    assert "its model_config: rope_theta is 10000, now it is 500000" in problem
    runs.has_checkpoint()
    runs.start(model_config="copy.yaml", facts=other, accept=["model_config"])
    assert runs.start(model_config="copy.yaml", facts=other) == {}


def test_tensors_of_another_shape_are_refused_though_accepted(runs):
    runs.has_checkpoint()
    wider = {"model_config": {**MODEL, "hidden_size": 48}}
    (problem,) = refused(runs, facts=wider, accept=["model_config"])
    assert "cannot resume with this model configuration, accepted or not" in problem
    assert "was (128, 32) and would be (128, 48)" in problem


def test_another_model_matters_where_its_weights_do(fine_tuning, caplog):
    other = {"model_config": None, "model_name_or_path": "elsewhere"}
    (problem,) = refused(fine_tuning, **other)
    assert "its model_name_or_path is base, now it is elsewhere" in problem
    fine_tuning.has_checkpoint()
    caplog.clear()
    fine_tuning.start(**other)
    assert "the run resumes from weights of its own" in warned(caplog)[0]


def test_under_adapters_the_model_always_matters(fine_tuning):
    base = {"model_config": None, "use_peft": "true"}
    fine_tuning.start(**base, model_name_or_path="base")
    fine_tuning.has_checkpoint()
    (problem,) = refused(fine_tuning, **base, model_name_or_path="elsewhere")
    assert "its model_name_or_path is base" in problem


BASE = {"model_config": None, "model_name_or_path": "base", "use_peft": "true"}
SHARDS = {"model-1.safetensors": "1" * 64, "model-2.safetensors": "2" * 64}


@pytest.fixture
def adapters(tmp_path):
    """A run with LoRA, on weights of which two files are known, with a checkpoint."""
    run = Runs(tmp_path, parse_fine_tuning)
    run.start(**BASE, facts=weights(sha256=SHARDS))
    run.has_checkpoint()
    return run


def weights(**known):
    return {"base_weights": known, "model_config": None}


def test_other_weights_under_adapters_are_refused_until_accepted(adapters, caplog):
    other = weights(sha256={**SHARDS, "model-2.safetensors": "3" * 64})
    (problem,) = refused(adapters, **BASE, facts=other)
    told = "its model_name_or_path: model-2.safetensors (SHA-256) is 22222222, now it is 33333333"
    assert told in problem
    assert "--accept_changes model_name_or_path." in problem
    accepted = adapters.start(**BASE, facts=other, accept=["model_name_or_path"])
    assert accepted == {"changed": {}, "accepted": ["model_name_or_path"]}
    assert adapters.start(**BASE, facts=other) == {}
    caplog.clear()
    refused(adapters, **BASE, facts=weights(sha256={"model.safetensors": "4" * 64}))
    line = "model_name_or_path: model-1.safetensors (SHA-256): 11111111 -> missing"
    assert f"{line} (and 2 files more)" in warned(caplog)[0]


def test_the_same_weights_at_another_path_are_logged_and_not_refused(adapters, caplog):
    moved = {**BASE, "model_name_or_path": "copy"}
    assert adapters.start(**moved, facts=weights(sha256=SHARDS))["accepted"] == []
    assert "model_name_or_path: base -> copy (the same weights)" in warned(caplog)[0]
    hub = {**BASE, "model_name_or_path": "some/model"}
    (problem,) = refused(adapters, **hub, facts=weights(commit="a" * 40))
    assert "its model_name_or_path is copy, now it is some/model" in problem


def test_a_branch_of_the_hub_that_moved_on_is_refused(adapters, caplog):
    first, second = (weights(commit=letter * 40) for letter in "ab")
    adapters.start(**BASE, facts=first)
    (problem,) = refused(adapters, **BASE, facts=second)
    assert f"(commit) is {'a' * 40}, now it is {'b' * 40}" in problem
    assert f"--model_revision {'a' * 40} names the old one" in caplog.text
    # The way out that was told works, and names no other weights.
    pinned = {**BASE, "model_revision": "a" * 40}
    assert adapters.start(**pinned, facts=first)["accepted"] == []
    (problem,) = refused(adapters, **{**pinned, "model_revision": "main"}, facts=second)[:1]
    assert "its model_revision is" in problem


def test_what_lay_under_adapters_of_an_earlier_version_is_not_known(tmp_path):
    run = Runs(tmp_path, parse_fine_tuning)
    run.start(**BASE)
    assert run.start(**BASE, facts=weights(sha256=SHARDS)) == {}


JUDGED = {
    "eval_data": ["held=data/held", "other=data/other"], "eval_strategy": "steps", "eval_steps": 3,
    "metric_for_best_model": "eval_held_loss",
}  # fmt: skip


def test_the_best_value_of_one_metric_is_compared_with_no_other(tmp_path):
    run = Runs(tmp_path, parse_pretraining)
    run.start(**{**JUDGED, "metric_for_best_model": "other_loss"})
    run.start(**JUDGED)  # nothing was judged yet
    run.has_checkpoint()
    run.start(**{**JUDGED, "metric_for_best_model": "held_loss"})  # the same by another name
    for metric in ("other_loss", None):
        changed = {**JUDGED, "metric_for_best_model": metric}
        (problem,) = refused(run, **changed, accept=["metric_for_best_model"])
        assert "cannot resume: its metric_for_best_model is held_loss, now" in problem
        assert "hold the best held_loss, with which nothing else compares. A run" in problem


def test_a_metric_may_come_later(runs):
    runs.start(**{**JUDGED, "metric_for_best_model": None})
    runs.has_checkpoint()
    runs.start(**JUDGED)


def test_a_setting_that_an_older_version_did_not_have_had_its_default(runs, caplog):
    path = runs.directory / "config.yaml"
    lines = [line for line in path.read_text().splitlines() if not line.startswith("seed:")]
    path.write_text("\n".join(lines))
    assert runs.start() == {}
    assert refused(runs, seed=7)


def test_a_run_of_a_version_that_rounds_otherwise_on_a_cpu_is_refused_until_accepted(runs):
    runs.starts[-1] |= {"launch": {"devices": ["cpu"]}}
    runs.start()  # of today's version: the mark is there
    old = {key: value for key, value in runs.starts[0].items() if key != "cpu_rounding"}
    runs.starts[:] = [old]
    (runs.directory / "provenance.json").write_text(json.dumps({"starts": runs.starts}))
    (problem,) = refused(runs)
    assert "order of sums on a CPU" in problem
    assert "--accept_changes use_cpu" in problem
    runs.start(accept=["use_cpu"])


def test_a_run_of_the_other_script_is_refused(runs):
    (problem,) = refused(runs, facts={"script": "sft_train.py"})
    assert "holds a run of pretrain.py: name another --output_dir" in problem


def test_a_broken_config_is_not_taken_for_no_change(runs):
    (runs.directory / "config.yaml").write_text("seed: [")
    (problem,) = refused(runs)
    assert "config.yaml is not as the first start wrote it" in problem
