"""A timed all-reduce: on every host at once, `python -m llmscale.cluster.doctor.all_reduce --first-rank 0 --ranks 1`.

One process per rank; the first host's first rank prints the result. Ends by itself: at the time limit at the latest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from llmscale.cluster.doctor.process_limit import process_limit
from llmscale.engine.network import set_network_interface
from llmscale.untrusted.interpreter import module_command

#: Before the JSON of the result.
RESULT_MARK = "llmscale-all-reduce "
#: Buffers grow until one all-reduce takes this long, or the buffer is this large.
_LONG_S = 0.25
_MOST_BYTES = {"gloo": 64 * 2**20, "nccl": 1024 * 2**20}
_FIRST_BYTES = 2**20
_REPEATS = 3
#: Seconds beyond the limit after which the kernel ends what has not ended itself.
SPARE_S = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Start this host's ranks, or be one of them (RANK is set)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("gloo", "nccl"), required=True)
    parser.add_argument("--master", required=True, help="address of the first host")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--first-rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True, help="ranks on this host")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--timeout-s", type=int, default=60)
    args = parser.parse_args(argv)
    with process_limit(args.timeout_s + SPARE_S):
        if "LLMSCALE_ALL_REDUCE_RANK" in os.environ:
            _give_up_after(args.timeout_s)
            _measure(args, int(os.environ["LLMSCALE_ALL_REDUCE_RANK"]))
            return 0
        return _start_ranks(args, list(sys.argv[1:] if argv is None else argv))


def _give_up_after(seconds: float) -> None:
    """End this process when time is up, with a word: by a thread, for joining keeps the main one outside Python."""

    def give_up() -> None:
        print(f"the ranks did not finish within {seconds:.0f} s", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()


def _start_ranks(args: argparse.Namespace, argv: list[str]) -> int:
    """This host's ranks as children, whose alarm ends them even when this process was killed."""
    children = [
        subprocess.Popen(
            module_command("llmscale.cluster.doctor.all_reduce", *argv),
            env={**os.environ, "LLMSCALE_ALL_REDUCE_RANK": str(args.first_rank + local)},
        )
        for local in range(args.ranks)
    ]
    codes = [child.wait() for child in children]
    return next((1 for code in codes if code), 0)


def _measure(args: argparse.Namespace, rank: int) -> None:
    """Join, measure, and print on rank 0. Imports torch."""
    import torch
    import torch.distributed as dist

    # By the way that a run's ranks would take.
    os.environ["MASTER_ADDR"] = args.master
    set_network_interface()
    device = torch.device("cpu")
    if args.backend == "nccl":
        device = torch.device("cuda", rank - args.first_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        args.backend,
        init_method=f"tcp://{args.master}:{args.port}",
        rank=rank,
        world_size=args.world_size,
        timeout=timedelta(seconds=args.timeout_s),
    )

    def reduce_once(num_bytes: int) -> float:
        """Seconds of one all-reduce, the slowest rank's."""
        buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(buffer)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds)

    num_bytes = _FIRST_BYTES
    while reduce_once(num_bytes) < _LONG_S and num_bytes < _MOST_BYTES[args.backend]:
        num_bytes *= 4
    num_bytes = min(num_bytes, _MOST_BYTES[args.backend])
    seconds = statistics.median(reduce_once(num_bytes) for _ in range(_REPEATS))
    latency_s = statistics.median(reduce_once(8) for _ in range(5 * _REPEATS))
    if rank == 0:
        result = {
            "backend": args.backend,
            "world_size": args.world_size,
            "num_bytes": num_bytes,
            "seconds": seconds,
            "latency_s": latency_s,
        }
        print(RESULT_MARK + json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
