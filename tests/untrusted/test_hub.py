from __future__ import annotations

import http.server
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from llmscale.errors import DataError
from llmscale.untrusted import hub
from llmscale.untrusted.hub import HubFiles, is_hub_name, read_hub_files
from tests.hub_server import lead_to_hub
from tests.loopback import serving

COMMIT, OLDER = "a" * 40, "b" * 40
TOKEN = "hf_secret"


class _Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the Hub does: large files from another place."""

    asked: list[tuple[str, str | None]]

    def do_HEAD(self) -> None:
        self._answer("HEAD ")

    def do_GET(self) -> None:
        self._answer()

    def _answer(self, verb: str = "") -> None:
        path = self.path.partition("?")[0]
        if path != "/api/agent-harnesses":  # newer versions of the library want it for their User-Agent
            self.asked.append((verb + path, self.headers["Authorization"]))
        if path == "/api/models/org/old-name/revision/main":
            self._send(307, b"", Location="/api/models/org/model/revision/main")
        elif path == "/api/models/org/huge/revision/main":
            self._describe({"tokenizer.json": 101})
        elif path.startswith("/api/models/org/locked"):
            self._send(401)
        elif path.startswith("/api/models/org/gated"):
            self._send(403, **{"X-Error-Code": "GatedRepo"})
        elif path.startswith("/api/models/org/busy"):
            self._send(503)
        elif path.startswith("/api/models/org/none"):
            self._send(404, **{"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/models/org/"):
            self._describe({})
        elif path == "/api/datasets/org/gated":
            self._send(200, b'{"id": "org/gated", "gated": "auto"}')
        elif path == "/api/datasets/org/locked":
            self._send(401)
        elif path == "/api/datasets/org/none":
            self._send(404, **{"X-Error-Code": "RepoNotFound"})
        elif path in (f"/org/model/resolve/{revision}/tokenizer.json" for revision in ("main", COMMIT)):
            blob = f"http://localhost:{self.server.server_address[1]}/blob"
            self._send(302, b"", Location=blob, **{"X-Linked-Size": "2", "X-Linked-ETag": f'"{"c" * 64}"'})
        elif path == "/blob":
            self._send(200, b"{}", ETag='"blob"')
        elif path == "/org/short/resolve/main/tokenizer.json":
            self._send(200, b'{"a": 1}', ETag='"short"', **{"Content-Length": "90"})
        elif path == "/org/evil/resolve/main/tokenizer.json":
            self._send(200, b"{}", ETag='"evil"', **{"X-Repo-Commit": "../../x"})
        else:
            self._send(404, **{"X-Error-Code": "EntryNotFound"})

    def _describe(self, sizes: dict[str, int]) -> None:
        files = [{"rfilename": name, "size": size} for name, size in sizes.items()]
        self._send(200, json.dumps({"id": "org/model", "sha": COMMIT, "siblings": files}).encode())

    def _send(self, status: int, contents: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(contents)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(contents)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple[str, str | None]]]:
    """What a Hub on this machine was asked, with the token it was given."""
    actual: list[tuple[str, str | None]] = []
    with serving(type("Hub", (_Hub,), {"asked": actual})) as url:
        lead_to_hub(monkeypatch, tmp_path, url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield actual


def _read(name: str) -> HubFiles:
    return read_hub_files(name, "tokenizer.json", ["tokenizer_config.json"], 100, DataError)


def test_files_come_from_one_commit_and_the_token_stays_with_the_hub(asked: list[tuple[str, str | None]]) -> None:
    actual = _read("org/model")
    assert (actual.name, actual.contents) == (f"org/model@{COMMIT}", {"tokenizer.json": b"{}"})
    assert dict(asked) == {
        "/api/models/org/model/revision/main": f"Bearer {TOKEN}",
        "HEAD /org/model/resolve/main/tokenizer.json": f"Bearer {TOKEN}",
        "/blob": None,
        f"HEAD /org/model/resolve/{COMMIT}/tokenizer_config.json": f"Bearer {TOKEN}",
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
    for _ in range(2):
        actual = _read("org/model")
        assert (actual.contents, actual.folder) == ({"tokenizer.json": b"{}"}, None)
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
    with monkeypatch.context() as without_network:
        lead_to_hub(without_network, tmp_path)
        assert read().contents == {"tokenizer_config.json": b"old"}
    assert read().contents == {"tokenizer_config.json": b"old", "tokenizer.json": b"{}"}
    paths = [f"/api/models/org/model/revision/{COMMIT}", f"HEAD /org/model/resolve/{COMMIT}/tokenizer.json"]
    assert [path for path, _ in asked] == [*paths, "/blob"]


def test_the_token_of_a_login_is_read_and_goes_nowhere_else(
    asked: list[tuple[str, str | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "token").write_text("hf_login\n")
    _read("org/model")
    assert {token for path, token in asked if path != "/blob"} == {"Bearer hf_login"}
    assert dict(asked)["/blob"] is None


def test_a_renamed_model_is_asked_for_with_the_token_too(asked: list[tuple[str, str | None]]) -> None:
    with pytest.raises(DataError, match=r"has no tokenizer\.json"):
        _read("org/old-name")
    assert dict(asked)["/api/models/org/model/revision/main"] == f"Bearer {TOKEN}"


def test_an_answer_that_breaks_off_is_not_kept(asked: list[tuple[str, str | None]], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="8 bytes"):
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


@pytest.mark.parametrize("contents", ["hf_secret\nX-Header: 1", "hf_secret" + "x" * 5000, "hf_secret\u20ac"])
def test_what_is_no_token_is_not_shown(
    contents: str, asked: list[tuple[str, str | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "token").write_text(contents)
    with pytest.raises(DataError) as caught:
        _read("org/locked")
    assert "secret" not in str(caught.value)


def test_no_login_is_no_error(
    tmp_path: Path, asked: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
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
        (f"org/empty@{COMMIT}", r"org/empty on the Hub has no tokenizer\.json at the revision a+\."),
        ("org/locked", r"the Hub answers 401 Unauthorized for model org/locked .*wrong, or needs a login or HF_TOKEN"),
        ("org/gated", r"the Hub answers 403 Forbidden for model org/gated .*accept its conditions on its page"),
        ("org/huge", r"org/huge/tokenizer\.json is larger than the limit of 100 bytes"),
    ],
)
def test_what_the_hub_does_not_give(name: str, text: str, asked: list[tuple[str, str | None]]) -> None:
    with pytest.raises(DataError, match=text) as caught:
        _read(name)
    assert len(str(caught.value).splitlines()) == 1
    assert not [path for path, _ in asked if path == "/blob"]


def test_a_commit_names_no_other_folder(asked: list[tuple[str, str | None]], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be fetched from the Hub"):
        _read("org/evil")
    assert not [*tmp_path.rglob("tokenizer.json")]


def test_offline(asked: list[tuple[str, str | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"HF_HUB_OFFLINE is set.*Download the model's tokenizer\.json"):
        _read("org/model")
    assert not asked
    lead_to_hub(monkeypatch, tmp_path)
    with pytest.raises(DataError, match=r"cannot be fetched from the Hub \(no connection to http://127.*refused\)"):
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
    ("name", "message"),
    [
        ("none", "hf:org/none: the Hub has no dataset org/none"),
        ("gated", "needs permission. Accept its conditions at .*org/gated, and set HF_TOKEN"),
        ("away", "no connection to http://127.*. Give files of this machine"),
        ("locked", r"cannot be read: the Hub answers 401 Unauthorized for dataset org/locked; the name is wrong.*\.$"),
    ],
)
def test_a_data_set_that_cannot_be_read_is_known_after_one_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, message: str, asked: list[tuple[str, str | None]]
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with monkeypatch.context() as perhaps_without_network:
        if name == "away":
            lead_to_hub(perhaps_without_network, tmp_path)
        with pytest.raises(DataError, match=message):
            hub.check_data_set(f"org/{name}", f"hf:org/{name}", DataError)
    assert len(asked) == (name != "away")
    asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.check_data_set(f"org/{name}", f"hf:org/{name}", DataError)
    assert not asked


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
