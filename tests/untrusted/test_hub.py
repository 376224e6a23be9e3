from __future__ import annotations

import http.server
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from llmscale.errors import DataError
from llmscale.untrusted import hub
from llmscale.untrusted.hub import HubFiles, is_hub_name, read_hub_files, read_token
from tests.loopback import serving

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
        elif self.path == "/api/models/org/old-name/revision/main":
            self.send_response(307)
            self.send_header("Location", "/api/models/org/model/revision/main")
            self.end_headers()
        elif self.path == "/api/models/org/short/revision/main":
            self._answer(json.dumps({"sha": COMMIT}).encode())
        elif self.path == f"/org/short/resolve/{COMMIT}/tokenizer.json":
            self.send_response(200)
            self.send_header("Content-Length", "90")
            self.end_headers()
            self.wfile.write(b'{"a": 1}')
        elif self.path.startswith("/org/busy/"):
            self.send_error(503)
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
    actual: list[tuple[str, str | None]] = []
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("HF_TOKEN_PATH", raising=False)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with serving(type("Hub", (_Hub,), {"asked": actual})) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield actual


def _read(name: str) -> HubFiles:
    return read_hub_files(name, "tokenizer.json", ["tokenizer_config.json"], 100, DataError)


def test_files_come_from_one_commit_and_the_token_stays_with_the_hub(asked: list[tuple[str, str | None]]) -> None:
    actual = _read("org/model")
    assert (actual.name, actual.contents) == (f"org/model@{COMMIT}", {"tokenizer.json": b"{}"})
    assert dict(asked) == {
        "/api/models/org/model/revision/main": f"Bearer {TOKEN}",
        f"/org/model/resolve/{COMMIT}/tokenizer.json": f"Bearer {TOKEN}",
        "/blob": None,
        f"/org/model/resolve/{COMMIT}/tokenizer_config.json": f"Bearer {TOKEN}",
    }


def test_what_was_fetched_is_asked_for_once_and_found_by_huggingface_hub(
    asked: list[tuple[str, str | None]], tmp_path: Path
) -> None:
    """That a file is missing, too."""
    with ThreadPoolExecutor(4) as pool:
        actual = list(pool.map(_read, ["org/model"] * 4))
    assert len(asked) == 4
    assert all(files == actual[0] for files in actual)
    assert _read(f"org/model@{COMMIT}") == actual[0]
    assert len(asked) == 4
    from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache

    cached = partial(try_to_load_from_cache, "org/model", cache_dir=tmp_path / "hub")
    assert cached("tokenizer.json") == str(actual[0].folder / "tokenizer.json")
    assert cached("tokenizer_config.json", revision=COMMIT) is _CACHED_NO_EXIST


def test_a_cache_that_cannot_be_written_costs_only_time(asked: list[tuple[str, str | None]], tmp_path: Path) -> None:
    (tmp_path / "hub").touch()
    assert [_read("org/model").folder for _ in range(2)] == [None, None]
    assert len(asked) == 8


