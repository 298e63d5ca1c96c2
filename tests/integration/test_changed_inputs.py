"""Inputs that a run does not copy: changed contents are found, even if name and size are equal."""

import json
import shutil

import numpy as np
import pytest
import tiny
from launching import run_processes
from safetensors.torch import load_file, save_file

import prepare_data
import pretrain
import sft_train
from utils.config import precision
from utils.config.errors import ConfigurationError
from utils.config.recipes import load_mapping
from utils.data.token_dataset import describe_split

pytestmark = pytest.mark.slow

ONCE = {"max_steps": 3}  # later a run of six steps resumes from this checkpoint


def test_one_token_changed_in_place_is_refused(pretraining, tmp_path, capsys):
    documents, run = tiny.documents(80, 5), tmp_path / "run"
    data = tiny.save(tmp_path / "data", {"input_ids": documents})
    describe_split(data)
    pretrain.main(pretraining(run, train_data=data, **ONCE))
    assert "measuring" not in capsys.readouterr().out, "its description speaks for it"
    document = np.array(documents[7], dtype=np.int32).tobytes()
    (file,) = data.glob("*.arrow")
    before = file.read_bytes()
    file.write_bytes(before.replace(document, document[:-4] + b"\x09" + document[-3:], 1))
    assert len(file.read_bytes()) == len(before)
    again = pretraining(run, train_data=data)
    with pytest.raises(ConfigurationError, match=r"stoker\.json describes other contents"):
        pretrain.main(again)
    description = data / "stoker.json"
    description.rename(tmp_path / "kept.json")
    with pytest.raises(ConfigurationError, match="its train_data: content fingerprint is"):
        pretrain.main(again)
    # The run resumes once the old contents are back, as the message says.
    (tmp_path / "kept.json").rename(description)
    file.write_bytes(before)
    pretrain.main(again)
    assert [start["resumed_from"] for start in tiny.starts(run)] == [None, f"{run}/checkpoint-3"]


def test_other_weights_under_the_adapters_are_refused(
    base_model, fine_tuning, fine_tuned, tmp_path, capsys
):
    base, run = shutil.copytree(base_model, tmp_path / "base"), tmp_path / "run"
    settings = {"model_name_or_path": base, "use_peft": "true"}
    fine_tuned(run, **settings, **ONCE)
    weights = load_file(base / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"its model_name_or_path: model\.safetensors is"):
        sft_train.main(fine_tuning(run, **settings))
    assert capsys.readouterr().out.count("of weights once") == 2
    fine_tuned(run, **settings, accept_changes="model_name_or_path")
    shown = capsys.readouterr().out
    assert "model_name_or_path: model.safetensors: " in shown
    assert "of weights once" not in shown, "the refused start has kept their digest"
    first, second = (start["base_weights"]["sha256"] for start in tiny.starts(run))
    assert first.keys() == second.keys() == {"model.safetensors"}
    assert first != second


def test_a_run_keeps_the_type_that_its_first_cpu_chose(pretraining, tmp_path, monkeypatch, capfd):
    """A run that chose bf16 on one CPU must not silently continue in float32 on another CPU."""
    run, longer = tmp_path / "run", {"max_steps": 2, "save_steps": 1}
    monkeypatch.setattr(precision, "has_amx", lambda: True)
    assert pretrain.main(pretraining(run, bf16="null", max_steps=1, save_steps=1)) == 0
    said = "mixed precision bf16 (this CPU computes bf16 fast; --bf16 false for float32)"
    assert said in capfd.readouterr().out
    values = load_mapping((run / "config.yaml").read_text())
    assert (values["bf16"][0], values["use_cpu"][0]) == (True, True)
    monkeypatch.setattr(precision, "has_fast_bf16", lambda: False)
    with pytest.raises(ConfigurationError, match=r"its bf16 is true, now it is false"):
        pretrain.main(pretraining(run, bf16="false", **longer))
    # The same command resumes the run on the other CPU, in bf16.
    # transformers compares eval_steps too, which is without effect if nothing is evaluated.
    assert pretrain.main(pretraining(run, bf16="null", eval_steps=7, **longer)) == 0
    shown = "".join(capfd.readouterr())
    assert "settings: bf16 true (as this run began); a new run here has false" in shown
    assert "resuming from" in shown
    assert "do not match the ones in" not in shown


