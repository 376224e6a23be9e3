"""Text in an object store gives what the same text on a disk gives."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from llmscale.data.prepare.sources import open_source as opening
from llmscale.data.prepare.sources.clean_folder import FORMAT, FORMAT_VERSION
from llmscale.data.prepare.sources.open_source import RemoteFile, open_source
from llmscale.data.prepare.sources.source import Document
from llmscale.data.storage import faults
from llmscale.data.storage.objects import Store
from llmscale.errors import DataError
from tests.conftest import HANG_S
from tests.data.prepare.conftest import json_lines, parquet_of, tar_of
from tests.object_store import ObjectStore

TEXTS = [f"document {number} " * (number + 1) for number in range(60)]
LINES = json_lines(TEXTS)


FORMATS = {
    "a.jsonl": LINES,
    "a.jsonl.gz": gzip.compress(LINES),
    "a.jsonl.zst": zstandard.compress(LINES),
    "a.tar": tar_of({"a.jsonl": LINES}),
    "a.parquet": parquet_of({"text": [*TEXTS]}, 20),
    "a.csv": ("id,text\n" + "".join(f'{number},"{text}"\n' for number, text in enumerate(TEXTS))).encode(),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_from_any_place(
    name: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_PART_BYTES", 1000)
    object_store.put(f"in/{name}", FORMATS[name])
    source = open_source("s3://bucket/in/a*")
    records = list(source.records((), None))
    assert [record.content for record in records if isinstance(record, Document)] == TEXTS
    assert list(source.records(records[40].place, None)) == records[41:]


def test_patterns_and_folders_choose_as_on_a_disk_and_in_order(object_store: ObjectStore) -> None:
    for name in ("in/b/2.txt", "in/b/1.txt", "in/a.txt", "in/a.bin", "in/.hidden/x.txt", "in/a.exe", "in2/z.txt"):
        object_store.put(name, name.encode())

    def found(spec: str, **options: str) -> list[str]:
        return list(open_source(spec, **options).documents())  # type: ignore[arg-type]

    assert found("s3://bucket/in") == found("s3://bucket/in/") == ["in/a.txt", "in/b/1.txt", "in/b/2.txt"]
    assert found("s3://bucket/in/**/*.txt") == ["in/a.txt", "in/b/1.txt", "in/b/2.txt"]
    assert found("s3://bucket/in/b/*.txt") == ["in/b/1.txt", "in/b/2.txt"]
    assert found("s3://bucket/in/", glob="2.*") == ["in/b/2.txt"]
    assert found("s3://bucket/in2/z.txt") == ["in2/z.txt"]
    assert {one.name for one in open_source("s3://bucket/in").passed_over} == {"a.exe", "a.bin", ".hidden"}
    assert found("s3://bucket/in/**/*.txt", out="s3://bucket/in/b/") == ["in/a.txt"]
    for spec in ("s3://bucket/nothing/", "s3://bucket/in/*.jsonl"):
        with pytest.raises(DataError, match="nothing has that name"):
            open_source(spec)
    with pytest.raises(DataError, match=r"Cannot list s3://none/x: .*The specified bucket does not exist"):
        open_source("s3://none/x")


def test_an_object_that_changes_is_noticed(object_store: ObjectStore) -> None:
    object_store.put("in/a.txt", b"one")
    source = open_source("s3://bucket/in/*.txt")
    before = source.fingerprint()
    object_store.put("in/a.txt", b"two")
    assert open_source("s3://bucket/in/*.txt").fingerprint() != before
    with pytest.raises(DataError, match="has changed"):
        list(source.documents())
    object_store.put("in/a.txt", b"one")
    assert open_source("s3://bucket/in/*.txt").fingerprint() == before


def test_an_object_that_is_replaced_while_it_is_read_is_noticed(
    object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_PART_BYTES", 1000)
    object_store.put("in/a.jsonl", LINES)
    documents = open_source("s3://bucket/in/a.jsonl").documents()
    assert [next(documents) for _ in range(3)] == TEXTS[:3]
    object_store.put("in/a.jsonl", LINES.replace(b"document", b"DOCUMENT"))
    with pytest.raises(DataError, match="has changed"):
        list(documents)


def test_a_file_that_is_let_go_of_asks_no_more(
    object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thread in a pause would keep the command from ending."""
    monkeypatch.setattr(opening, "_PART_BYTES", 1000)
    monkeypatch.setattr(faults, "RETRY_PAUSES_S", (2.0 * HANG_S,))
    object_store.put("in/a.txt", bytes(3000))
    store = Store("s3://bucket")
    file = RemoteFile(store, store.list_objects("s3://bucket/in/a.txt")[0], "bucket/in").open()
    object_store.requests.clear()
    object_store.fails = lambda method, _: sum(asked == "GET" for asked, _ in object_store.requests) > 1
    assert file.raw.read(10) == bytes(10)  # type: ignore[attr-defined]
    fetching = [thread for thread in threading.enumerate() if thread.name.startswith("fetch")]
    while "Trying again" not in capsys.readouterr().err:
        time.sleep(0.01)
    file.close()
    for thread in fetching:
        thread.join(HANG_S)
    # Of another file, which nobody closes: a process does not wait for it either.
    assert all(thread.daemon for thread in fetching)
    assert fetching and not any(thread.is_alive() for thread in fetching)


