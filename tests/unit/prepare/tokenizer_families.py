"""Tokenizers of the published families, trained on a few sentences."""

from functools import cache

import preparation_samples as samples
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import ByteLevel, TemplateProcessing
from transformers import PreTrainedTokenizerFast

BLANK = "\u2581"  # SentencePiece's character for a blank
BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    *samples.sentences(300),
    "x = [1, 2]\nyes\nno\nAnswer: yes\n",
    "漢字 한국어 ß\n",
    "xyesreturnvaluenaïveß1x2yes\n",
] * 2


def _trained(tokenizer, trainer):
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _bpe(**options):
    special = [UNKNOWN, BEGIN, END]
    return trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, show_progress=False, **options
    )


def _sentencepiece(*, prepend_scheme=None):
    """Return a BPE tokenizer with byte fallback.

    A pre-tokenizer (Metaspace) or a normalizer puts the first blank before a text. The tokenizer is
    trained on words, like SentencePiece, but does not split a text into words when it is used.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN, byte_fallback=True, fuse_unk=True))
    lines = pre_tokenizers.Split("\n", "isolated")
    words = pre_tokenizers.Metaspace(BLANK, "always")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, words])
    special = [UNKNOWN, BEGIN, END, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    _trained(tokenizer, trainer)
    if prepend_scheme:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, prepend_scheme, split=False)
    else:
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)]
        )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _byte_level(*, pattern=None, **options):
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(use_regex=pattern is None, **options)
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
    tokenizer.decoder = decoders.ByteLevel()
    return _trained(tokenizer, _bpe(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))


def _trimming():
    """Return a tokenizer whose offsets exclude a token's blanks, as in RoBERTa."""
    tokenizer = _byte_level(add_prefix_space=True)
    tokenizer.post_processor = ByteLevel(trim_offsets=True)
    return tokenizer


def _word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = [UNKNOWN, BEGIN, END]
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    return _trained(tokenizer, trainer)


def _unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, "always")
    tokenizer.decoder = decoders.Metaspace(BLANK, "always")
    special = [UNKNOWN, BEGIN, END]
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=special, unk_token=UNKNOWN, show_progress=False
    )
    return _trained(tokenizer, trainer)


FAMILIES = {
    "metaspace_always": lambda: _sentencepiece(prepend_scheme="always"),
    "metaspace_first": lambda: _sentencepiece(prepend_scheme="first"),
    "prepend_normalizer": _sentencepiece,
    "byte_level": lambda: _byte_level(add_prefix_space=False),
    "byte_level_cl100k": lambda: _byte_level(add_prefix_space=False, pattern=CL100K),
    "byte_level_prefix_space": lambda: _byte_level(add_prefix_space=True),
    "trimmed_offsets": _trimming,
    "word_piece": _word_piece,
    "unigram": _unigram,
}


@cache
def _serialized(family):
    return FAMILIES[family]().to_str()


def tokenizer_of(family, template=f"{BEGIN} $A"):
    """Return a tokenizer of a family that adds the tokens of `template` to each text."""
    tokenizer = Tokenizer.from_str(_serialized(family))
    numbers = [(token, tokenizer.token_to_id(token)) for token in (BEGIN, END)]
    if template != "$A":
        tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=numbers)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END, unk_token=UNKNOWN
    )
