"""Secrets: tokens from the environment or a private `.env` file, masked in all output."""

import contextlib
import html
import json
import logging
import os
import re
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

from utils.config.errors import ConfigurationError

logger = logging.getLogger(__name__)

TOKEN_NAMES = ("WANDB_API_KEY", "HF_TOKEN", "HF_WRITE_TOKEN")
MASK = "***"

_SECRET_NAME = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|APIKEY|_(KEY|PASS|PAT|PWD))S?(_?\d+)?$",
    re.IGNORECASE,
)
# Services issue longer secrets. Masking a word or number ("true", "2026") would damage every file.
_SHORTEST_SECRET = 8
# Tokens of the Hub and GitHub, also inside a longer word; `user:password` in a URL.
_FORMS = re.compile(
    r"hf_[A-Za-z0-9]{20,}|gh[opsu]_[A-Za-z0-9]{30,}|github_pat_\w{30,}"
    r"""|(?<=://)[^\s/@:'"\\,<>]*:[^\s/'"\\,<>]+(?=@)"""
)


def load_env_file(path: str | os.PathLike[str] = ".env") -> list[str]:
    """Set missing environment variables for tokens from a `.env` file; return their names.

    Only the variables in TOKEN_NAMES, such as HF_TOKEN, are read. Other lines of the file are
    ignored with a warning. The file may be missing. Raises ConfigurationError for a file that other
    users can read or change. No message shows a value.
    """
    from io import StringIO

    from dotenv import dotenv_values

    # No interpolation: a token may contain `$`.
    values = dotenv_values(stream=StringIO(_read_private(Path(path))), interpolate=False)
    taken = [name for name in TOKEN_NAMES if values.get(name) and not os.environ.get(name)]
    os.environ.update({name: str(values[name]) for name in taken})
    if unused := len(values.keys() - set(TOKEN_NAMES)):
        # Do not name them: a line without "=" may be a pasted token.
        logger.warning("%s: %d line(s) ignored, %s are read", path, unused, ", ".join(TOKEN_NAMES))
    return taken


def _read_private(path: Path) -> str:
    """Return the text of a file, "" if missing. Raises ConfigurationError if others can read it."""
    if path.is_dir():  # some users name their virtual environment .env
        return ""
    try:
        # Follow no symlink, because others may change its target. Do not wait for a pipe.
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
    """Replace values of secret variables and words that look like tokens by *** in a text."""
    return _mask(text, _secret_forms(_secrets()))


def redacted(value: Any) -> Any:
    """Return `value` with secrets masked in all texts, also in nested dicts and lists.

    Call this before JSON or YAML escapes the texts.
    """
    forms = _secret_forms(_secrets())

    def mask(part: Any) -> Any:
        if isinstance(part, str):
            return _mask(part, forms)
        if isinstance(part, Mapping):
            return {mask(key): mask(each) for key, each in part.items()}
        return [mask(each) for each in part] if isinstance(part, (list, tuple)) else part

    return mask(value)


def without_exported(command: str) -> str:
    """Mask the secrets in Slurm's --export=NAME=VALUE in a command line."""

    def masked(pair: re.Match[str]) -> str:
        return f"{pair[1]}={MASK}" if _SECRET_NAME.search(pair[1]) else pair[0]

    # printf %q escapes commas and other characters by a backslash.
    value = r"(\w+)=((?:\\[^,]|[^,\\])+)"
    return re.sub(r"--export[= ](?:\\.|\S)+", lambda word: re.sub(value, masked, word[0]), command)


def _secrets() -> tuple[str, ...]:
    """Return the values of secret environment variables, and each line of multi-line values."""
    values = [value for name, value in os.environ.items() if _SECRET_NAME.search(name)]
    parts = {part.strip() for value in values for part in (value, *value.splitlines())}
    return tuple(sorted(part for part in parts if len(part) >= _SHORTEST_SECRET))


@cache
def _secret_forms(secrets: tuple[str, ...]) -> tuple[str, ...]:
    """Return all texts to mask: each secret unchanged, escaped once (as in JSON) and twice."""
    forms = set(secrets)
    for _ in range(2):  # twice: JSON of a message that quotes JSON
        forms |= {escape(form) for form in forms for escape in _ESCAPES}
    # Longest first: a secret may contain another one.
    return tuple(sorted(forms, key=len, reverse=True))


def _mask(text: str, forms: tuple[str, ...]) -> str:
    for form in forms:
        text = text.replace(form, MASK)
    return _FORMS.sub(MASK, text)


def _escape_yaml(text: str) -> str:
    try:
        import yaml
    except ModuleNotFoundError:  # then nothing writes YAML
        return text
    return yaml.dump(text, default_style='"', allow_unicode=True, width=10**6)[1:-2]


# The escapes of JSON, Python, YAML, HTML (standard library and Jinja), URLs and bash.
_ESCAPES: tuple[Callable[[str], str], ...] = (
    lambda text: json.dumps(text)[1:-1],
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: repr(text)[1:-1],
    lambda text: repr(text + "'" + '"')[1:-4],
    lambda text: ascii(text)[1:-1],
    lambda text: text.replace("'", "''"),
    _escape_yaml,
    lambda text: html.escape(text, quote=False),
    html.escape,
    lambda text: html.escape(text).replace("&quot;", "&#34;").replace("&#x27;", "&#39;"),
    lambda text: quote(text, errors="replace"),
    lambda text: quote(text, safe="", errors="replace"),
    lambda text: quote_plus(text, errors="replace"),
    lambda text: re.sub(r"""([][ !"$&'()*,;<>?\\^`{|}])""", r"\\\1", text),  # bash's printf %q
)


def install_redaction() -> None:
    """Mask secrets in all log records and uncaught errors. A second call changes nothing.

    The log record factory masks the secrets. A filter on Stoker's handler would miss the handlers
    of libraries such as transformers.
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
    sys.excepthook = lambda *failure: write_error("".join(traceback.format_exception(*failure)))
    threading.excepthook = lambda failure: write_error(
        "".join(traceback.format_exception(*failure[:3]))
    )


def write_error(text: str) -> None:
    """Mask secrets in a text and write it to stderr at once. Failure to write is ignored."""
    with contextlib.suppress(OSError):
        sys.stderr.write(redact(text))
        sys.stderr.flush()
