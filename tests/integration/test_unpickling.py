"""No code from a checkpoint or a model runs."""

import contextlib
import dataclasses
import json
import pickle
import shutil

import payloads
import pytest
import torch

import pretrain
import sft_train
from utils.checkpoints.files import flush_and_record, list_files, read_manifest, write_manifest
from utils.config.errors import ConfigurationError

pytestmark = pytest.mark.slow


def test_a_resume_runs_nothing_of_a_strangers_file(pretraining, pretrained, tmp_path):
    """A resume refuses such a file. tests/unit/checkpoints/test_pickles.py tests each loader."""
    run, touched = pretrained(tmp_path / "run", max_steps=3), tmp_path / "touched"
    assert not list(run.rglob("training_args.bin")), "it would be a pickle"
    checkpoint = run / "checkpoint-3"
    whole = shutil.copytree(checkpoint, tmp_path / "whole")
    for name in ("optimizer.pt", "optimizer_0/.metadata", "custom_checkpoint_0.pkl"):
        payloads.write(checkpoint, name, payloads.Touch(touched))
        # An attacker's manifest, which matches the present files.
        files = flush_and_record(checkpoint, list_files(checkpoint))
        manifest = dataclasses.replace(read_manifest(checkpoint), files=files)
        write_manifest(checkpoint, manifest)
        with pytest.raises(ConfigurationError, match=name.replace(".", r"\.")):
            pretrain.main(pretraining(run, max_steps=6))
        assert checkpoint.is_dir(), "a refused checkpoint stays where it is"
        shutil.rmtree(checkpoint)
        shutil.copytree(whole, checkpoint)
    # The guard also acts on callers that pass weights_only=False, as DeepSpeed and
    # torch.distributed.checkpoint do.
    path = payloads.write(tmp_path, "optimizer.pt", payloads.Touch(touched))
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(path, weights_only=False)
    assert not touched.exists()


AUTO_MAP = {
    "AutoConfig": "modeling_evil.EvilConfig",
    "AutoModelForCausalLM": "modeling_evil.EvilModel",
    "AutoTokenizer": ["modeling_evil.EvilTokenizer", None],
}
# Attacks in a config.json that some transformers versions obeyed (CVE-2026-4372, CVE-2026-5241),
# and a part of the error. The module that they name is in the same folder.
TRICKS = {
    "auto_map": ({"auto_map": AUTO_MAP}, None),
    "attention": ({"_attn_implementation_internal": "modeling_evil"}, None),
    "attention_of_the_hub": ({"_attn_implementation": "./evil/kernel:modeling_evil"}, None),
    "nested": ({"trust_remote_code": True, "text_config": {"auto_map": AUTO_MAP}}, "text_config"),
    "architecture": (
        {"model_type": "evil", "auto_map": AUTO_MAP},
        r"no model can be made of it|can be loaded|evil",
    ),
}


@pytest.mark.parametrize("way", ["model_name_or_path", "init_from", "model_config"])
@pytest.mark.parametrize("trick", TRICKS)
def test_code_beside_a_model_is_not_run(
    trick, way, fine_tuning, pretraining, base_model, tmp_path, monkeypatch
):
    (changes, reason), touched = TRICKS[trick], tmp_path / "touched"
    model = shutil.copytree(base_model, tmp_path / "model")
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((model / name).read_text())
        tried = changes if name == "config.json" else {"auto_map": AUTO_MAP}
        (model / name).write_text(json.dumps(content | tried))
    code = f"open({str(touched)!r}, 'w').close()\nclass EvilConfig: pass\n"
    (model / "modeling_evil.py").write_text(code)
    monkeypatch.chdir(model)  # so that a plain import would find it
    if way == "model_config":
        argv = pretraining(tmp_path / "run", max_steps=1, model_config=model / "config.json")
        main = pretrain.main
    else:
        named = {"model_name_or_path": None} | {way: model}
        argv, main = fine_tuning(tmp_path / "run", max_steps=1, **named), sft_train.main
    with pytest.raises(ConfigurationError, match=reason) if reason else contextlib.nullcontext():
        main(argv)
    assert not touched.exists()
