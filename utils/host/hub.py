"""A test of the connection to the Hugging Face Hub. If it fails, only the local cache is used."""

import functools
import logging
import os
import re
import threading
from concurrent.futures import Future
from pathlib import Path

from utils.config.errors import ConfigurationError, did_you_mean

logger = logging.getLogger(__name__)

PROBE_LIMIT_S = 1.5
UPLOAD_LIMIT_S = 30.0  # an upload may wait longer for a slow Hub
# The Hub's cache contains a model or a tokenizer if it contains one of these files.
_FIRST_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json")
_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_offline_after_test = threading.Event()  # set if `stay_offline`, not the user, chose offline mode


@functools.cache
def hub_fault(limit_s: float | None = None) -> str:
    """Return the reason why the Hub cannot be reached, or "". The result is cached.

    limit_s: seconds to wait for an answer. None means PROBE_LIMIT_S. Without this test, the
    libraries would repeat each failing request for a minute. HF_HUB_OFFLINE=0 turns the test off.
    """
    from huggingface_hub import constants, get_session, is_offline_mode

    if is_offline_mode():
        return "this process is offline (HF_HUB_OFFLINE=1, as in Slurm jobs)"
    if "HF_HUB_OFFLINE" in os.environ:
        return ""
    limit_s = limit_s or PROBE_LIMIT_S
    answer: Future[str] = Future()
    session = get_session()

    def ask() -> None:
        try:
            session.head(constants.ENDPOINT)
            answer.set_result("")
        except Exception as error:  # errors of the HTTP library, of proxies and of the system
            answer.set_result(f"cannot be reached ({type(error).__name__}: {error})")

    # A thread, because no timeout of the HTTP library ends the wait for a name server.
    threading.Thread(target=ask, name="hub", daemon=True).start()
    try:
        fault = answer.result(limit_s)
    except TimeoutError:
        fault = f"gave no answer within {limit_s:g} s (HF_HUB_OFFLINE=0 waits longer)"
    return f"{constants.ENDPOINT} {fault}" if fault else ""


def upload_fault() -> str:
    """Return the reason why nothing can be uploaded to the Hub, or "" if the Hub answers.

    This function waits longer for an answer than `hub_fault`, and ignores an earlier failed test.
    """
    from huggingface_hub import constants

    if _offline_after_test.is_set():
        _offline_after_test.clear()
        os.environ.pop("HF_HUB_OFFLINE", None)
        constants.HF_HUB_OFFLINE = False
    return hub_fault(UPLOAD_LIMIT_S)


def use_cache_if_offline(name: str | None, revision: str | None = None) -> bool:
    """Test the Hub. If it does not answer, use only its cache in this process and return True.

    name: the Hub name of a model or tokenizer, or a local folder. If it is a local folder or None,
    the Hub is not needed and not tested. Raises ConfigurationError if the cache lacks the model or
    tokenizer.
    """
    if not name or not _NAME.fullmatch(name) or Path(name).exists() or not (fault := hub_fault()):
        return False
    stay_offline()
    if problem := missing_from_cache(name, revision):
        raise ConfigurationError(problem)
    logger.info("Hugging Face Hub: %s: %s comes from its cache", fault, name)
    return True


def stay_offline() -> None:
    """Let the Hub's libraries use only the cache, in this process and in its child processes."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        _offline_after_test.set()
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True  # the library reads the variable only when it is imported


def missing_from_cache(name: str, revision: str | None = None) -> str:
    """Return an error message if the Hub's cache lacks the model or tokenizer `name`, else ""."""
    from huggingface_hub import constants, try_to_load_from_cache

    found = (try_to_load_from_cache(name, file, revision=revision) for file in _FIRST_FILES)
    if any(isinstance(path, str) for path in found):
        return ""
    given = f"{name}@{revision}" if revision not in (None, "main") else name
    return (
        f"{given} is no local folder{did_you_mean(name)}, and not in the cache of the Hub "
        f"({constants.HF_HUB_CACHE}); "
        f"{hub_fault() or 'it was not downloaded'}. Where there is a network, download it: "
        f"python prepare_data.py --models {given}"
    )
