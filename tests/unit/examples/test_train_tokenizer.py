import json

import pytest
from transformers import AutoTokenizer

from examples import train_tokenizer as example


def test_the_same_texts_give_the_same_tokenizer_of_the_size_asked_for(tmp_path, capsys):
    text = "def add(a, b):\n    return a + b\n"
    file = tmp_path / "text.jsonl"
    file.write_text(json.dumps({"text": text}) + "\n")
    plain = tmp_path / "text.txt"
    plain.write_text(text)
    for name, given in (("one", file), ("two", plain)):
        example.main(["--vocabulary", "270", "--output_dir", str(tmp_path / name), str(given)])
    saved = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("one", "two")]
    assert saved[0] == saved[1]

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    assert len(tokenizer) == 270
    assert tuple(tokenizer.convert_ids_to_tokens(range(4))) == example.SPECIAL_TOKENS
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|pad|>")
    for words in (text, "any bytes: ñ 日本 \x00", "<|im_start|>user\nhi<|im_end|>\n"):
        assert tokenizer.decode(tokenizer(words)["input_ids"]) == words
    assert tokenizer.tokenize("a\n\nb")[1].endswith("Ċ"), "a line end closes a token"

    capsys.readouterr()
    example.main(["--vocabulary", "300", "--output_dir", str(tmp_path / "one"), str(file)])
    assert "is there already" in capsys.readouterr().out
    file.write_text('{"messages": []}')
    with pytest.raises(SystemExit):
        example.main(["--vocabulary", "270", "--output_dir", str(tmp_path / "x"), str(file)])
    assert "text.jsonl has a row without `text`" in capsys.readouterr().err
    file.write_text(json.dumps({"text": text}))
    for size in (200, 5000):
        with pytest.raises(SystemExit):
            example.main(
                ["--vocabulary", str(size), "--output_dir", str(tmp_path / "x"), str(file)]
            )
        assert "give 260 (bytes and special tokens) to" in capsys.readouterr().err