def test_the_rest_of_a_cached_model_comes_from_its_commit(
    asked: list[tuple[str, str | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the network is; where it is not, what is cached is all there is."""
    folder = tmp_path / "hub/models--org--model/snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder / "tokenizer_config.json").write_text("old")
    name, needed, other = f"org/model@{COMMIT}", "tokenizer_config.json", ["tokenizer.json"]
    read = partial(read_hub_files, name, needed, other, 100, DataError)
    endpoint = os.environ["HF_ENDPOINT"]
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert read().contents == {"tokenizer_config.json": b"old"}
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert read().contents == {"tokenizer_config.json": b"old", "tokenizer.json": b"{}"}
    assert [path for path, _ in asked] == [f"/org/model/resolve/{COMMIT}/tokenizer.json", "/blob"]


def test_the_token_of_a_login_is_read_and_goes_nowhere_else(
    asked: list[tuple[str, str | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/token").write_text("hf_login\n")
    _read("org/model")
    assert {token for path, token in asked if path != "/blob"} == {"Bearer hf_login"}
    assert dict(asked)["/blob"] is None
    (tmp_path / "elsewhere").write_text("hf_other")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "elsewhere"))
    assert read_token() == "hf_other"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert read_token() == TOKEN
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    assert read_token() is None


def test_a_renamed_model_is_asked_for_with_the_token_too(asked: list[tuple[str, str | None]]) -> None:
    with pytest.raises(DataError, match=r"has no tokenizer\.json"):
        _read("org/old-name")
    assert dict(asked)["/api/models/org/model/revision/main"] == f"Bearer {TOKEN}"


def test_an_answer_that_breaks_off_is_not_kept(asked: list[tuple[str, str | None]], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="breaks off after 8 bytes"):
        _read("org/short")
    assert not [path for path in (tmp_path / "hub").rglob("tokenizer.json")]


def test_a_hub_that_is_busy_is_not_taken_for_one_without_the_rest(
    asked: list[tuple[str, str | None]], tmp_path: Path
) -> None:
    folder = tmp_path / "hub" / "models--org--busy" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="the Hub answers 503"):
        _read(f"org/busy@{COMMIT}")


@pytest.mark.parametrize(
    ("contents", "text"),
    [
        ("hf_secret\nX-Header: 1", "holds no token"),
        ("hf_secret" + "x" * 5000, "is larger than"),
        ("hf_secret\0\x7f", "holds no token"),
        ("hf_secret\u00e4", "holds no token"),
    ],
)
def test_what_is_no_token_is_neither_sent_nor_shown(
    contents: str,
    text: str,
    asked: list[tuple[str, str | None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "token").write_text(contents)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(DataError, match=text) as caught:
        _read("org/model")
    assert "secret" not in str(caught.value)
    assert not asked


def test_no_login_is_no_error(
    tmp_path: Path, asked: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert read_token() is None
    _read("org/model")
    assert {token for _, token in asked} == {None}


def test_the_cache_comes_first(asked: list[tuple[str, str | None]], tmp_path: Path) -> None:
    cache = tmp_path / "hub/models--org--model"
    for commit in (COMMIT, OLDER):
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "snapshots" / commit / "tokenizer.json").write_text(commit)
        (cache / ".no_exist" / commit).mkdir(parents=True)
        (cache / ".no_exist" / commit / "tokenizer_config.json").touch()
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
        ("org/none", r"org/none is not a file or folder here.*knows no model org/none with a revision main"),
        (f"org/none@{COMMIT}", r"org/none on the Hub has no tokenizer\.json at the revision a+\."),
        ("org/evil", r"its answer names no commit"),
        ("org/locked", r"the Hub answers 401 Unauthorized for api/models/org/locked"),
        (f"org/model@{OLDER}", r"resolve/b+/tokenizer\.json is larger than the limit of 100 bytes"),
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
    monkeypatch.setenv("HF_ENDPOINT", "nonsense")
    with pytest.raises(DataError, match="unknown url type"):
        _read("org/model")


@pytest.mark.parametrize("name", ["gpt2", "org/model", "org/model@main", "a.b/c-d_e@v1.0"])
def test_names(name: str) -> None:
    assert is_hub_name(name)


@pytest.mark.parametrize(
    "name", ["", "../x", "a/../b", "a/b/c", "/a", "a/", "a//b", "ä/b", "a/b@../c", "a/b@", "a b", "a?x"]
)
def test_what_is_no_name(name: str) -> None:
    assert not is_hub_name(name)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "hf:org/set: the Hub has no dataset org/set"),
        (b'{"gated": "auto"}', "needs permission. Accept its conditions at .*org/set, and set HF_TOKEN"),
        (OSError("no connection to https://hub"), "no connection to https://hub. Give files of this machine"),
        (hub._Refused("the Hub answers 401"), r"cannot be read: the Hub answers 401\.$"),
    ],
)
def test_a_data_set_that_cannot_be_read_is_known_after_one_request(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | Exception | None, message: str
) -> None:
    asked: list[str] = []

    def fetch(place: str, max_bytes: int) -> bytes | None:
        asked.append(place)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(hub, "fetch_from_hub", fetch)
    monkeypatch.setattr(hub, "read_token", lambda: None)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(DataError, match=message):
        hub.check_data_set("org/set", "hf:org/set", DataError)
    assert len(asked) == 1
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.check_data_set("org/set", "hf:org/set", DataError)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("text", "is_forgotten"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("HuggingFaceFW/fineweb-edu", True),
        ("meta-llama/Llama-3.1-8B", True),
        ("gpt2", False),
        ("runs/first", False),
        ("crawl/text.jsonl", False),
        ("here/model", False),
        ("../x/y", False),
        ("hf:a/b", False),
    ],
)
def test_a_name_of_the_hub_without_its_prefix_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, is_forgotten: bool
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub.forgotten_prefix(text) == (f" Did you mean 'hf:{text}'?" if is_forgotten else "")