RATES = '''
import json
from pathlib import Path
from transformers import TrainerCallback

class Rates(TrainerCallback):
    """Notes the learning rate of each step before the step is taken."""

    def on_step_begin(self, args, state, control, **kwargs):
        rates = [group["lr"] for group in kwargs["optimizer"].param_groups]
        with (Path(args.output_dir) / f"rates-{args.process_index}").open("a") as file:
            file.write(json.dumps(rates) + "\\n")
'''
WSD = {"lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 2}
WSD["lr_scheduler_kwargs"] = '{"num_decay_steps": 3}'
LORA = {"use_peft": "true", "lora_r": 4, "lora_dropout": 0}


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        (None, {"lr_scheduler_type": "cosine", "ema_decay": 0.9}),
        (None, {**WSD, **LORA}),
        pytest.param("fsdp2", {}, marks=pytest.mark.exhaustive),
        pytest.param("zero2", {}, marks=pytest.mark.exhaustive),
        pytest.param("zero3", {}, marks=pytest.mark.exhaustive),
    ],
    ids=["cosine and EMA", "WSD and LoRA", "fsdp2", "zero2", "zero3"],
)
def test_a_finished_run_with_more_steps_follows_the_new_schedule_at_once(
    strategy, settings, fine_tuned, fine_tuning, tmp_path, capsys
):
    (tmp_path / "rates.py").write_text(RATES)
    settings = {"callbacks": f"{tmp_path}/rates.py:Rates", "save_steps": 6, **settings}
    run, whole = tmp_path / "run", tmp_path / "whole"
    for folder, steps in ((run, 6), (run, 12), (whole, 12)):
        if strategy is None:
            fine_tuned(folder, **settings, max_steps=steps)
        else:
            argv = fine_tuning(folder, **settings, max_steps=steps)
            run_processes(strategy, "sft_train.py", argv).succeeded()
    rates, expected = ((each / "rates-0").read_text().splitlines() for each in (run, whole))
    assert len(rates) == len(expected) == 12
    assert rates[6:] == expected[6:]
    if strategy is None:
        assert capsys.readouterr().out.count("the schedule has changed, step 7 takes ") == 1


def test_a_run_keeps_its_documents_while_its_dataset_grows(
    pretraining, workspace, tmp_path, capsys
):
    """The resumed run has the bits of an undisturbed one. A new run and the next stage see all."""
    sources = []
    for seed in (5, 6):
        rows = [" ".join(tiny.WORDS[token] for token in each) for each in tiny.documents(80, seed)]
        sources.append(tmp_path / f"{seed}.jsonl")
        sources[-1].write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    data = tmp_path / "data"
    words = ["--output_dir", str(data), "--sources"]
    tokenizer = ["--tokenizer_name_or_path", str(workspace / "tokenizer")]
    prepare_data.main([*words, str(sources[0]), *tokenizer])
    prepared = {"train_data": data, "tokenizer_name_or_path": None}
    whole = tmp_path / "whole"
    assert pretrain.main(pretraining(whole, **prepared)) == 0
    cut = tiny.copied(whole, tmp_path / "cut", step=3)
    prepare_data.main([*words, str(sources[1]), "--append", "true"])
    argv = pretraining(cut, **prepared)
    assert pretrain.main([*argv, "--dry_run", "true"]) == 0
    assert pretrain.main(argv) == 0
    assert f"{data}/train has grown since this run began" in capsys.readouterr().out
    tiny.assert_same_run(cut, whole)
    first, second = tiny.starts(cut)[-2:]
    assert (second["resumed_from"], second["data"]) == (f"{cut}/checkpoint-3", first["data"])
    later = tmp_path / "later"
    init = pretraining(later, **prepared, init_from=whole, model_config=None)
    assert pretrain.main(init) == 0
    (grown,) = tiny.starts(later)[0]["data"]["train"]
    assert [grown] != first["data"]["train"]
    # A run may take the new documents, as any other change of its data.
    argv = pretraining(cut, **prepared, max_steps=9, accept_changes="train_data")
    assert pretrain.main(argv) == 0
    assert tiny.starts(cut)[-1]["data"]["train"] == [grown]
