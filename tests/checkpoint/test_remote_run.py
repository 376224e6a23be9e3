"""A run in a store as other machines read it: an untrusted latest.json, parts of records, tensors by range."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmscale.checkpoint import remote_run
from llmscale.checkpoint.inventory import find_checkpoint, find_checkpoints
from llmscale.checkpoint.manifest import (
    Pieces,
    Validation,
    checkpoints_folder,
    find_damage,
    hash_json,
    load_manifest,
    load_pieces,
    save_manifest,
    save_pieces,
)
from llmscale.checkpoint.remote_run import (
    Chunk,
    Holder,
    RunIndex,
    apply_part,
    drop_tensors,
    encode_part,
    fetch_chunks,
    fetch_run,
    fetch_runs_below,
    is_record_name,
    parse_index,
    update_copy,
)
from llmscale.checkpoint.tensor_files import StoredWeights, fetch_checkpoint, load_index, stored_chunks
from llmscale.config.user_paths import copy_of
from llmscale.errors import CheckpointError, LlmscaleError
from tests.object_store import BUCKET, ObjectStore

URL = f"s3://{BUCKET}/runs/x"
HOLDER = Holder("abc", "host", 7, "boot", 3, 15.0)
INDEX = RunIndex(
    "run",
    2,
    "abc",
    HOLDER,
    {"step-00000004": "e00001-step-00000004", "step-00000004.old-1": "e00001-step-00000004.1"},
    {"history.json": "{}"},
    {"1": {"0": 3}, "2": {"0": 1, "12": 2}},
)


# latest.json


def test_an_index_is_read_as_it_was_written() -> None:
    for index in (INDEX, replace(INDEX, holder=None), RunIndex("run")):
        assert parse_index(index.encode(), "latest.json") == index


def signed(body: object) -> bytes:
    return json.dumps({"run": body, "xxh3_128": hash_json(body)}).encode()  # type: ignore[arg-type]


FIELDS = json.loads(INDEX.encode())["run"]


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"format": None},
        {"id": 3},
        {"epoch": -1},
        {"epoch": "1"},
        {"epoch": 1.5},
        {"last_token": []},
        {"checkpoints": []},
        {"carried": 3},
        {"records": [1]},
        {"holder": {}},
        {"holder": "me"},
        *({"holder": {**FIELDS["holder"], "beat_s": value}} for value in (0, -1, 1e9, "1", None)),
        *({"holder": {**FIELDS["holder"], name: None}} for name in ("token", "host", "pid", "boot", "beat")),
        *({"checkpoints": {name: "e00001-step-00000004"}} for name in ("../../x", "step-1", "", "latest", "a/b")),
        *(
            {"checkpoints": {"step-00000004": folder}}
            for folder in ("../x", "e1-step-4", "/", "", None, 3, "e00001-step-00000004/..", "e00001-step-00000004.x")
        ),
        *({"carried": {name: "x"}} for name in ("../a", "latest", "step-00000004", "")),
        *({"carried": {"history.json": value}} for value in (None, 3, {})),
        *({"records": value} for value in ({"x": {}}, {"1": 3}, {"1": {"a": 1}}, {"1": {"0": -1}}, {"1": {"0": "2"}})),
        *({"records": value} for value in ({"1": {"0": True}}, {"-1": {}}, {"1": {"../0": 1}}, {"1": {"0": 1.5}})),
    ],
    ids=lambda change: json.dumps(change)[:60],
)
def test_hostile_indexes_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"latest\.json"):
        parse_index(signed({**FIELDS, **change}), "latest.json")


@pytest.mark.parametrize(
    "contents",
    [b"", b"{}", b"[]", b"\xff", b"{" * 100_000, INDEX.encode()[:-10], INDEX.encode().replace(b"host", b"hosT")],
)
def test_damaged_indexes_are_refused(contents: bytes) -> None:
    with pytest.raises(CheckpointError):
        parse_index(contents, "latest.json")


# Records


@pytest.mark.parametrize("name", ["metrics.jsonl", "logs/2026-11-23T10:00.txt", "samples/rank-00000.bin", ".hidden"])
def test_names_of_records(name: str) -> None:
    legal = name != "logs/2026-11-23T10:00.txt"  # no colons
    assert is_record_name(name) is legal


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "..",
        "../x",
        "a/../../x",
        "a//b",
        "a/",
        "~/x\0",
        "a\nb",
        "é",
        ".holder",
        ".remote.json",
        ".uploads/x",
        ".lock",
        "checkpoints/latest",
        "a/" * 8 + "b",
        "x" * 201,
    ],
)
def test_parts_write_only_files_of_a_run(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert not is_record_name(name)
    with pytest.raises(CheckpointError):
        apply_part(run, encode_part([(name, 0, b"x", True)]), "part")
    assert [*run.rglob("*")] == [] and [*tmp_path.iterdir()] == [run]


def test_parts_add_replace_and_end_files(tmp_path: Path) -> None:
    apply_part(tmp_path, encode_part([("a/b", 0, b"0123456789", True), ("c", 0, b"x", True)]), "part")
    apply_part(tmp_path, encode_part([("a/b", 0, b"AB", False), ("a/b", 10, b"ab", False)]), "part")
    assert (tmp_path / "a/b").read_bytes() == b"AB23456789ab"
    apply_part(tmp_path, encode_part([("a/b", 0, b"new", True)]), "part")
    assert (tmp_path / "a/b").read_bytes() == b"new" and (tmp_path / "c").read_bytes() == b"x"


@pytest.mark.parametrize(
    "files",
    [
        None,
        {},
        "x",
        [3],
        [["a"]],
        [["a", 0, "eA==", True, 1]],
        [["a", -1, "eA==", True]],
        [["a", 0, "x", True]],
        [["a", 5, "eA==", True]],
        [["a", 1 << 60, "eA==", True]],
        [["a", 0, "e A==", True]],
        [["a", 0, 3, True]],
        [["d/e/f", 0, "eA==", True], ["d/e", 0, "eA==", True]],
        [["d", 0, "eA==", True], ["d/e", 0, "eA==", True]],
        [["link", 0, "eA==", True]],
    ],
    ids=str,
)
def test_hostile_parts_are_refused(files: object, tmp_path: Path) -> None:
    run, mine = tmp_path / "run", tmp_path / "mine"
    run.mkdir()
    mine.write_text("mine")
    (run / "link").symlink_to(mine)
    with pytest.raises(CheckpointError):
        apply_part(run, json.dumps({"files": files}).encode(), "part")
    assert mine.read_text() == "mine"


# A run in the store


@pytest.fixture
def store(object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setenv("LLMSCALE_RUNS", str(tmp_path / "copies"))
    return object_store


def publish(store: ObjectStore, run: Path, steps: tuple[int, ...], **changes: Any) -> RunIndex:
    """Upload these checkpoints of a local run by hand."""
    names = {f"step-{step:08d}": f"e00001-step-{step:08d}" for step in steps}
    for name, remote in names.items():
        for path in (checkpoints_folder(run) / name).iterdir():
            store.put(f"runs/x/checkpoints/{remote}/{path.name}", path.read_bytes())
    index = replace(RunIndex("run", 1, "abc", checkpoints=names), **changes)
    store.put("runs/x/latest.json", index.encode())
    return index


@pytest.fixture
def published(store: ObjectStore, save_steps: Callable[..., list[str]], tmp_path: Path) -> Path:
    """Return a local run whose checkpoints of steps 1 and 2 are in the store too."""
    save_steps(1, 2)
    publish(store, tmp_path / "run", (1, 2))
    return tmp_path / "run"


def test_a_view_has_descriptions_and_fetches_tensors_when_they_are_read(published: Path, store: ObjectStore) -> None:
    view = fetch_run(copy_of(URL, "view"))
    assert [checkpoint.step for checkpoint in find_checkpoints(view).current] == [2, 1]
    assert (checkpoints_folder(view) / "latest").read_text() == "step-00000002\n"
    newest = checkpoints_folder(view) / "step-00000002"
    assert not [*newest.glob("*.distcp")] and find_damage(newest) is None
    weights = StoredWeights(newest)
    assert weights.sizes == {"w": 1000}
    (tensors,) = newest.glob("*.distcp")
    original = checkpoints_folder(published) / "step-00000002" / tensors.name
    assert tensors.stat().st_size == original.stat().st_size
    assert tensors.read_bytes() != original.read_bytes(), "only the weights"
    assert fetch_checkpoint(newest) is None
    fetched = tensors.read_bytes()
    for entry in load_index(newest).values():
        for chunk in stored_chunks(entry):
            end = chunk.offset + chunk.num_bytes
            assert fetched[chunk.offset : end] == original.read_bytes()[chunk.offset : end]


def test_the_copy_follows_the_store(published: Path, store: ObjectStore) -> None:
    view = fetch_run(copy_of(URL, "view"))
    assert fetch_checkpoint(checkpoints_folder(view) / "step-00000001") is None
    publish(store, published, (2,), epoch=2)
    fetch_run(view)
    assert [path.name for path in checkpoints_folder(view).iterdir() if path.is_dir()] == ["step-00000002"]
    store.client.delete_object(Bucket=BUCKET, Key="runs/x/latest.json")
    with pytest.raises(CheckpointError, match="holds no run"):
        fetch_run(view)


def test_the_copy_names_the_best_of_what_is_published(published: Path, store: ObjectStore) -> None:
    for step, loss in ((1, 1.5), (2, 2.5)):
        folder = checkpoints_folder(published) / f"step-{step:08d}"
        save_manifest(folder, replace(load_manifest(folder), validation=Validation(loss, "8 of a set")))
    publish(store, published, (1, 2), epoch=2)
    best = copy_of(f"{URL}/checkpoints/best", "view")
    assert find_checkpoint(fetch_run(best)).name == best.read_text().strip() == "step-00000001"


def test_a_bounded_copy_drops_the_tensors_of_other_checkpoints(published: Path, store: ObjectStore) -> None:
    view = fetch_run(copy_of(URL, "view"))
    assert fetch_checkpoint(checkpoints_folder(view) / "step-00000001") is None
    publish(store, published, (1, 2), epoch=2)
    fetch_run(view)
    assert not [*view.rglob("*.distcp")]


def test_no_listing_decides(published: Path, store: ObjectStore) -> None:
    """An object that a listing shows too early, or not yet, changes nothing."""
    for path in (checkpoints_folder(published) / "step-00000002").iterdir():
        store.put(f"runs/x/checkpoints/e00002-step-00000003/{path.name}", path.read_bytes())
    store.fails = lambda method, path: method == "GET" and path.strip("/") == BUCKET
    view = fetch_run(copy_of(URL, "view"))
    assert [checkpoint.step for checkpoint in find_checkpoints(view).current] == [2, 1]
    assert fetch_checkpoint(checkpoints_folder(view) / "step-00000002") is None


@pytest.mark.parametrize("name", ["__0_0.distcp", "tensors.json", "state.json", "manifest.json"])
def test_altered_bytes_are_found(name: str, published: Path, store: ObjectStore) -> None:
    key = f"runs/x/checkpoints/e00001-step-00000002/{name}"
    contents = bytearray((checkpoints_folder(published) / "step-00000002" / name).read_bytes())
    contents[len(contents) // 2] ^= 1
    store.put(key, bytes(contents))
    view = fetch_run(copy_of(URL, "view"))
    folder = checkpoints_folder(view) / "step-00000002"
    assert find_damage(folder) or fetch_checkpoint(folder)
    assert fetch_checkpoint(checkpoints_folder(view) / "step-00000001") is None


@pytest.mark.parametrize("name", ["__0_0.distcp", "tensors.json"])
@pytest.mark.parametrize("contents", [None, b"", b"short"])
def test_missing_and_cut_objects_are_found(
    name: str, contents: bytes | None, published: Path, store: ObjectStore
) -> None:
    key = f"runs/x/checkpoints/e00001-step-00000002/{name}"
    store.client.delete_object(Bucket=BUCKET, Key=key) if contents is None else store.put(key, contents)
    assert fetch_checkpoint(checkpoints_folder(fetch_run(copy_of(URL, "view"))) / "step-00000002")


def test_a_description_that_cannot_be_fetched_leaves_no_half_checkpoint(published: Path, store: ObjectStore) -> None:
    store.fails = lambda method, path: path.endswith("e00001-step-00000002/state.json")
    view = copy_of(URL, "view")
    with pytest.raises(LlmscaleError):
        fetch_run(view)
    assert not (checkpoints_folder(view) / "step-00000002").exists()
    store.fails = lambda method, path: False
    fetch_run(view)
    assert fetch_checkpoint(checkpoints_folder(view) / "step-00000002") is None


def test_a_trainers_copy_is_kept_while_it_is_the_newest(published: Path, store: ObjectStore, tmp_path: Path) -> None:
    run = copy_of(URL, "train")
    run.parent.mkdir(parents=True)
    shutil.copytree(published, run)
    (run / ".holder").write_text("abc\n")
    index = remote_run.read_index(run)
    assert index is not None
    update_copy(run, index)
    assert [*run.rglob("*.distcp")], "nobody has trained it since"
    update_copy(run, replace(index, epoch=2, last_token="other"))
    assert not [*run.rglob("*.distcp")] and not (run / ".holder").exists()
    assert load_pieces(checkpoints_folder(run) / "step-00000002") == Pieces((), "e00001-step-00000002")
    with pytest.raises(CheckpointError, match="holds no run"):
        update_copy(run, None)
    assert [*run.rglob("step-*")], "the store may be the wrong one"


def test_dropping_tensors_keeps_what_the_store_does_not_have(published: Path) -> None:
    folder = checkpoints_folder(published) / "step-00000001"
    drop_tensors(folder)
    assert [*folder.glob("*.distcp")]
    save_pieces(folder, Pieces(("tensors.json", "__0_0.distcp"), "e00001-step-00000001"))
    drop_tensors(folder)
    assert not [*folder.glob("*.distcp")] and find_damage(folder) is None


def test_a_view_keeps_the_tensors_of_checkpoints_in_use(published: Path) -> None:
    view = fetch_run(copy_of(URL, "view"))

    def fetch(step: int) -> set[str]:
        assert fetch_checkpoint(checkpoints_folder(view) / f"step-{step:08d}") is None
        return {path.parent.name for path in view.rglob("*.distcp")}

    assert fetch(1) == {"step-00000001"} and fetch(2) == {"step-00000001", "step-00000002"}
    for path in (checkpoints_folder(view) / "step-00000001").glob("*.distcp"):
        os.utime(path, (0, 0))
    assert fetch(2) == {"step-00000002"}


def test_chunks_are_fetched_by_few_ranges(published: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoints_folder(fetch_run(copy_of(URL, "view"))) / "step-00000002"
    chunks = [chunk for entry in load_index(folder).values() for chunk in stored_chunks(entry)]
    store.requests.clear()
    fetch_chunks(folder, chunks)
    assert sum(method == "GET" and path.endswith(".distcp") for method, path in store.requests) == 1
    monkeypatch.setattr(remote_run, "_RANGE_BYTES", 1)
    assert len([*remote_run._ranges(chunks)]) == len(chunks) == 2
    assert fetch_checkpoint(folder) is None
    neighbours = [Chunk("a", 0, 10, ""), Chunk("a", 10, 5, ""), Chunk("b", 15, 5, ""), Chunk("b", 1 << 20, 5, "")]
    monkeypatch.setattr(remote_run, "_RANGE_BYTES", 1 << 30)
    assert [len(group) for group in remote_run._ranges(neighbours[::-1])] == [2, 1, 1]


def test_an_answer_that_was_damaged_once_is_fetched_again(
    published: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints_folder(fetch_run(copy_of(URL, "view"))) / "step-00000002"
    load_index(folder)
    read, damaged = remote_run.Store.read, []

    def read_damaged(self: Any, url: str, begin: int = 0, end: int | None = None) -> bytes:
        data = read(self, url, begin, end)
        if not damaged:
            damaged.append(url)
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    monkeypatch.setattr(remote_run.Store, "read", read_damaged)
    assert fetch_checkpoint(folder) is None and damaged


def test_a_count_of_records_that_do_not_exist_ends_at_the_first(published: Path, store: ObjectStore) -> None:
    publish(store, published, (2,), records={"1": {"0": 10**15}})
    store.requests.clear()
    with pytest.raises(LlmscaleError):
        fetch_run(copy_of(URL, "view"))
    assert len(store.requests) < 1000


def test_all_runs_below_a_url_are_found(published: Path, store: ObjectStore) -> None:
    contents = store.files("runs/x/latest.json")[""]
    for key in ("runs/not a name/latest.json", "runs/file", "runs/z/metrics.jsonl"):
        store.put(key, contents)
    store.put("runs/y/latest.json", RunIndex("other").encode())
    folder = copy_of(f"s3://{BUCKET}/runs", "view")
    fetch_runs_below(folder / "x", print)
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["x"]
    fetch_runs_below(folder, print)
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["x", "y"]
