"""A stand-in for the Hugging Face Hub on loopback, which answers what its real clients ask for."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

CHANGED = "2026-11-03T08:00:00.000Z"  # when each file was committed
TOKEN = "hf_thisTokenOpensTheGate0000"


@dataclass
class Repository:
    """Files by commit, and commits by branch; `gated` ones answer to TOKEN alone."""

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
    """Repositories by `datasets/OWNER/NAME` or `models/OWNER/NAME`; `asked` lists the requests."""

    def __init__(self, url: str):
        self.url = url
        self.repositories: dict[str, Repository] = {}
        self.asked: list[str] = []

    def add(self, name: str, files: dict[str, bytes], **options) -> str:
        """Publish files on the branch main; return the commit."""
        return self.repositories.setdefault(name, Repository(**options)).commit(files)

    def downloads(self) -> list[str]:
        """Return the files whose content was asked for since the last call, and forget requests."""
        found = [line.split("/resolve/")[1] for line in self.asked if line.startswith("GET /d/")]
        self.asked.clear()
        return sorted(found)


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
        if parts[0] == "api":
            self._api(parts[1:], parse_qs(url.query), body)
        else:
            self._file(parts)

    def _api(self, parts: list[str], query: dict, body: str) -> None:
        name, verb, rest = "/".join(parts[:3]), (parts[3:4] or [""])[0], parts[4:]
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self._refuse(401, "RepoNotFound")  # as the Hub answers without a token
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
        """Tell size and digest, and where the content is, as of files in the Hub's storage."""
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
