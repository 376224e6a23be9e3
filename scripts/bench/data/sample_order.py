"""Compare the order of samples with a uniform shuffle, and measure its cost at 10^8 samples.

    python -m scripts.bench.data.sample_order

quality: on datasets with sorted text, the standard deviation of a batch's mean place over a uniform shuffle's (1.00 is
right; below it batches are stratified, above it they come from a part of the text), and the largest autocorrelation of
these means at lags 1 to 8, in units of its noise (3 or 4 of them is nothing). Batches of 1 to 2,048, datasets of 1 to
10,000 shards, beside NumPy's permutation and Streaming's four shuffles.

cost: memory per rank and node, and seconds to the first batch after a resume.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from llmscale.data.order.sample_order import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_CANONICAL_NODES,
    RankLayout,
    SampleOrder,
    shard_batch,
)
from llmscale.data.prepare.sources.tokens import streaming_module
from llmscale.data.prepare.split_writer import window_keys
from scripts.bench.harness import (
    describe_machine,
    machine_line,
    median_and_range,
    output_file,
    save_result,
    show_range,
    whole_number,
)

GLOBAL_BATCH, RANKS_PER_NODE, SEQ_LEN = 512, 8, 1024
BATCHES = (1, 8, 12, 24, 48, 128, 512, 2048)
SEEDS = 4
EPOCHS = 2
#: Streaming's own defaults.
STREAMING_ROWS, STREAMING_BLOCK = 64, 1 << 18
STREAMING = ("py1e", "py1br", "py1s", "naive")

#: From shard sizes and a seed to places in the text of the samples of two epochs.
Orderer = Callable[[np.ndarray, int], np.ndarray]


def sets() -> dict[str, np.ndarray]:
    """Return the samples of each shard by dataset."""
    rng = np.random.default_rng(0)
    uneven = np.maximum(rng.lognormal(3.2, 0.8, 10_000), 1).astype(np.int64)
    return {
        "1 shard": np.array([300_000]),
        "3 uneven shards": np.array([20_000, 200_000, 80_000]),
        "60 shards": np.full(60, 5_000),
        "400 shards": np.full(400, 750),
        "10,000 uneven shards": uneven,
    }


def today(sizes: np.ndarray, seed: int) -> np.ndarray:
    return SampleOrder(sizes, seed=seed).sample_ids(np.arange(EPOCHS * int(sizes.sum())))


def numpy_permutation(sizes: np.ndarray, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.permutation(int(sizes.sum())) for _ in range(EPOCHS)])


def streaming(algorithm: str) -> Orderer:
    """Return one of Streaming's shuffles as a StreamingDataset on one node reads it."""

    def places(sizes: np.ndarray, seed: int) -> np.ndarray:
        n = int(sizes.sum())
        partition = streaming_module("partition").get_partitions("relaxed", n, STREAMING_ROWS, 1, 1, 1, 1, 0, 1)
        partition = partition.reshape(-1)
        # Padding of short rows repeats samples: each is counted once.
        partition = partition[np.sort(np.unique(partition, return_index=True)[1])]
        partition = partition[partition >= 0]
        shuffle = streaming_module("shuffle").get_shuffle
        return np.concatenate(
            [
                shuffle(algorithm, sizes, STREAMING_ROWS, seed, epoch, STREAMING_BLOCK)[partition]
                for epoch in range(EPOCHS)
            ]
        )

    return places


ORDERS: dict[str, Orderer] = {
    "llmscale": today,
    "NumPy's permutation": numpy_permutation,
    **{f"Streaming {name}": streaming(name) for name in STREAMING},
}


def spread(places: np.ndarray, n: int, batch: int) -> tuple[float, float]:
    """Return the standard deviation over a uniform shuffle's, and the largest autocorrelation over its noise."""
    count = len(places) // batch
    means = places[: count * batch].reshape(count, batch).mean(axis=1) - (n - 1) / 2
    uniform = np.sqrt((n * n - 1) / 12 / batch * (n - batch) / (n - 1))
    variance = max(float((means**2).mean()), 1e-300)
    lags = [(means[:-lag] * means[lag:]).mean() / variance + batch / (n - batch) for lag in range(1, 9)]
    return float(np.sqrt(variance) / uniform), float(np.abs(lags).max() * np.sqrt(count))


def measure_batches(orderer: Orderer, sizes: np.ndarray) -> dict[str, dict[str, float]]:
    """Return by batch size: root mean square of the ratio, median and range of the autocorrelation over seeds."""
    n = int(sizes.sum())
    spreads = [[spread(places, n, batch) for batch in BATCHES] for places in (orderer(sizes, s) for s in range(SEEDS))]
    ratios, lags = np.moveaxis(np.array(spreads), 2, 0)
    return {
        str(batch): {"ratio": float(np.sqrt((ratios[:, i] ** 2).mean())), "lag": median_and_range(lags[:, i].tolist())}
        for i, batch in enumerate(BATCHES)
    }


