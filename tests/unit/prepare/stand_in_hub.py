"""A stand-in for the Hugging Face Hub on loopback, which answers the Hub's real clients."""

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import preparation_samples as samples
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[3]
CHANGED = "2026-11-03T08:00:00.000Z"  # when each file was committed
TOKEN = "hf_thisTokenOpensTheGate0000"


@dataclass
class Repository:
    """A repository: files by commit, and commits by branch. If `gated`, it requires TOKEN."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        """Make `files` the content of a branch; return the commit."""
        sha = hashlib.sha1(repr((ref, sorted(files.items()))).encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.refs[ref] = sha
        return sha


class StandInHub:
    """Repositories by `datasets/OWNER/NAME` or `models/OWNER/NAME`; `asked` lists the requests.

    While it `fails`, it answers each request with an error of the server.
    """

    def __init__(self, url: str):
        self.url = url
        self.repositories: dict[str, Repository] = {}
        self.asked: list[str] = []
        self.fails = False

    def add(self, name: str, files: dict[str, bytes], ref: str = "main", **options) -> str:
        """Publish files on a branch; return the commit."""
        return self.repositories.setdefault(name, Repository(**options)).commit(files, ref)

    def downloads(self) -> list[str]:
        """Return the files that were downloaded since the last call, and clear `asked`."""
        lines = [line.split("/resolve/")[1] for line in self.asked if line.startswith("GET /d/")]
        self.asked.clear()
        return sorted(line.partition("/")[2] for line in lines)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: StandInHub

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_GET

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        self.hub.asked.append(f"{self.command} {unquote(self.path)}")
        if self.hub.fails:
            self._refuse(500, "InternalError")
        elif parts[0] == "api":
            self._api(parts[1:], parse_qs(url.query), body)
        else:
            self._file(parts)

    def _api(self, parts: list[str], query: dict, body: str) -> None:
        name, verb, rest = "/".join(parts[:3]), (parts[3:4] or [""])[0], parts[4:]
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self._refuse(401, "RepoNotFound")  # the Hub's answer without a token
        sha = self._sha(repository, rest[0] if rest else "main")
        if sha is None:
            return self._refuse(404, "RevisionNotFound")
        files = repository.commits[sha]
        if verb in ("", "revision"):
            return self._json({
                "_id": "0", "id": name.split("/", 1)[1], "sha": sha, "private": False,
                "gated": "auto" if repository.gated else False, "tags": [], "downloads": 0,
                "likes": 0, "lastModified": CHANGED,
                "siblings": [{"rfilename": path} for path in files],
            })  # fmt: skip
        if verb == "paths-info":
            wanted = json.loads(body)["paths"] if body[:1] == "{" else parse_qs(body)["paths"]
            return self._json([_entry(path, files[path]) for path in wanted if path in files])
        assert verb == "tree", self.path
        folder = "".join(f"{part}/" for part in rest[1:])
        inside = {path: data for path, data in files.items() if path.startswith(folder)}
        if folder and not inside:
            return self._refuse(404, "EntryNotFound")
        if query.get("recursive", ["false"])[0].lower() != "true":
            folders = {folder + p[len(folder) :].split("/")[0] for p in inside} - inside.keys()
            inside = {p: data for p, data in inside.items() if "/" not in p[len(folder) :]}
        else:
            folders = {p.rsplit("/", n)[0] for p in inside for n in range(1, p.count("/") + 1)}
        listed = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": p} for p in folders]
        return self._json([*listed, *(_entry(path, data) for path, data in inside.items())])

    def _file(self, parts: list[str]) -> None:
        """Answer with size, digest and location of a file, like the Hub's storage."""
        is_content = parts[0] == "d"
        parts = parts[1:] if is_content else parts
        kind = "datasets" if parts[0] == "datasets" else "models"
        owner, name, _, revision, *path = parts[kind == "datasets" :]
        repository = self.hub.repositories.get(f"{kind}/{owner}/{name}")
        if repository is None:
            return self._refuse(401, "RepoNotFound")
        token = self.headers.get("Authorization", "")
        if repository.gated and token != f"Bearer {TOKEN}" and not is_content:
            return self._refuse(403 if token else 401, "GatedRepo")
        sha = self._sha(repository, revision)
        if sha is None:
            return self._refuse(404, "RevisionNotFound")
        data = repository.commits[sha].get("/".join(path))
        if data is None:
            return self._refuse(404, "EntryNotFound", sha)
        headers = {"X-Repo-Commit": sha, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        if not is_content:
            headers |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": headers["ETag"]}
            headers["Location"] = f"{self.hub.url}/d{self.path}"
            return self._send(302, b"", headers)
        return self._send(200, data, headers)

    @staticmethod
    def _sha(repository: Repository, revision: str) -> str | None:
        return revision if revision in repository.commits else repository.refs.get(revision)

    def _json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, sha: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": code}
        self._send(status, b"", headers | ({"X-Repo-Commit": sha} if sha else {}))

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *arguments) -> None:
        pass


def _entry(path: str, data: bytes) -> dict:
    digest = hashlib.sha1(data).hexdigest()
    commit = {"id": "0" * 40, "title": "add", "date": CHANGED}
    return {"type": "file", "oid": digest, "size": len(data), "path": path, "lastCommit": commit}


