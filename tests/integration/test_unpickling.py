"""Nothing that came with a checkpoint or a model runs."""

import contextlib
import dataclasses
import json
import pickle
import shutil
import sys
from pathlib import Path

import payloads
import pytest
import torch

import pretrain
import sft_train
from utils.checkpoints.files import flush_and_record, list_files, read_manifest, write_manifest
from utils.config.errors import ConfigurationError

pytestmark = pytest.mark.slow


def committed_again(checkpoint: Path) -> None:
    """Write a manifest that vouches for whatever is there now, as an attacker would."""
    files = flush_and_record(checkpoint, list_files(checkpoint))
    write_manifest(checkpoint, dataclasses.replace(read_manifest(checkpoint), files=files))


@pytest.fixture(scope="module")
def kept_run(tmp_path_factory):
    return tmp_path_factory.mktemp("stopped") / "run"


@pytest.fixture
def stopped(kept_run, pretraining, tmp_path):
    """A copy of a run with one checkpoint at step 3."""
    if not kept_run.exists():
        pretrain.main(pretraining(kept_run, max_steps=3))
    ignored = shutil.ignore_patterns(".lock")  # this process holds it
    return shutil.copytree(kept_run, tmp_path / "run", ignore=ignored)


# What each loader unpickles is in tests/unit/checkpoints/test_pickles.py.
@pytest.mark.parametrize(
    "name", ["optimizer.pt", "optimizer_0/.metadata", "custom_checkpoint_0.pkl"]
)
def test_a_resume_runs_nothing_of_a_strangers_file(name, pretraining, stopped, tmp_path):
    touched = tmp_path / "touched"
    payloads.write(stopped / "checkpoint-3", name, payloads.Touch(touched))
    committed_again(stopped / "checkpoint-3")
    with pytest.raises(ConfigurationError, match=name.replace(".", r"\.")):
        pretrain.main(pretraining(stopped, max_steps=6))
    assert not touched.exists()
    assert (stopped / "checkpoint-3").is_dir(), "a refused checkpoint stays where it is"


def test_the_guard_of_torch_stays_on_for_what_asks_for_none(stopped, pretraining, tmp_path):
    """As DeepSpeed and torch.distributed.checkpoint ask (weights_only=False)."""
    assert not list(stopped.rglob("training_args.bin")), "it would be a pickle"
    pretrain.main(pretraining(stopped, max_steps=3))
    path = payloads.write(tmp_path, "optimizer.pt", payloads.Touch(tmp_path / "touched"))
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(path, weights_only=False)
    assert not (tmp_path / "touched").exists()


# What a config.json may try, and transformers obeyed at one time or another (CVE-2026-4372,
# CVE-2026-5241); the module it names lies beside it.
TRICKS = {
    "auto_map": {
        "auto_map": {
            "AutoConfig": "modeling_evil.EvilConfig",
            "AutoModelForCausalLM": "modeling_evil.EvilModel",
            "AutoTokenizer": ["modeling_evil.EvilTokenizer", None],
        }
    },
    "attention": {"_attn_implementation_internal": "modeling_evil"},
    "attention_of_the_hub": {"_attn_implementation": "./evil/kernel:modeling_evil"},
    "nested": {
        "trust_remote_code": True,
        "text_config": {"trust_remote_code": True, "auto_map": {"AutoConfig": "modeling_evil.E"}},
    },
}


@pytest.fixture(scope="module")
def imports():
    """The files of Python code that were compiled or opened for it since; hooks stay for good."""
    seen: list[str] = []

    def hook(event: str, arguments: tuple) -> None:
        if event in ("exec", "import", "compile", "open"):
            seen.append(str(arguments[:2]))

    sys.addaudithook(hook)
    return seen


def evil_model(base_model: Path, directory: Path, trick: dict, touched: Path) -> Path:
    shutil.copytree(base_model, directory)
    config = json.loads((directory / "config.json").read_text()) | trick
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    tokenizer |= {name: trick[name] for name in ("auto_map",) if name in trick}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    code = f"open({str(touched)!r}, 'w').close()\nclass EvilConfig: pass\n"
    (directory / "modeling_evil.py").write_text(code)
    return directory


@pytest.mark.parametrize("way", ["model_name_or_path", "init_from", "model_config"])
@pytest.mark.parametrize("trick", TRICKS)
def test_code_beside_a_model_is_not_run(
    trick, way, fine_tuning, pretraining, base_model, imports, tmp_path, monkeypatch
):
    touched = tmp_path / "touched"
    model = evil_model(base_model, tmp_path / "model", TRICKS[trick], touched)
    monkeypatch.chdir(model)  # so that a plain import would find it
    if way == "model_config":
        argv = pretraining(tmp_path / "run", max_steps=1, model_config=model / "config.json")
        main = pretrain.main
    else:
        named = {"model_name_or_path": None} | {way: model}
        argv, main = fine_tuning(tmp_path / "run", max_steps=1, **named), sft_train.main
    imports.clear()
    reason = "text_config" if trick == "nested" else None
    with pytest.raises(ConfigurationError, match=reason) if reason else contextlib.nullcontext():
        main(argv)
    assert not touched.exists()
    assert not [event for event in imports if "modeling_evil" in event]


def test_an_architecture_that_is_only_code_is_refused(fine_tuning, base_model, imports, tmp_path):
    trick = {"model_type": "evil", **TRICKS["auto_map"]}
    model = evil_model(base_model, tmp_path / "model", trick, tmp_path / "touched")
    argv = fine_tuning(tmp_path / "run", model_name_or_path=model)
    with pytest.raises(ConfigurationError, match=r"no model could be found|can be loaded"):
        sft_train.main(argv)
    assert not (tmp_path / "touched").exists()
