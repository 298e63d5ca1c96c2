import html
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.parse

import markupsafe
import pytest
import yaml
from launching import ROOT

from utils.config.errors import ConfigurationError
from utils.host.atomic_files import replace_text
from utils.host.journal_file import strict_json
from utils.host.redaction import MASK, load_env_file, redact, redacted, without_exported
from utils.launch.verdict import NOTES_DIR, VERDICT, leave_note, leave_verdict, read_notes

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
    monkeypatch.setenv("DEBUG_TOKEN", "true")  # too short for a secret
    text = f"{CANARY}HF_TOKEN {CANARY}WANDB_API_KEY {CANARY}DB_PASSWORD {CANARY}HF_TOKEN-and-more"
    assert redact(f"{text} use_cpu=true") == "*** *** *** *** use_cpu=true"
    assert redact("url?token=hf_AbCdEfGhIjKlMnOpQrStUvWx") == "url?token=***"
    assert redact("my_run_hf_AbCdEfGhIjKlMnOpQrStUvWx-7") == "my_run_***-7"


@pytest.mark.parametrize(
    "name",
    ["TOKEN", "hf_token", "GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "X_APIKEY",
     "DB_PASSWD", "APP_SECRET_KEY", "SSH_PRIVATE_KEY", "API_KEY", "OPENAI_KEY", "GITHUB_PAT",
     "DB_PASS", "MYSQL_PWD", "KEY_PASSPHRASE", "HF_TOKEN_2", "WANDB_API_KEY1", "API_KEYS"],
)  # fmt: skip
def test_names_of_secrets_and_of_other_things(name, monkeypatch):
    monkeypatch.setenv(name, f"  {CANARY}\n")
    assert redact(f"a {CANARY} b") == "a *** b", "also without the line end of a pasted value"
    others = ("TOKENIZERS_PARALLELISM", "SLURM_JOB_NAME", "KEYBOARD", "SECRETARY", "PWD", "OLDPWD",
              "MONKEY", "HF_TOKEN_PATH", "COMPASS")  # fmt: skip
    for other in others:
        monkeypatch.setenv(other, "ordinary-text")
    assert redact("ordinary-text") == "ordinary-text"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:pa%40ss@host/x", "https://***@host/x"),
        ("https://:token@host", "https://***@host"),
        ("proxy http://u:p@ss@10.0.0.1:3128, at 12:30", "proxy http://***@10.0.0.1:3128, at 12:30"),
        ('{"a": "s3://k:v@b", "c": "d@e"}', '{"a": "s3://***@b", "c": "d@e"}'),
        (f"git clone https://{'ghp_' + 'Ab1' * 12}@github.com", "git clone https://***@github.com"),
        ('{"a": "http://host:80", "b": "c@d"}', '{"a": "http://host:80", "b": "c@d"}'),
        ("http://host:80/a@b ssh://git@host", "http://host:80/a@b ssh://git@host"),
        ("hf://datasets/owner/name@main", "hf://datasets/owner/name@main"),
    ],
)
def test_passwords_in_addresses_are_masked(text, shown):
    assert redact(text) == shown


