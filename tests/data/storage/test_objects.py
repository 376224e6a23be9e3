"""Compare-and-swap on an object of each store, against servers on loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.message import Message
from urllib.parse import urlsplit

import pytest

from llmscale.data.storage import faults, objects
from llmscale.data.storage.faults import Overtaken
from llmscale.data.storage.objects import Store, probe_conditions
from llmscale.data.storage.schemes import check_not_forgotten, check_out_url, path_of
from llmscale.errors import DataError, UnreachableError
from tests.azure_store import AzureStore
from tests.conftest import HANG_S
from tests.google_store import GoogleStore
from tests.object_store import BUCKET, ObjectStore
from tests.relay import Relay, relay_to

SLOW_DOWN = (503, b"<Error><Code>SlowDown</Code></Error>")
EXPIRED = (400, b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>")
CONFLICT = (409, b"<Error><Code>ConditionalRequestConflict</Code></Error>")
NOT_IMPLEMENTED = (501, b"<Error><Code>NotImplemented</Code></Error>")


@dataclass
class Place:
    """An empty bucket or container behind a relay."""

    url: str
    relay: Relay
    put: Callable[[str, bytes], None]
    files: Callable[[], dict[str, bytes]]


KINDS = ["s3", "google", pytest.param("azure", marks=pytest.mark.slow)]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Each store in turn; retries do not pause."""
    monkeypatch.setattr(faults, "RETRY_PAUSES_S", (0.0, 0.0))
    if request.param == "s3":
        store: ObjectStore = request.getfixturevalue("object_store")
        with relay_to(urlsplit(store.url).port or 0) as relay:
            monkeypatch.setenv("S3_ENDPOINT_URL", relay.url)
            yield Place(f"s3://{BUCKET}", relay, store.put, store.files)
        return
    server: GoogleStore | AzureStore = request.getfixturevalue(request.param)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("GCS_KEY", "GCS_SECRET", "AZURE_ACCOUNT_NAME", "AZURE_ACCOUNT_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    yield Place(server.url, server.relay, server.put, server.files)
    server.relay.harm = lambda method, path: ""
    server.relay.refuses = lambda method, headers: None
    server.clear()


class Shared:
    """An object that several writers change."""

    def __init__(self, url: str) -> None:
        self._url, self._store = url, Store(url)

    def read(self) -> tuple[bytes, str] | None:
        return self._store.read_versioned(self._url)

    def write(self, contents: bytes, version: str | None) -> str:
        return self._store.write_if(self._url, contents, version or "")


on_s3 = pytest.mark.parametrize("place", ["s3"], indirect=True)


def _once(place: Place, answer: tuple[int, bytes], method: str) -> list[tuple[int, bytes]]:
    """Answer the next request of this method so; return the answers left."""
    left = [answer]
    place.relay.refuses = lambda asked, headers: left.pop() if left and asked == method else None
    return left


def _lose_write(place: Place) -> list[str]:
    """Lose the answer to the next write; return the answers left to lose."""
    left = ["lose"]
    place.relay.harm = lambda method, path: left.pop() if left and method in ("PUT", "POST") else ""
    return left


def _writes(place: Place) -> int:
    return sum(method in ("PUT", "POST") for method, _ in place.relay.requests)


def test_a_write_replaces_only_the_version_that_was_read(place: Place) -> None:
    mine, other = Shared(f"{place.url}/runs/a"), Shared(f"{place.url}/runs/a")
    assert mine.read() is None
    first = mine.write(b"one", None)
    assert other.read() == (b"one", first)
    with pytest.raises(Overtaken, match=r"Another writer has changed .*/runs/a"):
        other.write(b"two", None)
    second = other.write(b"two", first)
    assert second != first
    before = _writes(place)
    with pytest.raises(Overtaken):
        mine.write(b"three", first)
    assert _writes(place) == before + 1
    assert mine.read() == (b"two", second)


def test_a_removed_object_is_not_replaced(place: Place) -> None:
    shared = Shared(f"{place.url}/a")
    version = shared.write(b"one", None)
    Store(place.url).delete(f"{place.url}/a")
    with pytest.raises(Overtaken):
        shared.write(b"two", version)
    assert shared.read() is None and place.files() == {}


@pytest.mark.parametrize("exists", [False, True])
def test_an_own_write_whose_answer_was_lost_counts(place: Place, exists: bool) -> None:
    shared = Shared(f"{place.url}/a")
    version = shared.write(b"one", None) if exists else None
    left = _lose_write(place)
    written = shared.write(b"two", version)
    assert not left
    assert shared.read() == (b"two", written)
    assert shared.write(b"three", written) != written


def test_no_increment_of_two_writers_is_lost(place: Place) -> None:
    def increment(number: int) -> None:
        shared, done = Shared(f"{place.url}/count"), 0
        while done < 20:
            content = shared.read()
            contents, version = content or (b"", None)
            try:
                shared.write(contents + b"%d:%d " % (number, done), version)
            except Overtaken:
                continue
            done += 1

    threads = [threading.Thread(target=increment, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    content = Shared(f"{place.url}/count").read()
    assert content is not None
    expected = [b"%d:%d" % (number, done) for number in range(2) for done in range(20)]
    assert sorted(content[0].split()) == sorted(expected)


def test_throttling_is_retried(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    shared = Shared(f"{place.url}/a")
    left = _once(place, SLOW_DOWN, "POST" if place.url.startswith("gs") else "PUT")
    version = shared.write(b"one", None)
    assert not left
    left = _once(place, SLOW_DOWN, "GET")
    assert shared.read() == (b"one", version)
    assert not left
    assert capsys.readouterr().err.count("Trying again") == 2


def test_an_answer_that_is_cut_is_read_again(place: Place) -> None:
    shared = Shared(f"{place.url}/a")
    version = shared.write(b"a body of some bytes", None)
    left = ["cut"]
    place.relay.harm = lambda method, path: left.pop() if left and method == "GET" else ""
    assert shared.read() == (b"a body of some bytes", version)
    assert not left


@on_s3
def test_a_conflict_of_two_conditional_writes_is_retried(place: Place) -> None:
    left = _once(place, CONFLICT, "PUT")
    Shared(f"{place.url}/a").write(b"one", None)
    assert not left and place.files() == {"a": b"one"}


@on_s3
def test_renewed_credentials_are_picked_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Shared(f"{place.url}/a")
    version = shared.write(b"one", None)

    def refuse(method: str, headers: Message) -> tuple[int, bytes] | None:
        return None if "Credential=renewed/" in headers["Authorization"] else EXPIRED

    place.relay.refuses = refuse
    with pytest.raises(UnreachableError, match=r"ExpiredToken.*Give AWS_ACCESS_KEY_ID") as raised:
        shared.write(b"two", version)
    assert "testing" not in str(raised.value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")
    version = shared.write(b"two", version)
    # Renewed before the open client's have expired: no error at all.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "again")
    place.relay.refuses = lambda method, headers: EXPIRED if "=renewed/" in headers["Authorization"] else None
    assert shared.read() == (b"two", version)


def test_an_object_that_is_too_large_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MAX_BYTES", 1000)
    shared = Shared(f"{place.url}/a")
    version = shared.write(bytes(1000), None)
    place.put("b", bytes(1001))
    with pytest.raises(DataError, match="/b has 1,001 bytes"):
        Shared(f"{place.url}/b").read()
    with pytest.raises(DataError, match="/a would have 1,001 bytes"):
        shared.write(bytes(1001), version)
    assert shared.read() == (bytes(1000), version)


def test_a_missing_bucket_is_an_error(place: Place) -> None:
    shared = Shared(f"{place.url}2/a")
    for attempt in (shared.read, lambda: shared.write(b"one", None), lambda: shared.write(b"one", "123")):
        with pytest.raises(DataError, match=r"Cannot (read|write|list) .*2/a: ") as raised:
            attempt()
        assert not isinstance(raised.value, Overtaken)


def test_an_hmac_key_of_google_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCS_KEY", "key")
    monkeypatch.setenv("GCS_SECRET", "secret")
    with pytest.raises(DataError, match="Unset both, and give GOOGLE_APPLICATION_CREDENTIALS"):
        Shared("gs://bucket/a").read()


def test_a_store_with_conditions_passes_the_check(place: Place) -> None:
    probe_conditions(f"{place.url}/runs/a")
    assert place.files() == {}


@on_s3
@pytest.mark.parametrize("stripped", ["if-match", "if-none-match"])
def test_a_server_that_ignores_a_condition_is_found_out(place: Place, stripped: str) -> None:
    place.relay.strips = {stripped}
    with pytest.raises(DataError, match="ignores or refuses conditional writes"):
        probe_conditions(f"{place.url}/runs/a")
    assert place.files() == {}
    place.relay.refuses = lambda method, headers: NOT_IMPLEMENTED if method == "PUT" else None
    with pytest.raises(DataError, match="ignores or refuses conditional writes"):
        probe_conditions(f"{place.url}/runs/a")


def test_places_for_a_set() -> None:
    assert check_out_url("s3://bucket/a/set/") == "s3://bucket/a/set"
    assert check_out_url("hf://datasets/org/name") == "hf://datasets/org/name"
    assert path_of("gs://bucket/a/") == "bucket/a"


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket",
        "s3://bucket//set",
        "s3://bucket/../set",
        "s3://bucket/set?x=1",
        "s3://bucket/*",
        "S3://b/set",
        "ftp://host/set",
        "hf://datasets/org",
        "hf://datasets/org/name/folder",
        "hf://models/org/name",
        "s3://b/\x1b[0m",
    ],
)
def test_no_place_for_a_set(url: str) -> None:
    with pytest.raises(DataError):
        check_out_url(url)


def test_a_scheme_without_its_slashes_is_no_folder() -> None:
    with pytest.raises(DataError, match="s3://BUCKET"):
        check_not_forgotten("s3:/bucket/set", "--out")
    check_not_forgotten("hf:org/name", "--input")
