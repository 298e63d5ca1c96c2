"""From documents to a fine-tuned model by the three scripts; secrets stay out of all files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from launching import quiet_environment
from transformers import AutoModelForCausalLM, AutoTokenizer

import prepare_data
import pretrain
import sft_train
from examples.train_tokenizer import train_tokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CANARIES = {
    "WANDB_API_KEY": "canary0wandb0" + "5" * 27,
    "HF_TOKEN": "hf_canaryREADcanaryREADcanaryREAD",
    "HF_WRITE_TOKEN": "hf_canaryWRITEcanaryWRITEcanary",
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Prepare text/ and chats/ from JSONL with a trained tokenizer; chats/ has no pad token."""
    root = tmp_path_factory.mktemp("prepared")
    names = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    texts = [{"text": f"{i}: " + " ".join(names[i % 8 :] + names[: i % 8]) * 3} for i in range(60)]
    turns = [
        [{"role": "user", "content": f"what follows {names[i % 7]}?"},
         {"role": "assistant", "content": names[i % 7 + 1]}]
        for i in range(60)
    ]  # fmt: skip
    for name, records in (("text", texts), ("chats", [{"messages": chat} for chat in turns])):
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    tokenizer = train_tokenizer((row["text"] for row in texts), 290)
    tokenizer.save_pretrained(root / "trained")
    text = {"sources": root / "text.jsonl", "validation_fraction": 0.1}
    text["tokenizer_name_or_path"] = root / "trained"
    prepare_data.main(tiny.flags(**text, output_dir=root / "text"))
    tokenizer.pad_token = None
    tokenizer.save_pretrained(root / "tokenizer")
    chats = {"sources": root / "chats.jsonl", "tokenizer_name_or_path": root / "tokenizer"}
    chats["chat_template"] = ROOT / "recipes" / "chat_templates" / "chatml.jinja"
    prepare_data.main(tiny.flags(**chats, output_dir=root / "chats"))
    return root


SMALL = {
    "sequence_length": 64, "global_batch_size": 4, "per_device_train_batch_size": 4,
    "learning_rate": 1e-2, "logging_steps": 5, "bf16": False,
}  # fmt: skip


def model_config(path: Path) -> Path:
    """Write a configuration without a vocabulary size: the run derives it from the tokenizer."""
    config = json.loads(tiny.make_model_config(path).read_text())
    del config["vocab_size"]
    path.write_text(json.dumps(config))
    return path


def test_documents_in_a_model_that_answers_out(prepared, tmp_path):
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    settings = {
        "train_data": prepared / "text", "model_config": model_config(tmp_path / "model.json"),
        "eval_data": f"validation={prepared / 'text' / 'validation'}", "eval_steps": 10,
        "max_steps": 10, "output_dir": base,
    }  # fmt: skip
    pretrain.main(tiny.flags(**SMALL, **settings))
    assert sorted(tiny.evaluations(base, "validation")) == [10]
    settings = {"train_data": prepared / "chats", "model_name_or_path": base / "final"}
    sft_train.main(tiny.flags(**SMALL, **settings, output_dir=tuned, max_steps=250))
    tokenizer = AutoTokenizer.from_pretrained(tuned / "final")
    assert tokenizer.pad_token is None, "none is needed"
    model = AutoModelForCausalLM.from_pretrained(tuned / "final")
    chat = [{"role": "user", "content": "what follows three?"}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    # The finished model stops at the end of its turn.
    assert answer == "four<|im_end|>"


def test_tokens_are_in_no_file_and_no_line_of_a_run(prepared, tmp_path):
    """The files of wandb are included; without a network wandb goes offline by itself.

    The run needs its own process, because wandb keeps the settings of a process's first run.
    """
    env_file, run = tmp_path / ".env", tmp_path / "run"
    env_file.write_text("".join(f"{name}={value}\n" for name, value in CANARIES.items()))
    argv = tiny.flags(
        train_data=prepared / "text", model_config=model_config(tmp_path / "model.json"),
        output_dir=run, report_to="wandb", max_steps=10, eval_steps=10, max_eval_sequences=1,
        eval_data=f"text={prepared / 'text' / 'validation'}", sample_prompts="two and", **SMALL,
    )  # fmt: skip
    environment = {
        name: value
        for name, value in quiet_environment().items()
        if not name.startswith("WANDB_") and name not in CANARIES
    }
    # Nothing listens at this address, as on a node without internet.
    environment["WANDB_BASE_URL"] = "http://127.0.0.1:9"
    command = [sys.executable, str(ROOT / "pretrain.py"), *argv]
    for mode, code in ((0o644, 2), (0o600, 0)):
        env_file.chmod(mode)
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        shown = done.stdout + done.stderr
        assert done.returncode == code, shown[-4000:]
        assert ("chmod 600" in shown) == (code == 2)
    assert "wandb: offline" in shown
    assert f"python status.py {run} --sync" in shown
    (offline,) = (run / "wandb").glob("offline-run-*")
    (table,) = offline.glob("files/media/table/samples_*.json")
    (row,) = json.loads(table.read_text())["data"]
    assert row[:2] == [10, "two and"]
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path != env_file]
    assert len(files) > 10
    for value in CANARIES.values():
        assert value not in shown
        for path in files:
            assert value.encode() not in path.read_bytes(), path
