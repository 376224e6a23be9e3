"""The Hugging Face Hub on this machine, with one model: as much of it as a download asks for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

from tests.loopback import serving

#: What own/model is at.
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What it has and was asked for, and the cache of those who ask."""

    files: Path
    home: Path
    endpoint: str
    asked: list[str]

    @property
    def environment(self) -> dict[str, str]:
        """Of those who ask."""
        home = str(self.home)
        return {"HF_ENDPOINT": self.endpoint, "HF_HOME": home, "HF_HUB_CACHE": f"{home}/hub", "no_proxy": "*"}

    @property
    def cache(self) -> Path:
        return self.home / "hub" / "models--own--model"

    @property
    def snapshot(self) -> Path:
        return self.cache / "snapshots" / COMMIT

    @property
    def cached(self) -> set[str]:
        return {path.name for path in self.snapshot.iterdir()}


class _Handler(SimpleHTTPRequestHandler):
    def __init__(self, *args: object, asked: list[str], **settings: object) -> None:
        self._asked = asked
        super().__init__(*args, **settings)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self._asked.append(self.path)
        if not self.path.startswith("/api/models/own/model"):
            super().do_GET()
            return
        answer = json.dumps(self._list_tree() if "/tree/" in self.path else self._describe()).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _describe(self) -> dict[str, object]:
        files = [{"rfilename": path.name} for path in Path(self.directory).iterdir()]
        return {"id": "own/model", "sha": COMMIT, "siblings": files}

    def _list_tree(self) -> list[dict[str, object]]:
        """Return what huggingface_hub 1 and later ask for."""
        entries = []
        for path in Path(self.directory).iterdir():
            contents = path.read_bytes()
            entry = {
                "type": "file",
                "path": path.name,
                "size": len(contents),
                "oid": hashlib.sha1(contents).hexdigest(),
            }
            if path.suffix in (".safetensors", ".bin"):
                entry["lfs"] = {"oid": hashlib.sha256(contents).hexdigest(), "size": len(contents), "pointerSize": 130}
            entries.append(entry)
        return entries

    def translate_path(self, path: str) -> str:
        return str(Path(self.directory) / path.rpartition("/")[2])

    def end_headers(self) -> None:
        """With the sha256 of a large file, and a hash as git has it of a small one."""
        path = Path(self.translate_path(self.path))
        if path.is_file():
            contents = path.read_bytes()
            if path.suffix in (".safetensors", ".bin"):
                self.send_header("X-Linked-ETag", f'"{hashlib.sha256(contents).hexdigest()}"')
                self.send_header("X-Linked-Size", str(len(contents)))
            else:
                self.send_header("ETag", f'"{hashlib.sha1(contents).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        super().end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def serve_model(files: Path, home: Path) -> Iterator[Hub]:
    """own/model with these files, at one commit. `home`: of huggingface_hub, for those who ask."""
    asked: list[str] = []
    with serving(partial(_Handler, directory=str(files), asked=asked)) as url:
        yield Hub(files, home, url, asked)
