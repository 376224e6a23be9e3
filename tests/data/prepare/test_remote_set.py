"""A set in an object store is whole or not there, and the local one to the last byte."""

from __future__ import annotations

import itertools
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from llmscale.cli.main import main
from llmscale.data.prepare import remote_set
from llmscale.data.prepare.prepare_set import Prepared, PrepareOptions, prepare
from llmscale.data.prepare.remote_set import RemoteSet
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.shards.cache import open_set
from llmscale.data.shards.manifest import MANIFEST_NAME, UNFINISHED_NAME
from llmscale.data.shards.token_shards import TokenShards
from llmscale.data.storage import faults
from llmscale.data.storage.objects import Store
from llmscale.data.tokenizers.load_tokenizer import load_tokenizer
from llmscale.errors import DataError
from tests import warm_start
from tests.conftest import HANG_S, Ranks, build_train_command, read_losses
from tests.object_store import BUCKET, ObjectStore
from tests.relay import Relay, relay_to

OPTIONS = PrepareOptions(seq_len=16, val_fraction=0.1, shard_bytes=4096)
URL = f"s3://{BUCKET}/sets/a"


@pytest.fixture
def corpus(tmp_path: Path, write_documents: Callable[..., list[str]]) -> Path:
    """Text for some eight shards of OPTIONS."""
    write_documents(tmp_path / "documents.jsonl", 60)
    return tmp_path / "documents.jsonl"


@pytest.fixture
def long_corpus(tmp_path: Path, write_documents: Callable[..., list[str]]) -> Path:
    write_documents(tmp_path / "documents.jsonl", 120)
    return tmp_path / "documents.jsonl"


def _prepare(corpus: Path, work_dir: Path, options: PrepareOptions = OPTIONS, *, overwrite: bool = False) -> Prepared:
    out = RemoteSet(URL, work_dir=work_dir, overwrite=overwrite)
    return prepare(open_source(str(corpus)), out, load_tokenizer("bytes"), options, num_workers=1)


def _local(corpus: Path, out: Path, options: PrepareOptions = OPTIONS) -> dict[str, bytes]:
    prepare(open_source(str(corpus)), out, load_tokenizer("bytes"), options, num_workers=1)
    return _files(out)


def _read(data: str, cache: Path | None = None) -> list[list[int]]:
    shards = TokenShards(open_set(data, cache), "train")
    return shards.read(np.arange(len(shards))).tolist()


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _is_empty(folder: Path) -> bool:
    return not folder.exists() or not any(folder.iterdir())


def test_it_is_the_local_set_and_nothing_is_left_here(corpus: Path, object_store: ObjectStore, tmp_path: Path) -> None:
    assert not _prepare(corpus, tmp_path / "work").reused
    assert object_store.files("sets/a/") == _local(corpus, tmp_path / "set")
    assert _is_empty(tmp_path / "work")
    puts = [path.removeprefix(f"/{BUCKET}/sets/a/") for method, path in object_store.requests if method == "PUT"]
    # Whoever sees the manifest sees everything, whoever sees an index sees its shards.
    assert puts[0] == UNFINISHED_NAME and puts[-1] == MANIFEST_NAME
    is_index = [name.endswith("index.json") for name in puts]
    assert is_index.index(True) > max(k for k, name in enumerate(puts) if ".mds" in name)


