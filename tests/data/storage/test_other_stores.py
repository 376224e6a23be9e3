"""gs://, az:// and hf://, each against a server on loopback: what is tested of S3 in its own files.

Google's is gcp-storage-emulator, Azure's is Azurite (`npm install -g azurite`), the Hub's is tests/hub_store.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from llmscale.data.prepare.prepare_set import PrepareOptions, prepare
from llmscale.data.prepare.remote_set import RemoteSet
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.shards.cache import open_set
from llmscale.data.shards.token_shards import TokenShards
from llmscale.data.storage import faults, objects
from llmscale.data.storage.objects import Store as OneStore
from llmscale.data.tokenizers.load_tokenizer import load_tokenizer
from llmscale.errors import DataError
from tests.azure_store import AzureStore
from tests.conftest import Ranks, build_train_command, read_losses
from tests.google_store import GoogleStore
from tests.hub_store import NAME, TOKEN, Hub, serve_hub

OPTIONS = PrepareOptions(seq_len=16, val_fraction=0.1, shard_bytes=8192)
Failing = Callable[[str, str], bool]


class Store(Protocol):
    """One of them, as the tests below see it."""

    url: str
    """Where text may lie."""
    out: str
    """Where a set may lie."""

    def put(self, name: str, contents: bytes) -> None: ...

    def files(self) -> dict[str, bytes]:
        """Of the set, by name."""

    def fail(self, fails: Failing) -> None: ...


class _Emulated:
    def __init__(self, server: GoogleStore | AzureStore) -> None:
        self._server = server
        self.url, self.out = server.url, f"{server.url}/sets/a"

    def put(self, name: str, contents: bytes) -> None:
        self._server.put(name, contents)

    def files(self) -> dict[str, bytes]:
        return self._server.files("sets/a/")

    def fail(self, fails: Failing) -> None:
        self._server.relay.fails = fails

    def refuse(self, refuses: Callable[[str, Message], tuple[int, bytes] | None]) -> None:
        self._server.relay.refuses = refuses

    def damage(self, harm: Callable[[str, str], str]) -> None:
        self._server.relay.harm = harm


class _OnTheHub:
    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.url = self.out = f"hf://datasets/{NAME}"

    def put(self, name: str, contents: bytes) -> None:
        self.hub.put(name, contents)

    def files(self) -> dict[str, bytes]:
        return self.hub.files()

    def fail(self, fails: Failing) -> None:
        self.hub.fails = fails


KINDS = ["google", pytest.param("azure", marks=pytest.mark.slow), "hub"]


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Empty; retries do not pause."""
    monkeypatch.setattr(faults, "RETRY_PAUSES_S", (0.0, 0.0))
    if request.param == "hub":
        with serve_hub() as hub:
            _lead_to(hub, monkeypatch)
            yield _OnTheHub(hub)
        return
    server: GoogleStore | AzureStore = request.getfixturevalue(request.param)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("GCS_KEY", "GCS_SECRET", "AZURE_ACCOUNT_NAME", "AZURE_ACCOUNT_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    yield _Emulated(server)
    server.relay.fails = lambda method, path: False
    server.relay.harm = lambda method, path: ""
    server.relay.refuses = lambda method, headers: None
    server.clear()


def _lead_to(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_ENDPOINT is read when the library is imported."""
    from huggingface_hub import constants, file_download

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    for module in (constants, file_download):
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def corpus(tmp_path: Path, write_documents: Callable[..., list[str]]) -> Path:
    write_documents(tmp_path / "documents.jsonl", 80)
    return tmp_path / "documents.jsonl"


def _prepare(corpus: Path, out: Path | RemoteSet, options: PrepareOptions = OPTIONS) -> bool:
    return prepare(open_source(str(corpus)), out, load_tokenizer("bytes"), options, num_workers=1).reused


def _local(corpus: Path, out: Path, options: PrepareOptions = OPTIONS) -> dict[str, bytes]:
    _prepare(corpus, out, options)
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def _read(data: str, cache: Path | None = None) -> np.ndarray:
    shards = TokenShards(open_set(data, cache), "train")
    return shards.read(np.arange(len(shards)))


def test_the_set_there_is_the_local_one_and_reads_alike(corpus: Path, store: Store, tmp_path: Path) -> None:
    assert not _prepare(corpus, RemoteSet(store.out, work_dir=tmp_path / "work"))
    assert store.files() == _local(corpus, tmp_path / "set")
    assert np.array_equal(_read(store.out, tmp_path / "cache"), _read(str(tmp_path / "set")))
    assert _prepare(corpus, RemoteSet(store.out, work_dir=tmp_path / "work"))


def test_text_there_is_read_as_on_a_disk(corpus: Path, store: Store) -> None:
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    store.put("in/a.jsonl", corpus.read_bytes())
    store.put("in/deep/b.txt", b"deep")
    for name in ("in/a.jsonl", "in/*.jsonl"):
        assert list(open_source(f"{store.url}/{name}").documents()) == texts
    # A folder with records is read without its other files; a pattern reads what it matches.
    assert list(open_source(f"{store.url}/in").documents()) == texts
    assert list(open_source(f"{store.url}/in/**/*.*").documents()) == [*texts, "deep"]
    with pytest.raises(DataError, match="nothing has that name"):
        open_source(f"{store.url}/none/*.txt")


def test_an_object_that_changes_is_noticed(store: Store) -> None:
    store.put("in/a.txt", b"one")
    source = open_source(f"{store.url}/in/a.txt")
    store.put("in/a.txt", b"two")
    with pytest.raises(DataError, match="has changed"):
        list(source.documents())


def test_what_fails_once_is_tried_again(
    corpus: Path, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The Hub's requests for reading are tried again by its client; a commit is not.
    left = {"shard.00000", "manifest.json", "/commit/main"}

    def once(method: str, path: str) -> bool:
        hit = next((name for name in left if name in path and method in ("GET", "POST", "PUT")), None)
        left.discard(hit or "")
        return hit is not None

    store.fail(once)
    _prepare(corpus, RemoteSet(store.out, work_dir=tmp_path / "work"))
    store.fail(lambda method, path: False)
    assert store.files() == _local(corpus, tmp_path / "set")
    left = {"shard.00001", "index.json"}
    store.fail(once)
    assert np.array_equal(_read(store.out, tmp_path / "cache"), _read(str(tmp_path / "set")))
    assert not left
    assert "Trying again" in capsys.readouterr().err


@pytest.mark.parametrize("store", KINDS[:2], indirect=True)
def test_bytes_cut_on_their_way_are_fetched_again(corpus: Path, store: _Emulated, tmp_path: Path) -> None:
    _prepare(corpus, RemoteSet(store.out, work_dir=tmp_path / "work"))
    _local(corpus, tmp_path / "set")
    store.put("in/a.jsonl", corpus.read_bytes())
    texts = list(open_source(str(corpus)).documents())
    left = {"shard.00000", "index.json", "in%2Fa.jsonl", "in/a.jsonl"}

    def once(method: str, path: str) -> str:
        is_body = method == "GET" and ("alt=media" in path or "comp=list" not in path)
        hit = next((name for name in left if name in path and is_body), None)
        left.discard(hit or "")
        return "cut" if hit else ""

    store.damage(once)
    assert np.array_equal(_read(store.out, tmp_path / "cache"), _read(str(tmp_path / "set")))
    assert list(open_source(f"{store.url}/in/a.jsonl").documents()) == texts
    assert len(left) == 1


def test_the_hub_is_asked_for_one_commit_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a.mds", "b.mds"]
    for name in names:
        (tmp_path / name).write_text(name)
    with serve_hub() as hub, ThreadPoolExecutor(2) as pool:
        _lead_to(hub, monkeypatch)
        # The other one, if it does not wait, comes while this one does.
        hub.during_commit = lambda: hub.has_overlapped.wait(0.2)
        url = f"hf://datasets/{NAME}"
        one = OneStore(url)
        for sent in [pool.submit(one.upload, tmp_path / name, f"{url}/{name}") for name in names]:
            sent.result()
        assert hub.files() == {name: name.encode() for name in names}


@pytest.mark.parametrize("store", ["hub"], indirect=True)
def test_somebody_elses_commit_is_waited_for(corpus: Path, store: _OnTheHub, tmp_path: Path) -> None:
    store.hub.is_contended = True
    _prepare(corpus, RemoteSet(store.out, work_dir=tmp_path / "work"))
    assert store.files() == _local(corpus, tmp_path / "set")


def test_one_set_replaces_another(corpus: Path, store: Store, tmp_path: Path) -> None:
    _prepare(corpus, RemoteSet(store.out, work_dir=tmp_path / "work"))
    other = PrepareOptions(seq_len=8, val_fraction=0.1, shard_bytes=8192)
    with pytest.raises(DataError, match="Replace it with --overwrite"):
        _prepare(corpus, RemoteSet(store.out, work_dir=tmp_path / "work"), other)
    _prepare(corpus, RemoteSet(store.out, work_dir=tmp_path / "work", overwrite=True), other)
    expected = _local(corpus, tmp_path / "set", other)
    files = store.files()
    assert files.pop("manifest.json") != expected["manifest.json"]
    assert {name.partition("/")[2]: data for name, data in files.items()} == expected
    assert np.array_equal(_read(store.out, tmp_path / "cache"), _read(str(tmp_path / "set")))


MISSING = {
    "google": ("GOOGLE_APPLICATION_CREDENTIALS", "Give GOOGLE_APPLICATION_CREDENTIALS"),
    "azure": ("AZURE_STORAGE_CONNECTION_STRING", "Give AZURE_ACCOUNT_NAME"),
    "hub": ("HF_TOKEN", "Give HF_TOKEN"),
}


def _take_credentials(kind: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MISSING[kind][0])
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(home))


@pytest.mark.parametrize("store", ["google", "hub"], indirect=True)
def test_what_is_public_is_read_without_credentials(
    request: pytest.FixtureRequest, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("in/a.txt", b"open")
    _take_credentials(request.node.callspec.params["store"], tmp_path, monkeypatch)
    if isinstance(store, _OnTheHub):
        store.hub.is_public = True
    assert list(open_source(f"{store.url}/in/a.txt").documents()) == ["open"]


def test_missing_credentials_are_named(
    request: pytest.FixtureRequest, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = request.node.callspec.params["store"]
    message = MISSING[kind][1]
    _take_credentials(kind, tmp_path, monkeypatch)
    if kind == "google":  # its emulator lets everybody in
        store.refuse(lambda method, headers: None if "Authorization" in headers else (401, b"{}"))
    with pytest.raises(DataError, match=message):
        RemoteSet(store.out, work_dir=tmp_path / "work")
    with pytest.raises(DataError, match=message):
        open_set(store.out, tmp_path / "cache")


@pytest.mark.slow
def test_ranks_train_on_it(
    corpus: Path, store: Store, tmp_path: Path, ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", constants.ENDPOINT)
    _prepare(corpus, RemoteSet(store.out, work_dir=tmp_path / "work"))
    _local(corpus, tmp_path / "set")
    losses = []
    for name, data in (("remote", store.out), ("local", str(tmp_path / "set"))):
        command = build_train_command(tmp_path, tmp_path / name, "--data", data, "--steps", "3")
        ranks(command, 2).wait()
        losses.append(read_losses(tmp_path / name))
    assert losses[0] == losses[1] and len(losses[0]) == 3


def test_the_hub_client_warns_of_no_retry_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub.utils.logging")
    before = hub.get_verbosity()
    monkeypatch.delenv("HF_HUB_VERBOSITY", raising=False)
    try:
        hub.set_verbosity_warning()
        objects._quieten_hub()
        assert hub.get_verbosity() == hub.ERROR
    finally:
        hub.set_verbosity(before)