def measure_blocks(num_samples: int = 4_000_000, num_shards: int = 1_000) -> dict[str, dict[str, dict[str, float]]]:
    """Measure a dataset too large for a node: 48 rows, blocks of two shards, windows shuffled or in order."""
    sizes = np.full(num_shards, num_samples // num_shards)
    block = 2 * int(sizes[0])
    text_place = np.argsort(window_keys(0, num_samples, 0))

    def blocks(_: np.ndarray, seed: int) -> np.ndarray:
        order = SampleOrder(sizes, seed=seed, num_canonical_nodes=DEFAULT_CANONICAL_NODES, block_size=block)
        return order.sample_ids(np.arange(num_samples))

    return {
        "written by prepare": measure_batches(lambda s, seed: text_place[blocks(s, seed)], sizes),
        "written in order": measure_batches(blocks, sizes),
    }


def shard_sizes(num_samples: int, seq_len: int) -> np.ndarray:
    """Return the samples of each 64 MiB shard of uint16 windows."""
    per_shard = (64 << 20) // (2 * (seq_len + 1) + 4)
    full, rest = divmod(num_samples, per_shard)
    return np.array([per_shard] * full + [rest] * (rest > 0), np.int64)


def large_order(sizes: np.ndarray) -> SampleOrder:
    """Return the order of a dataset too large for a node."""
    return SampleOrder(sizes, seed=17, num_canonical_nodes=DEFAULT_CANONICAL_NODES, block_size=DEFAULT_BLOCK_SIZE)


def measure_cost(sizes: np.ndarray) -> dict[str, float]:
    """Resume in the middle of the third epoch; return seconds and bytes to the first batch, and seconds per batch."""
    start = int(2.5 * sizes.sum())
    tracemalloc.start()
    begin_s = time.perf_counter()
    order = large_order(sizes)
    positions = np.arange(start, start + GLOBAL_BATCH, dtype=np.int64)
    layout = RankLayout(0, (RANKS_PER_NODE,) * 2)
    order.sample_ids(shard_batch(positions, order.rows(positions), layout))
    first_s = time.perf_counter() - begin_s
    begin_s = time.perf_counter()
    for step in range(200):
        later = positions + step * GLOBAL_BATCH
        order.sample_ids(shard_batch(later, order.rows(later), layout))
    per_batch_s = (time.perf_counter() - begin_s) / 200
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "first_batch_s": first_s,
        "batch_s": per_batch_s,
        "peak_bytes_per_rank": peak_bytes,
    }


def print_costs(cost: dict[str, float], samples: int) -> None:
    per_rank = cost["peak_bytes_per_rank"] / 1e6
    print(
        f"\n{samples:,} samples: first batch after a resume {cost['first_batch_s']:.4f} s, "
        f"later ones {cost['batch_s']:.4f} s; {per_rank:.2f} MB per rank, {per_rank * RANKS_PER_NODE:.1f} MB per node "
        f"of {RANKS_PER_NODE} ranks"
    )


def print_batches(title: str, rows: dict[str, dict[str, dict[str, float]]]) -> None:
    print(f"\n{title}: ratio of standard deviations, largest autocorrelation over its noise (range of the seeds)")
    print(f"{'':26}" + "".join(f"{batch:>26}" for batch in BATCHES))
    for name, row in rows.items():
        print(
            f"{name:26}"
            + "".join(f"{row[str(b)]['ratio']:.2f} {show_range(row[str(b)]['lag'], '.1f')}".rjust(26) for b in BATCHES)
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the raw measurements to this file")
    parser.add_argument("--only", choices=["quality", "cost"], help="answer one of the two questions")
    parser.add_argument("--sets", nargs="*", choices=list(sets()), help="datasets of quality (default: all)")
    parser.add_argument("--samples", type=whole_number, default=10**8, help="samples of cost (default: 10^8)")
    args = parser.parse_args()
    machine = describe_machine()
    result: dict[str, object] = {"machine": machine, "epochs": EPOCHS, "seeds": SEEDS}
    if args.only != "cost":
        batches = {}
        for title, sizes in sets().items():
            if args.sets is None or title in args.sets:
                batches[title] = {name: measure_batches(orderer, sizes) for name, orderer in ORDERS.items()}
                print_batches(title, batches[title])
        result["batches"] = batches
        if args.sets is None:
            result["blocks"] = blocks = measure_blocks()
            print_batches("1,000 shards read in blocks, too large for a node", blocks)
    if args.only != "quality":
        result["cost"] = cost = measure_cost(shard_sizes(args.samples, SEQ_LEN))
        print_costs(cost, args.samples)
    print(machine_line(machine))
    save_result(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
