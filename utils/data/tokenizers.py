"""Loading, hashing and comparing tokenizers."""

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from utils.config.errors import ConfigurationError, did_you_mean
from utils.host.foreign import library_errors, read_object
from utils.host.hub import missing_from_cache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_ADVICE = (
    "A folder needs tokenizer.json; a Hub name needs a connection or a cached copy; a tokenizer's "
    "own code is not run."
)
MOST_IDS = 1 << 24  # sixty times the largest published vocabulary
_GENERATION = re.compile(r"\{%([-+]?)\s*(end|)generation\s*([-+]?)%\}")


def load_tokenizer(name_or_path: str, *, is_cached: bool = False) -> "PreTrainedTokenizerBase":
    """Load a tokenizer from a folder or by its Hub name. The tokenizer's own code is never run.

    is_cached: true to read the Hub cache without asking the Hub. Raises ConfigurationError if the
    tokenizer is missing, needs its own code, has no eos_token, or has an id of 2**24 or more.
    """
    from huggingface_hub import is_offline_mode
    from transformers import AutoTokenizer

    is_folder = Path(name_or_path).is_dir()
    if not is_folder and re.fullmatch(r"[^./~][^/]*(/[^/]+)?", name_or_path) is None:
        what = f"no such folder{did_you_mean(name_or_path)}"
        raise ConfigurationError(f"tokenizer_name_or_path: {name_or_path}: {what}")
    if (
        not is_folder
        and (is_cached or is_offline_mode())
        and (problem := missing_from_cache(name_or_path))
    ):
        raise ConfigurationError(f"tokenizer_name_or_path: {problem}")
    with library_errors(name_or_path, "no tokenizer can be loaded from there", TOKENIZER_ADVICE):
        _check_ids(Path(name_or_path))
        tokenizer = AutoTokenizer.from_pretrained(
            name_or_path, local_files_only=is_folder or is_cached, trust_remote_code=False
        )
        size, end = vocabulary_size(tokenizer), tokenizer.eos_token_id
    if end is None:
        raise ConfigurationError(
            f"tokenizer_name_or_path: {name_or_path}: the tokenizer has no eos_token, so the end "
            "of a document could not be marked; set one and save the tokenizer again"
        )
    if size > MOST_IDS:
        raise ConfigurationError(
            f"tokenizer_name_or_path: {name_or_path}: its {len(tokenizer):,} tokens have ids up to "
            f"{size - 1:,}, and a model needs a row for each id up to the largest: mend the ids in "
            "tokenizer.json"
        )
    return tokenizer


def _check_ids(folder: Path) -> None:
    """Raise ConfigurationError if vocab.json has an id that is not an integer."""
    path = folder / "vocab.json"
    # With tokenizer.json, vocab.json is not read.
    if path.is_file() and not (folder / "tokenizer.json").exists():
        for word, number in read_object(path).items():
            if type(number) is not int:
                raise ConfigurationError(f"{path}: the id of {word!r} is {number!r:.40}, no number")


def vocabulary_size(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the largest token id plus one; some smaller ids may have no token."""
    return max(tokenizer.get_vocab().values()) + 1


def id_type(tokenizer: "PreTrainedTokenizerBase") -> np.dtype:
    """Return the integer type in which token ids are stored: uint16 if possible, else uint32."""
    return np.dtype(np.uint16 if vocabulary_size(tokenizer) <= 1 << 16 else np.uint32)


def tokenizer_sha256(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a SHA-256 of a tokenizer's rules and vocabulary, without the chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        # Each call of a tokenizer sets truncation and padding.
        content.pop("truncation", None)
        content.pop("padding", None)
    else:
        content = tokenizer.get_vocab()
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    canonical = json.dumps([content, special], sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def chat_template_sha256(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return the SHA-256 of the chat template, or None if there is no template or several."""
    template = tokenizer.chat_template
    return hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else None


def without_training_marks(template: str) -> str:
    """Return a chat template with {% with %} instead of {% generation %}.

    Only transformers knows {% generation %}. The result renders the same text, because {% with %}
    has the same scope and trims the same blanks.
    """
    return _GENERATION.sub(r"{%\1 \2with \3%}", template)


def render_alike(one: "PreTrainedTokenizerBase", other: "PreTrainedTokenizerBase") -> bool:
    """Return whether two tokenizers' chat templates are equal, apart from {% generation %} tags."""
    mine, theirs = (
        without_training_marks(each.chat_template) if isinstance(each.chat_template, str) else None
        for each in (one, other)
    )
    return mine == theirs


def foreign_token(one: "PreTrainedTokenizerBase", other: "PreTrainedTokenizerBase") -> str | None:
    """Return a text about the first id that has different tokens in two tokenizers, or None.

    Added tokens are not compared, because chat models rename reserved tokens. Reserved tokens do
    not occur in text.
    """
    mine, theirs = ({n: word for word, n in each.get_vocab().items()} for each in (one, other))
    added = one.added_tokens_decoder.keys() | other.added_tokens_decoder.keys()
    for number in sorted(mine.keys() & theirs.keys() - added):
        if mine[number] != theirs[number]:
            return (
                f"token {number} is {mine[number]!r} in the one and {theirs[number]!r} in the other"
            )
    return None


def differences(one: "PreTrainedTokenizerBase", other: "PreTrainedTokenizerBase") -> list[str]:
    """Return texts that describe the differences of two tokenizers with different hashes."""
    mine, theirs = one.special_tokens_map, other.special_tokens_map
    found = [
        f"{name} {mine.get(name)} instead of {theirs.get(name)}"
        for name in sorted({*mine, *theirs})
        if name.endswith("_token") and mine.get(name) != theirs.get(name)
    ]
    if foreign := foreign_token(one, other):
        found.append(foreign)
    elif words := sorted(one.get_vocab().keys() ^ other.get_vocab().keys()):
        found.append(f"{len(words)} added tokens in one of them alone ({', '.join(words[:3])})")
    return found or ["other rules for cutting text into tokens (normalizer, merges, prefixes)"]
