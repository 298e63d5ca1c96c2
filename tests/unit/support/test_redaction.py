import os
import subprocess
import sys
from pathlib import Path

import pytest

from utils.config.errors import ConfigurationError
from utils.support.redaction import (
    load_env_file,
    redact,
    redact_argv,
)

ROOT = Path(__file__).parents[3]
CANARY = "canary-1234567890abcdef"


@pytest.fixture(autouse=True)
def _no_tokens(monkeypatch):
    for name in ("WANDB_API_KEY", "HF_TOKEN", "HF_WRITE_TOKEN", "OTHER", "MY_SECRET"):
        monkeypatch.delenv(name, raising=False)


def env_file(folder, text, mode=0o600):
    path = folder / ".env"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_three_tokens_are_taken_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/elsewhere")
    path = env_file(
        tmp_path, f"WANDB_API_KEY={CANARY}\nHF_TOKEN='h'\nexport HF_WRITE_TOKEN=a${{HOME}}b\n"
    )
    assert load_env_file(path) == ["WANDB_API_KEY", "HF_TOKEN", "HF_WRITE_TOKEN"]
    assert [os.environ[name] for name in ("WANDB_API_KEY", "HF_TOKEN", "HF_WRITE_TOKEN")] == [
        CANARY, "h", "a${HOME}b",
    ]  # fmt: skip


def test_what_the_environment_has_wins_and_a_missing_file_or_value_is_fine(tmp_path, monkeypatch):
    assert load_env_file(tmp_path / ".env") == []
    assert load_env_file(env_file(tmp_path, "# nothing\nHF_TOKEN=\n")) == []
    assert "HF_TOKEN" not in os.environ
    monkeypatch.setenv("HF_TOKEN", "from-the-environment")
    assert load_env_file(env_file(tmp_path, "HF_TOKEN=from-the-file")) == []
    assert os.environ["HF_TOKEN"] == "from-the-environment"


def test_the_shipped_example_sets_nothing_and_warns_of_nothing(tmp_path, caplog):
    path = env_file(tmp_path, (ROOT / ".env.example").read_text())
    assert load_env_file(path) == []
    assert not caplog.records


def test_other_lines_are_counted_and_not_used(tmp_path, caplog):
    # The last two lines are tokens pasted without a name.
    text = f"OTHER={CANARY}\nPATH=/nowhere\n{CANARY}\nhf_canary1234\n"
    load_env_file(env_file(tmp_path, text))
    assert "OTHER" not in os.environ
    assert os.environ["PATH"] != "/nowhere"
    (record,) = caplog.records
    assert ".env: 4 line(s) ignored, WANDB_API_KEY, HF_TOKEN" in record.message
    assert "canary" not in caplog.text.lower()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o777, 0o444])
def test_a_file_that_others_can_touch_is_refused(tmp_path, mode):
    path = env_file(tmp_path, f"HF_TOKEN={CANARY}", mode)
    with pytest.raises(ConfigurationError, match=rf"mode {mode:03o}.*chmod 600 .*\.env") as refusal:
        load_env_file(path)
    assert CANARY not in str(refusal.value)
    assert "HF_TOKEN" not in os.environ


def test_symlinks_folders_and_other_users_files_are_refused(tmp_path, monkeypatch):
    path = env_file(tmp_path, "HF_TOKEN=x")
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigurationError, match="no symlink"):
        load_env_file(tmp_path / "link")
    (tmp_path / "folder").mkdir(mode=0o700)
    with pytest.raises(ConfigurationError, match=r"folder holds tokens, but it is not a file of y"):
        load_env_file(tmp_path / "folder")
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(ConfigurationError, match=r"not a file of yours \(owner: uid .*chmod 600"):
        load_env_file(path)


def test_bytes_that_are_no_text_are_refused_without_showing_them(tmp_path):
    path = env_file(tmp_path, "")
    path.write_bytes(b"HF_TOKEN=" + CANARY.encode() + b"\xff")
    with pytest.raises(ConfigurationError, match="not UTF-8") as refusal:
        load_env_file(path)
    assert refusal.value.__cause__ is None
    assert refusal.value.__suppress_context__


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "MY_SECRET", "DB_PASSWORD"])
def test_secret_values_of_the_environment_are_masked(monkeypatch, name):
    monkeypatch.setenv(name, CANARY)
    assert redact(f"Bearer {CANARY}, again {CANARY}") == "Bearer ***, again ***"


def test_a_secret_within_another_leaves_no_remainder_and_short_values_stay(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setenv("MY_SECRET", CANARY + "-and-more")
    monkeypatch.setenv("DEBUG_TOKEN", "true")
    assert redact(f"x {CANARY}-and-more y use_cpu=true") == "x *** y use_cpu=true"


def test_hub_tokens_are_known_by_their_form():
    assert redact("url?token=hf_AbCdEfGhIjKlMnOpQrStUvWx") == "url?token=***"


@pytest.mark.parametrize(
    ("argv", "redacted"),
    [
        (["--hub_token", "abc", "--seed", "1"], ["--hub_token", "***", "--seed", "1"]),
        (["--hub-token", "abc"], ["--hub-token", "***"]),
        (["--hub_token=abc"], ["--hub_token=***"]),
        (["--wandb_api_key", "abc"], ["--wandb_api_key", "***"]),
        (["--token", "abc"], ["--token", "***"]),
        (["--eos_token", "<|im_end|>"], ["--eos_token", "<|im_end|>"]),
        (["--hub_token", "--seed", "1"], ["--hub_token", "--seed", "1"]),
        (["run.py", "--max_steps=3"], ["run.py", "--max_steps=3"]),
    ],
)
def test_a_command_line_loses_its_secrets(argv, redacted):
    assert redact_argv(argv) == redacted


LEAKY = """
import logging, threading
from utils.launch.script import configure_logging
from utils.support.redaction import load_env_file
configure_logging()
configure_logging()
load_env_file({path!r})
import os
secret = os.environ["HF_TOKEN"]
logging.getLogger("mine").info("token %s", secret)
library = logging.getLogger("library")          # with a handler of its own, as transformers has
library.propagate = False
library.addHandler(logging.StreamHandler())
library.warning("GET https://x?token=" + secret)
import warnings
warnings.warn("warned of " + secret)
try:
    raise KeyError(secret)
except KeyError:
    logging.getLogger("mine").exception("caught")
thread = threading.Thread(target=lambda: 1 / len(secret[:0] or print() or {{}}[secret]))
thread.start(); thread.join()
raise RuntimeError("died with " + secret)
"""


@pytest.mark.slow
def test_a_secret_is_in_no_output_of_a_process(tmp_path):
    path = env_file(tmp_path, f"HF_TOKEN={CANARY}\n")
    done = subprocess.run(
        [sys.executable, "-c", LEAKY.format(path=str(path))],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert CANARY not in done.stdout + done.stderr
    assert "token ***" in done.stdout
    assert "warned of ***" in done.stdout
    assert "GET https://x?token=***" in done.stderr
    assert "KeyError: '***'" in done.stdout
    assert "RuntimeError: died with ***" in done.stderr
    assert "KeyError: '***'" in done.stderr, "the thread's"
