from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmscale.errors import DataError
from llmscale.untrusted.hub import HubFiles, is_hub_name, read_hub_files

COMMIT, OLDER = "a" * 40, "b" * 40
TOKEN = "hf_secret"


class _Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the Hub does: large files from another place."""

    asked: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        if self.path == "/api/models/org/model/revision/main":
            self._answer(json.dumps({"sha": COMMIT, "siblings": []}).encode())
        elif self.path == "/api/models/org/evil/revision/main":
            self._answer(json.dumps({"sha": "../../x"}).encode())
        elif self.path == f"/org/model/resolve/{COMMIT}/tokenizer.json":
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/blob")
            self.end_headers()
        elif self.path == "/blob":
            self._answer(b"{}")
        elif self.path == f"/org/model/resolve/{OLDER}/tokenizer.json":
            self._answer(b"[]" * 100)
        elif self.path.startswith("/api/models/org/locked"):
            self.send_error(401)
        else:
            self.send_error(404)

    def _answer(self, contents: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(contents)))
        self.end_headers()
        self.wfile.write(contents)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple[str, str | None]]]:
    """What a Hub on this machine was asked, with the token it was given."""
    found: list[tuple[str, str | None]] = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (_Hub,), {"asked": found}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


def _read(name: str) -> HubFiles:
    return read_hub_files(name, "tokenizer.json", ["tokenizer_config.json"], 100, DataError)


def test_files_come_from_one_commit_and_the_token_stays_with_the_hub(asked: list[tuple[str, str | None]]) -> None:
    found = _read("org/model")
    assert (found.name, found.contents) == (f"org/model@{COMMIT}", {"tokenizer.json": b"{}"})
    assert dict(asked) == {
        "/api/models/org/model/revision/main": f"Bearer {TOKEN}",
        f"/org/model/resolve/{COMMIT}/tokenizer.json": f"Bearer {TOKEN}",
        "/blob": None,
        f"/org/model/resolve/{COMMIT}/tokenizer_config.json": f"Bearer {TOKEN}",
    }


def test_the_cache_comes_first(asked: list[tuple[str, str | None]], tmp_path: Path) -> None:
    cache = tmp_path / "hub/models--org--model"
    for commit in (COMMIT, OLDER):
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "snapshots" / commit / "tokenizer.json").write_text(commit)
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text(OLDER)
    assert _read("org/model").name == f"org/model@{OLDER}"
    assert _read(f"org/model@{COMMIT}").contents == {"tokenizer.json": COMMIT.encode()}
    assert not asked
    (cache / "refs/main").write_text("../../x")
    assert _read("org/model").name == f"org/model@{COMMIT}"
    assert asked


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("org/none", r"org/none is no file or folder here.*knows no model org/none with a revision main"),
        (f"org/none@{COMMIT}", r"org/none on the Hub has no tokenizer\.json at the revision a+\."),
        ("org/evil", r"its answer names no commit"),
        ("org/locked", r"the Hub answers 401 Unauthorized for api/models/org/locked"),
        (f"org/model@{OLDER}", r"resolve/b+/tokenizer\.json is larger than the 100 bytes"),
    ],
)
def test_what_the_hub_does_not_give(name: str, text: str, asked: list[tuple[str, str | None]]) -> None:
    with pytest.raises(DataError, match=text):
        _read(name)


def test_offline(asked: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"HF_HUB_OFFLINE is set.*Download the model's tokenizer\.json"):
        _read("org/model")
    assert not asked
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"cannot be fetched from the Hub \(.*refused\)"):
        _read("org/model")


@pytest.mark.parametrize("name", ["gpt2", "org/model", "org/model@main", "a.b/c-d_e@v1.0"])
def test_names(name: str) -> None:
    assert is_hub_name(name)


@pytest.mark.parametrize(
    "name", ["", "../x", "a/../b", "a/b/c", "/a", "a/", "a//b", "ä/b", "a/b@../c", "a/b@", "a b", "a?x"]
)
def test_what_is_no_name(name: str) -> None:
    assert not is_hub_name(name)
