"""The beginning and the end of a script: log lines, switches, messages, note, exit code."""

import errno
import io
import logging
import os
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import datasets
import pytest
import safetensors.torch
import torch
from launching import ROOT

from utils.config.errors import (
    ConfigurationError,
    ExitCode,
    NoProgressError,
    StorageError,
    UnfitClusterError,
)
from utils.host.run_lock import held_runs, leave_run_lock, take_run_lock
from utils.launch import script
from utils.launch.script import LineFormatter, configure_environment, configure_logging, run_script
from utils.launch.verdict import read_notes


@pytest.fixture(autouse=True)
def notes(tmp_path, monkeypatch) -> Path:
    """Pretend to be rank 0 on n1, with a directory for notes."""
    directory = tmp_path / "notes"
    directory.mkdir()
    monkeypatch.setenv("STOKER_NOTES_DIR", str(directory))
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "STOKER_NODE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return directory


def raising(error: BaseException):
    def main():
        raise error

    return main


def the_note(notes: Path) -> tuple[str, int, str]:
    [note] = read_notes(notes)
    return note.kind, note.exit_code, note.text


@pytest.mark.parametrize(
    ("error", "code", "title"),
    [
        (ConfigurationError, 2, "configuration error:"),
        (UnfitClusterError, 69, "cluster error:"),
        (StorageError, 74, "storage error:"),
        (NoProgressError, 77, "no progress:"),
    ],
)
def test_each_kind_of_refusal_has_its_title_and_exit_code(capsys, notes, error, code, title):
    assert run_script(raising(error(["first\nsecond line", "third"]))) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == f"{title}\n  - first\n    second line\n  - third\n"
    assert the_note(notes) == ("refused", code, f"{error.kind}: first")


def test_other_nodes_show_one_line(capsys, monkeypatch, notes):
    waited = []
    monkeypatch.setattr(script.time, "sleep", waited.append)
    for rank, local_rank, shown in [
        ("8", "0", ["n1 rank 8  configuration error: one"]),
        ("9", "1", []),
    ]:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert run_script(raising(ConfigurationError(["one", "two"]))) == 2
        assert capsys.readouterr().err.splitlines() == shown
    # The launcher ends all ranks after the first one ends, so the silent ranks end last.
    assert waited == [script.SPEAK_FIRST_S]
    assert [note.rank for note in read_notes(notes)] == [8, 9]


def test_what_main_returns_is_the_exit_code(notes, monkeypatch):
    assert [run_script(lambda code=code: code) for code in (None, 0)] == [0, 0]
    assert read_notes(notes) == []
    assert run_script(lambda: ExitCode.STOPPED) == 75
    assert the_note(notes)[:2] == ("stopped", 75)
    # Under the launcher a stop has exit code 0: at any other code torchrun kills the other ranks.
    monkeypatch.setenv("STOKER_NODE_DIR", "/tmp")
    assert run_script(lambda: ExitCode.STOPPED) == 0
    (notes / "rank-0.json").unlink()
    assert run_script(lambda: 3) == 3
    assert read_notes(notes) == []  # the launcher has the exit code


def test_no_secret_is_shown_or_noted(capsys, monkeypatch, notes):
    monkeypatch.setenv("HF_TOKEN", "correcthorsebattery")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(notes / "of-torchrun"))
    take_run_lock(notes)
    for error in (
        RuntimeError("sent correcthorsebattery"),
        ConfigurationError("sent correcthorsebattery"),
        OSError(errno.ENOSPC, "No space left", "/no/correcthorsebattery"),
    ):
        run_script(raising(error))
        assert "***" in (notes / "of-torchrun").read_text()
        assert "correcthorsebattery" not in (notes / "of-torchrun").read_text()
        assert "***" in held_runs()[notes]
    leave_run_lock(notes)
    assert "correcthorsebattery" not in capsys.readouterr().err
    assert "correcthorsebattery" not in (notes / ".lock/owner-1").read_text()
    assert "sent *** (" in the_note(notes)[2]