HARD = [
    'quo"te-1234', "apo'strophe", "back\\slash\\n", "both\"and'of\\them", "a+b/c=d%e&f?g#h",
    "<script>&amp;", "größe-日本語-🔑", "new\nline-1234", "tab\tand\x01\x1fmore", "a  b: c# - {d}",
    "%41%42%43%44", "*.[]()^$|?+", "{curly}${x}", "\\u00e9\\x41\\\\", "trailing\\",
]  # fmt: skip
WRITERS = {
    "json": json.dumps,
    "json with its characters": lambda text: json.dumps(text, ensure_ascii=False),
    "json in json": lambda text: json.dumps({"a": json.dumps([text])}),
    "repr": repr,
    "ascii": ascii,
    "repr of an error": lambda text: repr(KeyError("it's \"" + text)),
    "repr in json": lambda text: json.dumps(repr([text])),
    "yaml": lambda text: yaml.dump({"a": text}, allow_unicode=True, width=10**6),
    "yaml, quoted": lambda text: yaml.dump(text, default_style='"', allow_unicode=True),
    "html": html.escape,
    "jinja": lambda text: str(markupsafe.escape(text)),
    "json in html": lambda text: html.escape(json.dumps(text)),
    "quote": urllib.parse.quote,
    "quote all": lambda text: urllib.parse.quote(text, safe=""),
    "query": lambda text: urllib.parse.urlencode({"q": text}),
    "bash": lambda text: (
        subprocess.run(
            ["bash", "-c", 'printf %q "$1"', "bash", text],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    ),
    "as it is": str,
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("secret", HARD)
def test_a_secret_is_found_however_it_is_written(secret, writer, monkeypatch):
    monkeypatch.setenv("MY_SECRET", secret)
    if writer == "bash" and not secret.isprintable():
        return  # printf %q writes $'...'
    if "yaml" in writer and "\n" in secret:
        return  # YAML breaks and indents the secret, so `redacted` is called before the encoding
    shown = redact(WRITERS[writer](f"before {secret} after"))
    # The quotes around the secret may differ.
    masked = WRITERS[writer](f"before {MASK} after").replace("%2A", "*").replace(r"\*", "*")
    words = re.findall(r"\w+|\*+", masked)
    assert re.findall(r"\w+|\*+", shown) == words


def test_a_secret_that_sbatch_exports_is_masked_by_its_name():
    """The job's environment may have another value."""
    words = ["sbatch", "--export=ALL,X=1,DB_PASSWORD=a=b$c d,HF_TOKEN=t,Y=2", "--max_tokens=9", "s"]
    command = subprocess.run(
        ["bash", "-c", 'printf "%q " "$@"', "bash", *words], capture_output=True, text=True,
        check=True,
    ).stdout  # fmt: skip
    shown = f"--export=ALL,X=1,DB_PASSWORD={MASK},HF_TOKEN={MASK},Y=2"
    assert shlex.split(without_exported(command)) == ["sbatch", shown, "--max_tokens=9", "s"]


@pytest.mark.parametrize("secret", HARD)
def test_data_is_masked_before_it_is_encoded(secret, monkeypatch):
    monkeypatch.setenv("MY_SECRET", secret)
    data = {secret: [secret, (f"x{secret}y", 1, 1.5, None, True)], "b": {"c": secret * 2}}
    masked = {MASK: [MASK, [f"x{MASK}y", 1, 1.5, None, True]], "b": {"c": MASK * 2}}
    assert redacted(data) == masked
    assert json.loads(strict_json(data)) == masked


def test_a_key_of_several_lines_is_masked_line_by_line_too(monkeypatch):
    lines = ["-----BEGIN KEY-----", "MIIEvQIBADANBg", "kqhkiG9w0BAQEF", "-----END KEY-----"]
    monkeypatch.setenv("MY_PRIVATE_KEY", "\n".join(lines) + "\n")
    assert redact("\n".join(f"[rank 1] {line}" for line in lines)) == "\n".join(
        ["[rank 1] ***"] * 4
    )


def test_files_are_written_without_secrets(tmp_path, monkeypatch):
    secret = "quo\"te\\and\n'more"
    monkeypatch.setenv("MY_SECRET", secret)
    replace_text(tmp_path / "file", json.dumps({"error": f"died of {secret}!"}))
    assert json.loads((tmp_path / "file").read_text()) == {"error": "died of ***!"}
    replace_text(tmp_path / "file", secret, exact=True)
    assert (tmp_path / "file").read_text() == secret
    monkeypatch.setenv(NOTES_DIR, str(tmp_path))
    leave_note("failed", 1, f"died of {secret}!")
    leave_verdict(f"rank 3 died of {secret}!", 1)
    assert [note.text for note in read_notes(tmp_path)] == ["died of ***!"]
    assert (tmp_path / VERDICT).read_text() == "rank 3 died of ***!\n"


LEAKY = """
import logging, threading
from utils.launch.script import configure_logging
from utils.host.redaction import load_env_file
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
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert CANARY not in done.stdout + done.stderr
    assert "token ***" in done.stdout
    assert "warned of ***" in done.stdout
    assert "GET https://x?token=***" in done.stderr
    assert "KeyError: '***'" in done.stdout
    assert "RuntimeError: died with ***" in done.stderr
    assert "KeyError: '***'" in done.stderr, "the thread's"
