"""Keys of published messages that switch training on a message on or off."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from utils.prepare.values import ASSISTANT, UnusableRowError

# _TRAINED: keys of axolotl, ms-swift, LLaMA-Factory, OpenAI and Mistral. _MASKED: torchtune's keys,
# which have the opposite sense.
_TRAINED = (
    *("weight", "loss_weight", "loss_scale", "loss", "loss_mask"),
    *("train", "training", "trainable", "train_on_turn"),
)
_MASKED = ("mask", "masked")
_ABOUT_TRAINING = re.compile("train|loss|mask|weight", re.IGNORECASE)


def with_weight(where: str, message: dict[str, Any], is_trained: dict[str, bool]) -> dict[str, Any]:
    """Return a message with `weight: 0` if its keys exclude it from training.

    is_trained: the flags from the message's parts (`trained_parts`). Only the assistant's messages
    are trained on. In another message a key that asks for training stays, and is counted as a key
    that is not read.
    """
    flags = [key for key in message if _ABOUT_TRAINING.search(key)]
    if message["role"] != ASSISTANT:
        idle = [k for k in flags if k.lower() in _MASKED or not message[k]]
        return {key: value for key, value in message.items() if key not in idle}
    said = {**is_trained, **{key: _flag(where, key, message.pop(key)) for key in flags}}
    if len(set(said.values())) > 1:
        message_text = f"{where}: {' and '.join(map(repr, said))} contradict each other: keep one"
        raise UnusableRowError("unclear_weight", message_text)
    return message | ({"weight": 0} if False in said.values() else {})


def trained_parts(where: str, parts: Sequence[Any]) -> dict[str, bool]:
    """Return the flag that all parts of an answer have, as {"its parts": flag}; {} without flags.

    A flag is True if the part is trained on. Raises UnusableRowError if only some parts are.
    """
    said = {
        _flag(where, key, part[key])
        for part in parts
        if isinstance(part, Mapping)
        for key in (*_TRAINED, *_MASKED)
        if part.get(key) is not None
    }
    every = all(isinstance(part, Mapping) and {*_TRAINED, *_MASKED} & {*part} for part in parts)
    if False in said and (True in said or not every):
        raise UnusableRowError(
            "unclear_weight",
            f"{where}: some parts are not trained on, which is read of whole messages alone: give "
            "the message 'weight': 0 or 1",
        )
    return dict.fromkeys(["its parts"], said.pop()) if said else {}


def _flag(where: str, key: str, value: Any) -> bool:
    """Tell whether a key asks for training; raises UnusableRowError for a value that is unclear."""
    word = key.lower()
    if word in _TRAINED and isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    if word in _MASKED and isinstance(value, bool):
        return not value
    raise UnusableRowError(
        "unclear_weight",
        f"{where} has {key!r}: {value!r:.60}, which is not read: write 'weight': 0 (the message is "
        "not trained on) or 1",
    )
