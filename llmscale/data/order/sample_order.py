"""The order in which samples are seen: a pure function of (seed, epoch, set). NumPy only.

Position g of the stream is the (g + 1)-th sample that the run sees. Epoch g // n follows epoch g // n - 1 without a
gap, each holds every one of the n samples exactly once, and nothing is padded, dropped or repeated: a global batch may
straddle two epochs. So the state of the stream is one number, the samples seen, whatever the ranks, nodes or workers.

By default an epoch is a random permutation of the whole set, drawn from all of it at every moment. Two things bound
what a node must hold of a remote set, and cost nothing where they are the default:

- **Rows.** Positions go round R canonical rows in an order that is random in each round and fair to every number of
  nodes that divides R (`scramble`). A row is a part of the set that one node can hold, the same in every epoch. Rows
  are as alike as can be: each takes its share of shards from every region of the set. From eight shards to a row on,
  their means differ so little that the order cannot be told from a shuffle of the whole; a smaller set has one row.
- **Blocks.** Each epoch, each row shuffles its shards and is cut into equal blocks of `block_size` samples or less,
  which are shuffled one after the other. A row is a ring that each epoch enters at a random place, so that rows do not
  change blocks together and no block is short. This bounds what a node holds at a time, and is random only where
  neighbours in a shard are strangers: `prepare` shuffles what it writes.

Every shuffle is a Feistel permutation (permutation.py), so any position is found on its own: no list of samples, a few
kB per shard, any start in milliseconds. Random bits are splitmix64's rather than NumPy's generators', whose streams may
change between versions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from llmscale.data.order.permutation import UInt64Array, fold64, key64, permute
from llmscale.data.shards.cache import SetLocation
from llmscale.errors import ConfigError, DataError

IntArray = NDArray[np.int64]
#: Far beyond any run; positions are int64, and are added to.
MOST_POSITIONS = 1 << 56
#: [begin, end) of stream positions, ascending and apart.
Ranges = tuple[tuple[int, int], ...]


class StreamOrder(Protocol):
    """A pure function from stream positions to samples: position g is the (g + 1)-th sample that a run sees."""

    num_samples: int
    """Samples there are; ids are below it."""

    def rows(self, positions: IntArray) -> IntArray:
        """Canonical row of each position [n], which decides the node that takes it (`RankLayout`)."""

    def sample_ids(self, positions: IntArray) -> IntArray:
        """Sample at each position [n]."""


class SkippingOrder:
    """An order that leaves ranges of the stream out, as if they had never been in it."""

    def __init__(self, order: StreamOrder, skipped: Ranges) -> None:
        self.num_samples = order.num_samples
        self.order, self._skipped = order, skipped

    def rows(self, positions: IntArray) -> IntArray:
        """See StreamOrder."""
        return self.order.rows(stream_positions(positions, self._skipped))

    def sample_ids(self, positions: IntArray) -> IntArray:
        """See StreamOrder."""
        return self.order.sample_ids(stream_positions(positions, self._skipped))


def stream_positions(seen: IntArray, skipped: Ranges) -> IntArray:
    """Where in the stream the samples lie before which so many were seen: int64 of the same shape."""
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
    """A nested permutation of turns modulo prime^exponent."""
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
    """(prime, exponent) of each prime factor, ascending."""
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


#: Everything that decides an order, as a checkpoint keeps it.
OrderIdentity = dict[str, str | int | bool | None]

#: Rows that go to nodes whole. 48 is divided by 1, 2, 3, 4, 6, 8, 12, 16, 24 and 48 nodes.
DEFAULT_CANONICAL_NODES = 48
#: The means of rows of eight shards, one from each of eight regions, hold about a hundredth of the variance of a
#: sample: batches spread as a full shuffle's do, within half a percent.
SHARDS_PER_ROW = 8
#: For a set too large for a node: with 48 rows a batch is drawn from 1.5 million samples (Streaming's default: 2
#: million), and a row needs two or three 64 MiB shards of 1,024-token samples at a time.
DEFAULT_BLOCK_SIZE = 1 << 15
#: Far beyond any use; a few kB are kept per row.
MOST_CANONICAL_NODES = 1 << 20

# Domains of the keys: equal (seed, epoch) must not give related shard orders, rounds, entrances and shuffles.
_SHARDS, _SPANS, _ENTRANCES, _BLOCKS, _ROUNDS = range(5)


@dataclass(frozen=True)
class _EpochTable:
    """One epoch's order of spans: span i covers places [ends[i-1], ends[i]) of the concatenated rows."""

    starts: IntArray
    """First sample id of each span, [spans]."""
    begins: IntArray
    """First place of each span, [spans]."""
    ends: IntArray
    """Place behind each span, [spans]."""


