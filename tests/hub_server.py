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

import pytest

from tests.loopback import serving

#: What own/model is at.
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What it has and was asked for, and the cache of those who ask."""

    files: Path
    home: Path
    asked: list[str]

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

    def do_HEAD(self) -> None:
        self._asked.append(f"HEAD {self.path}")
        super().do_HEAD()

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
        files = [{"rfilename": path.name, "size": path.stat().st_size} for path in Path(self.directory).iterdir()]
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
        elif "/resolve/" in self.path:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("X-Repo-Commit", COMMIT)
        super().end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


def lead_to_hub(monkeypatch: pytest.MonkeyPatch, home: Path, endpoint: str = "http://127.0.0.1:9") -> None:
    """Have this process and its children ask this Hub, at first one that nobody reaches, with the cache in `home`.

    huggingface_hub reads the variables when it is imported.
    """
    from huggingface_hub import constants, file_download

    for name, value in {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "no_proxy": "*"}.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    for module in (constants, file_download):
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)


@contextmanager
def serve_model(files: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """own/model with these files, at one commit. `home`: of huggingface_hub, for those who ask."""
    asked: list[str] = []
    with serving(partial(_Handler, directory=str(files), asked=asked)) as url:
        lead_to_hub(monkeypatch, home, url)
        yield Hub(files, home, asked)
