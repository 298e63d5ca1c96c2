"""Uploads by the real huggingface_hub to a stand-in Hub on this machine."""

import base64
import json
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from launching import quiet_environment

from utils.config.errors import ConfigurationError
from utils.publish import hub as hub_module
from utils.publish.hub import files_to_publish
from utils.run.finish import run_or_warn

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TOKEN = "hf_" + "w" * 30


class Hub(ThreadingHTTPServer):
    """A Hub with models as {name: {file: content}}; `private` names the private ones."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.models: dict[str, dict[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        self.private: set[str] = set()
        self.commits: list[str] = []

    def create(self, asked: dict) -> tuple[int, dict]:
        owner = asked.get("organization") or "me"
        name, url = f"{owner}/{asked['name']}", f"{self.url}/{owner}/{asked['name']}"
        if owner != "me":
            return 403, {"error": "You don't have the rights"}
        if name in self.models:
            return 409, {"url": url, "error": "You already created this model repo"}
        self.models[name] = {".gitattributes": b""}
        self.private |= {name} if asked.get("visibility") == "private" else set()
        return 200, {"url": url}

    def commit(self, name: str, lines: list[dict]) -> tuple[int, dict]:
        files = self.models[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        self.commits.append(name)
        return 200, {"commitUrl": f"{self.url}/{name}/commit/abc", "commitOid": "abc"}


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, code: int, content: dict) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        oid = self.path.rpartition("/")[2]
        self.server.blobs[oid] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, {})

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/")
        if name not in self.server.models:
            return self.answer(404, {"error": "Repository not found"})
        siblings = [{"rfilename": file} for file in self.server.models[name]]
        private = name in self.server.private
        return self.answer(200, {"id": name, "private": private, "siblings": siblings})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        hub, path = self.server, self.path
        name = path.removeprefix("/api/models/").rpartition("/preupload/")[0]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            return self.answer(*hub.create(json.loads(body)))
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if "/preupload/" in path:
            files = [
                {"path": file["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular"}
                for file in json.loads(body)["files"]
            ]  # fmt: skip
            assert name in hub.models
            return self.answer(200, {"files": files})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                one | {"actions": {"upload": {"href": f"{hub.url}/upload/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self.answer(200, {"transfer": "basic", "objects": objects})
        name = path.removeprefix("/api/models/").rpartition("/commit/")[0]
        return self.answer(*hub.commit(name, [json.loads(line) for line in body.splitlines()]))


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


# Runs commands in turn, each in a fork. argv: a JSON list of a command's arguments and its token.
COMMANDS = """
import json, os, sys
from huggingface_hub import HfApi, ModelCard
from utils.launch.script import run_script
from utils.publish import hub

