from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from llmscale.data.loader import Feed, FeedPlan, rank_sample_ids
from llmscale.data.order.sample_order import (
    WHOLE_SET_BYTES,
    OrderSettings,
    RankLayout,
    SampleOrder,
    build_order,
    shard_batch,
)
from llmscale.data.shards.cache import SetLocation, open_set
from llmscale.data.shards.manifest import ShardInfo
from llmscale.data.shards.token_shards import TokenShards
from llmscale.errors import ConfigError, DataError, MachineError
from tests import warm_start
from tests.conftest import HANG_S, shared_memory_segments

GLOBAL_BATCH = 24
#: World sizes 1, 2, 3, 4, 6 and 8 on one to six nodes, equal and unequal.
LAYOUTS = [
    (1,),
    (2,),
    (1, 1),
    (3,),
    (1, 1, 1),
    (2, 1),
    (4,),
    (2, 2),
    (6,),
    (3, 3),
    (2, 2, 2),
    (1,) * 6,
    (8,),
    (4, 4),
    (5, 3),
]


@pytest.fixture(scope="module")
def location(make_set: Callable[..., Path]) -> SetLocation:
    """About 350 samples in about 4 shards; not divisible by the batch or the rows."""
    dataset = open_set(str(make_set(40)))
    assert dataset.manifest.splits["train"].num_samples % GLOBAL_BATCH
    return dataset


def _settings(shuffle: bool) -> OrderSettings:
    return OrderSettings(seed=11, shuffle=shuffle, num_canonical_nodes=12, block_size=16)


def build_feed(
    location: SetLocation, plan: FeedPlan, *, num_workers: int = 0, shuffle: bool = True, start_sample: int = 0
) -> Feed:
    order = build_order(location, _settings(shuffle))
    return Feed(TokenShards(location, "train"), order, plan, start_sample=start_sample, num_workers=num_workers)


def _run_ranks(
    location: SetLocation,
    layout: tuple[int, ...],
    micro: int,
    start: int,
    stop: int,
    *,
    shuffle: bool,
    num_workers: int,
) -> dict[int, np.ndarray]:
    """Sorted ids of each global batch of steps start..stop-1, read by every rank's own feed."""
    world = sum(layout)
    accumulation = GLOBAL_BATCH // world // micro
    shards = TokenShards(location, "train")
    steps: dict[int, list[np.ndarray]] = {step: [] for step in range(start, stop)}
    for rank in range(world):
        plan = FeedPlan(RankLayout(rank, layout), micro, accumulation)
        feed = build_feed(location, plan, num_workers=num_workers, shuffle=shuffle, start_sample=start * GLOBAL_BATCH)
        for step in range(start, stop):
            for _ in range(accumulation):
                batch = next(feed)
                ids = batch.sample_ids.numpy()
                assert batch.tokens.dtype == torch.int64
                assert np.array_equal(batch.tokens.numpy(), shards.read(ids))
                steps[step].append(ids)
        feed.close()
    return {step: np.sort(np.concatenate(ids)) for step, ids in steps.items()}


@pytest.mark.parametrize(
    ("seed", "shuffle"),
    [
        (0, True),
        (1, False),
        *(pytest.param(seed, shuffle, marks=pytest.mark.slow) for seed in range(2, 6) for shuffle in (True, False)),
    ],
)
def test_any_history_of_restarts_gives_the_single_process_sequence(
    location: SetLocation, seed: int, shuffle: bool
) -> None:
    """Two and a half epochs, three restarts at random steps with random layouts, micro-batches and workers."""
    rng = random.Random(f"{seed} {shuffle}")
    order = build_order(location, _settings(shuffle))
    num_steps = int(2.5 * order.num_samples) // GLOBAL_BATCH
    borders = [0, *sorted(rng.sample(range(1, num_steps), 3)), num_steps]
    history: dict[int, np.ndarray] = {}
    for start, stop in pairwise(borders):
        layout = rng.choice(LAYOUTS)
        share = GLOBAL_BATCH // sum(layout)
        micro = rng.choice([size for size in range(1, share + 1) if share % size == 0])
        history |= _run_ranks(location, layout, micro, start, stop, shuffle=shuffle, num_workers=rng.randrange(4))
    single = order.sample_ids(np.arange(num_steps * GLOBAL_BATCH))
    assert list(history) == list(range(num_steps))
    for step, ids in history.items():
        assert np.array_equal(ids, np.sort(single[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]))
    consumed = np.concatenate([history[step] for step in range(num_steps)])
    counts = np.bincount(consumed, minlength=order.num_samples)
    assert set(counts) <= {2, 3}


