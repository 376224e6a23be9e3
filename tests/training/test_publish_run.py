"""One trainer at a time, and what a trainer writes to a store, in this process."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from llmscale.checkpoint.inventory import delete_checkpoint, set_aside_existing
from llmscale.checkpoint.manifest import checkpoints_folder, load_pieces
from llmscale.checkpoint.remote_run import (
    BEAT_VARIABLE,
    BEATS_MISSED,
    TOKEN_NAME,
    Lease,
    fetch_run,
    prune_run,
    read_index,
    take_lease,
    update_copy,
)
from llmscale.checkpoint.save import CheckpointSaver
from llmscale.checkpoint.tensor_files import fetch_checkpoint
from llmscale.config.user_paths import copy_of
from llmscale.data.storage import faults
from llmscale.data.storage.faults import Overtaken
from llmscale.engine.collectives import Disks
from llmscale.engine.process_group import World
from llmscale.errors import CheckpointError, ConfigError, DataError
from llmscale.training import publish_run
from llmscale.training.publish_run import RecordUploads, RunPublisher, open_publisher
from tests.checkpoint.conftest import build_snapshot
from tests.conftest import HANG_S
from tests.object_store import ObjectStore

URL = "s3://bucket/runs/x"


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, object_store: ObjectStore) -> None:
    monkeypatch.setenv("LLMSCALE_RUNS", str(tmp_path / "copies"))
    monkeypatch.setenv(BEAT_VARIABLE, "0.1")
    monkeypatch.setattr(faults, "RETRY_PAUSES_S", (0.01, 0.1))


@pytest.fixture
def run() -> Path:
    return copy_of(URL, "train")


def take(run: Path) -> Lease:
    return take_lease(run, lambda line: None)[0]


def pretend(lease: Lease, **holder: object) -> None:
    """Change what the store says of the holder."""
    assert lease.index.holder is not None
    changed = replace(lease.index.holder, **holder)  # type: ignore[arg-type]
    lease.update(lambda index: replace(index, holder=changed))


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


# The lease


def test_of_two_that_start_at_once_one_is_refused_and_writes_nothing(run: Path, object_store: ObjectStore) -> None:
    for _ in range(2):
        object_store.client.delete_object(Bucket="bucket", Key="runs/x/latest.json")
        taken, refused = [], []
        barrier = threading.Barrier(3)

        def start(taken: list[Lease] = taken, refused: list[str] = refused, barrier: threading.Barrier = barrier):
            barrier.wait()
            try:
                taken.append(take(run))
            except ConfigError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=start) for _ in range(3)]
        for thread in threads:
            thread.start()
        # Another start sees a process that exists, and waits for its signs of life.
        while sum(not thread.is_alive() for thread in threads) < 3:
            faults.time.sleep(0.02)
            for lease in taken:
                lease.update(lambda index: index)
        assert (len(taken), len(refused)) == (1, 2)
        index = read_index(run)
        assert index is not None and index.last_token == taken[0].index.last_token and index.epoch == 1
        assert set(object_store.files("runs/x/")) == {"latest.json"}, "probes are removed"


def test_a_dead_holder_of_this_boot_is_replaced_at_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BEAT_VARIABLE, "600")
    old = take(run)
    pretend(old, pid=ended_process())
    new = take(run)
    assert new.index.epoch == 2


def test_a_silent_holder_is_replaced_after_missed_beats(run: Path) -> None:
    old = take(run)
    pretend(old, boot="another", pid=1)
    lines: list[str] = []
    began = faults.time.monotonic()
    new, before = take_lease(run, lines.append)
    waited_s = faults.time.monotonic() - began
    assert waited_s >= 0.1 * BEATS_MISSED and len(lines) == 1 and URL in lines[0]
    assert before is not None and before.epoch == 1 and new.index.epoch == 2


def test_a_holder_that_releases_meanwhile_is_replaced(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BEAT_VARIABLE, "0.5")
    old = take(run)
    pretend(old, boot="another")
    release = threading.Timer(0.3, old.release)
    release.start()
    assert take(run).index.epoch == 2
    release.join()


def test_whoever_was_replaced_can_write_nothing_more(run: Path) -> None:
    old = take(run)
    pretend(old, pid=ended_process())
    new = take(run)
    for action in (lambda: old.update(lambda index: replace(index, checkpoints={"x": "y"})), old.release):
        with pytest.raises(Overtaken):
            action()
    new.update(lambda index: index)
    assert read_index(run) == new.index
    new.release()
    with pytest.raises(Overtaken):
        old.release()
    assert take(run).index.epoch == 3


def test_a_write_whose_answer_never_came_is_no_other_trainer(
    run: Path, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = take(run)
    store, replace_it = lease._store, lease._store.write_if

    def lose(url: str, contents: bytes, version: str) -> str:
        replace_it(url, contents, version)
        raise DataError("no answer")

    monkeypatch.setattr(store, "write_if", lose)
    with pytest.raises(DataError):
        lease.update(lambda index: index)
    monkeypatch.setattr(store, "write_if", replace_it)
    lease.update(lambda index: index)
    lease.release()
    index = read_index(run)
    assert index is not None and index.holder is None


# Records


def send(records: RecordUploads, object_store: ObjectStore) -> None:
    records.send(lambda url, contents: object_store.put(url.removeprefix("s3://bucket/"), contents))


def publish_records(lease: Lease, **by_rank: RecordUploads) -> None:
    counts = {rank.removeprefix("rank"): records.num_parts for rank, records in by_rank.items()}
    lease.update(lambda index: replace(index, records={**index.records, str(index.epoch): counts}))


def seen_elsewhere(name: str) -> dict[str, bytes]:
    """Return the files of a fresh copy."""
    copy = fetch_run(copy_of(URL, "view"))
    files = {path.relative_to(copy).as_posix(): path for path in copy.rglob("*") if path.is_file()}
    return {path: files[path].read_bytes() for path in files if not path.startswith((".", "checkpoints/"))}


def test_records_arrive_in_parts_as_they_are(run: Path, object_store: ObjectStore) -> None:
    run.mkdir(parents=True)
    lease = take(run)
    records = RecordUploads(run, 1, 0, [0])
    wanted: dict[str, bytes] = {}

    def write(name: str, contents: bytes) -> None:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(contents)
        wanted[name] = contents

    write("config.json", b"{}")
    write("metrics.jsonl", b"line\n" * 30_000)
    write("logs/rank-00000.log", bytes(100_000))
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "latest").write_text("step-00000001\n")
    (run / ".lock").write_text("mine")
    (run / "link").symlink_to("/etc/passwd")
    send(records, object_store)
    publish_records(lease, rank0=records)
    assert seen_elsewhere("a") == wanted
    before = records.num_parts
    send(records, object_store)
    assert records.num_parts == before, "nothing has changed"
    write("metrics.jsonl", wanted["metrics.jsonl"] + b"more\n")
    write("logs/rank-00000.log", bytes(100_000) + b"tail")
    write("config.json", b"{'a': 1}")
    send(records, object_store)
    publish_records(lease, rank0=records)
    assert seen_elsewhere("a") == wanted
    newest = max(name for name in object_store.files("runs/x/records/"))
    assert len(object_store.files("runs/x/records/")[newest]) < 20_000, "only what was added"
    write("metrics.jsonl", b"short\n")
    send(records, object_store)
    publish_records(lease, rank0=records)
    assert seen_elsewhere("a") == wanted


def test_a_start_on_the_same_disks_sends_its_own_records_and_no_stale_ones(
    tmp_path: Path, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's disk has a copy of rank 0's metrics from the last time that the run moved."""

    def on_disk(node: int) -> Path:
        monkeypatch.setenv("LLMSCALE_RUNS", str(tmp_path / f"node-{node}"))
        return copy_of(URL, "train")

    first = on_disk(9)
    lease = take(first)
    first.mkdir(parents=True)
    (first / "metrics.jsonl").write_bytes(b"a" * 100_000)
    records = RecordUploads(first, 1, 0, [0])
    send(records, object_store)
    publish_records(lease, rank0=records)
    lease.release()
    for epoch in (2, 3):
        lease, before = take_lease(on_disk(0), print)
        of_ranks = []
        for rank in (0, 1):
            run = on_disk(rank)
            update_copy(run, before)
            (run / TOKEN_NAME).write_text(lease.index.last_token)
            of_ranks.append(RecordUploads(run, epoch, rank, [rank]))
        with (on_disk(0) / "metrics.jsonl").open("ab") as file:
            file.write(b"b" * 1000)
        (on_disk(1) / "rank-1.log").write_bytes(b"c" * epoch)
        for rank, records in enumerate(of_ranks):
            on_disk(rank)
            send(records, object_store)
        if epoch == 2:
            # Lines that the second start could not send.
            with (on_disk(0) / "metrics.jsonl").open("ab") as file:
                file.write(b"d" * 1000)
        on_disk(0)
        publish_records(lease, rank0=of_ranks[0], rank1=of_ranks[1])
        lease.release()
    on_disk(5)
    assert seen_elsewhere("x") == {
        "metrics.jsonl": b"a" * 100_000 + b"b" * 1000 + b"d" * 1000 + b"b" * 1000,
        "rank-1.log": b"ccc",
    }


