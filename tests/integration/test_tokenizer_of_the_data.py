"""Tokenizer and chat template come from the data: a base model, its chat sibling, new tokens.

The two tokenizers imitate Qwen3-0.6B-Base and Qwen3-0.6B: the same vocabulary, but `<|endoftext|>`
and `<|im_end|>` as eos_token, and a template only for the chat model.
"""

import json
from pathlib import Path

import pytest
import tiny
import torch
from launching import run_processes
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import prepare_data
import sft_train
from examples.train_tokenizer import train_tokenizer
from utils.config.errors import ConfigurationError

pytestmark = pytest.mark.slow

LORA = {"use_peft": "true", "lora_r": 2, "lora_dropout": 0, "lora_target_modules": "all-linear"}
TEN_TOKENS = ["<is>", *(f"<{number}>" for number in range(9))]  # ids up to 309, beyond the 304 rows
CHATML = Path(__file__).parents[2] / "recipes" / "chat_templates" / "chatml.jinja"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Make base/ (weights, tokenizer without template), chat/ (sibling's tokenizer), rows.jsonl."""
    root = tmp_path_factory.mktemp("models")
    rows = [{"text": f"{i} plus {i + 1} is {2 * i + 1}. " * 4} for i in range(60)]
    base = train_tokenizer((row["text"] for row in rows), 300)
    base.save_pretrained(root / "base")
    base.eos_token, base.chat_template = "<|im_end|>", CHATML.read_text()
    base.save_pretrained(root / "chat")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=304, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        bos_token_id=0, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(root / "base")
    pairs = [{"instruction": f"{i} plus {i + 1}?", "output": f"is {2 * i + 1}"} for i in range(60)]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return root


def prepare(models: Path, output: Path, **changes: object) -> Path:
    settings = {"sources": models / "rows.jsonl", "tokenizer_name_or_path": models / "chat"}
    assert prepare_data.main(tiny.flags(**(settings | {"output_dir": output} | changes))) == 0
    return output


@pytest.fixture(scope="module")
def chats(models, tmp_path_factory) -> Path:
    return prepare(models, tmp_path_factory.mktemp("prepared") / "chats")


def argv(models: Path, data: Path, run: Path, **changes: object) -> list[str]:
    settings = tiny.RUN | {
        "train_data": data, "model_name_or_path": models / "base", "output_dir": run,
        "max_steps": 2, "save_steps": 1,
    }  # fmt: skip
    return tiny.flags(**(settings | changes))


def test_a_base_model_learns_chats_of_its_sibling(models, chats, tmp_path, capsys):
    """Train a base model on chats that were prepared with the chat model's tokenizer."""
    sft_train.main(argv(models, chats, tmp_path / "run"))
    said = capsys.readouterr().out
    assert "eos_token <|im_end|> instead of <|endoftext|>" in said
    assert "another chat template; final/ gets it" in said
    final = tmp_path / "run" / "final"
    tokenizer = AutoTokenizer.from_pretrained(final)
    assert tokenizer.eos_token == "<|im_end|>"
    assert "generation %}" not in tokenizer.chat_template
    trained = AutoTokenizer.from_pretrained(chats / "tokenizer")
    chat = {"conversation": [{"role": "user", "content": "1 plus 2?"}], "tokenize": False}
    of_final, of_data = (
        each.apply_chat_template(**chat, add_generation_prompt=True)
        for each in (tokenizer, trained)
    )
    assert of_final == of_data
    stops = json.loads((final / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [0, 3]
    # final/ lacks the {% generation %} markers of the data's template, which renders the same text.
    for given in ({}, {"tokenizer_name_or_path": final}):
        changes = {"model_name_or_path": final, "dry_run": "true"} | given
        sft_train.main(argv(models, chats, tmp_path / "next", **changes))
        assert "another chat template" not in capsys.readouterr().out


def refusal(arguments: list[str]) -> str:
    with pytest.raises(ConfigurationError) as raised:
        sft_train.main([*arguments, "--dry_run", "true"])
    return str(raised.value)


def test_what_does_not_fit_the_data_is_refused(models, chats, tmp_path):
    given = {"tokenizer_name_or_path": models / "base"}
    said = refusal(argv(models, chats, tmp_path / "run", **given))
    assert "eos_token <|im_end|> instead of <|endoftext|>" in said
    assert "Leave --tokenizer_name_or_path out" in said
    other = AutoTokenizer.from_pretrained(chats / "tokenizer")
    other.chat_template += " "
    other.save_pretrained(tmp_path / "other")
    given = {"tokenizer_name_or_path": tmp_path / "other"}
    said = refusal(argv(models, chats, tmp_path / "run", **given))
    assert "rendered with another chat template" in said
    data = prepare(models, tmp_path / "data", add_tokens="<is>")
    settings = {"use_peft": "true", "loss_head": "fused"}
    assert "rows of new tokens" in refusal(argv(models, data, tmp_path / "run", **settings))


def test_a_vocabulary_that_is_not_the_models_is_refused(models, tmp_path):
    other = train_tokenizer(["another 123 "] * 9, 265)
    other.save_pretrained(tmp_path / "other")
    changes = {"tokenizer_name_or_path": tmp_path / "other", "chat_template": CHATML}
    trained = prepare(models, tmp_path / "data", **changes)
    said = refusal(argv(models, trained, tmp_path / "run"))
    assert f"has another vocabulary than {models / 'base'}" in said
    given = {"tokenizer_name_or_path": trained / "tokenizer"}
    said = refusal(argv(models, trained, tmp_path / "run", **given))
    assert "train without --tokenizer_name_or_path" in said


def test_tokens_beyond_the_embedding_that_no_data_uses_train(models, tmp_path):
    """Gemma 3 1B has such a token: 262,145 tokens, but 262,144 rows in its embedding."""
    small = tmp_path / "base"
    model = AutoModelForCausalLM.from_pretrained(models / "base")
    model.resize_token_embeddings(300)
    model.save_pretrained(small)
    for place in (small, tmp_path / "chat"):
        tokenizer = AutoTokenizer.from_pretrained(models / "chat")
        tokenizer.add_tokens(["<image_soft_token>"])
        tokenizer.save_pretrained(place)
    data = prepare(models, tmp_path / "data", tokenizer_name_or_path=tmp_path / "chat")
    settings = {"model_name_or_path": small, "packing": "none", "dry_run": "true"}
    assert sft_train.main(argv(models, data, tmp_path / "run", **settings)) == 0
    pair = {"instruction": "<image_soft_token>", "output": "is 1"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(pair))
    changes = {"tokenizer_name_or_path": tmp_path / "chat", "sources": tmp_path / "rows.jsonl"}
    using = prepare(models, tmp_path / "using", **changes)
    said = refusal(argv(models, using, tmp_path / "run", model_name_or_path=small))
    assert "holds token id 300, but the vocabulary ends at 299" in said


@pytest.mark.parametrize(
    ("adapted", "tied"), [(False, True), (True, False)], ids=["full-tied", "lora-untied"]
)
def test_new_tokens_are_trained_saved_and_resumed(adapted, tied, models, tmp_path, capsys):
    base, run = models / "base", tmp_path / "run"
    if tied:
        base = tmp_path / "base"
        config = AutoModelForCausalLM.from_pretrained(models / "base").config
        config.tie_word_embeddings = True
        AutoModelForCausalLM.from_config(config).save_pretrained(base)
        AutoTokenizer.from_pretrained(models / "base").save_pretrained(base)
    rows = (models / "rows.jsonl").read_text().replace("is ", "<is>")
    (tmp_path / "rows.jsonl").write_text(rows)
    changes = {"sources": tmp_path / "rows.jsonl", "add_tokens": TEN_TOKENS}
    data = prepare(models, tmp_path / "data", **changes)
    settings = {"model_name_or_path": base, "save_dtype": "float32"} | (LORA if adapted else {})
    assert sft_train.main(argv(models, data, run, **settings, dry_run=True)) == 0
    sft_train.main(argv(models, data, run, **settings))
    said = capsys.readouterr().out
    assert "320 rows, 304 before; 10 new tokens (<is>, <0>, <1>, <2>, <3>, ...) begin" in said
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    new = tokenizer.convert_tokens_to_ids("<is>")
    assert new == 300
    final = AutoModelForCausalLM.from_pretrained(run / "final")
    assert final.config.vocab_size == 320
    assert final.config.tie_word_embeddings == tied
    before = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for get in ("get_input_embeddings", "get_output_embeddings"):
        old, now = (getattr(model, get)().weight for model in (before, final))
        mean = old[:300].mean(dim=0)
        # New rows begin as the mean of the old rows; only the row of <is> was trained.
        assert not torch.allclose(now[new], mean, atol=1e-4)
        assert torch.linalg.vector_norm(now[new] - mean) < 0.5
        if adapted:
            assert torch.equal(now[:300], old[:300])
            torch.testing.assert_close(now[310:], mean.expand(10, -1))
    whole = {file.name: file.read_bytes() for file in (run / "final").iterdir()}
    sft_train.main(argv(models, data, tiny.cut(run, step=1), **settings))
    assert {file.name: file.read_bytes() for file in (run / "final").iterdir()} == whole


# Under ZeRO-3 PEFT's trainable tokens need a GPU.
@pytest.mark.parametrize(
    ("name", "adapted"),
    [("fsdp2", True), pytest.param("zero3", False, marks=pytest.mark.exhaustive)],
)
def test_sharded_strategies_give_new_tokens_the_same_rows(name, adapted, models, tmp_path):
    data = prepare(models, tmp_path / "data", add_tokens=TEN_TOKENS)
    settings = {"save_dtype": "float32", "per_device_train_batch_size": 1}
    settings |= LORA if adapted else {}
    sft_train.main(argv(models, data, tmp_path / "one", **settings))
    run_processes(
        name, "sft_train.py", argv(models, data, tmp_path / "two", **settings)
    ).succeeded()
    one, two = (
        AutoModelForCausalLM.from_pretrained(tmp_path / run / "final").state_dict()
        for run in ("one", "two")
    )
    torch.testing.assert_close(two, one, rtol=0, atol=2e-3)