def test_nodes_fetch_only_their_rows_of_a_remote_set(location: SetLocation, tmp_path: Path) -> None:
    """Over a whole epoch each of two nodes needs about half of the samples' shards, and they share none but by cuts."""
    order = SampleOrder(np.full(64, 10), seed=1, num_canonical_nodes=4, block_size=20)
    shards_of_node = []
    for node in range(2):
        plan = FeedPlan(RankLayout(node, (1, 1)), 8, 1)
        ids = np.concatenate([rank_sample_ids(order, plan, 16 * step) for step in range(3 * 40)])
        assert np.array_equal(ids, rank_sample_ids(order, plan, 0, 3 * 40)), "found together, they are the same"
        shards_of_node.append(set((ids // 10).tolist()))
    assert len(shards_of_node[0] & shards_of_node[1]) <= 3
    assert all(30 <= len(shards) <= 34 for shards in shards_of_node)


@pytest.mark.parametrize("layout", [(1, 1), (1, 1, 1), (2, 2, 2, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("batch", [24, 56 * 3])
def test_nodes_read_only_their_rows_at_any_batch(layout: tuple[int, ...], batch: int) -> None:
    """Of the default order of 400 shards, over three epochs. A batch that straddles two epochs may ask for more."""
    order = SampleOrder(np.full(400, 25) + np.arange(400) % 3, seed=1)
    nodes = np.repeat(np.arange(len(layout)), layout)
    turns = np.repeat(np.arange(len(layout)), np.array(layout) // np.gcd.reduce(layout))
    rows = order.rows(np.arange(3 * order.num_samples))
    for first in range(0, len(rows) - batch, batch):
        if first // order.num_samples != (first + batch - 1) // order.num_samples:
            continue
        positions = np.arange(first, first + batch)
        for rank in range(sum(layout)):
            mine = shard_batch(positions, rows[positions], RankLayout(rank, layout))
            assert set(turns[rows[mine] % len(turns)]) == {nodes[rank]}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_damage_is_one_clear_error(location: SetLocation, tmp_path: Path, num_workers: int) -> None:
    copied = Path(shutil.copytree(location.folder, tmp_path / "set"))
    shard = copied / "train" / "shard.00001.mds"
    contents = bytearray(shard.read_bytes())
    contents[-1] ^= 1
    # Before the workers start: each checks a shard's hash once, when it first reads from it.
    shard.write_bytes(contents)
    feed = build_feed(open_set(str(copied)), FeedPlan(RankLayout(0, (1,)), 1, 1), num_workers=num_workers)
    with pytest.raises(DataError, match=rf"^Shard {shard} was altered: [^\n]*$"):
        for _ in range(200):
            next(feed)
    assert not multiprocessing.active_children()


@pytest.fixture
def feed_with_workers(location: SetLocation) -> Iterator[Feed]:
    feed = build_feed(location, FeedPlan(RankLayout(0, (1,)), 2, 1), num_workers=2)
    next(feed)
    yield feed
    feed.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_worker_is_named_with_its_signal_and_is_not_the_users_mistake(
    feed_with_workers: Feed, number: signal.Signals
) -> None:
    worker = feed_with_workers._workers[1]
    assert worker.pid is not None
    os.kill(worker.pid, number)
    with pytest.raises(
        MachineError, match=rf"Data worker 1 \(process {worker.pid}\) was killed by {number.name}.*--num-workers"
    ):
        for _ in range(1000):  # what it sent before is trained on
            next(feed_with_workers)


def test_a_worker_killed_halfway_through_a_batch_leaves_nobody_waiting(make_set: Callable[..., Path]) -> None:
    """The rest of it never comes, and the pipe does not end: another worker has it open, too."""
    location = open_set(str(make_set(300)))
    plan = FeedPlan(RankLayout(0, (1,)), 2048, 1)  # more than a pipe holds
    feed = build_feed(location, plan, num_workers=2)
    first = feed._workers[0]
    assert first.pid is not None
    threading.Timer(1.0, os.kill, (first.pid, signal.SIGKILL)).start()
    with pytest.raises(MachineError, match="was killed by SIGKILL"):
        while True:
            next(feed)
    feed.close()


def test_workers_outlive_signals_to_the_process_group(location: SetLocation) -> None:
    """From their first moment on: the trainer catches them, goes on to the end of its step and saves."""
    feed = build_feed(location, FeedPlan(RankLayout(0, (1,)), 2, 1), num_workers=4)
    for _ in range(2):
        for worker in multiprocessing.active_children():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                os.kill(worker.pid or 0, number)
        for _ in range(50):
            next(feed)
    feed.close()


def test_closing_ends_the_workers(feed_with_workers: Feed) -> None:
    feed_with_workers.close()
    deadline_s = time.monotonic() + HANG_S
    while multiprocessing.active_children() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not multiprocessing.active_children()
    with pytest.raises(DataError, match="was closed"):
        next(feed_with_workers)


LEAVE_OPEN = """
import sys
from llmscale.data.loader import Feed, FeedPlan
from llmscale.data.order.sample_order import OrderSettings, build_order
from llmscale.data.order.sample_order import RankLayout
from llmscale.data.shards.cache import open_set
from llmscale.data.shards.token_shards import TokenShards
plan = FeedPlan(RankLayout(0, (1,)), int(sys.argv[3]), 4)
location = open_set(sys.argv[1])
feed = Feed(TokenShards(location, "train"), build_order(location, OrderSettings(seed=1)), plan, num_workers=2)
next(feed)
print("read", flush=True)
if sys.argv[2] == "wait":
    sys.stdin.read()
"""


def test_a_process_that_ends_without_closing_does_not_hang(location: SetLocation) -> None:
    command = [sys.executable, "-c", LEAVE_OPEN, str(location.folder), "exit", "2"]
    assert subprocess.run(command, timeout=HANG_S, capture_output=True, text=True).stdout == "read\n"


@pytest.mark.parametrize("micro_batch_size", [2, 2000])
def test_a_killed_process_leaves_nothing_behind(location: SetLocation, tmp_path: Path, micro_batch_size: int) -> None:
    """No shared memory, no lock file, no worker: not even one that waits to write into a full pipe (64 kB)."""
    before = shared_memory_segments()
    command = [sys.executable, "-c", LEAVE_OPEN, str(location.folder), "wait", str(micro_batch_size)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with warm_start.Process(command, env=environment, start_new_session=True, **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == b"read\n"
        time.sleep(0.5)  # the workers fill their pipe
        process.kill()
        process.wait()
    deadline_s = time.monotonic() + HANG_S
    while _group_exists(process.pid) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not _group_exists(process.pid)
    assert shared_memory_segments() <= before
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_two_sets_in_one_process(location: SetLocation, make_set: Callable[..., Path], tmp_path: Path) -> None:
    """Both remote, with one cache."""
    other = open_set(str(make_set(40, seed=5)), tmp_path / "cache")
    first = open_set(str(location.folder), tmp_path / "cache")
    plan = FeedPlan(RankLayout(0, (1,)), 4, 1)
    feeds = {each.folder: build_feed(each, plan, num_workers=1) for each in (first, other)}
    direct = {each.folder: TokenShards(each, "train") for each in (first, other)}
    for _ in range(30):
        for folder, feed in feeds.items():
            batch = next(feed)
            assert np.array_equal(batch.tokens.numpy(), direct[folder].read(batch.sample_ids.numpy()))
    for feed in feeds.values():
        feed.close()


def test_an_order_of_another_set_is_refused(location: SetLocation) -> None:
    with pytest.raises(ConfigError, match="The order has 5 samples"):
        Feed(TokenShards(location, "train"), SampleOrder([5], seed=0), FeedPlan(RankLayout(0, (1,)), 1, 1))


# Which order a run gets, from what its set is and where it lies.

MakeLocation = Callable[..., SetLocation]


@pytest.fixture
def make_location(shared_set: Path) -> MakeLocation:
    """A set of `num_shards` shards that are together as large as asked; nothing of it can be read."""

    def make(num_shards: int, gib: float, *, is_shuffled: bool = True, remote: str | None = None) -> SetLocation:
        location = open_set(str(shared_set))
        shard_bytes = int(gib * 2**30 / num_shards)
        shards = tuple(ShardInfo(f"shard.{i:05d}.mds", shard_bytes, "", 1000) for i in range(num_shards))
        train = dataclasses.replace(location.manifest.splits["train"], shards=shards)
        request = {**location.manifest.request, "--no-shuffle": not is_shuffled}
        manifest = dataclasses.replace(location.manifest, splits={"train": train}, request=request)
        return dataclasses.replace(location, manifest=manifest, remote=remote)

    return make


def _rows_and_block(location: SetLocation, **settings: object) -> tuple[object, object]:
    identity = build_order(location, OrderSettings(seed=1, **settings)).identity("")
    assert identity["algorithm"] == "feistel-rounds-2"
    return identity["num_canonical_nodes"], identity["block_size"]


@pytest.mark.parametrize(
    ("num_shards", "gib", "is_shuffled", "remote", "expected"),
    [
        (1, 0.01, True, None, (1, None)),
        (128, 8, True, None, (1, None)),
        (128, 8, False, "s3://b/set", (1, None)),
        (4000, 2, False, "s3://b/set", (48, None)),  # rows cost nothing there
        (129, 8.01, True, None, (48, 32768)),
        (3061, 191, True, "s3://b/set", (48, 32768)),
        (3061, 191, False, "s3://b/set", (48, 32768)),
        (3061, 191, False, None, (48, None)),  # in order and at hand: shuffled as a whole
        (20, 191, False, None, (1, None)),
    ],
)
def test_blocks_are_for_sets_too_large_for_a_node(
    make_location: MakeLocation,
    num_shards: int,
    gib: float,
    is_shuffled: bool,
    remote: str | None,
    expected: tuple[int, int | None],
) -> None:
    location = make_location(num_shards, gib, is_shuffled=is_shuffled, remote=remote)
    assert _rows_and_block(location) == expected


def test_a_cache_limit_says_what_a_node_holds(make_location: MakeLocation) -> None:
    location = make_location(20, 2, remote="s3://b/set")
    assert _rows_and_block(location, cache_limit_bytes=1 << 30) == (48, 32768)
    assert _rows_and_block(location, cache_limit_bytes=3 << 30) == (1, None)
    assert WHOLE_SET_BYTES == 8 << 30


def test_settings_come_before_what_is_saved_and_that_before_defaults(make_location: MakeLocation) -> None:
    location = make_location(3061, 191)
    saved = {"algorithm": "feistel-rounds-2", "shuffle": True, "num_canonical_nodes": 12, "block_size": None}
    assert _rows_and_block(location, num_canonical_nodes=6) == (6, 32768)
    assert _rows_and_block(location, saved_order=saved) == (12, None)
    assert _rows_and_block(location, saved_order=saved, num_canonical_nodes=6, block_size=5) == (6, 5)


def test_an_order_is_kept_when_its_set_moves(make_location: MakeLocation) -> None:
    """A large old set is shuffled as a whole where it is at hand; a run that began so goes on so from a remote copy."""
    begun = build_order(make_location(3061, 191, is_shuffled=False), OrderSettings(seed=1)).identity("")
    moved = make_location(3061, 191, is_shuffled=False, remote="s3://b/set")
    assert build_order(moved, OrderSettings(seed=1, saved_order=begun)).identity("") == begun


def test_an_unknown_algorithm_shows_in_the_identity(shared_set: Path) -> None:
    """So the comparison on resume refuses it by name."""
    saved = {"algorithm": "quantum-9", "shuffle": True, "num_canonical_nodes": 48, "block_size": 32768}
    order = build_order(open_set(str(shared_set)), OrderSettings(seed=7, saved_order=saved))
    assert order.identity("")["algorithm"] == "feistel-rounds-2"


@pytest.mark.parametrize("value", ["48", 0, -1, True, 1.5, 1 << 70, [48]])
@pytest.mark.parametrize("name", ["num_canonical_nodes", "block_size"])
def test_a_saved_order_that_is_none_is_refused(shared_set: Path, name: str, value: object) -> None:
    with pytest.raises(DataError, match=f"The saved order of samples has {name}"):
        build_order(
            open_set(str(shared_set)), OrderSettings(seed=7, saved_order={"algorithm": "feistel-rounds-2", name: value})
        )