@contextmanager
def stand_in_hub() -> Iterator[StandInHub]:
    """Serve a Hub without repositories until the block ends."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.hub = StandInHub(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield handler.hub
    server.shutdown()
    server.server_close()


# --- the published datasets: subsets and files as of November 2026

QUESTIONS = [f"What is two and {n}? Think about it for as long as you like." for n in range(30)]
CHATS = [samples.chat(question, "4") | {"source": "tests"} for question in QUESTIONS]
PROBLEMS = [{"question": f"And what is {n} plus one?", "answer": f"#### {n}"} for n in range(30)]
PAGES = [{"text": f"Page {n} of the web.", "url": "u", "score": 3.5} for n in range(30)]
SAID = [
    {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": "4"}]}
    for question in QUESTIONS
]
Subsets = dict[str, dict[str, str]]  # subset -> split -> pattern of its files
CARDS: dict[str, Subsets] = {
    "HuggingFaceTB/smoltalk": {
        name: {"train": f"data/{name}/train-*", "test": f"data/{name}/test-*"}
        for name in ("all", "smol-magpie-ultra")
    },
    "HuggingFaceH4/ultrachat_200k": {
        "default": {
            name: f"data/{name}-*" for name in ("train_sft", "test_sft", "train_gen", "test_gen")
        }
    },
    "allenai/tulu-3-sft-mixture": {"default": {"train": "data/train-*"}},
    "openai/gsm8k": {
        name: {"train": f"{name}/train-*", "test": f"{name}/test-*"}
        for name in ("main", "socratic")
    },
    "HuggingFaceFW/fineweb-edu": {
        "default": {"train": "data/*/*"},
        "sample-10BT": {"train": "sample/10BT/*"},
        "sample-100BT": {"train": "sample/100BT/*"},
        "CC-MAIN-2024-51": {"train": "data/CC-MAIN-2024-51/*"},
    },
}
ROWS = {"openai/gsm8k": PROBLEMS, "HuggingFaceFW/fineweb-edu": PAGES}


def parquet(rows: list[dict]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def card(subsets: Subsets) -> bytes:
    """Return a README.md with the subsets in its YAML header, as the Hub's web pages write it."""
    lines = ["---", "license: apache-2.0", "configs:"]
    for name, splits in subsets.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        for split, pattern in splits.items():
            lines += [f"  - split: {split}", f"    path: {pattern}"]
    return "\n".join([*lines, "---", "# A dataset"]).encode()


def publish(hub: StandInHub, name: str, subsets: Subsets, rows: list[dict]) -> str:
    """Publish a dataset with two different files per split; return the commit."""
    files = {"README.md": card(subsets), ".gitattributes": b""}
    for pattern in [pattern for splits in subsets.values() for pattern in splits.values()]:
        for number in range(2):
            ending = f"0000{number}-of-00002.parquet" if pattern.endswith("-*") else f"00{number}"
            path = pattern.replace("/*/", "/CC-MAIN-2025-05/").removesuffix("*") + ending
            path = path if path.endswith(".parquet") else f"{path}_00000.parquet"
            files[path] = parquet([*rows, rows[number]] if "train" in path else rows[number:9])
    return hub.add(f"datasets/{name}", files)


def publish_all(hub: StandInHub, folder: Path) -> None:
    """Publish the datasets of the recipes, and a small model under the name Qwen/Qwen3-8B."""
    for name, subsets in CARDS.items():
        publish(hub, name, subsets, ROWS.get(name, CHATS))
    hermes = {"README.md": b"---\nlanguage:\n- eng\n---\n# OpenHermes"}
    hub.add(
        "datasets/teknium/OpenHermes-2.5",
        hermes | {"openhermes2_5.json": json.dumps(SAID).encode()},
    )
    samples.saved_tokenizer(folder, Path(samples.CHATML).read_text())
    loads = {path.name: path.read_bytes() for path in folder.iterdir()}
    loads["config.json"] = json.dumps({"model_type": "qwen3", "hidden_size": 8}).encode()
    loads["additional_chat_templates/tool_use.jinja"] = b"{{ tools }}"
    other = ("README.md", "pytorch_model.bin", "consolidated.safetensors", "model-Q4_K_M.gguf")
    other += ("original/model.safetensors", "onnx/config.json", "modeling_qwen.py", "a.pth")
    weights = {"model-00001-of-00001.safetensors": b"weights"}
    hub.add("models/Qwen/Qwen3-8B", loads | weights | {name: name.encode() for name in other})


# --- the client


_LOOP = """
import contextlib, io, json, logging, os, sys
import prepare_data
from utils.launch.script import run_script
for line in sys.stdin:
    words, folder, extra = json.loads(line)
    before = dict(os.environ)
    os.environ.update(extra)
    os.chdir(folder)
    logging.getLogger().handlers.clear()
    with contextlib.redirect_stderr(io.StringIO()) as told:
        code = run_script(lambda: prepare_data.main(words))
    os.environ.clear()
    os.environ.update(before)
    print(json.dumps([code, told.getvalue()]), flush=True)
"""


class Preparer:
    """A process with its own HF_HOME that runs prepare_data.py repeatedly."""

    def __init__(self, url: str, home: Path, **environment: str):
        own = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "SLURM_"))}
        own |= {"HF_ENDPOINT": url, "HF_HOME": str(home), "PYTHONPATH": str(ROOT), **environment}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", _LOOP], env=own, **pipes)

    def __call__(self, *words: object, folder: Path = ROOT, **environment: str) -> tuple[int, str]:
        """Run prepare_data.py in a folder; return its exit code and log."""
        order = [list(map(str, words)), str(folder), environment]
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        code, told = json.loads(self.process.stdout.readline())
        return code, told

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=30)