codes = []
for number, (words, token) in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if child == 0:
        log = os.open(f"{number}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        os.environ["HF_WRITE_TOKEN"] = token
        code = run_script(lambda: hub.main(words))
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""


@pytest.fixture
def python(hub, tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs Python with the stand-in Hub, in the test's directory."""

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        environment = quiet_environment(
            {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
             "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hf"), "HF_WRITE_TOKEN": TOKEN}
        )  # fmt: skip
        environment.pop("HF_TOKEN", None)
        return subprocess.run(
            [sys.executable, *argv], cwd=tmp_path, env=environment, capture_output=True, text=True,
            check=True,
        )  # fmt: skip

    return run


@pytest.fixture
def publish(python, tmp_path) -> Callable[..., list[tuple[int, str]]]:
    """Return a function that runs (command, token) pairs and returns their codes and outputs."""

    def run(*commands: tuple[str, str]) -> list[tuple[int, str]]:
        given = [(words.split(), token) for words, token in commands]
        codes = json.loads(python("-c", COMMANDS, json.dumps(given)).stdout)
        return [(code, (tmp_path / f"{at}.log").read_text()) for at, code in enumerate(codes)]

    return run


def test_a_run_is_pushed_at_its_end_and_its_adapter_afterwards(
    hub, python, publish, fine_tuning, tmp_path
):
    argv = fine_tuning(
        "runs/mine", max_steps=1, use_peft="true", lora_target_modules="all-linear",
        push_to_hub="true", hub_model_id="me/tiny", save_steps=5,
    )  # fmt: skip
    done = python(str(ROOT / "sft_train.py"), *argv)
    assert f"published: {hub.url}/me/tiny" in done.stdout
    assert hub.private == {"me/tiny"}
    assert hub.commits == ["me/tiny"], "once, whatever was saved"
    final, there = tmp_path / "runs" / "mine" / "final", hub.models["me/tiny"]
    assert there.keys() - {".gitattributes"} == {path.name for path in final.iterdir()}
    assert there["model.safetensors"] == (final / "model.safetensors").read_bytes()
    card = there["README.md"].decode()
    assert 'AutoModelForCausalLM.from_pretrained("me/tiny"' in card
    assert "runs/mine/final" in (final / "README.md").read_text()
    assert "runs/mine/final" not in card
    assert TOKEN.encode() not in b"".join(there.values()) + (done.stdout + done.stderr).encode()
    assert str(tmp_path).encode() not in b"".join(there.values())

    adapter = tmp_path / "runs" / "mine" / "adapter"
    assert "More Information Needed" not in (adapter / "README.md").read_text()
    (adapter / "optimizer.pt").write_bytes(b"private")
    words = "runs/mine me/lora --adapter"
    named = f"{words} --base_model Qwen/Qwen3-8B"
    nameless, dry = publish((words, TOKEN), (f"{named} --public --dry_run", ""))
    assert nameless[0] == 2
    assert "--base_model OWNER/NAME" in nameless[1]
    assert dry[0] == 0, dry
    assert "adapter_model.safetensors  " in dry[1]
    assert "me/lora" not in hub.models
    ((code, shown),) = publish((f"{named} --public", TOKEN))
    assert code == 0, shown
    assert "left out, since they belong to no model: optimizer.pt" in shown
    there = hub.models["me/lora"]
    assert "optimizer.pt" not in there
    assert "me/lora" not in hub.private
    assert json.loads(there["adapter_config.json"])["base_model_name_or_path"] == "Qwen/Qwen3-8B"
    card = ModelCard(there["README.md"].decode())
    assert (card.data.base_model, card.data.base_model_relation) == ("Qwen/Qwen3-8B", "adapter")
    assert "vllm serve Qwen/Qwen3-8B --enable-lora --lora-modules mine=me/lora" in card.text
    # A second upload deletes only old parts of the weights: they would be loaded as well.
    there |= {"adapter_model-2.safetensors": b"", "LICENSE": b"mine"}
    ((code, shown),) = publish((named, TOKEN))
    assert code == 0, shown
    assert "is there already and stays public" in shown
    assert "adapter_model-2.safetensors" not in there
    assert there["LICENSE"] == b"mine"


@pytest.fixture
def finished(tmp_path) -> Path:
    final = tmp_path / "run" / "final"
    final.mkdir(parents=True)
    for name in ("config.yaml", "provenance.json"):
        (tmp_path / "run" / name).write_text("{}")
    (final / "config.json").write_text("{}")
    (final / "model.safetensors").write_bytes(b"weights")
    return tmp_path / "run"


def test_what_cannot_be_published_is_refused_with_what_to_type(hub, publish, finished, tmp_path):
    other_token = "hf_" + "z" * 30
    for name in ("secret", "token", "link", "begun"):
        shutil.copytree(finished, tmp_path / name)
    (tmp_path / "secret/final/chat_template.jinja").write_text(f"one\ntwo {TOKEN}")
    (tmp_path / "token/final/tokenizer.json").write_text(f"one\ntwo {other_token}")
    (tmp_path / "elsewhere.json").write_text("{}")
    (tmp_path / "link/final/vocab.json").symlink_to(tmp_path / "elsewhere.json")
    shutil.move(tmp_path / "begun/final", tmp_path / "begun/checkpoint-1")
    found = "it holds what looks like a token"
    cases = [
        ("run me/x", "", "HF_WRITE_TOKEN=hf_... (cp .env.example .env"),
        ("run me/x", "hf_wr" + "x" * 20, "401 (Invalid username or password.): is the token"),
        ("run other/x", TOKEN, "is other you or an organization of yours"),
        ("run a/b/c --dry_run", "", "'a/b/c' is no name on the Hub, give OWNER/NAME"),
        ("run me/x --base_model a/b/c", TOKEN, "'a/b/c' is no name on the Hub, give OWNER/NAME"),
        ("run me/x --adapter", TOKEN, "has no adapter/ yet"),
        ("run/final me/x", TOKEN, "run/final has no final/ yet"),
        ("hf me/x", TOKEN, "give the directory of a run (its output_dir; --adapter needs"),
        ("secret me/x", TOKEN, f"secret/final/chat_template.jinja:2: {found}"),
        ("token me/x", TOKEN, f"token/final/tokenizer.json:2: {found}"),
        ("link me/x", TOKEN, "link/final names 'vocab.json', which is no path inside"),
        ("begun me/x", TOKEN, "has no final/ yet, which the end of a run writes: resume it first"),
    ]
    answers = publish(*((words, token) for words, token, _ in cases))
    for (_, _, said), (code, shown) in zip(cases, answers, strict=True):
        assert code == 2, shown
        assert said in shown
        assert TOKEN not in shown
        assert other_token not in shown
    assert hub.models == {}


DAMAGED = {
    "final/README.md": [b"\xff", b"---\n- a\n---\n"],
    "lm_eval.json": [b"{", b"[]", b"{}", b'{"results": 7}', b'{"results": {"a": 7}, "n-shot": 7}'],
    "adapter/adapter_config.json": [b"", b"[]", b"{}", b'{"base_model_name_or_path": "a\\u0000"}'],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_by_its_name(name, finished):
    named = {"adapter": True} if name.startswith("adapter") else {"base_model": "me/base"}
    (finished / "final" / "README.md").write_text("A card.")
    (finished / "adapter").mkdir()
    for content in DAMAGED[name]:
        (finished / name).write_bytes(content)
        with pytest.raises(ConfigurationError) as refused:
            files_to_publish(finished, "me/x", **named)
        assert str(finished / name) in str(refused.value), content


def test_an_upload_that_fails_at_the_end_is_a_warning_with_the_command(
    finished, monkeypatch, caplog
):
    monkeypatch.chdir(finished.parent)
    monkeypatch.setenv("HF_WRITE_TOKEN", TOKEN)
    with caplog.at_level(logging.WARNING):
        run_or_warn("push_to_hub", hub_module, ["run", "me/x", "--public"])  # tests are offline
    assert "the run is complete, but this failed: me/x: this process is offline" in caplog.text
    assert "login node: python -m utils.publish.hub run me/x --public" in caplog.text
