"""Progress of a preparation: a bar on a terminal, a plain line every ten seconds elsewhere."""

import logging
import sys
import time
from types import TracebackType

from tqdm import tqdm

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0


class PreparationProgress:
    """Shows documents/s and tokens/s; a context manager.

    total_bytes: size of the sources still to be read; `done_bytes` is counted unit by unit.
    """

    def __init__(self, total_bytes: int):
        self.documents = self.tokens = self.done_bytes = 0
        self._total_bytes = total_bytes
        self._start = self._shown = time.monotonic()
        self._bar = (
            tqdm(total=total_bytes, unit="B", unit_scale=True, desc="tokenizing")
            if sys.stderr.isatty()
            else None
        )

    def show(self, documents: int, tokens: int, done_bytes: int) -> None:
        """Take the totals so far and show them, when it is time."""
        moved = done_bytes - self.done_bytes
        self.documents, self.tokens, self.done_bytes = documents, tokens, done_bytes
        if self._bar is not None:
            self._bar.set_postfix_str(self._rates(), refresh=False)
            self._bar.update(moved)
        elif time.monotonic() - self._shown >= SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            logger.info("%s", self._line())

    def __enter__(self) -> "PreparationProgress":
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if error_type is None:
            logger.info("%s", self._line())

    def _rates(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        return f"{self.documents / seconds:,.0f} documents/s, {self.tokens / seconds:,.0f} tokens/s"

    def _line(self) -> str:
        return (
            f"{self.done_bytes / 2**20:,.1f} of {self._total_bytes / 2**20:,.1f} MiB, "
            f"{self.documents:,} documents, {self.tokens:,} tokens "
            f"({self._rates()}, {time.monotonic() - self._start:.0f} s)"
        )