# Checkpoints


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield World(0, 1, 0, (1,), torch.device("cpu"), "cpu", dist.group.WORLD, Disks((0,)))
    dist.destroy_process_group()


class Trainer:
    """One start of the run, with one rank."""

    def __init__(self, run: Path, world: World, keep_every: int = 0) -> None:
        self.lines: list[str] = []
        self.lost: list[str] = []
        self.run = run
        publisher = open_publisher(run, keep_every, world, self.lines.append, self.lost.append)
        assert publisher is not None
        self.publisher: RunPublisher = publisher
        self._saver = CheckpointSaver(
            run,
            keep_last=2,
            keep_every=keep_every,
            in_background=False,
            report=self.lines.append,
            disks=world.disks,
            on_saved=publisher.saved,
        )
        publisher.start(None)

    def save(self, *steps: int) -> None:
        for step in steps:
            self._saver.save(build_snapshot(step))

    def wait_for(self, text: str) -> None:
        deadline = faults.time.monotonic() + HANG_S
        while not any(text in line for line in self.lines):
            assert faults.time.monotonic() < deadline, self.lines
            faults.time.sleep(0.01)

    def end(self) -> None:
        try:
            self.publisher.finish()
        finally:
            self.publisher.close()


def named(run: Path) -> dict[str, str]:
    index = read_index(run)
    assert index is not None
    return dict(index.checkpoints)


