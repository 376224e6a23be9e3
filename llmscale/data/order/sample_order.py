"""The order in which samples are seen: a pure function of (seed, epoch, dataset). NumPy only.

Position g of the stream is the (g + 1)-th sample that the run sees. Each epoch has every one of the n samples exactly
once, nothing is padded, dropped or repeated, and a global batch may span two epochs. So the state of the stream is one
number, the samples seen, for any number of ranks, nodes or workers.

By default an epoch is a random permutation of the dataset. Two mechanisms bound how much of a remote dataset a node
must hold:

- **Rows.** Positions visit R canonical rows in rounds, in an order that is random in each round and balanced for every
  number of nodes that divides R (`scramble`). A row is a part of the dataset that one node can hold, the same in every
  epoch. Each row takes its share of shards from every region of the dataset. From eight shards per row on, the order is
  statistically like a full shuffle; a smaller dataset has one row. - **Blocks.** Each epoch, each row shuffles its
  shards and is cut into equal blocks of at most `block_size` samples, which are shuffled one after the other. A row is
  a ring that each epoch enters at a random place, so that rows do not change blocks together and no block is short.
  This bounds what a node holds at a time. It needs shuffled shards, which `prepare` writes.

Every shuffle is a Feistel permutation (permutation.py), so any position is computed on its own: no list of samples, a
few kB per shard, any start in milliseconds. Random bits come from splitmix64, because NumPy's generators may change
between versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from llmscale.data.order.permutation import UInt64Array, fold64, key64, permute
from llmscale.data.shards.cache import SetLocation
from llmscale.errors import ConfigError, DataError

IntArray = NDArray[np.int64]
#: Limit of positions, far beyond any run and far below int64's.
MOST_POSITIONS = 1 << 56
#: Ranges [begin, end) of stream positions, ascending and disjoint.
Ranges = tuple[tuple[int, int], ...]
#: Rows, each held by one node. 48 is divided by 1, 2, 3, 4, 6, 8, 12, 16, 24 and 48 nodes.
DEFAULT_CANONICAL_NODES = 48
#: The means of rows of eight shards, one from each of eight regions, hold about a hundredth of the variance of a
#: sample: batches spread as a full shuffle's do, within half a percent.
SHARDS_PER_ROW = 8
#: Block size of a dataset too large for a node: with 48 rows a batch is drawn from 1.5 million samples (Streaming's
#: default: 2 million), and a row needs two or three 64 MiB shards of 1,024-token samples at a time.
DEFAULT_BLOCK_SIZE = 1 << 15
#: Most rows; each takes a few kB.
MOST_CANONICAL_NODES = 1 << 20
# Domains of the keys: equal (seed, epoch) must not give related shard orders, rounds, entrances and shuffles.
_SHARDS, _SPANS, _ENTRANCES, _BLOCKS, _ROUNDS = range(5)
#: Up to this size, 4 billion tokens of two bytes, every node can hold the dataset, so its order is one shuffle.
WHOLE_SET_BYTES = 8 << 30


class StreamOrder(Protocol):
    """A pure function from stream positions to samples; position g is the (g + 1)-th sample that a run sees."""

    num_samples: int
    """Number of samples; ids are below it."""

    def rows(self, positions: IntArray) -> IntArray:
        """Return the canonical row of each position [n], which decides its node (`RankLayout`)."""

    def sample_ids(self, positions: IntArray) -> IntArray:
        """Return the sample at each position [n]."""


class MovedOrder:
    """An order whose positions are moved: ranges of the stream are skipped, or its first samples come again."""

    def __init__(self, order: StreamOrder, move: Callable[[IntArray], IntArray]) -> None:
        """`move` returns the position in `order` of each position [n]."""
        self.num_samples = order.num_samples
        self._order = order
        self._move = move

    def rows(self, positions: IntArray) -> IntArray:
        """Implement StreamOrder."""
        return self._order.rows(self._move(positions))

    def sample_ids(self, positions: IntArray) -> IntArray:
        """Implement StreamOrder."""
        return self._order.sample_ids(self._move(positions))


def stream_positions(seen: IntArray, skipped: Ranges) -> IntArray:
    """Return the stream positions of the next sample after `seen` samples: int64 of the same shape."""
    moved = seen.copy()
    for begin, end in skipped:
        moved[moved >= begin] += end - begin
    return moved


def join_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """[begin, end) ranges, ascending, those that touch made one."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return tuple(joined)


