"""Real prepared sets, small enough to prepare in a test."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from llmscale.data.prepare.prepare_set import PrepareOptions, prepare
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.storage import faults
from llmscale.data.tokenizers.load_tokenizer import load_tokenizer
from tests.azure_store import AzureStore, find_azurite, serve_azure
from tests.google_store import GoogleStore, serve_google
from tests.object_store import BUCKET, ObjectStore, serve_objects

WORDS = ["der", "die", "das", "und", "in", "nicht", "ein", "auch", "es", "\n", "\t", "你好", "naïve", "🙂"]


def _write_documents(path: Path, num_documents: int, seed: int = 0) -> list[str]:
    """A JSONL file of random documents of very different lengths; returns their texts."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 60))) + f" {number}" for number in range(num_documents)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return texts


MakeSet = Callable[..., Path]


@pytest.fixture(scope="session")
def write_documents() -> Callable[..., list[str]]:
    """The function that writes a JSONL file of random documents."""
    return _write_documents


@pytest.fixture(scope="session")
def make_set(tmp_path_factory: pytest.TempPathFactory) -> MakeSet:
    """Prepares a set of many small shards and returns its folder."""

    def make(num_documents: int = 120, *, seed: int = 0, compression: str = "", seq_len: int = 16) -> Path:
        folder = tmp_path_factory.mktemp("set")
        _write_documents(folder / "documents.jsonl", num_documents, seed)
        options = PrepareOptions(seq_len=seq_len, val_fraction=0.1, shard_bytes=4096, compression=compression)
        source = open_source(str(folder / "documents.jsonl"))
        prepare(source, folder / "set", load_tokenizer("bytes"), options, num_workers=1)
        return folder / "set"

    return make


@pytest.fixture(scope="session")
def shared_set(make_set: MakeSet) -> Path:
    """One set for tests that do not change it."""
    return make_set()


@pytest.fixture(scope="session")
def running_store() -> Iterator[ObjectStore]:
    """An S3 server for the session, whose clients read boto3's descriptions of S3 once."""
    from botocore.loaders import JSONFileLoader

    load = functools.cache(JSONFileLoader().load_file)
    with mock.patch.object(JSONFileLoader, "load_file", lambda self, path: load(path)), serve_objects() as store:
        yield store


@pytest.fixture
def object_store(running_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """The S3 server with an empty bucket and nothing that fails; retries do not pause."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in running_store.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(faults, "RETRY_PAUSES_S", (0.0, 0.0))
    running_store.requests.clear()
    yield running_store
    running_store.fails = running_store.spoil = lambda method, path: False
    for name in running_store.files():
        running_store.client.delete_object(Bucket=BUCKET, Key=name)


@pytest.fixture(scope="session")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoogleStore]:
    pytest.importorskip("gcp_storage_emulator")
    with serve_google(tmp_path_factory.mktemp("google")) as server:
        yield server


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureStore]:
    if find_azurite() is None:
        pytest.skip("needs azurite: npm install -g azurite")
    with serve_azure(tmp_path_factory.mktemp("azure")) as server:
        yield server