def check_published(*names: str) -> None:
    """Verify checkpoints on a new disk."""
    view = fetch_run(copy_of(URL, "view"))
    for name in names:
        assert fetch_checkpoint(checkpoints_folder(view) / name) is None


def stored(object_store: ObjectStore) -> set[str]:
    return {name.split("/")[0] for name in object_store.files("runs/x/checkpoints/")}


def test_saved_checkpoints_are_published_and_kept_as_the_run_keeps_them(
    run: Path, world: World, object_store: ObjectStore
) -> None:
    trainer = Trainer(run, world)
    for step in (1, 2, 3):
        trainer.save(step)
        trainer.wait_for(f"published {URL}/checkpoints/e00001-step-{step:08d}")
    trainer.end()
    assert named(run) == {f"step-0000000{step}": f"e00001-step-0000000{step}" for step in (2, 3)}
    assert stored(object_store) == {"e00001-step-00000002", "e00001-step-00000003"}
    check_published("step-00000002")
    tensors = [path for path in checkpoints_folder(run).glob("*/*.distcp")]
    assert {path.parent.name for path in tensors} == {"step-00000003"}, "the disk keeps the newest checkpoint's tensors"


def test_publishing_ends_whatever_its_thread_waits_for(
    run: Path, world: World, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish_run, "_RECORDS_S", 0.002)
    monkeypatch.setattr(publish_run, "_LONGEST_S", 0.002)
    monkeypatch.setattr(faults, "RETRY_PAUSES_S", (0.0, 0.002))
    draw = random.Random(0)
    for step in range(1, 11):
        trainer = Trainer(run, world)
        trainer.save(step)
        faults.time.sleep(0.002 * draw.randint(0, 20))
        ending = threading.Thread(target=trainer.end, daemon=True)
        ending.start()
        ending.join(HANG_S)
        assert not ending.is_alive()
        assert f"step-{step:08d}" in named(run)