def scramble(turns: IntArray, num_rows: int, keys: UInt64Array) -> IntArray:
    """Return the row visited at each turn, int64 [n], for `turns` [n] in 0..num_rows - 1 of rounds with `keys` [n].

    A fixed order of the R rows would show as a period in batches smaller than a round; a free shuffle would leave such
    a batch with more rows of one node than of another. So rows are scrambled digit by digit: for every divisor N of R,
    the row modulo N is a permutation of the turn modulo N, and N turns from a multiple of N meet each of N nodes once.
    For R a power of a prime these are Owen's nested scrambles (A. Owen, "Randomly permuted (t,m,s)-nets and
    (t,s)-sequences", 1995), lowest digit first. Several primes are joined by the Chinese remainder theorem.
    """
    rows = np.zeros_like(turns)
    for prime, exponent in prime_powers(num_rows):
        modulus = prime**exponent
        others = num_rows // modulus
        # 1 modulo `modulus`, 0 modulo the other prime powers.
        unit = others * pow(others, -1, modulus) % num_rows
        residues = _scramble_digits(turns, prime, exponent, fold64(keys, np.array([prime], np.uint64)))
        rows = (rows + residues * unit) % num_rows
    return rows


def _scramble_digits(turns: IntArray, prime: int, exponent: int, keys: UInt64Array) -> IntArray:
    """Return a nested permutation of turns modulo prime^exponent."""
    images = np.zeros_like(turns)
    weight = 1
    for _ in range(exponent):
        # weight + lower digits: another number for every place in the tree of digits.
        draws = fold64(keys, (weight + turns % weight).astype(np.uint64))
        # digit -> a digit + b modulo a prime permutes the digits for every a but 0.
        factors = (draws % np.uint64(prime - 1)).astype(np.int64) + 1
        shifts = ((draws >> np.uint64(32)) % np.uint64(prime)).astype(np.int64)
        images += (turns // weight % prime * factors + shifts) % prime * weight
        weight *= prime
    return images


def prime_powers(number: int) -> Iterator[tuple[int, int]]:
    """Yield (prime, exponent) of each prime factor, ascending."""
    prime = 2
    while prime * prime <= number:
        exponent = 0
        while number % prime == 0:
            number //= prime
            exponent += 1
        if exponent:
            yield prime, exponent
        prime += 1
    if number > 1:
        yield number, 1


#: Everything that decides an order, as a checkpoint stores it.
OrderIdentity = dict[str, str | int | bool | None]


@dataclass(frozen=True)
class _EpochTable:
    """One epoch's order of spans: span i covers places [ends[i-1], ends[i]) of the concatenated rows."""

    starts: IntArray
    """First sample id of each span, [spans]."""
    begins: IntArray
    """First place of each span, [spans]."""
    ends: IntArray
    """End of each span, [spans]."""


class SampleOrder:
    """Sample ids by stream position, at a few kB per shard and nothing per sample.

    `num_canonical_nodes` None means 48 rows if that is statistically like one row, else one. `block_size` None makes
    each row one block. Raises ConfigError for invalid settings.
    """

    algorithm: ClassVar[str] = "feistel-rounds-2"
    """Name of the algorithm; changed whenever the same settings would give another order."""

    def __init__(
        self,
        samples_per_shard: Sequence[int] | IntArray,
        *,
        seed: int,
        shuffle: bool = True,
        num_canonical_nodes: int | None = None,
        block_size: int | None = None,
    ) -> None:
        for name, value in (("num_canonical_nodes", num_canonical_nodes), ("block_size", block_size)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}.")
        if (num_canonical_nodes or 1) > MOST_CANONICAL_NODES:
            raise ConfigError(f"num_canonical_nodes must be at most {MOST_CANONICAL_NODES}, not {num_canonical_nodes}.")
        self.samples_per_shard = np.asarray(samples_per_shard, np.int64)
        self.num_samples = int(self.samples_per_shard.sum())
        if self.num_samples < 1:
            raise ConfigError("The dataset holds no samples, so it has no order.")
        self.seed = seed
        self.shuffle = shuffle
        self.num_canonical_nodes = num_canonical_nodes or rows_that_do_not_show(self.samples_per_shard)
        self.block_size = block_size
        rows = np.arange(self.num_canonical_nodes, dtype=np.int64)
        #: Entries of each row in an epoch, [R].
        self._row_sizes = (self.num_samples - rows + self.num_canonical_nodes - 1) // self.num_canonical_nodes
        self._row_begins = np.cumsum(self._row_sizes) - self._row_sizes
        self._span_starts, self._span_sizes, self._span_rows = self._cut_rows()
        # Two epochs at a time: a global batch may span them.
        self._epoch_table = lru_cache(maxsize=2)(self._build_epoch_table)

    def rows(self, positions: IntArray) -> IntArray:
        """Return the canonical row of each stream position, int64 of the same shape. With N nodes, N dividing R, node
        row % N holds it: N positions from a multiple of N on need each node once, unless they span two epochs."""
        rows = np.zeros(positions.shape, np.int64)
        if self.shuffle and self.num_canonical_nodes > 1:
            for epoch, chosen in self._by_epoch(positions):
                rows[chosen] = self._visits(epoch, positions[chosen] % self.num_samples)[0]
        return rows

    def sample_ids(self, positions: IntArray) -> IntArray:
        """Return the sample id at each stream position (non-negative, any order), int64 [n]."""
        if not self.shuffle:
            return positions % self.num_samples
        ids = np.empty(len(positions), np.int64)
        for epoch, chosen in self._by_epoch(positions):
            ids[chosen] = self._ids_in_epoch(epoch, positions[chosen] % self.num_samples)
        return ids

    def identity(self, set_fingerprint: str) -> OrderIdentity:
        """Return everything that decides the order. A checkpoint stores it, and a resume with another identity is
        refused."""
        return {
            "algorithm": self.algorithm,
            "set_fingerprint": set_fingerprint,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_canonical_nodes": self.num_canonical_nodes,
            "block_size": self.block_size,
        }

    def _by_epoch(self, positions: IntArray) -> list[tuple[int, IntArray]]:
        """Return each epoch that occurs, with the indices of its positions."""
        epochs = positions // self.num_samples
        return [(int(epoch), np.flatnonzero(epochs == epoch)) for epoch in np.unique(epochs)]

    def _cut_rows(self) -> tuple[IntArray, IntArray, IntArray]:
        """Put the shards in the order of rows and cut them at row borders: (first id, size, row) of each span."""
        shard_ends = np.cumsum(self.samples_per_shard)
        shard_starts = shard_ends - self.samples_per_shard
        shard_order = self._order_shards(shard_starts)
        place_ends = np.cumsum(self.samples_per_shard[shard_order])
        place_begins = place_ends - self.samples_per_shard[shard_order]
        begins = np.unique(np.concatenate([place_begins, self._row_begins]))
        begins = begins[begins < self.num_samples]
        owner = np.searchsorted(place_ends, begins, side="right")
        starts = shard_starts[shard_order[owner]] + begins - place_begins[owner]
        sizes = np.diff(np.append(begins, self.num_samples))
        rows = np.searchsorted(self._row_begins + self._row_sizes, begins, side="right")
        return starts, sizes, rows

    def _order_shards(self, shard_starts: IntArray) -> IntArray:
        """Return an order of the shards, [shards], any part of which is a fair sample of the dataset.

        The dataset is cut into as many regions as a row has shards. Each region's shards are shuffled, and the regions
        are merged so that all end together.
        """
        sizes = self.samples_per_shard
        num_regions = max(1, self.num_samples // (self.num_canonical_nodes * int(sizes.max())))
        regions = np.minimum((shard_starts + sizes // 2) * num_regions // self.num_samples, num_regions - 1)
        draws = fold64(key64(self.seed, _SHARDS), np.arange(len(sizes), dtype=np.uint64))
        shuffled = np.lexsort((draws, regions))
        region_sizes = np.bincount(regions, weights=sizes, minlength=num_regions).astype(np.int64)
        region_begins = np.cumsum(region_sizes) - region_sizes
        middles = 2 * np.cumsum(sizes[shuffled]) - sizes[shuffled] - 2 * region_begins[regions[shuffled]]
        paces = middles / np.maximum(region_sizes[regions[shuffled]], 1)
        return shuffled[np.lexsort((draws[shuffled], paces))]

    def _build_epoch_table(self, epoch: int) -> _EpochTable:
        spans = np.arange(len(self._span_starts), dtype=np.uint64)
        order = np.lexsort((fold64(key64(self.seed, epoch, _SPANS), spans), self._span_rows))
        ends = np.cumsum(self._span_sizes[order])
        return _EpochTable(self._span_starts[order], ends - self._span_sizes[order], ends)

    def _visits(self, epoch: int, places: IntArray) -> tuple[IntArray, IntArray]:
        """Return the row of places [n], and how often it was visited before in this epoch.

        Rounds begin at stream positions divisible by R, as batches begin at multiples of their size. Places before an
        epoch's first full round and after its last visit the rows in turn.
        """
        num_rows = self.num_canonical_nodes
        head = min(-epoch * self.num_samples % num_rows, self.num_samples)
        num_rounds = (self.num_samples - head) // num_rows
        rounds, turns = np.divmod(places - head, num_rows)
        round_keys = fold64(key64(self.seed, epoch, _ROUNDS), rounds.astype(np.uint64))
        is_whole = (rounds >= 0) & (rounds < num_rounds)
        rows = np.where(is_whole, scramble(turns, num_rows, round_keys), places % num_rows)
        return rows, rounds + (rows < head).astype(np.int64)

    def _ids_in_epoch(self, epoch: int, places: IntArray) -> IntArray:
        """Return the sample ids of places [n] in the epoch."""
        rows, shuffled = self._shuffled_entries(epoch, places)
        table = self._epoch_table(epoch)
        row_places = self._row_begins[rows] + shuffled
        spans = np.searchsorted(table.ends, row_places, side="right")
        return table.starts[spans] + row_places - table.begins[spans]

    def _shuffled_entries(self, epoch: int, places: IntArray) -> tuple[IntArray, IntArray]:
        """Return the row of places [n] in the epoch, and the entry after the shuffle in its block."""
        rows, entries = self._visits(epoch, places)
        sizes = self._row_sizes[rows]
        row_words = rows.astype(np.uint64)
        entrances = fold64(key64(self.seed, epoch, _ENTRANCES), row_words) % sizes.astype(np.uint64)
        entries = (entries + entrances.astype(np.int64)) % sizes
        num_blocks = -(-sizes // min(self.block_size or self.num_samples, self.num_samples))
        lengths = -(-sizes // num_blocks)
        blocks = entries // lengths
        begins = blocks * lengths
        keys = fold64(fold64(key64(self.seed, epoch, _BLOCKS), row_words), blocks.astype(np.uint64))
        return rows, begins + permute(entries - begins, np.minimum(lengths, sizes - begins), keys)


def rows_that_do_not_show(samples_per_shard: IntArray) -> int:
    """Return 48 if a row holds SHARDS_PER_ROW of the largest shard, else 1. Shards are about equally large, so this
    means a dataset of 384 shards and more."""
    num_rows = DEFAULT_CANONICAL_NODES
    fits = int(samples_per_shard.max()) * SHARDS_PER_ROW * num_rows <= int(samples_per_shard.sum())
    return num_rows if fits else 1


@dataclass(frozen=True)
class RankLayout:
    """This rank's position among the data-parallel ranks. Raises ConfigError for contradictory numbers."""

    data_parallel_rank: int
    """Rank, numbered node by node, as DeepSpeed's launcher does."""
    ranks_per_node: tuple[int, ...]
    """Data-parallel ranks on each node, in the order of their ranks."""

    def __post_init__(self) -> None:
        if not self.ranks_per_node or min(self.ranks_per_node) < 1:
            raise ConfigError(f"Every node needs at least one rank, not {list(self.ranks_per_node)}.")
        if not 0 <= self.data_parallel_rank < self.data_parallel_size:
            raise ConfigError(f"rank must be in 0..{self.data_parallel_size - 1}, not {self.data_parallel_rank}.")

    @property
    def data_parallel_size(self) -> int:
        return sum(self.ranks_per_node)


def shard_batch(positions: IntArray, rows: IntArray, layout: RankLayout, unit: int = 1) -> IntArray:
    """Return this rank's share of a global batch: `positions` [G] with their canonical rows [G] -> its part.

    A stable sort by preferred node, cut into D = data_parallel_size parts of whole micro-batches of `unit` samples; the
    parts of two ranks differ by one micro-batch at most. Raises ConfigError when `unit` does not divide G.
    """
    if len(positions) % unit:
        raise ConfigError(f"A global batch of {len(positions)} samples is not a number of micro-batches of {unit}.")
    parts = len(positions) // unit
    rank = layout.data_parallel_rank
    begin, end = (parts * number // layout.data_parallel_size * unit for number in (rank, rank + 1))
    if len(layout.ranks_per_node) == 1:  # with one node, sorting changes nothing
        return positions[begin:end]
    order = np.argsort(preferred_nodes(rows, layout.ranks_per_node), kind="stable")
    return positions[order[begin:end]]


def preferred_nodes(rows: IntArray, ranks_per_node: Sequence[int]) -> IntArray:
    """Return the node that should hold each row: rows go round the nodes, in proportion to their ranks.

    Equal nodes take row % num_nodes. Consecutive rows fill every node's share exactly.
    """
    turns = math.gcd(*ranks_per_node)
    counts = np.array(ranks_per_node, np.int64) // turns
    return np.repeat(np.arange(len(counts), dtype=np.int64), counts)[rows % counts.sum()]


@dataclass(frozen=True)
class OrderSettings:
    """Settings of the order of a dataset's training split."""

    seed: int
    """Seed of the sample order."""
    shuffle: bool = True
    """False keeps the dataset's order in every epoch."""
    num_canonical_nodes: int | None = None
    """Rows, each held by one node. Part of the order: do not change it when the number of nodes changes."""
    block_size: int | None = None
    """Samples of a row that are shuffled together."""
    saved_order: Mapping[str, object] | None = None
    """Identity of the order that a run began with, for the settings left None."""
    cache_limit_bytes: int | None = None
    """Limit of a remote dataset's local cache, or None."""


def build_order(location: SetLocation, settings: OrderSettings) -> SampleOrder:
    """Return the sample order of the training split, from the manifest alone. Raises DataError for a malformed saved
    order."""
    sizes = [shard.num_samples for shard in location.manifest.splits["train"].shards]
    saved = settings.saved_order or {}
    num_rows = settings.num_canonical_nodes or _saved_number(saved, "num_canonical_nodes", MOST_CANONICAL_NODES)
    block_size = settings.block_size or _saved_number(saved, "block_size", 1 << 62)
    if not saved and _is_read_in_blocks(location, settings):
        num_rows = num_rows or DEFAULT_CANONICAL_NODES
        block_size = block_size or DEFAULT_BLOCK_SIZE
    return SampleOrder(
        sizes, seed=settings.seed, shuffle=settings.shuffle, num_canonical_nodes=num_rows, block_size=block_size
    )


def _is_read_in_blocks(location: SetLocation, settings: OrderSettings) -> bool:
    """Return whether a new run should need few shards at a time: if the dataset is too large for a node. A shuffled
    dataset loses no randomness; any other is read so only if it is remote."""
    num_bytes = sum(shard.bytes for shard in location.manifest.splits["train"].shards)
    limit_bytes = min(WHOLE_SET_BYTES, settings.cache_limit_bytes or WHOLE_SET_BYTES)
    return num_bytes > limit_bytes and (location.manifest.is_shuffled or location.remote is not None)


def _saved_number(saved: Mapping[str, object], name: str, most: int) -> int | None:
    value = saved.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most):
        return value
    raise DataError(f"The saved order of samples has {name} {value!r}; it must be in 1..{most:,}, or none.")
