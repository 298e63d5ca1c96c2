"""Uploads by the real huggingface_hub to a stand-in Hub on this machine."""

import base64
import json
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from launching import quiet_environment

from utils.config.errors import ConfigurationError
from utils.publish.hub import files_to_publish, push_at_the_end

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


def run(hub: Hub | None, cwd: Path, *argv: str, token: str = TOKEN) -> tuple[int, str]:
    """Run Python with these arguments; return its exit code and output."""
    environment = quiet_environment(
        {"HF_ENDPOINT": hub.url if hub else "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0",
         "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT), "HF_HOME": str(cwd / "hf")}
    )  # fmt: skip
    environment.pop("HF_TOKEN", None)
    if token:
        environment["HF_WRITE_TOKEN"] = token
    done = subprocess.run(
        [sys.executable, *argv], cwd=cwd, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_run_is_pushed_at_its_end_and_its_adapter_afterwards(hub, fine_tuning, tmp_path):
    argv = fine_tuning(
        "runs/mine", max_steps=1, use_peft="true", lora_target_modules="all-linear",
        push_to_hub="true", hub_model_id="me/tiny", save_steps=5,
    )  # fmt: skip
    code, shown = run(hub, tmp_path, str(ROOT / "sft_train.py"), *argv)
    assert code == 0, shown
    assert f"published: {hub.url}/me/tiny" in shown
    assert hub.private == {"me/tiny"}
    assert hub.commits == ["me/tiny"], "once, whatever was saved"
    final, there = tmp_path / "runs" / "mine" / "final", hub.models["me/tiny"]
    names = {path.name for path in final.iterdir()}
    assert there.keys() - {".gitattributes"} == names
    assert there["model.safetensors"] == (final / "model.safetensors").read_bytes()
    card = there["README.md"].decode()
    assert 'pipeline("text-generation", "me/tiny"' in card
    assert "runs/mine/final" in (final / "README.md").read_text()
    assert "runs/mine/final" not in card
    everything = b"".join(there.values()) + shown.encode()
    assert TOKEN.encode() not in everything
    assert str(tmp_path).encode() not in b"".join(there.values())
    _publish_the_adapter(hub, tmp_path)


def _publish_the_adapter(hub: Hub, tmp_path: Path) -> None:
    adapter = tmp_path / "runs" / "mine" / "adapter"
    assert "More Information Needed" not in (adapter / "README.md").read_text()
    words = ["-m", "utils.publish.hub", "runs/mine"]
    code, shown = run(hub, tmp_path, *words, "me/lora", "--adapter")
    assert code == 2
    assert "--base_model OWNER/NAME" in shown
    (adapter / "optimizer.pt").write_bytes(b"private")
    words += ["me/lora", "--adapter", "--public", "--base_model", "Qwen/Qwen3-8B"]
    code, shown = run(hub, tmp_path, *words, "--dry_run", token="")
    assert code == 0, shown
    assert "adapter_model.safetensors  " in shown
    assert "me/lora" not in hub.models
    code, shown = run(hub, tmp_path, *words)
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
    code, shown = run(hub, tmp_path, *words[:-3], "--private", "--base_model", "Qwen/Qwen3-8B")
    assert code == 0, shown
    assert "is there already and stays public" in shown
    assert "adapter_model-2.safetensors" not in there
    assert there["LICENSE"] == b"mine"


@pytest.fixture
def finished(tmp_path):
    final = tmp_path / "run" / "final"
    final.mkdir(parents=True)
    for name in ("config.yaml", "provenance.json"):
        (tmp_path / "run" / name).write_text("{}")
    (final / "config.json").write_text("{}")
    (final / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_what_cannot_be_published_is_refused_with_what_to_type(hub, finished):
    run_dir, publish = finished / "run", ["-m", "utils.publish.hub"]
    for token, words, said in (
        ("", ["run", "me/x"], "HF_WRITE_TOKEN=hf_... (cp .env.example .env"),
        ("hf_wrong" + "x" * 20, ["run", "me/x"], "401 (Invalid username or password.): the token"),
        (TOKEN, ["run", "other/x"], "is other you or an organization of yours"),
        (TOKEN, ["run", "a/b/c"], "is no name on the Hub, give OWNER/NAME"),
        (TOKEN, ["run", "me/x", "--adapter"], "it was no LoRA run: leave --adapter out"),
        (TOKEN, ["run/final", "me/x"], "is a part of a run: give run."),
        (TOKEN, ["hf", "me/x"], "no directory of a run"),
    ):
        code, shown = run(hub, finished, *publish, *words, token=token)
        assert code == 2, shown
        assert said in shown
    code, shown = run(None, finished, *publish, "run", "me/x")
    assert code == 2
    assert "me/x: the upload failed: " in shown
    for secret, file in ((TOKEN, "chat_template.jinja"), ("hf_" + "z" * 30, "tokenizer.json")):
        (run_dir / "final" / file).write_text(f"one\ntwo {secret}")
        code, shown = run(hub, finished, *publish, "run", "me/x")
        assert code == 2
        assert f"run/final/{file}:2: it holds what looks like a token" in shown
        assert secret not in shown
        (run_dir / "final" / file).unlink()
    (run_dir / "final" / "vocab.json").symlink_to(finished / "elsewhere.json")
    (finished / "elsewhere.json").write_text("{}")
    code, shown = run(hub, finished, *publish, "run", "me/x")
    assert code == 2
    assert "run/final names 'vocab.json', which is no path inside" in shown
    (run_dir / "final" / "vocab.json").unlink()
    shutil.move(run_dir / "final", run_dir / "checkpoint-1")
    code, shown = run(hub, finished, *publish, "run", "me/x")
    assert "run has no final/ yet, which the end of a run writes: resume it first" in shown
    assert hub.models == {}


DAMAGED = {
    "final/README.md": [b"\xff", b"---\n- a\n---\n"],
    "lm_eval.json": [b"{", b"[]", b"{}", b'{"results": 7}', b'{"results": {"a": 7}, "n-shot": 7}'],
    "adapter/adapter_config.json": [b"", b"[]", b"{}", b'{"base_model_name_or_path": "a\\u0000"}'],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_by_its_name(name, finished):
    run_dir = finished / "run"
    adapter = name.startswith("adapter")
    (run_dir / "final" / "README.md").write_text("A card.")
    (run_dir / "adapter").mkdir()
    for content in DAMAGED[name]:
        (run_dir / name).write_bytes(content)
        with pytest.raises(ConfigurationError) as refused:
            files_to_publish(
                run_dir, "me/x", adapter=adapter, base_model=None if adapter else "me/base"
            )
        assert str(run_dir / name) in str(refused.value), content


def test_an_upload_that_fails_at_the_end_is_a_warning_with_the_command(
    finished, monkeypatch, caplog
):
    monkeypatch.chdir(finished)
    monkeypatch.setenv("HF_WRITE_TOKEN", TOKEN)
    with caplog.at_level(logging.WARNING):
        push_at_the_end(Path("run"), "me/x", False)  # tests are offline
    assert "run/final is complete but not uploaded (me/x: the upload failed" in caplog.text
    assert "login node: python -m utils.publish.hub run me/x --public" in caplog.text