def test_a_step_that_is_saved_again_replaces_nothing_half(run: Path, world: World, object_store: ObjectStore) -> None:
    trainer = Trainer(run, world)
    trainer.save(1)
    while load_pieces(checkpoints_folder(run) / "step-00000001") is None:
        faults.time.sleep(0.01)
    object_store.fails = lambda method, path: method == "PUT" and path.endswith("manifest.json")
    set_aside_existing(checkpoints_folder(run) / "step-00000001")
    trainer.save(1)
    trainer.wait_for("WARNING")
    (folder,) = named(run).values()
    assert {f"{folder}/{name}" for name in ("manifest.json", "state.json")} < set(
        object_store.files("runs/x/checkpoints/")
    )
    check_published("step-00000001")
    object_store.fails = lambda method, path: False
    trainer.end()
    assert set(named(run)) == {"step-00000001", "step-00000001.old-1"}
    assert named(run)["step-00000001.old-1"] == folder
    delete_checkpoint(checkpoints_folder(run) / "step-00000001.old-1")
    later = Trainer(run, world)
    later.save(2)
    later.end()
    assert set(named(run)) == {"step-00000001", "step-00000002"} and folder not in stored(object_store)


def test_a_trainer_that_was_replaced_publishes_nothing_and_is_told(
    run: Path, world: World, object_store: ObjectStore
) -> None:
    trainer = Trainer(run, world)
    trainer.save(1)
    trainer.wait_for("published")
    assert trainer.publisher._lease is not None
    pretend(trainer.publisher._lease, boot="another")
    trainer.publisher._lease._turn.acquire()  # it is suspended
    other = take(run)
    before = object_store.files("runs/x/latest.json")
    trainer.publisher._lease._turn.release()
    trainer.save(2)
    with pytest.raises(CheckpointError, match="another trainer has taken"):
        trainer.end()
    assert len(trainer.lost) == 1 and URL in trainer.lost[0]
    assert object_store.files("runs/x/latest.json") == before
    assert list(named(run)) == ["step-00000001"]
    other.update(lambda index: index)
    other.release()


def test_signs_of_life_do_not_wait_for_a_slow_upload(run: Path, world: World, object_store: ObjectStore) -> None:
    trainer = Trainer(run, world)
    held, go_on = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> bool:
        if method == "PUT" and path.endswith(".distcp"):
            held.set()
            go_on.wait(HANG_S)
        return False

    object_store.fails = hold
    trainer.save(1)
    assert held.wait(HANG_S)
    try:
        with pytest.raises(ConfigError, match="in use"):
            take(run)
    finally:
        go_on.set()
    trainer.end()
    assert list(named(run)) == ["step-00000001"]


def test_training_goes_on_while_the_store_refuses(
    run: Path, world: World, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish_run, "_END_S", 0.5)
    trainer = Trainer(run, world)
    trainer.save(1)
    trainer.wait_for("published")
    object_store.fails = lambda method, path: method == "PUT"
    trainer.save(2, 3, 4)
    trainer.wait_for("WARNING")
    with pytest.raises(CheckpointError, match="the same command"):
        trainer.end()
    assert list(named(run)) == ["step-00000001"]
    assert sum("WARNING" in line for line in trainer.lines) == 1
    object_store.fails = lambda method, path: False
    check_published("step-00000001")


