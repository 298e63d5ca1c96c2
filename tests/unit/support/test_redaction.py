import os
import subprocess
import sys

import pytest
from launching import ROOT

from utils.config.errors import ConfigurationError
from utils.support.redaction import load_env_file, redact

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


def test_three_tokens_are_taken_as_they_are_unless_the_environment_has_them(
    tmp_path, monkeypatch, caplog
):
    assert load_env_file(tmp_path / ".env") == []
    assert load_env_file(env_file(tmp_path, (ROOT / ".env.example").read_text())) == []
    assert not caplog.records
    monkeypatch.setenv("HF_TOKEN", "from-the-environment")
    text = f"\ufeffWANDB_API_KEY={CANARY}\nHF_TOKEN='h'\nexport HF_WRITE_TOKEN=a${{HOME}}b\n"
    assert load_env_file(env_file(tmp_path, text)) == ["WANDB_API_KEY", "HF_WRITE_TOKEN"]
    taken = [os.environ[name] for name in ("WANDB_API_KEY", "HF_TOKEN", "HF_WRITE_TOKEN")]
    assert taken == [CANARY, "from-the-environment", "a${HOME}b"]
    caplog.clear()
    # The last two lines are tokens pasted without a name.
    text = f"OTHER={CANARY}\nPATH=/nowhere\n{CANARY}\nhf_canary1234\n"
    load_env_file(env_file(tmp_path, text))
    assert "OTHER" not in os.environ
    assert os.environ["PATH"] != "/nowhere"
    (record,) = caplog.records
    assert ".env: 4 line(s) ignored, WANDB_API_KEY, HF_TOKEN" in record.message
    assert "canary" not in caplog.text.lower()


def test_a_file_that_is_not_the_users_alone_is_refused(tmp_path, monkeypatch):
    path = env_file(tmp_path, f"HF_TOKEN={CANARY}")
    for mode in (0o640, 0o604, 0o602, 0o601):
        path.chmod(mode)
        private = rf"mode {mode:03o}.*chmod 600 .*\.env"
        with pytest.raises(ConfigurationError, match=private) as refusal:
            load_env_file(path)
        assert CANARY not in str(refusal.value)
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "folder").mkdir()
    assert load_env_file(tmp_path / "folder") == [], "a virtual environment may be called .env"
    with pytest.raises(ConfigurationError, match="no symlink"):
        load_env_file(tmp_path / "link")
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(ConfigurationError, match=r"not a file that you alone can read.*chmod 600"):
        load_env_file(path)
    assert "HF_TOKEN" not in os.environ


def test_secrets_are_masked_by_value_and_by_form(monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "DB_PASSWORD"):
        monkeypatch.setenv(name, CANARY + name)
    monkeypatch.setenv("MY_SECRET", CANARY + "HF_TOKEN-and-more")
    monkeypatch.setenv("DEBUG_TOKEN", "true")  # too short to be one
    text = f"{CANARY}HF_TOKEN {CANARY}WANDB_API_KEY {CANARY}DB_PASSWORD {CANARY}HF_TOKEN-and-more"
    assert redact(f"{text} use_cpu=true") == "*** *** *** *** use_cpu=true"
    assert redact("url?token=hf_AbCdEfGhIjKlMnOpQrStUvWx") == "url?token=***"


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
