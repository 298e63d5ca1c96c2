"""A stand-in for wandb's server that accepts a run's upload: points, files and artifacts."""

import base64
import contextlib
import gzip
import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROJECT = {"id": "P", "name": "stoker", "entity": {"id": "E", "name": "somebody"}}


class WandbServer(ThreadingHTTPServer):
    """A server on a free port of this machine that accepts one key.

    points: the logged lines of each run. configs: the settings of each run. files: the last content
    by path. artifacts: name and type of each complete artifact.
    """

    def __init__(self, key: str):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url, self.key = f"http://127.0.0.1:{self.server_address[1]}", key
        self.points: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.configs: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        self.begun: list[tuple[str, str]] = []
        self.artifacts: list[tuple[str, str]] = []

    def answer(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        """Answer wandb's GraphQL queries, with the fields that wandb reads."""
        asked = re.search(r"\b(?:query|mutation) (\w+)", query)
        kind = re.sub(r"(?<!^)(?=[A-Z])", "_", asked[1]).lower() if asked else ""
        return getattr(self, f"_{kind}", lambda _: {})(given)

    def _run_resume_status(self, given: dict[str, Any]) -> dict[str, Any]:
        bucket = self._bucket(given["name"]) if given["name"] in self.configs else None
        return {"model": {**PROJECT, "bucket": bucket}}

    def _upsert_bucket(self, given: dict[str, Any]) -> dict[str, Any]:
        run = given["name"]
        answer = {"bucket": self._bucket(run), "inserted": run not in self.configs}
        self.configs[run] = json.loads(given.get("config") or "{}")
        return {"upsertBucket": answer}

    def _bucket(self, run: str) -> dict[str, Any]:
        empty = dict.fromkeys(("config", "summaryMetrics", "wandbConfig"), "{}")
        empty |= dict.fromkeys(("historyTail", "eventsTail"), "[]")
        counts = {
            "historyLineCount": len(self.points[run]),
            "logLineCount": 0,
            "eventsLineCount": 0,
        }
        return {"id": run, "name": run, "tags": [], "project": PROJECT, **empty, **counts}

    def _create_run_files(self, given: dict[str, Any]) -> dict[str, Any]:
        files = [self._place(f"run/{name}", name=name) for name in given["files"]]
        return {"createRunFiles": {"runID": "R", "uploadHeaders": [], "files": files}}

    def _create_artifact(self, given: dict[str, Any]) -> dict[str, Any]:
        more = given["input"]
        self.begun.append((more["artifactCollectionName"], more["artifactTypeName"]))
        number = str(len(self.begun) - 1)
        artifact = {"id": number, "state": "PENDING", "artifactSequence": {}}
        return {"createArtifact": {"artifact": artifact}}

    def _create_artifact_manifest(self, _: dict[str, Any]) -> dict[str, Any]:
        manifest = {"id": "M", "file": self._place("manifest", id="F")}
        return {"createArtifactManifest": {"artifactManifest": manifest}}

    def _create_artifact_files(self, given: dict[str, Any]) -> dict[str, Any]:
        edges = [
            {"node": {**self._place(f"artifact/{file['name']}", storagePath=file["name"]),
                      "artifact": {"id": file["artifactID"]}}}
            for file in given["input"]["artifactFiles"]
        ]  # fmt: skip
        return {"createArtifactFiles": {"files": {"edges": edges}}}

    def _commit_artifact(self, given: dict[str, Any]) -> dict[str, Any]:
        self.artifacts.append(self.begun[int(given["artifactID"])])
        return {"commitArtifact": {"artifact": {"id": given["artifactID"], "digest": "D"}}}

    def _place(self, path: str, **more: str) -> dict[str, Any]:
        return {**more, "uploadUrl": f"{self.url}/{path}", "uploadHeaders": []}


@contextlib.contextmanager
def wandb_server(key: str) -> Iterator[WandbServer]:
    """Serve until the block ends."""
    with WandbServer(key) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    server: WandbServer

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        packed = self.headers.get("Content-Encoding") == "gzip"
        return gzip.decompress(body) if packed else body

    def _answer(self, content: Any, code: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        """Keep a file."""
        self.server.files[self.path] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        """Answer a query or store points; refuse another key."""
        body, server = self._body(), self.server
        user = base64.b64decode(self.headers.get("Authorization", "").removeprefix("Basic "))
        if user != f"api:{server.key}".encode():
            return self._answer({"errors": [{"message": "who are you?"}]}, 401)
        if self.path == "/graphql":
            given = json.loads(body)
            return self._answer(
                {"data": server.answer(given["query"], given.get("variables") or {})}
            )
        if self.path.endswith("/file_stream"):  # of /files/ENTITY/PROJECT/RUN
            history = json.loads(body).get("files", {}).get("wandb-history.jsonl", {})
            points = server.points[self.path.split("/")[-2]]
            points += [json.loads(line) for line in history.get("content", [])]
        return self._answer({})
