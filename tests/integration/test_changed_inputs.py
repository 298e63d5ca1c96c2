"""What a run reads and holds no copy of: other contents under the same name, size and all."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny
from datasets import load_from_disk
from safetensors.torch import load_file, save_file

import prepare_data
import pretrain
import sft_train
from utils.config import precision as cpu_precision
from utils.config.errors import ConfigurationError
from utils.config.recipes import load_mapping

pytestmark = pytest.mark.slow

ONCE = {"max_steps": 3}  # then a run of six resumes from its checkpoint


@pytest.fixture
def prepared(workspace, tmp_path) -> Path:
    texts = [{"text": " ".join(f"t{token}" for token in row)} for row in tiny.documents(80, 5)]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, texts)))
    prepare_data.main(
        tiny.flags(
            sources=tmp_path / "text.jsonl",
            tokenizer_name_or_path=workspace / "tokenizer",
            output_dir=tmp_path / "data",
        )
    )
    return tmp_path / "data" / "train"


def test_one_token_changed_in_place_is_refused(prepared, pretraining, tmp_path, capsys):
    run = tmp_path / "run"
    pretrain.main(pretraining(run, train_data=prepared, **ONCE))
    assert "measuring" not in capsys.readouterr().out, "its description speaks for it"
    document = np.array(load_from_disk(str(prepared))[7]["input_ids"], dtype=np.uint16).tobytes()
    (file,) = prepared.glob("*.arrow")
    before = file.read_bytes()
    with file.open("r+b") as opened:
        opened.seek(before.index(document) + len(document) - 2)
        opened.write(b"\x09")
    assert len(file.read_bytes()) == len(before)
    again = pretraining(run, train_data=prepared)
    with pytest.raises(ConfigurationError, match=r"stoker\.json describes other contents"):
        pretrain.main(again)
    description = prepared / "stoker.json"
    description.rename(tmp_path / "kept.json")
    with pytest.raises(ConfigurationError, match="its train_data: content fingerprint is"):
        pretrain.main(again)
    # With the old contents it resumes, as the message says.
    (tmp_path / "kept.json").rename(description)
    file.write_bytes(before)
    pretrain.main(again)
    assert [start["resumed_from"] for start in tiny.starts(run)] == [None, f"{run}/checkpoint-3"]


def test_other_weights_under_the_adapters_are_refused(
    base_model, fine_tuning, tmp_path, monkeypatch, capsys
):
    base, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(base_model, base)

    def argv(**changes):
        return fine_tuning(run, model_name_or_path=base, use_peft="true", **changes)

    with monkeypatch.context() as earlier:
        earlier.setattr("utils.runs.provenance._version", lambda name: f"{name}'s first")
        sft_train.main(argv(**ONCE))
    assert "of weights once" in capsys.readouterr().out
    weights = load_file(base / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"its model_name_or_path: model\.safetensors is"):
        sft_train.main(argv())
    capsys.readouterr()
    sft_train.main(argv(accept_changes="model_name_or_path"))
    shown = capsys.readouterr().out
    assert "model_name_or_path: model.safetensors: " in shown
    assert "checkpoint-3 was written with other versions: torch torch's first -> " in shown
    assert "of weights once" not in shown, "the refused start has kept their digest"
    first, second = (start["base_weights"]["sha256"] for start in tiny.starts(run))
    assert first.keys() == second.keys() == {"model.safetensors"}
    assert first != second


def test_a_run_stays_with_what_its_first_cpu_decided(pretraining, tmp_path, monkeypatch, capfd):
    """Another CPU's answer would be another run."""
    run = tmp_path / "run"
    monkeypatch.setattr(cpu_precision, "has_amx", lambda: True)
    argv = pretraining(run, bf16="null", max_steps=1, save_steps=1)
    assert pretrain.main(argv) == 0
    said = "mixed precision bf16 (this CPU computes bf16 fast; --bf16 false for float32)"
    assert said in capfd.readouterr().out
    values = load_mapping((run / "config.yaml").read_text())
    assert (values["bf16"][0], values["use_cpu"][0]) == (True, True)
    longer = pretraining(run, bf16="null", max_steps=2)
    monkeypatch.setattr(cpu_precision, "has_fast_bf16", lambda: False)
    with pytest.raises(ConfigurationError, match=r"its bf16 is True, now it is False"):
        pretrain.main(longer)
    # Asked for, it resumes in bf16 there too.
    assert pretrain.main(pretraining(run, bf16=True, use_cpu=True, max_steps=2, save_steps=1)) == 0
    assert "resuming from" in capfd.readouterr().out