class SampleOrder:
    """Sample ids by stream position. Costs a few kB per shard and nothing per sample.

    `num_canonical_nodes` None: as many rows as do not show, 48 or one. `block_size` None: a row is one block.
    Raises ConfigError for settings that cannot form an order.
    """

    algorithm: ClassVar[str] = "feistel-rounds-2"
    """Changed whenever the same settings would give another order."""

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
            raise ConfigError("The order of an empty set is not defined: the set holds no samples.")
        self.seed = seed
        self.shuffle = shuffle
        self.num_canonical_nodes = num_canonical_nodes or rows_that_do_not_show(self.samples_per_shard)
        self.block_size = block_size
        rows = np.arange(self.num_canonical_nodes, dtype=np.int64)
        #: Entries of each row in an epoch, [R].
        self._row_sizes = (self.num_samples - rows + self.num_canonical_nodes - 1) // self.num_canonical_nodes
        self._row_begins = np.cumsum(self._row_sizes) - self._row_sizes
        self._span_starts, self._span_sizes, self._span_rows = self._cut_rows()
        # Two epochs live at a time: a global batch may straddle them.
        self._epoch_table = lru_cache(maxsize=2)(self._build_epoch_table)

    def rows(self, positions: IntArray) -> IntArray:
        """Canonical row of each stream position, int64 of the same shape. Of N | R nodes, node row % N holds it: N
        positions counted from a multiple of N need each node once, unless they straddle two epochs."""
        rows = np.zeros(positions.shape, np.int64)
        if self.shuffle and self.num_canonical_nodes > 1:
            for epoch, chosen in self._by_epoch(positions):
                rows[chosen] = self._visits(epoch, positions[chosen] % self.num_samples)[0]
        return rows

    def sample_ids(self, positions: IntArray) -> IntArray:
        """Sample id at each stream position (non-negative, any order), int64 [n] for positions [n]."""
        if not self.shuffle:
            return positions % self.num_samples
        ids = np.empty(len(positions), np.int64)
        for epoch, chosen in self._by_epoch(positions):
            ids[chosen] = self._ids_in_epoch(epoch, positions[chosen] % self.num_samples)
        return ids

    def identity(self, set_fingerprint: str) -> OrderIdentity:
        """Everything that decides the order. A checkpoint keeps it; a resume with another is refused."""
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
        """Each epoch met, with the indices of its positions."""
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
        """An order of the shards, [shards], of which any part is a fair sample of the set.

        The set is cut into as many regions as a row has shards. Each region's shards are shuffled, and the regions are
        merged, each at the pace that ends them together.
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
        """Row, and how often it was visited before in this epoch, of places [n].

        Rounds begin at stream positions that R divides, as batches begin at multiples of their size; what an epoch has
        before its first whole round and behind its last goes through the rows in turn.
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
        """Sample ids of places [n] in the epoch."""
        rows, shuffled = self._shuffled_entries(epoch, places)
        table = self._epoch_table(epoch)
        row_places = self._row_begins[rows] + shuffled
        spans = np.searchsorted(table.ends, row_places, side="right")
        return table.starts[spans] + row_places - table.begins[spans]

    def _shuffled_entries(self, epoch: int, places: IntArray) -> tuple[IntArray, IntArray]:
        """Row, and the entry shuffled in its block, of places [n] in the epoch."""
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
    """48 for a set whose largest shard fits a row several times, else 1. Shards of one set are about equally large, so
    this is a set of 384 shards and more."""
    num_rows = DEFAULT_CANONICAL_NODES
    fits = int(samples_per_shard.max()) * SHARDS_PER_ROW * num_rows <= int(samples_per_shard.sum())
    return num_rows if fits else 1