def answer_again(object_store: ObjectStore, but_not_for: str) -> None:
    """End an outage, except for the steps of these digits: an attempt at one of them may still be retried."""
    object_store.fails = lambda method, path: method == "PUT" and re.search(f"step-0000000[{but_not_for}]", path)


def test_only_the_newest_waits_and_is_published_once_the_store_answers(
    run: Path, world: World, object_store: ObjectStore
) -> None:
    object_store.fails = lambda method, path: method == "PUT" and "checkpoints/" in path
    trainer = Trainer(run, world)
    trainer.save(1, 2, 3)
    trainer.wait_for("WARNING")
    answer_again(object_store, but_not_for="12")
    trainer.wait_for("written again")
    trainer.end()
    assert list(named(run)) == ["step-00000003"]
    object_store.fails = lambda method, path: False
    later = Trainer(run, world)
    later.end()
    assert stored(object_store) == {"e00001-step-00000003"}, "what was never published is removed"


def test_checkpoints_to_keep_wait_for_the_store_too(run: Path, world: World, object_store: ObjectStore) -> None:
    object_store.fails = lambda method, path: method == "PUT" and "checkpoints/" in path
    trainer = Trainer(run, world, keep_every=2)
    trainer.save(1, 2, 3, 4, 5)
    trainer.wait_for("WARNING")
    answer_again(object_store, but_not_for="13")
    trainer.end()
    assert list(named(run)) == ["step-00000002", "step-00000004", "step-00000005"]
    tensors = {path.parent.name for path in checkpoints_folder(run).glob("*/*.distcp")}
    assert tensors == {"step-00000005"} and not [*(run / ".uploads").rglob("*.distcp")]


def test_listings_from_before_the_run_cost_only_space(run: Path, world: World, object_store: ObjectStore) -> None:
    object_store.lists_nothing = True
    for start, steps in ((1, (1, 2, 3)), (2, (4,))):
        trainer = Trainer(run, world)
        for step in steps:
            trainer.save(step)
            trainer.wait_for(f"e{start:05d}-step-{step:08d}")
        trainer.end()
    assert list(named(run)) == ["step-00000003", "step-00000004"]
    check_published(*named(run))
    object_store.lists_nothing = False
    assert stored(object_store) > set(named(run).values())
    Trainer(run, world).end()
    assert stored(object_store) == set(named(run).values())


def test_a_start_replaces_the_records_of_earlier_ones(run: Path, world: World, object_store: ObjectStore) -> None:
    for start in (1, 2, 3):
        trainer = Trainer(run, world)
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(b"%d\n" % start)
        trainer.end()
        index = read_index(run)
        assert index is not None and list(index.records) == [str(start)]
        assert seen_elsewhere("x")["metrics.jsonl"].splitlines() == [b"%d" % number for number in range(1, start + 1)]
    assert {name.split("/")[0] for name in object_store.files("runs/x/records/")} == {"e00002", "e00003"}


def test_pruning_waits_for_the_trainer_and_keeps_its_copy(run: Path, world: World, object_store: ObjectStore) -> None:
    trainer = Trainer(run, world)
    trainer.save(1, 2)
    trainer.wait_for("published")
    with pytest.raises(ConfigError, match="in use"):
        prune_run(run, ["step-00000001"], print)
    trainer.end()
    names = sorted(named(run))
    prune_run(copy_of(URL, "view"), names[:-1], print)
    assert list(named(run)) == names[-1:]
    assert stored(object_store) == {f"e00001-{names[-1]}"}
    index = read_index(run)
    assert index is not None and index.holder is None
    update_copy(run, index)
    assert (run / TOKEN_NAME).exists(), "the trainer's copy is still the newest"
