"""chat.py: runs, checkpoints and adapters answer as in plain transformers; nothing is written."""

import io
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin, TextStreamer

import chat
from utils.checkpoints.files import Manifest, flush_and_record, list_files, write_manifest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
T5, T78, T9 = [{"role": "user", "content": words} for words in ("t5", "t7 t8", "t9")]
ANSWER = {"role": "assistant", "content": "t1"}


def make_models(base_model, root):
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    model = AutoModelForCausalLM.from_pretrained(base_model)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    model.resize_token_embeddings(len(tokenizer))
    for parameter in model.parameters():  # no two tokens may be almost equally likely
        parameter.data.mul_(8)
    model.name_or_path = str(root / "base")
    for name in ("text", "base", "adapter", "merged"):
        if name == "adapter":
            model = get_peft_model(model, LoraConfig(init_lora_weights=False))
        model = model.merge_and_unload() if name == "merged" else model
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        tokenizer.chat_template = (ROOT / "recipes/chat_templates/chatml.jinja").read_text()


def let_it_end_texts(directory):
    """Make a tokenizer add EOS after every text, like tokenizers with add_eos_token."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    end = (tokenizer.eos_token, tokenizer.eos_token_id)
    ending = TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    tokenizer.backend_tokenizer.post_processor = ending
    tokenizer.save_pretrained(directory)
    assert AutoTokenizer.from_pretrained(directory)("t5")["input_ids"][-1] == end[1]


def plain(directory, *asked):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    if tokenizer.chat_template:
        asked = [tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)]
    ids = tokenizer(asked[0], return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(directory)
    said = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=[0, 129])
    return tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True)


def test_what_answers_and_what_it_says(base_model, capsys, monkeypatch, tmp_path):
    make_models(base_model, models := tmp_path / "models")

    def ask(model, *flags, typed="", code=0):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        assert chat.main([str(model), *flags, "--greedy", "--max_new_tokens", "12"]) == code
        return capsys.readouterr()

    base, run, asked = models / "base", tmp_path / "run", ("--prompt", "t5")
    for step, source in ((3, "merged"), (6, "base")):  # checkpoint 6 is still being written
        shutil.copytree(models / source, run / f"checkpoint-{step}")
    files = flush_and_record(run / "checkpoint-3", list_files(run / "checkpoint-3"))
    write_manifest(run / "checkpoint-3", Manifest("mine", 1, "single", 1, step=3, files=files))
    (run / "provenance.json").write_text(json.dumps({"run_id": "mine", "starts": []}))
    before = {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]}
    shown = ask(run, *asked)
    assert before == {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]}
    assert "no final/ yet: checkpoint-3, its newest" in shown.err
    assert shown.out.strip() == plain(models / "merged", T5) != plain(base, T5)
    assert ask(models / "adapter", *asked).out == shown.out
    shutil.copytree(base, run / "final")
    expected = plain(models / "text", "t5")
    shown = ask(models / "text", *asked)
    assert shown.out.strip() == expected
    assert "[not finished after 12 tokens: --max_new_tokens 24 allows more]" in shown.err
    monkeypatch.setattr("sys.stdin", io.StringIO("/quit\n"))
    assert chat.main([str(models / "text")]) == 0
    assert "at most 512 new tokens" in capsys.readouterr().err, "the default on a CPU"
    let_it_end_texts(models / "text")
    assert ask(models / "text", *asked).out.strip() == expected
    shown = ask(base, typed="t5\nt7 t8\n/reset\nt5\n/system t9\nt5\n/quit\nt5\n")
    first, second, again, told = shown.out.splitlines()
    assert first == again == ask(run, *asked).out.strip() == plain(base, T5)
    assert second == plain(base, T5, ANSWER | {"content": first}, T78)
    assert told == plain(base, T9 | {"role": "system"}, T5)
    with_variable = ask(base, *asked, "--system", "t9", "--chat_template_kwargs", '{"x": 1}')
    assert with_variable.out.strip() == told
    put = TextStreamer.put  # the replacement presses Ctrl-C after the first token of an answer

    def put_and_press(streamer, tokens):
        put(streamer, tokens)
        if tokens.dim() == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TextStreamer, "put", put_and_press)
    shown = ask(base, typed="t5\n/reset\nt5")
    assert shown.out.split() == first.split()[:1] * 2
    assert shown.err.count("[not finished: Ctrl-C]") == 2
    assert ask(base, *asked, code=130).out.split() == first.split()[:1]
    command = [sys.executable, "chat.py", tmp_path / "none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.split(". ")[0][-23:]) == (2, "none: no such directory")


def test_flags_that_cannot_work_are_refused_before_the_model_is_looked_for(capsys):
    for words in (
        ["--greedy", "--top_p", "0.9"], ["--max_new_tokens", "-1"], ["--chat_template_kwargs", "7"],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as refused:
            chat.main(["no/such/model/anywhere", *words])
        assert refused.value.code == 2
        assert f"error: {words[0]}: " in capsys.readouterr().err


def test_an_empty_answer_is_said(base_model, tmp_path, monkeypatch, capsys):
    """A model that ends its answer at once would otherwise print only an empty line."""
    make_models(base_model, tmp_path)
    end = AutoTokenizer.from_pretrained(tmp_path / "text").eos_token_id

    def ends(self, input_ids, **_):
        return torch.nn.functional.pad(input_ids, (0, 1), value=end)

    monkeypatch.setattr(GenerationMixin, "generate", ends)
    assert chat.main([str(tmp_path / "text"), "--prompt", "t5", "--max_new_tokens", "2"]) == 0
    assert "[the answer is empty: the model ended at once]" in capsys.readouterr().err
