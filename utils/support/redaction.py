"""Secrets: taken from the environment or a private `.env` file, and kept out of every output."""

import logging
import os
import re
import stat
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType

from utils.config.errors import ConfigurationError

logger = logging.getLogger(__name__)

TOKEN_NAMES = ("WANDB_API_KEY", "HF_TOKEN", "HF_WRITE_TOKEN")
MASK = "***"

_SECRET_NAME = re.compile(r"(_TOKEN|_API_KEY|_SECRET|_PASSWORD)$")
# Below this length a value is more likely a word of ordinary text ("true") than a secret.
_SHORTEST_SECRET = 8
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")


def load_env_file(path: str | os.PathLike[str] = ".env") -> list[str]:
    """Take the tokens in TOKEN_NAMES from a `.env` file into the environment; name those taken.

    The environment wins; a missing file is fine; other lines are ignored with a warning. Raises
    ConfigurationError for a file that is not private. No value ever enters a message.
    """
    from io import StringIO

    from dotenv import dotenv_values

    # Without interpolation: a `$` in a token is a `$`.
    values = dotenv_values(stream=StringIO(_read_private(Path(path))), interpolate=False)
    taken = [name for name in TOKEN_NAMES if values.get(name) and not os.environ.get(name)]
    os.environ.update({name: str(values[name]) for name in taken})
    if unused := len(values.keys() - set(TOKEN_NAMES)):
        # Counted, not named: a line without "=" may be a pasted token.
        logger.warning("%s: %d line(s) ignored, %s are read", path, unused, ", ".join(TOKEN_NAMES))
    return taken


def _read_private(path: Path) -> str:
    """Read a file that only its owner, this user, can read; empty where there is no file."""
    if path.is_dir():  # a virtual environment
        return ""
    try:
        # Not through a symlink, whose target others may change; a pipe would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error.strerror}): make it a file of your own, no symlink."
        ) from error
    with os.fdopen(descriptor, encoding="utf-8-sig", errors="replace") as file:
        status = os.fstat(descriptor)
        mode = stat.S_IMODE(status.st_mode)
        if not stat.S_ISREG(status.st_mode) or mode & 0o077 or status.st_uid != os.getuid():
            raise ConfigurationError(
                f"{path} holds tokens, but is not a file that you alone can read and change (owner "
                f"{status.st_uid}, mode {mode:03o}): make it your own, then chmod 600 {path}"
            )
        return file.read()


def redact(text: str) -> str:
    """Replace every known secret in `text`: by value (secret names in the environment) or form."""
    secrets = [value for name, value in os.environ.items() if _SECRET_NAME.search(name)]
    # Longest first: a secret may contain another one.
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, MASK)
    return _HUB_TOKEN.sub(MASK, text)


def install_redaction() -> None:
    """Redact every log record, whatever logger and handler it takes, and every uncaught error.

    A filter on our own handler would miss libraries that bring their own (transformers does), so
    records are redacted where they are made. Installing twice changes nothing.
    """
    make_record = logging.getLogRecordFactory()
    if getattr(make_record, "redacts", False):
        return

    def make_redacted_record(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        record.msg, record.args = redact(record.getMessage()), None
        if record.exc_info:
            record.exc_text = redact("".join(traceback.format_exception(*record.exc_info)).rstrip())
        return record

    make_redacted_record.redacts = True  # type: ignore[attr-defined] # marks it as installed
    logging.setLogRecordFactory(make_redacted_record)
    sys.excepthook = _print_redacted_error
    threading.excepthook = lambda failure: _print_redacted_error(
        failure.exc_type, failure.exc_value, failure.exc_traceback
    )


def _print_redacted_error(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))
    sys.stderr.flush()