def test_a_read_that_fails_is_tried_again_where_it_was(
    object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(opening, "_PART_BYTES", 1000)
    object_store.put("in/a.jsonl", LINES)
    source = open_source("s3://bucket/in/a.jsonl")
    begun = len(object_store.requests)
    object_store.fails = lambda method, _: method == "GET" and begun + 8 < len(object_store.requests) < begun + 11
    assert list(source.documents()) == TEXTS
    assert "Trying again" in capsys.readouterr().err
    object_store.fails = lambda method, _: method == "GET"
    with pytest.raises(DataError, match=r"s3://bucket/in/a\.jsonl"):
        list(source.documents())


def test_shards_are_no_text(object_store: ObjectStore) -> None:
    object_store.put("set/train/shard.00000.mds", b"x")
    object_store.put("set/train/index.json", b"{}")
    with pytest.raises(DataError, match="MDS"):
        open_source("s3://bucket/set")
    with pytest.raises(DataError, match="MDS"):
        open_source("s3://bucket/set/train/*.mds")


def test_glob_chooses_before_shards_are_looked_for(object_store: ObjectStore) -> None:
    object_store.put("all/set/train/shard.00000.mds", b"x")
    object_store.put("all/a.txt", b"text")
    assert list(open_source("s3://bucket/all", glob="*.txt").documents()) == ["text"]
    assert list(open_source("s3://bucket/all").documents()) == ["text"]
    for spec in ("s3://bucket/all/*.txt", "s3://bucket/all/a.txt"):
        with pytest.raises(DataError, match="--glob"):
            open_source(spec, glob="*.txt")


def test_what_was_removed_does_not_come_back(object_store: ObjectStore) -> None:
    manifest = json.dumps({"format": FORMAT, "version": FORMAT_VERSION}).encode()
    remaining, gone = (zstandard.compress(json.dumps({"text": text}).encode()) for text in ("kept", "gone"))
    for name, contents in [
        ("all/out/clean.json", manifest),
        ("all/out/documents-00000.jsonl.zst", remaining),
        ("all/out/removed/01-exact.jsonl.zst", gone),
        ("all/other/clean.json", b"mine"),
        ("all/other/removed/x.jsonl.zst", remaining),
    ]:
        object_store.put(name, contents)
    assert list(open_source("s3://bucket/all/out").documents()) == ["kept"]
    assert list(open_source("s3://bucket/all").documents()) == ["kept", "kept"]
    assert list(open_source("s3://bucket/all/**/*.zst").documents()) == ["kept", "kept"]
    assert list(open_source("s3://bucket/all/out/removed/*").documents()) == ["gone"]


def test_a_public_object_is_read_without_credentials(
    object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    object_store.client.put_object(Bucket="bucket", Key="in/a.txt", Body=b"open", ACL="public-read")
    _without_credentials(monkeypatch.delenv, monkeypatch.setenv, tmp_path)
    assert list(open_source("s3://bucket/in/a.txt").documents()) == ["open"]


def _without_credentials(delete: Callable[[str], None], put: Callable[[str, str], None], home: Path) -> None:
    delete("AWS_ACCESS_KEY_ID")
    delete("AWS_SECRET_ACCESS_KEY")
    put("AWS_SHARED_CREDENTIALS_FILE", str(home / "none"))
    put("AWS_CONFIG_FILE", str(home / "none"))
