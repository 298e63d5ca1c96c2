"""Prompts for the samples that a model writes during training: read and tokenized."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from utils.config.errors import ConfigurationError
from utils.host.foreign import reason
from utils.prepare.chat_templates import PROBE, ChatTemplate
from utils.prepare.encoding import prompt_ids
from utils.prepare.rows import ChatDocument, document_fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILES = (".jsonl", ".txt")


class Prompt(NamedTuple):
    """The text of a prompt as its author wrote it, and the token ids that the model continues."""

    text: str
    token_ids: list[int]


def load_prompts(
    entries: Sequence[str], tokenizer: "PreTrainedTokenizerBase", *, chats: bool, most_tokens: int
) -> list[Prompt]:
    """Return the prompts of `sample_prompts`: each entry is a text, or a .txt or .jsonl file.

    A line of a .jsonl file has `prompt` or, for `chats`, `messages`. With `chats`, the tokenizer's
    chat template renders the prompts, if there is one. Raises ConfigurationError with all faults.
    """
    template = ChatTemplate(tokenizer) if chats and tokenizer.chat_template is not None else None
    prompts, problems = [], []
    for where, line in _lines(entries):
        try:
            fields = json.loads(line) if where.partition(":")[0].endswith(".jsonl") else line
            prompt = _prompt(fields, tokenizer, template)
            if not 0 < len(prompt.token_ids) <= most_tokens:
                raise ValueError(
                    f"it has {len(prompt.token_ids):,} tokens, and the model takes 1 to "
                    f"{most_tokens:,} before what it adds (sample_max_new_tokens)"
                )
            prompts.append(prompt)
        except ConfigurationError:
            raise  # a limit of time or memory, which every other prompt would reach as well
        except Exception as error:  # also an error of the template
            problems.append(f"sample_prompts {where}: {reason(error)}")
    if problems:
        raise ConfigurationError(problems)
    return prompts


def _lines(entries: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the origin and the text of each prompt; raises ConfigurationError."""
    for entry in entries:
        path = Path(entry)
        if path.suffix not in FILES or (re.search(r"\s", entry) and not path.is_file()):
            yield repr(entry[:40]), entry
            continue
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"sample_prompts {entry} cannot be read: {error}") from error
        numbered = [(f"{path}:{at}", line) for at, line in enumerate(lines, 1) if line.strip()]
        if not numbered:
            raise ConfigurationError(f"sample_prompts {entry} is empty: put a prompt on each line.")
        yield from numbered


def _prompt(
    fields: Any, tokenizer: "PreTrainedTokenizerBase", template: ChatTemplate | None
) -> Prompt:
    """Return the prompt of a line; raises an Exception of any type if the line is faulty."""
    record = fields if isinstance(fields, dict) else {"prompt": fields}
    key = "messages" if "messages" in record else "prompt"
    asked = record.get(key)
    if isinstance(asked, str) and template is None:
        return Prompt(asked, prompt_ids(tokenizer, asked))
    if template is None or not asked:
        what = "`prompt` or `messages`" if template else "`prompt`; there are no chats here"
        raise ValueError(f"give a text, or an object with {what}")
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    chat = document_fields(record | {key: messages}, "messages", [(key, "messages")])
    adapted = template.adapted(chat["messages"])
    document = ChatDocument(adapted, PROBE, chat["tools"], chat["chat_template_kwargs"])
    text = template.render(document, generation_prompt=True)
    shown = str(chat["messages"][-1]["content"])
    return Prompt(shown, tokenizer(text, add_special_tokens=False)["input_ids"])