def test_shards_leave_this_disk_while_others_are_written(
    long_corpus: Path, object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    move = RemoteSet._move

    def count(self: RemoteSet, name: str) -> None:
        nonlocal most
        most = max(most, len(list(self._folder.rglob("*.mds*"))))
        move(self, name)

    monkeypatch.setattr(RemoteSet, "_move", count)
    prepared = _prepare(long_corpus, tmp_path / "work")
    assert len(prepared.manifest.splits["train"].shards) > most
    assert most <= remote_set._MOST_WAITING + 2


def test_what_is_there_is_refused_or_found_before_any_text_is_read(
    corpus: Path, object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    object_store.put("sets/a/precious.txt", b"x")
    with pytest.raises(DataError, match="is not a prepared dataset"):
        _prepare(corpus, tmp_path / "work")
    object_store.client.delete_object(Bucket=BUCKET, Key="sets/a/precious.txt")
    # A neighbour whose name begins alike is none of ours.
    object_store.put("sets/ab/x", b"x")
    _prepare(corpus, tmp_path / "work")
    before = object_store.files()
    monkeypatch.setattr("llmscale.data.prepare.prepare_set.tokenise", None)
    assert _prepare(corpus, tmp_path / "work").reused
    with pytest.raises(DataError, match="Replace it with --overwrite"):
        _prepare(corpus, tmp_path / "work", PrepareOptions(seq_len=8, val_fraction=0.1, shard_bytes=4096))
    assert object_store.files() == before


def test_without_credentials_or_bucket_nothing_is_begun(
    corpus: Path, object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="The bucket must exist"):
        RemoteSet("s3://no-such-bucket/set", work_dir=tmp_path / "work")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(DataError, match="Give AWS_ACCESS_KEY_ID"):
        _prepare(corpus, tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_an_upload_that_fails_or_arrives_spoilt_is_tried_again(
    corpus: Path, object_store: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = {"shard.00001": 1, "shard.00003": 2, MANIFEST_NAME: 1}
    spoilt = {"shard.00002": 2, "index": 1}

    def once(left: dict[str, int]) -> Callable[[str, str], bool]:
        def hits(method: str, path: str) -> bool:
            name = next((name for name in left if name in path and left[name]), None)
            if method != "PUT" or name is None:
                return False
            left[name] -= 1
            return True

        return hits

    object_store.fails, object_store.spoil = once(faults), once(spoilt)
    _prepare(corpus, tmp_path / "work")
    assert not any(faults.values()) and not any(spoilt.values())
    lines = capsys.readouterr().err.splitlines()
    assert sum("Trying again" in line for line in lines) == 7
    assert object_store.files("sets/a/") == _local(corpus, tmp_path / "set")


def test_a_store_that_stays_away_leaves_the_work_for_the_next_run(
    corpus: Path, object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    object_store.fails = lambda method, path: method == "PUT" and "shard.00004" in path
    with pytest.raises(DataError, match=rf"Cannot upload {URL}/train/shard.00004.mds: .*same command continues"):
        _prepare(corpus, tmp_path / "work")
    assert MANIFEST_NAME not in object_store.files("sets/a/")
    object_store.fails = lambda method, path: False
    with pytest.raises(DataError, match="unfinished dataset prepared differently"):
        _prepare(corpus, tmp_path / "work", PrepareOptions(seq_len=8, val_fraction=0.1, shard_bytes=4096))
    object_store.requests.clear()
    monkeypatch.setattr("llmscale.data.prepare.prepare_set.tokenise", None)
    _prepare(corpus, tmp_path / "work")
    # What had come there is not sent again.
    assert ("PUT", f"/{BUCKET}/sets/a/train/shard.00000.mds") not in object_store.requests
    assert object_store.files("sets/a/") == _local_files(corpus, tmp_path, monkeypatch)
    assert _is_empty(tmp_path / "work")


def _local_files(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    monkeypatch.undo()
    return _local(corpus, tmp_path / "set")


@pytest.mark.parametrize("what", ["train/shard.00000.mds", ""], ids=["a shard", "everything"])
def test_what_somebody_removed_meanwhile_is_noticed(
    what: str, corpus: Path, object_store: ObjectStore, tmp_path: Path
) -> None:
    object_store.fails = lambda method, path: method == "PUT" and "shard.00004" in path
    with pytest.raises(DataError):
        _prepare(corpus, tmp_path / "work")
    object_store.fails = lambda method, path: False
    for name in object_store.files("sets/a/"):
        if name.startswith(what):
            object_store.client.delete_object(Bucket=BUCKET, Key=f"sets/a/{name}")
    if what:
        with pytest.raises(DataError, match="is missing now"):
            _prepare(corpus, tmp_path / "work")
        assert MANIFEST_NAME not in object_store.files("sets/a/")
    else:
        _prepare(corpus, tmp_path / "work")
        assert object_store.files("sets/a/") == _local(corpus, tmp_path / "set")


#: Few shards, so that there are few moments.
OLD, NEW = (PrepareOptions(seq_len=seq_len, val_fraction=0.1, shard_bytes=8192) for seq_len in (16, 8))


class Killed(BaseException):
    """Nothing is done after it."""


def _kill_at(moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the change of the store of that number, from then on."""
    changes = itertools.count()

    def or_die(change: Callable[..., None]) -> Callable[..., None]:
        def change_or_die(self: Store, *arguments: object) -> None:
            if next(changes) >= moment:
                raise Killed
            change(self, *arguments)

        return change_or_die

    for name in ("upload", "write", "delete"):
        monkeypatch.setattr(Store, name, or_die(getattr(Store, name)))


@pytest.mark.slow
def test_a_set_is_replaced_in_one_moment(
    long_corpus: Path, object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before any change of the store, the old set or the new one is there to the last window, and the same
    command goes on."""
    for name, options in (("old", OLD), ("new", NEW)):
        _local(long_corpus, tmp_path / name, options)
    old, new = (_read(str(tmp_path / name)) for name in ("old", "new"))
    _prepare(long_corpus, tmp_path / "work", OLD)
    object_store.put("sets/a/mine.txt", b"not a set's")
    seen: list[list[list[int]]] = []
    while True:
        with monkeypatch.context() as patch:
            # Every start writes a few objects again before it goes on; behind the moment none does.
            _kill_at(1 if new in seen else len(seen), patch)
            try:
                _prepare(long_corpus, tmp_path / "work", NEW, overwrite=True)
            except Killed:
                pass
            else:
                break
        seen.append(_read(URL, tmp_path / "cache"))
    assert seen.index(new) > 3 and all(files == old for files in seen[: seen.index(new)])
    assert len(seen) - seen.index(new) > 5 and all(files == new for files in seen[seen.index(new) :])
    files = object_store.files("sets/a/")
    assert files.pop("mine.txt") == b"not a set's" and files.pop(MANIFEST_NAME)
    assert {name.partition("/")[2]: data for name, data in files.items()} == _files(tmp_path / "new")
    assert _prepare(long_corpus, tmp_path / "work", NEW).reused
    assert _is_empty(tmp_path / "work")


def test_overwriting_a_set_with_itself_mends_it(corpus: Path, object_store: ObjectStore, tmp_path: Path) -> None:
    _prepare(corpus, tmp_path / "work", OLD)
    expected = object_store.files("sets/a/")
    for name in ("train/shard.00000.mds", MANIFEST_NAME):
        object_store.put(f"sets/a/{name}", b"spoilt")
        assert not _prepare(corpus, tmp_path / "work", OLD, overwrite=True).reused
        files = object_store.files("sets/a/")
        del files[MANIFEST_NAME]
        assert {name.partition("/")[2]: data for name, data in files.items()} == expected
        assert len({name.partition("/")[0] for name in files}) == 1


def test_an_unfinished_set_is_replaced_too(corpus: Path, object_store: ObjectStore, tmp_path: Path) -> None:
    object_store.fails = lambda method, path: method == "PUT" and "shard.00001" in path
    with pytest.raises(DataError):
        _prepare(corpus, tmp_path / "work", OLD)
    object_store.fails = lambda method, path: False
    with pytest.raises(DataError, match="unfinished dataset prepared differently"):
        _prepare(corpus, tmp_path / "work", NEW)
    _prepare(corpus, tmp_path / "work", NEW, overwrite=True)
    names = {name.partition("/")[0] for name in object_store.files("sets/a/")}
    assert len(names) == 2 and MANIFEST_NAME in names


def test_whoever_reads_the_old_set_is_told(corpus: Path, object_store: ObjectStore, tmp_path: Path) -> None:
    _prepare(corpus, tmp_path / "work", OLD)
    shards = TokenShards(open_set(URL, tmp_path / "cache"), "train")
    first = shards.read(np.array([0]))
    _prepare(corpus, tmp_path / "work", NEW, overwrite=True)
    assert np.array_equal(shards.read(np.array([0])), first)
    with pytest.raises(DataError, match="was replaced while it was read"):
        shards.read(np.arange(len(shards)))


def test_a_copy_of_all_that_is_there_names_the_folder_of_the_set(
    corpus: Path, object_store: ObjectStore, tmp_path: Path
) -> None:
    _prepare(corpus, tmp_path / "work", OLD)
    _prepare(corpus, tmp_path / "work", NEW, overwrite=True)
    for name, data in object_store.files("sets/a/").items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(data)
    for cache in (None, tmp_path / "cache"):
        with pytest.raises(DataError, match="Name that folder"):
            open_set(str(tmp_path / "copy"), cache)
    (inner,) = (tmp_path / "copy").glob("set-*")
    _local(corpus, tmp_path / "new", NEW)
    assert _read(str(inner)) == _read(str(tmp_path / "new"))


def test_whoever_reads_an_equal_set_goes_on(corpus: Path, object_store: ObjectStore, tmp_path: Path) -> None:
    _prepare(corpus, tmp_path / "work", OLD)
    shards = TokenShards(open_set(URL, tmp_path / "cache"), "train")
    shards.read(np.array([0]))
    _prepare(corpus, tmp_path / "work", OLD, overwrite=True)
    samples = shards.read(np.arange(len(shards)))
    assert samples.tolist() == _read(URL, tmp_path / "other cache")


def test_a_replacement_that_was_given_up_is_named(
    corpus: Path,
    object_store: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _prepare(corpus, tmp_path / "work", OLD)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        _kill_at(2, patch)
        _prepare(corpus, tmp_path / "work", NEW, overwrite=True)
    (left,) = {name.partition("/")[0] for name in object_store.files("sets/a/") if name.startswith("set-")}
    capsys.readouterr()
    assert _prepare(corpus, tmp_path / "work", OLD).reused
    assert f"{URL}/{left} belongs to an unfinished --overwrite" in capsys.readouterr().err


def test_the_end_waits_for_no_pause(object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for one of a look at what came there."""
    out = RemoteSet(URL, work_dir=tmp_path / "work")
    (tmp_path / "shard.00000.mds").write_bytes(b"x")
    out._folder = tmp_path
    is_asked = threading.Event()

    def fails(method: str, path: str) -> bool:
        if method != "PUT":
            is_asked.set()
        return method != "PUT"

    object_store.fails = fails
    monkeypatch.setattr(faults, "RETRY_PAUSES_S", (2.0 * HANG_S,))
    out.keep_shard(tmp_path / "shard.00000.mds")
    assert is_asked.wait(HANG_S)
    closing = threading.Thread(target=out.close, daemon=True)
    closing.start()
    closing.join(HANG_S)
    assert not closing.is_alive()


@pytest.mark.parametrize("folder", ["../other", "train", 7, None])
def test_a_manifest_names_no_other_folder(folder: object, object_store: ObjectStore, tmp_path: Path) -> None:
    object_store.put(f"sets/a/{MANIFEST_NAME}", json.dumps({"format_version": 2, "generation": folder}).encode())
    with pytest.raises(DataError, match="which cannot hold a dataset"):
        open_set(URL, tmp_path / "cache")


@pytest.mark.slow
def test_ranks_train_on_it(
    corpus: Path,
    object_store: ObjectStore,
    tmp_path: Path,
    ranks: Callable[..., Ranks],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    _prepare(corpus, tmp_path / "work")
    _local(corpus, tmp_path / "set")
    losses = []
    for name, data in (("remote", URL), ("local", str(tmp_path / "set"))):
        command = build_train_command(tmp_path, tmp_path / name, "--data", data, "--steps", "3")
        ranks(command, 2).wait()
        losses.append(read_losses(tmp_path / name))
    assert losses[0] == losses[1] and len(losses[0]) == 3


KILLED = """
import sys, time
from pathlib import Path
from llmscale.data.prepare import tokenise
from llmscale.data.prepare.prepare_set import (PrepareOptions, prepare)
from llmscale.data.prepare.remote_set import RemoteSet
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.storage.objects import Store
from llmscale.data.tokenizers.load_tokenizer import load_tokenizer
tokenise.CHECKPOINT_INTERVAL_S = 0.02
tokenise.BATCH_CHARACTERS = 2000
def slowly(change):
    def change_slowly(self, *arguments):
        time.sleep(0.03)
        change(self, *arguments)
        time.sleep(0.03)
    return change_slowly
Store.upload, Store.write = slowly(Store.upload), slowly(Store.write)
source, url, work = sys.argv[1:]
options = PrepareOptions(seq_len=16, val_fraction=0.1, shard_bytes=4096)
print("ready", flush=True)
out = RemoteSet(url, work_dir=Path(work))
prepare(open_source(source), out, load_tokenizer("bytes"), options, num_workers=2)
"""


@pytest.mark.parametrize("num_kills", [pytest.param(number, marks=pytest.mark.slow) for number in (2, 12)])
def test_killed_at_any_moment_it_goes_on(
    num_kills: int, long_corpus: Path, object_store: ObjectStore, tmp_path: Path
) -> None:
    object_store.put("in/documents.jsonl", long_corpus.read_bytes())
    (tmp_path / "run.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "run.py"), "s3://bucket/in/*.jsonl", URL, str(tmp_path / "work")]
    rng = random.Random(num_kills)
    for number in range(num_kills):
        process = warm_start.Process(command, stdout=subprocess.PIPE)
        if number == 0:
            _wait_for_upload(process, object_store)
        else:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(rng.uniform(0.2, 1.5))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    warm_start.run(command, check=True)
    stored = object_store.files("sets/a/")
    expected = _local(long_corpus, tmp_path / "set")
    ours, theirs = (json.loads(files.pop(MANIFEST_NAME)) for files in (stored, expected))
    assert stored == expected
    assert ours["fingerprint"] == theirs["fingerprint"] and ours["splits"] == theirs["splits"]
    assert _is_empty(tmp_path / "work")


def _wait_for_upload(process: subprocess.Popen[bytes], store: ObjectStore) -> None:
    deadline_s = time.monotonic() + HANG_S
    while not any(method == "PUT" and "shard.00002" in path for method, path in store.requests):
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.02)


def test_the_commands_take_urls(
    corpus: Path, object_store: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("HOME", str(tmp_path))
    object_store.put("in/a.jsonl", corpus.read_bytes())
    prepare_it = ["data", "prepare", "--input", "s3://bucket/in/*.jsonl", "--tokenizer", "bytes", "--seq-len", "16"]
    assert main([*prepare_it, "--out", URL]) == 0
    assert main(["data", "verify", URL]) == 0
    assert main(["data", "inspect", URL]) == 0
    object_store.put("sets/a/train/shard.00000.mds", b"spoilt")
    assert main(["data", "verify", URL]) == 1
    assert "train" in capsys.readouterr().err
    for flags in (["--out", "folder", "--work-dir", "x"], ["--out", "s3:/bucket/a"]):
        assert main([*prepare_it, *flags]) == 2


@pytest.fixture
def relay(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    """Lead to the store through a relay that can damage answers. Tries end early."""
    monkeypatch.setattr(faults, "RETRY_PAUSES_S", (0.0, 0.0))
    with relay_to(int(object_store.url.rpartition(":")[2])) as relay:
        monkeypatch.setenv("S3_ENDPOINT_URL", relay.url)
        yield relay


def _harm(relay: Relay, harm: str, name: str, times: int) -> None:
    left = iter(range(times))
    relay.harm = lambda method, path: harm if method == "GET" and name in path and next(left, None) is not None else ""


def test_bytes_damaged_on_their_way_are_fetched_again(
    corpus: Path, object_store: ObjectStore, relay: Relay, tmp_path: Path
) -> None:
    _prepare(corpus, tmp_path / "work")
    _local(corpus, tmp_path / "set")
    expected = _read(str(tmp_path / "set"))
    for name in ("manifest.json", "index.json", "shard.00000"):
        _harm(relay, "flip", name, 1)
        assert main(["data", "verify", URL]) == 0, name
        _harm(relay, "cut", name, 1)
        assert _read(URL, tmp_path / f"cache-{name}") == expected, name


def test_text_cut_on_its_way_is_read_again(corpus: Path, object_store: ObjectStore, relay: Relay) -> None:
    object_store.put("in/a.jsonl", corpus.read_bytes())
    expected = list(open_source(str(corpus)).documents())
    _harm(relay, "cut", "/in/a.jsonl", 1)
    assert list(open_source(f"s3://{BUCKET}/in/a.jsonl").documents()) == expected
    _harm(relay, "cut", "list-type", 1)
    assert list(open_source(f"s3://{BUCKET}/in").documents()) == expected


def test_a_store_that_stalls_is_given_up_and_no_shard_is_called_damaged(
    corpus: Path,
    object_store: ObjectStore,
    relay: Relay,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _prepare(corpus, tmp_path / "work")
    monkeypatch.setattr(faults, "STALL_S", 2.5)
    monkeypatch.setattr(faults, "RETRY_PAUSES_S", ())
    monkeypatch.setattr(faults, "_LINE_S", (1.0, 10.0))
    for harm, name in (("hang", "manifest.json"), ("stall", "shard.0")):
        _harm(relay, harm, name, 1000)
        assert main(["data", "verify", URL]) == 2
        output = capsys.readouterr()
        assert "Waiting to " in output.err
        assert "no answer" in output.err.splitlines()[-1] and "damaged" not in output.out


def test_an_unfinished_set_says_so_and_how_to_end_it(
    corpus: Path,
    object_store: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(faults, "RETRY_PAUSES_S", ())
    object_store.fails = lambda method, path: method == "PUT" and "shard.00001" in path
    with pytest.raises(DataError):
        _prepare(corpus, tmp_path / "work")
    object_store.fails = lambda method, path: False
    for command in ("inspect", "verify"):
        assert main(["data", command, URL]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert f"{URL} is not finished" in line
        assert f"llmscale data prepare --input {corpus} --tokenizer bytes --seq-len 16 --out {URL}" in line
