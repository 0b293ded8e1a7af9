"""A small Hugging Face Hub: the endpoints that huggingface_hub calls, and a storage server that large files redirect to.

``python fake_hub.py FOLDER`` serves FOLDER/owner/repo/*; tests use ``FakeHub`` and look at what was asked of it.
"""

import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

TOKEN = "hf_aGoodToken"


@dataclass
class Repo:
    files: dict[str, bytes]
    is_gated: bool = False

    @property
    def commit(self) -> str:
        listed = "".join(f"{name} {_sha256(data)}\n" for name, data in sorted(self.files.items()))
        return hashlib.sha1(listed.encode()).hexdigest()


@dataclass(frozen=True)
class Asked:
    server: str  # "hub" or "storage"
    method: str
    path: str
    range: str | None
    authorization: str | None


@dataclass
class FakeHub:
    """``drops``: how many bytes of a file are sent before the connection breaks, one number per time it is asked for."""

    repos: dict[str, Repo] = field(default_factory=dict)
    drops: dict[str, list[int]] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    status: int | None = None  # answer everything with it
    page: bytes | None = None  # answer everything with it, like the login page of a hotel
    asked: list[Asked] = field(default_factory=list)
    endpoint: str = ""
    storage: str = ""

    @contextmanager
    def running(self) -> Iterator["FakeHub"]:
        servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, name)) for name in ("hub", "storage")]
        self.endpoint, self.storage = (f"http://127.0.0.1:{server.server_port}" for server in servers)
        threads = [Thread(target=server.serve_forever, args=(0.02,), daemon=True) for server in servers]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            for server in servers:
                server.shutdown()
                server.server_close()

    def downloads(self, name: str) -> list[Asked]:
        return [asked for asked in self.asked if asked.server == "storage" and asked.path.endswith("/" + name)]


def _handler(hub: FakeHub, server: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(
                Asked(server, self.command, path, self.headers.get("Range"), self.headers.get("Authorization"))
            )
            if hub.page is not None or hub.status is not None:
                return self.answer(hub.status or 200, hub.page or b"")
            if server == "storage":
                return self.send_file(path)
            if path.startswith("/api/models/"):
                return self.describe(path.removeprefix("/api/models/").partition("/revision/")[0])
            found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            return self.redirect(found[1], found[3]) if found else self.answer(404, b"")

        def describe(self, name: str) -> None:
            repo = hub.repos.get(name)
            if repo is None:
                return self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            siblings = [
                {
                    "rfilename": file,
                    "size": len(data),
                    "lfs": {"sha256": _sha256(data), "size": len(data), "pointerSize": 9},
                }
                for file, data in repo.files.items()
            ]
            facts = {
                "id": name,
                "sha": repo.commit,
                "gated": "manual" if repo.is_gated else False,
                "siblings": siblings,
            }
            return self.answer(200, json.dumps(facts).encode(), {"Content-Type": "application/json"})

        def redirect(self, name: str, file: str) -> None:
            repo = hub.repos.get(name)
            if repo is None:
                return self.answer(401, b"", {"X-Error-Code": "RepoNotFound"})
            if repo.is_gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
            if file not in repo.files:
                return self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit})
            data = repo.files[file]
            headers = {
                "X-Repo-Commit": repo.commit,
                "X-Linked-Size": str(len(data)),
                "X-Linked-ETag": f'"{_sha256(data)}"',
                "Location": f"{hub.storage}/{name}/{file}?signature=secret",
            }
            return self.answer(302, b"", headers)

        def send_file(self, path: str) -> None:
            repo, _, file = path.removeprefix("/").partition("/")
            repo, file = f"{repo}/{file.partition('/')[0]}", file.partition("/")[2]
            whole = hub.repos[repo].files[file]
            data = bytes(len(whole)) if file in hub.damaged else whole
            begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
            headers = {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"} if begin else {}
            drops = hub.drops.get(file)
            return self.answer(206 if begin else 200, data[begin:], headers, drops.pop(0) if drops else None)

        def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, n: int | None = None) -> None:
            self.send_response(status)
            for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[:n])
            if n is not None:
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def main(folder: Path) -> None:
    repos = {
        repo.relative_to(folder).as_posix(): Repo(
            {file.relative_to(repo).as_posix(): file.read_bytes() for file in repo.rglob("*") if file.is_file()}
        )
        for repo in folder.glob("*/*")
    }
    with FakeHub(repos).running() as hub:
        print(f"HF_ENDPOINT={hub.endpoint}", flush=True)
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
