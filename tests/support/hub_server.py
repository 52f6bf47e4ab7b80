"""A hub on loopback that speaks what `huggingface_hub` asks of the Hugging Face Hub, and fails as it is told to.

By hand: `python tests/support/hub_server.py DIRECTORY [PORT]` serves DIRECTORY/models/ORG/NAME/... and
DIRECTORY/datasets/ORG/NAME/...; then `HF_ENDPOINT=http://127.0.0.1:PORT rft-train ...`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "t" * 20


@dataclass
class Repository:
    """Commits of one repository by hash, with their files, and the branches that name them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    refusal: str = ""
    """"gated" or "private": only the token of this module may read it."""

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Make `files` the content of a branch; returns the hash."""
        digest = hashlib.sha1(usedforsecurity=False)
        for name in sorted(files):
            digest.update(name.encode() + b"\0" + files[name])
        sha = digest.hexdigest()
        self.commits[sha] = dict(files)
        self.refs[branch] = sha
        return sha


@dataclass
class Hub:
    """Repositories by (kind, name), what was asked, and what goes wrong."""

    url: str = ""
    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """(method, path) in order."""
    ranges: list[str] = field(default_factory=list)
    """Values of the header Range."""
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """By name of a file: after how many bytes each next answer with it is cut off."""
    delay: float = 0.0
    """Seconds before every answer."""
    status: int = 0
    """Status of every answer, in place of the right one."""

    def add(self, kind: str, name: str, files: dict[str, bytes] | Path, *, refusal: str = "") -> str:
        """Add a repository with one commit, from files or a directory; returns the hash of the commit."""
        if isinstance(files, Path):
            files = {str(p.relative_to(files)): p.read_bytes() for p in sorted(files.rglob("*")) if p.is_file()}
        repository = self.repositories.setdefault((kind, name), Repository())
        repository.refusal = refusal
        return repository.commit(files)

    def downloads(self) -> list[str]:
        """Paths of files that were sent, or asked to be."""
        return [path for method, path in self.requests if method == "GET" and "/resolve/" in path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._get(body=False)

    def do_GET(self) -> None:
        self._get(body=True)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        content = self.rfile.read(length)
        if self._failing():
            return
        path = urlsplit(self.path).path
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            wrong = {"X-Error-Message": "Invalid credentials in Authorization header"}
            self._send(401, {"error": "Unauthorized"}, wrong)
        elif path == "/api/repos/create":
            asked = json.loads(content)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            known = ("model", name) in self.hub.repositories
            repository = self.hub.repositories.setdefault(("model", name), Repository())
            repository.refusal = "private" if asked.get("visibility") == "private" or asked.get("private") else ""
            if not known:
                repository.commit({})
            self._send(409 if known else 200, {"url": f"{self.hub.url}/{name}", "name": name})
        elif path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = json.loads(content)["files"]
            self._send(200, {"files": [{**f, "uploadMode": "regular", "shouldIgnore": False} for f in files]})
        elif "/commit/" in path:
            self._commit(path, content)
        else:
            self._send(404, {"error": "Not found"})

    def _commit(self, path: str, content: bytes) -> None:
        name = path.removeprefix("/api/models/").rpartition("/commit/")[0]
        repository = self.hub.repositories["model", name]
        files = dict(repository.commits[repository.refs["main"]])
        for line in content.splitlines():
            row = json.loads(line)
            if row["key"] == "file":
                files[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
        sha = repository.commit(files)
        self._send(200, {"commitOid": sha, "commitUrl": f"{self.hub.url}/{name}/commit/{sha}", "success": True})

    def _failing(self) -> bool:
        self.hub.requests.append((self.command, unquote(urlsplit(self.path).path)))
        if self.headers.get("Range"):
            self.hub.ranges.append(self.headers["Range"])
        time.sleep(self.hub.delay)
        if self.hub.status:
            self._send(self.hub.status, {"error": "told to fail"})
        return bool(self.hub.status)

    def _get(self, *, body: bool) -> None:
        if self._failing():
            return
        path = unquote(urlsplit(self.path).path).lstrip("/")
        is_api = path.startswith("api/")
        path = path.removeprefix("api/")
        kind = "dataset" if path.startswith("datasets/") else "model"
        parts = path.removeprefix("datasets/").removeprefix("models/").split("/")
        repository = self.hub.repositories.get((kind, "/".join(parts[:2])))
        if repository is None:
            self._send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif repository.refusal and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            code = {"gated": "GatedRepo", "private": "RepoNotFound"}[repository.refusal]
            self._send(403 if repository.refusal == "gated" else 401, {"error": code}, {"X-Error-Code": code})
        else:
            action, rest = (parts[2], "/".join(parts[3:])) if len(parts) > 2 else ("revision", "main")
            self._answer(repository, action if is_api else "resolve", rest, "/".join(parts[:2]), body=body)

    def _answer(self, repository: Repository, action: str, rest: str, name: str, *, body: bool) -> None:
        known = [*repository.refs, *repository.commits]
        revision = next((r for r in sorted(known, key=len, reverse=True) if rest == r or rest.startswith(f"{r}/")), "")
        sha = repository.refs.get(revision, revision)
        if not sha:
            self._send(404, {"error": "Invalid rev"}, {"X-Error-Code": "RevisionNotFound"})
            return
        files = repository.commits[sha]
        if action == "revision":
            self._send(200, {"id": name, "sha": sha, "siblings": [{"rfilename": file} for file in files]})
        elif action == "tree":
            rows = [
                {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for file, data in files.items()
            ]
            self._send(200, rows)
        else:
            self._file(files, rest.removeprefix(f"{revision}/"), sha, body=body)

    def _file(self, files: dict[str, bytes], name: str, sha: str, *, body: bool) -> None:
        if name not in files:
            self._send(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
            return
        data = files[name]
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", sha)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if not body:
            return
        cuts = self.hub.cuts.get(name)
        if cuts:
            self.wfile.write(data[start : start + cuts.pop(0)])
            self.wfile.flush()
            self.close_connection = True
        else:
            self.wfile.write(data[start:])

    def _send(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def running_hub(port: int = 0) -> Generator[Hub]:
    """Serve an empty hub on a port of 127.0.0.1 until the end of the block."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask_in_place_of_the_hub(hub: Hub, folder: Path, monkeypatch: Any) -> None:
    """Let `huggingface_hub` ask this hub: an empty cache in the folder, no token, limits of time of a second."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    # the tests of all packages are run offline
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(folder)


def main(directory: Path, port: int) -> None:
    """Serve the repositories of a directory until it is interrupted, and print what is asked."""
    with running_hub(port) as hub:
        for kind in ("model", "dataset"):
            for path in sorted((directory / f"{kind}s").glob("*/*")):
                print(kind, path.parent.name + "/" + path.name, hub.add(kind, f"{path.parent.name}/{path.name}", path))
        print(hub.url, flush=True)
        told = 0
        while True:
            time.sleep(0.5)
            for request in hub.requests[told:]:
                print(*request, flush=True)
                told += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
