"""Guards around libraries that read a user's files: models, tokenizers, chat templates.

If a file is damaged or hostile, a library may raise an error of any type, compute for hours, or
wait for a pipe for ever. The guards then raise a ConfigurationError that names the file.
"""

import contextlib
import json
import resource
import signal
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from utils.config.errors import ConfigurationError, did_you_mean
from utils.host.faults import memory_error, storage_error, waits_for_ranks
from utils.host.redaction import redact

# Published chat templates render a chat in a millisecond. A model of 671 billion parameters is
# built without weights (on the meta device) in a fifth of a second.
CPU_LIMIT_S = 30.0
RENDERING_BYTES = 4 << 30
LONGEST_REASON = 400
_PATTERNS = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt", "*.safetensors")


class _CpuTimeIsUp(BaseException):
    """The CPU time limit was reached. A BaseException, because libraries catch Exception."""


@contextlib.contextmanager
def library_errors(what: str | Path, problem: str, advice: str = "") -> Iterator[None]:
    """Context manager: turn errors of libraries that read a user's files into ConfigurationError.

    what     the file, folder or Hub name that the libraries read
    problem  the part of the message that says what failed
    advice   the last sentence of the message, left out if a file in the folder is damaged

    The message also has the damaged files and the library's error. Errors of storage, memory and
    other ranks are raised unchanged.
    """
    folder = Path(what)
    try:
        with prefix_errors(what):
            for path in _files_to_read(folder):
                if not path.is_file():  # libraries wait for a pipe, and ignore a broken link
                    raise ConfigurationError(
                        f"{path} is a folder, a pipe, a device or a broken link: put the file "
                        "there, or delete it."
                    )
            yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, ConfigurationError, _CpuTimeIsUp):
        raise
    except BaseException as error:  # a panic of the tokenizers library is no Exception
        lost_rank = waits_for_ranks(traceback.extract_tb(error.__traceback__))
        if lost_rank or storage_error(error) or memory_error(error):
            raise
        damaged = [*_damaged_files(folder)]
        meant = "" if folder.exists() else did_you_mean(folder)
        text = f"{what}{meant}: {problem}: {'; '.join([*damaged, reason(error)])}. "
        text += "" if damaged else advice
        raise ConfigurationError(text.rstrip()) from error


@contextlib.contextmanager
def prefix_errors(what: str | Path) -> Iterator[None]:
    """Context manager: begin the messages of a ConfigurationError with `what` if none names it."""
    try:
        yield
    except ConfigurationError as error:
        if str(what) in str(error):
            raise
        problems = [f"{what}: {each}" for each in error.problems]
        raise type(error)(problems, error.report) from error


@contextlib.contextmanager
def resource_limits(what: str | Path, memory_bytes: int | None = None) -> Iterator[None]:
    """Context manager: raise ConfigurationError if the block uses too much CPU time or memory.

    what: the name for the message. The CPU time limit is CPU_LIMIT_S seconds. memory_bytes: the
    limit of additional address space. Give None (no limit) if the block may start CUDA, which
    reserves much address space. An inner block keeps the limits of the outer block. Other threads
    than the main thread are not limited, because only the main thread gets signals.
    """
    in_thread = threading.current_thread() is not threading.main_thread()
    if in_thread or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return

    def stop(*_: Any) -> None:
        raise _CpuTimeIsUp

    handler = signal.signal(signal.SIGVTALRM, stop)
    before = resource.getrlimit(resource.RLIMIT_AS)
    if memory_bytes is not None:
        with open("/proc/self/statm", "rb", buffering=0) as file:  # noqa: PTH123 - for every chat
            most = int(file.read(64).split()[0]) * resource.getpagesize() + memory_bytes
        if before[0] == resource.RLIM_INFINITY or most < before[0]:
            resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_LIMIT_S)
    try:
        yield
    except _CpuTimeIsUp:
        raise ConfigurationError(f"{what} takes more than {CPU_LIMIT_S:g} s of CPU time.") from None
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError for lack of memory
        if memory_error(error) is None:
            raise
        raise ConfigurationError(f"{what}: {reason(error)}.") from error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def reason(error: BaseException) -> str:
    """Return an error's message as one short line. Add the error's type to a one-word message."""
    if isinstance(error, MemoryError):
        return f"more than {RENDERING_BYTES >> 30} GiB of memory is needed"
    text = error.problems[0] if isinstance(error, ConfigurationError) else str(error)
    text = " ".join(text.split())
    text = redact(text if " " in text else f"{type(error).__name__} {text}")  # before shortening
    return (text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}...").rstrip(" .")


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ConfigurationError for any other content."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also: not UTF-8, nested too deep
        raise ConfigurationError(f"{path} is not JSON: {reason(error)}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} holds {json.dumps(content)[:40]}, not a JSON object")
    return content


def _files_to_read(folder: Path) -> list[Path]:
    """Return the files that libraries read in `folder`. A file or a Hub name gives []."""
    with contextlib.suppress(OSError, ValueError):  # a name that no file system accepts
        return [path for pattern in _PATTERNS for path in sorted(folder.glob(pattern))]
    return []


def _damaged_files(folder: Path) -> Iterator[str]:
    for path in _files_to_read(folder) or [folder]:
        try:
            if path.suffix == ".json":
                read_object(path)
            elif path.suffix == ".safetensors":
                with safe_open(path, "np"):  # reads the header
                    pass
        except ConfigurationError as error:
            yield error.problems[0]
        except Exception as error:  # of the safetensors library
            yield f"{path}: {reason(error)}"