def test_storage_that_fails_in_any_words_is_a_storage_error(capsys, notes, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")  # perhaps only this rank has the error, so it shows it
    for error, said in [
        # tokenizers raises a plain Exception.
        (Exception("No space left on device (os error 28)"), r"device \(Exception: No spa.*\)\."),
        (OSError(errno.EDQUOT, "x", "/no/x"), r"Disk quota exceeded, writing /no/x\. Make"),
    ]:
        assert run_script(raising(error)) == ExitCode.STORAGE
        shown = capsys.readouterr().err
        assert shown.startswith("storage error:\n  - n1: ")
        assert re.search(said, shown)
        assert "start the same command again" in shown
        assert the_note(notes)[:2] == ("refused", 74)


def test_a_failed_compilation_names_the_way_without(capsys):
    assert run_script(raising(torch._dynamo.exc.Unsupported("a graph break"))) == 1
    assert capsys.readouterr().err.endswith("--compile false trains without, slower.\n")


def test_system_exit_passes_through_and_ctrl_c_is_one_line(notes, capsys):
    with pytest.raises(SystemExit, match="0"):
        run_script(raising(SystemExit(0)))
    assert run_script(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "\ninterrupted by the user (Ctrl-C)\n"
    with pytest.raises(SystemExit, match="usage"):
        run_script(raising(SystemExit("usage")))
    assert read_notes(notes) == []  # the launcher has the exit code


def test_the_words_of_libraries_for_a_full_disk_are_known(small_disk, capsys):
    datasets.disable_progress_bars()
    tensors, rows = {"a": torch.zeros(200_000)}, {"a": [list(range(200_000))]}
    for save in (
        lambda: torch.save(tensors, small_disk / "optimizer.pt"),
        lambda: safetensors.torch.save_file(tensors, small_disk / "model.safetensors"),
        lambda: datasets.Dataset.from_dict(rows).save_to_disk(small_disk / "rows"),
    ):
        for left in small_disk.iterdir():
            left.unlink()
        assert run_script(save) == 74
        shown = capsys.readouterr().err
        assert "storage error:\n  - n1: " in shown
        assert str(small_disk) in shown or "test_script.py" in shown


@pytest.mark.slow
@pytest.mark.parametrize(("body", "code"), [("return 0", 0), ("raise RuntimeError", 1)])
def test_a_rank_that_has_ended_neither_fails_nor_waits_in_its_teardown(body, code):
    program = f"""
        import os, sys
        from utils.launch.script import run_script
        class AbortsWhenTornDown:
            def __del__(self, abort=os.abort): abort()
        kept = AbortsWhenTornDown()
        def main(): {body}
        sys.exit(run_script(main))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | {"WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)},
        timeout=600, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == code


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_log_on_a_full_disk_changes_no_exit_code(ranks, notes):
    program = """
        import logging, sys
        from utils.config.errors import UnfitClusterError
        from utils.launch.script import configure_logging, run_script
        def main():
            configure_logging()
            logging.warning("a line")
            raise UnfitClusterError("no GPU")
        sys.exit(run_script(main))
    """
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            env=os.environ | {"WORLD_SIZE": ranks, "PYTHONPATH": str(ROOT)},
            timeout=600, stdout=full, stderr=full, check=False,
        )  # fmt: skip
    assert done.returncode == 69
    assert the_note(notes) == ("refused", 69, "cluster error: no GPU")


def test_a_python_without_the_packages_says_so(monkeypatch):
    monkeypatch.delenv("STOKER_NOTES_DIR")
    for command in (["pretrain.py", "--help"], ["-m", "utils.launch.node", "x"]):
        done = subprocess.run(  # -S: without site-packages
            [sys.executable, "-S", *command], cwd=ROOT, check=False, text=True, capture_output=True
        )
        assert done.returncode == 69
        assert f"{sys.executable} has no " in done.stderr
        assert "activate the environment" in done.stderr
        assert "Traceback" not in done.stderr


# The beginning


@pytest.fixture
def fresh_logging(monkeypatch):
    """Undo what configure_logging changes in this process."""
    logging.captureWarnings(False)  # captureWarnings(True) does nothing if it is on
    root = logging.getLogger()
    handlers, level, factory = list(root.handlers), root.level, logging.getLogRecordFactory()
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    yield
    logging.captureWarnings(False)
    logging.setLogRecordFactory(factory)
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("datasets", "httpx", "py.warnings"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def logged() -> list[str]:
    out = io.StringIO()
    configure_logging()
    known = logging.getLogger().handlers
    (handler,) = [one for one in known if isinstance(one.formatter, LineFormatter)]
    handler.setStream(out)
    log = logging.getLogger("utils.test")
    log.info("started")
    log.warning("careful")
    logging.getLogger("datasets").info("noise")
    warnings.warn("odd thing", stacklevel=1)
    return out.getvalue().splitlines()


def test_rank_0_tells_all_in_one_line_an_event_other_ranks_their_warnings(
    fresh_logging, monkeypatch
):
    configure_logging()  # two calls must not print lines twice
    lines = [line.split("  ", 1) for line in logged()]
    assert [len(clock) for clock, _ in lines] == [len("12:34:56")] * 3
    messages = [message for _, message in lines]
    assert messages[:2] == ["started", "WARNING  careful"]
    assert messages[2].startswith("WARNING  UserWarning: odd thing (")
    monkeypatch.setenv("RANK", "3")
    (line,) = logged()
    assert line.endswith("  n1 rank 3  WARNING  careful")


def test_switches_keep_what_the_user_set_and_a_slurm_job_is_offline(monkeypatch, caplog):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    for job, given, expected in [("", None, None), ("7", "0", "0"), ("7", None, "1")]:
        for name, value in (("SLURM_JOB_ID", job or None), ("HF_HUB_OFFLINE", given)):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            configure_environment()
        assert os.environ.get("HF_HUB_OFFLINE") == expected
        assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
        assert ("offline (Slurm job); HF_HUB_OFFLINE=0 allows" in caplog.text) == (expected == "1")


FORK = """
import os, sys
calls = []
sys._current_frames = lambda: calls.append("asked")
from utils.launch.script import configure_environment
configure_environment()
child = os.fork()
if not child:
    os._exit(0)
os.waitpid(child, 0)
import torch._dynamo
print(len(calls), os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


def test_old_pythons_lock_their_threads_before_a_fork_and_compiled_code_outlives_tmp(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    command = [sys.executable, "-c", FORK]
    printed = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    old = int(sys.version_info < (3, 11, 10))
    assert printed == f"{old} {tmp_path}/stoker/compiled\n"
