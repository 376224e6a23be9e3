"""A server that answers what huggingface_hub asks of the Hub about one dataset: files, folders, commits, LFS.

The Hub's newer transfer of large files (Xet) is not here; its client goes without where a server does not offer it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit

from tests.loopback import serving

#: Of a request's method and path, whether it is to fail.
Failing = Callable[[str, str], bool]
NAME = "team/sets"
TOKEN = "hf_testing"


class Hub:
    """What a test sees of the server."""

    def __init__(self) -> None:
        self.url = ""
        self.contents: dict[str, bytes] = {".gitattributes": b""}
        self.fails: Failing = lambda method, path: False
        self.is_public = False
        self.lock = threading.Lock()
        self.large: dict[str, bytes] = {}
        """What was uploaded as LFS, by its sha256, and perhaps no commit has named yet."""
        self.during_commit: Callable[[], object] = lambda: None
        self.has_overlapped = threading.Event()
        """A commit came while another one was under way, and was refused."""
        self.is_contended = False
        """Whether somebody else's commit is under way whenever one comes for the first time."""
        self._committing = threading.Lock()
        self._refused: set[bytes] = set()

    def files(self, prefix: str = "") -> dict[str, bytes]:
        """Everything below a prefix, by the name behind it, but for what every dataset has."""
        actual = {name: data for name, data in self.contents.items() if name != ".gitattributes"}
        return {name.removeprefix(prefix): data for name, data in actual.items() if name.startswith(prefix)}

    def put(self, name: str, contents: bytes) -> None:
        with self.lock:
            self.contents[name] = contents

    def describe(self, name: str) -> dict[str, object]:
        data = self.contents[name]
        actual: dict[str, object] = {
            "type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest(),
        }  # fmt: skip
        if name.endswith(".mds"):
            actual["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return actual

    def list(self, folder: str, *, recursive: bool) -> list[dict[str, object]]:
        prefix = f"{folder}/" if folder else ""
        actual: dict[str, dict[str, object]] = {}
        for name in sorted(self.contents):
            if not name.startswith(prefix):
                continue
            parts = name.removeprefix(prefix).split("/")
            for depth in range(1, len(parts) if recursive else min(2, len(parts))):
                path = prefix + "/".join(parts[:depth])
                actual[path] = {"type": "directory", "path": path, "oid": "0" * 40}
            if recursive or len(parts) == 1:
                actual[name] = self.describe(name)
        return list(actual.values())

    def commit(self, body: bytes) -> bool:
        """False: one is under way."""
        if self.is_contended and body not in self._refused:
            self._refused.add(body)
            return False
        if not self._committing.acquire(blocking=False):
            self.has_overlapped.set()
            return False
        try:
            self.during_commit()
            self._change(body.splitlines())
        finally:
            self._committing.release()
        return True

    def _change(self, lines: list[bytes]) -> None:
        with self.lock:
            for line in lines:
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    self.contents[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    self.contents[value["path"]] = self.large[value["oid"]]
                elif entry["key"] == "deletedFile":
                    del self.contents[value["path"]]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer_all(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        if self.hub.fails(self.command, path):
            self._send(500, b"{}")
        elif self.command == "PUT" and path.startswith("/large/"):
            self.hub.large[path.removeprefix("/large/")] = body
            self._send(200, b"")
        elif not self.hub.is_public and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            # As the Hub says of what may not be seen.
            self._send(401, b'{"error": "Invalid username or password."}', {"X-Error-Message": "Invalid credentials"})
        else:
            self._answer(path, parse_qs(parts.query), body)

    do_GET = do_HEAD = do_POST = do_PUT = _answer_all  # http.server's names

    def _answer(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
        api, hub = f"/api/datasets/{NAME}", self.hub
        if path in (api, f"{api}/revision/main"):
            self._send_json({"id": NAME, "sha": "0" * 40, "private": True, "tags": [], "siblings": []})
        elif path.startswith(f"{api}/tree/main"):
            folder = path.removeprefix(f"{api}/tree/main").strip("/")
            actual = hub.list(folder, recursive=query.get("recursive") == ["True"])
            self._send_json(actual) if actual or not folder else self._send_missing()
        elif path == f"{api}/paths-info/main":
            self._send_json(self._find_paths(parse_qs(body.decode()).get("paths", [])))
        elif path == f"{api}/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": name, "uploadMode": "lfs" if name.endswith(".mds") else "regular", "shouldIgnore": False}
                     for name in names]  # fmt: skip
            self._send_json({"files": modes})
        elif path == f"/datasets/{NAME}.git/info/lfs/objects/batch":
            objects = [
                {**one, "actions": {"upload": {"href": f"{hub.url}/large/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self._send_json({"transfer": "basic", "objects": objects})
        elif path == f"{api}/commit/main":
            if hub.commit(body):
                self._send_json(
                    {"success": True, "commitOid": "0" * 40, "commitUrl": f"{hub.url}/commit", "hookOutput": ""}
                )
            else:
                self._send(412, b'{"error": "A commit has happened since. Please refresh and try again."}')
        elif path.startswith(f"/datasets/{NAME}/resolve/"):
            self._send_file(path.split("/", 5 + NAME.count("/"))[-1])
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _find_paths(self, names: list[str]) -> list[dict[str, object]]:
        actual = []
        for name in names:
            if name in self.hub.contents:
                actual.append(self.hub.describe(name))
            elif any(other.startswith(f"{name}/") for other in self.hub.contents):
                actual.append({"type": "directory", "path": name, "oid": "0" * 40})
        return actual

    def _send_file(self, name: str) -> None:
        if name not in self.hub.contents:
            self._send_missing()
            return
        data, status = self.hub.contents[name], 200
        headers = {"X-Repo-Commit": "0" * 40, "ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        if wanted := self.headers.get("Range"):
            first, last = (int(place) if place else None for place in wanted.removeprefix("bytes=").split("-"))
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data, status = data[first : None if last is None else last + 1], 206
        self._send(status, data, headers)

    def _send_missing(self) -> None:
        self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """A server with an empty dataset."""
    hub = Hub()
    with serving(type("Handler", (_Handler,), {"hub": hub})) as hub.url:
        yield hub
