"""Train a byte-level BPE tokenizer for a model from scratch, on text files or the `text` of JSONL.

    python examples/train_tokenizer.py --vocabulary 8192 --output_dir data/tokenizer text.jsonl

The same texts give the same tokenizer. Do not train it on evaluation files. Its special tokens are
those of the ChatML template in recipes/chat_templates.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, PADDING = "<|endoftext|>", "<|pad|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, PADDING, TURN_START, TURN_END)
SMALLEST = 256 + len(SPECIAL_TOKENS)  # every byte is a token

# The splitting rule of cl100k_base (OpenAI's tiktoken, as in Llama 3): a line end always closes a
# token, so the first token of an assistant's turn never merges with the line end before it.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def main(argv: Sequence[str] | None = None) -> None:
    """Train and save a tokenizer; exit with a message if the texts cannot fill the vocabulary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="text, or JSONL with `text`")
    parser.add_argument("--vocabulary", type=int, required=True, help=f"tokens, from {SMALLEST} on")
    parser.add_argument("--output_dir", type=Path, required=True)
    arguments = parser.parse_args(argv)
    if arguments.output_dir.exists():
        sys.stdout.write(f"{arguments.output_dir} is there already: nothing is done\n")
        return
    try:
        tokenizer = train_tokenizer(texts_of(arguments.files), arguments.vocabulary)
    except ValueError as error:
        parser.error(str(error))
    tokenizer.save_pretrained(arguments.output_dir)
    sys.stdout.write(f"{len(tokenizer):,} tokens in {arguments.output_dir}\n")


def texts_of(files: Iterable[Path]) -> Iterator[str]:
    """Yield the texts of JSONL files; any other file is one text."""
    for file in files:
        if file.suffix != ".jsonl":
            yield file.read_text(encoding="utf-8")
            continue
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                if not isinstance(row, dict) or "text" not in row:
                    raise ValueError(f"{file} has a row without `text`: give texts, not chats")
                yield row["text"]


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of exactly `vocabulary_size` tokens; raises ValueError where that fails."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    reached = tokenizer.get_vocab_size()
    if reached != vocabulary_size:
        raise ValueError(
            f"vocabulary {vocabulary_size}: these texts make {reached} tokens; give {SMALLEST} "
            f"(bytes and special tokens) to {reached}, or more texts"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        additional_special_tokens=[TURN_START, TURN_END],
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    main()
