"""Errors of libraries that read foreign files, and limits on their time and memory."""

import errno
import resource
import signal
import threading

import pytest

from utils.config.errors import ConfigurationError, StorageError
from utils.host import foreign as module
from utils.host.foreign import library_errors, resource_limits


class PanicException(BaseException):
    """Like the exception of the tokenizers library."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PanicException("index out of bounds"), "index out of bounds"),
        (KeyError("model"), "KeyError 'model'"),
        (ZeroDivisionError("division by zero"), "division by zero"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
        (ConfigurationError("no such layer"), "no such layer"),
    ],
)
def test_an_error_is_refused_with_the_folder_and_its_damaged_file(tmp_path, error, said):
    with pytest.raises(ConfigurationError) as refusal, library_errors(tmp_path, "it does not load"):
        raise error
    assert str(tmp_path) in str(refusal.value)
    assert said in str(refusal.value)
    (tmp_path / "config.json").write_text("[]")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigurationError) as refusal, library_errors(tmp_path, "it does not load"):
        raise TypeError("it is odd")
    assert "config.json holds [], not a JSON object" in str(refusal.value)
    assert "model.safetensors: Error while deserializing header" in str(refusal.value)


def _lost_rank() -> None:
    code = compile("raise RuntimeError('closed')", "/x/torch/distributed/ops.py", "exec")
    exec(code)


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(3),
        MemoryError(),
        OSError(errno.ENOSPC, "No space left on device"),
        StorageError("full"),
    ],
)
def test_what_is_no_fault_of_the_files_passes(tmp_path, error):
    with pytest.raises(type(error)), library_errors(tmp_path, "it does not load"):
        raise error


def test_an_error_of_a_collective_passes(tmp_path):
    with pytest.raises(RuntimeError, match="closed"), library_errors(tmp_path, "it does not load"):
        _lost_rank()


def test_limits_end_a_computation_and_leave_the_process_as_it_was(monkeypatch):
    monkeypatch.setattr(module, "CPU_LIMIT_S", 0.2)
    before = signal.getsignal(signal.SIGVTALRM), resource.getrlimit(resource.RLIMIT_AS)

    def endless() -> None:
        while True:
            try:
                sum(range(1000))
            except Exception:  # like a library that continues
                raise AssertionError from None

    with (
        pytest.raises(ConfigurationError, match=r"x takes more than 0.2 s"),
        resource_limits("x"),
        resource_limits("y"),
    ):
        endless()
    with (
        pytest.raises(ConfigurationError, match="of memory is needed"),
        resource_limits("x", 1 << 28),
    ):
        bytearray(1 << 30)
    assert (signal.getsignal(signal.SIGVTALRM), resource.getrlimit(resource.RLIMIT_AS)) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_a_thread_has_no_limits():
    done: list[bool] = []

    def work() -> None:
        with resource_limits("x"):
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done


def test_a_secret_is_masked_before_a_reason_is_cut(monkeypatch):
    monkeypatch.setenv("MY_SECRET", "canary-" + "x" * 2 * module.LONGEST_REASON)
    said = module.reason(ValueError(f"no such file: {'y' * 200}/canary-{'x' * 900}"))
    assert "canary" not in said
    assert said.endswith("/***" + "x" * (900 - 2 * module.LONGEST_REASON))
