"""What the sample order costs at 10^8 samples: memory of a process, first batch after a resume, quality of the shuffle.

usage: python scripts/bench/order_memory.py [--samples 100000000] [--seq-len 1024]

Compared with Streaming's py1br at its own block size, which builds the whole permutation (at 1/20 of the samples, since
it needs 8 bytes per sample and several copies).
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import time
import tracemalloc

import numpy as np

from llmscale.data.order.sample_order import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_CANONICAL_NODES,
    RankLayout,
    SampleOrder,
    shard_batch,
)

GLOBAL_BATCH = 512
RANKS_PER_NODE = 8


def shard_sizes(num_samples: int, seq_len: int) -> np.ndarray:
    """Samples per 64 MiB shard of uint16 windows."""
    per_shard = (64 << 20) // (2 * (seq_len + 1) + 4)
    full, rest = divmod(num_samples, per_shard)
    return np.array([per_shard] * full + [rest] * (rest > 0), np.int64)


def large_order(sizes: np.ndarray) -> SampleOrder:
    """The order of a set too large for a node."""
    return SampleOrder(sizes, seed=17, num_canonical_nodes=DEFAULT_CANONICAL_NODES, block_size=DEFAULT_BLOCK_SIZE)


def measure_cost(sizes: np.ndarray) -> dict[str, float]:
    """Resume in the middle of the third epoch: seconds and bytes from nothing to the first batch, then per batch."""
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
        "peak_bytes_per_node_of_8_ranks": peak_bytes * RANKS_PER_NODE,
    }


def measure_quality(ids: np.ndarray, rows: np.ndarray, sizes: np.ndarray) -> dict[str, float]:
    """Distinct shards in a global batch, and shards that one of one, of eight nodes holds within 100,000 samples."""
    shard_of = np.repeat(np.arange(len(sizes)), sizes)
    batches = ids[: len(ids) // GLOBAL_BATCH * GLOBAL_BATCH].reshape(-1, GLOBAL_BATCH)[:: max(len(ids) // 10**6, 1)]
    held = {}
    for nodes in (1, 8):
        window = ids[: 100_000 * nodes][rows[: 100_000 * nodes] % nodes == 0]
        held[f"shards_per_100k_samples_of_1_in_{nodes}_nodes"] = float(len(np.unique(shard_of[window])))
    return {"distinct_shards_per_batch": float(np.mean([len(np.unique(shard_of[b])) for b in batches])), **held}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10**8)
    parser.add_argument("--seq-len", type=int, default=1024)
    args = parser.parse_args()
    rss_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sizes = shard_sizes(args.samples, args.seq_len)
    cost = measure_cost(sizes)
    cost["rss_growth_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - rss_before
    result: dict[str, object] = {
        "machine": f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, NumPy "
        f"{np.__version__}",
        "samples": args.samples,
        "shards": len(sizes),
        "num_canonical_nodes": DEFAULT_CANONICAL_NODES,
        "block_size": DEFAULT_BLOCK_SIZE,
        "cost": cost,
    }
    small = shard_sizes(args.samples // 20, args.seq_len)
    n = int(small.sum())
    order = large_order(small)
    result["quality"] = measure_quality(order.sample_ids(np.arange(n)), order.rows(np.arange(n)), small)
    from llmscale.data.shards.streaming_import import streaming_module

    begin_s = time.perf_counter()
    partition = streaming_module("partition").get_partitions("relaxed", n, 8, 1, 1, 1, 1, 0, 1).reshape(-1)
    theirs = streaming_module("shuffle").get_shuffle("py1br", small, 8, 17, 0, 1 << 18)
    theirs = theirs[partition[partition >= 0]]
    result["py1br_8_rows_block_2^18"] = {
        "seconds_for_1/20": time.perf_counter() - begin_s,
        **measure_quality(theirs, np.arange(n) % 8, small),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
