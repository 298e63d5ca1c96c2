"""Calls what may never return: storage and networks that hang instead of failing."""

import threading
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")


def call_within(limit_s: float, action: Callable[[], Answer]) -> Answer:
    """Return the answer of `action`, or raise what it raises; TimeoutError after `limit_s`.

    It runs in a thread of its own, which then stays stuck behind without keeping the process.
    """
    answers: list[Answer] = []
    errors: list[BaseException] = []

    def act() -> None:
        try:
            answers.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=act, name="with a limit", daemon=True)
    thread.start()
    thread.join(limit_s)
    if answers:
        return answers[0]
    if errors:
        raise errors[0]
    raise TimeoutError(f"no answer within {limit_s:g} s")