@dataclass(frozen=True)
class RankLayout:
    """Where this rank stands among the data-parallel ones. Raises ConfigError when the numbers contradict."""

    data_parallel_rank: int
    """Ranks are numbered node by node, as DeepSpeed's launcher does."""
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


def shard_batch(positions: IntArray, rows: IntArray, layout: RankLayout) -> IntArray:
    """This rank's share of a global batch: `positions` [G] with their canonical rows [G] -> [G / D].

    A stable sort by preferred node, cut into D = data_parallel_size equal parts. Raises ConfigError when D does
    not divide G.
    """
    if len(positions) % layout.data_parallel_size:
        raise ConfigError(
            f"A global batch of {len(positions)} samples cannot be dealt to {layout.data_parallel_size} ranks equally: "
            "the world size must divide it."
        )
    share = len(positions) // layout.data_parallel_size
    begin = layout.data_parallel_rank * share
    if len(layout.ranks_per_node) == 1:  # every row prefers it, so that sorting would change nothing
        return positions[begin : begin + share]
    order = np.argsort(preferred_nodes(rows, layout.ranks_per_node), kind="stable")
    return positions[order[begin : begin + share]]


def preferred_nodes(rows: IntArray, ranks_per_node: Sequence[int]) -> IntArray:
    """The node that should hold each row: rows go round the nodes, as often as a node has ranks.

    Equal nodes take row % num_nodes. Consecutive rows fill every node's share exactly.
    """
    turns = math.gcd(*ranks_per_node)
    counts = np.array(ranks_per_node, np.int64) // turns
    return np.repeat(np.arange(len(counts), dtype=np.int64), counts)[rows % counts.sum()]


#: A set of this size, 4 billion tokens of two bytes, is read in the order of one shuffle: every node holds all of it.
WHOLE_SET_BYTES = 8 << 30


@dataclass(frozen=True)
class OrderSettings:
    """How the training split of a set is ordered."""

    seed: int
    """Of the sample order."""
    shuffle: bool = True
    """False: the order of the set, the same in every epoch."""
    num_canonical_nodes: int | None = None
    """Rows that go to nodes whole. Part of the order: leave it as it is when the nodes change."""
    block_size: int | None = None
    """Samples of a row that are shuffled together."""
    saved_order: Mapping[str, object] | None = None
    """The identity of the order that a run began with: its algorithm, and what the two settings above leave open."""
    cache_limit_bytes: int | None = None
    """Of a remote set's local cache; None is no limit."""


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
    """Return whether a new run should need few shards at a time: for a set too large for a node. In a shuffled set that
    costs no randomness; any other set is worth it only if it has to be fetched."""
    num_bytes = sum(shard.bytes for shard in location.manifest.splits["train"].shards)
    limit_bytes = min(WHOLE_SET_BYTES, settings.cache_limit_bytes or WHOLE_SET_BYTES)
    return num_bytes > limit_bytes and (location.manifest.is_shuffled or location.remote is not None)


def _saved_number(saved: Mapping[str, object], name: str, most: int) -> int | None:
    value = saved.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most):
        return value
    raise DataError(f"The saved order of samples has {name} {value!r}; it must be in 1..{most:,}, or none.")
