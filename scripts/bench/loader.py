#!/usr/bin/env python3
"""How fast training windows are read: ours beside nanoGPT's memmap, StreamingDataset, LitData and datasets.

    python scripts/bench/loader.py --json scripts/bench/results/loader.json

Every contestant gives micro-batches of int64 windows [b, T + 1], shuffled, from the same tokens on the same disk. Each
is a process of its own that waits for its turn: a round asks each for as many batches, so other load falls on all of
them, and the ratio to nanoGPT's get_batch (a random offset into one memory map, which keeps no epochs, no order and no
place to resume) is taken within each round. Workers are warm and nobody trains, so this is the most that a loader
gives; a training step takes far longer. Beside it: seconds from the start of the process to its first batch, imports
left out, resident memory after the rounds, and how long ours takes to the first ids at 90 % of --resume-samples
samples.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from flag_types import output_file, whole_number, whole_or_zero
from machine import describe_circumstances, describe_machine, save_result
from paced_ranks import REPOSITORY, Job, Orders

sys.path.insert(0, str(REPOSITORY))

BASELINE = "nanoGPT memmap"
#: Contestant -> (kind, data workers).
CONTESTANTS = {
    BASELINE: ("memmap", 0),
    "llmscale, 0 workers": ("llmscale", 0),
    "llmscale, 1 worker": ("llmscale", 1),
    "llmscale, 2 workers": ("llmscale", 2),
    "StreamingDataset, 0 workers": ("streaming", 0),
    "StreamingDataset, 2 workers": ("streaming", 2),
    "datasets, 0 workers": ("datasets", 0),
    "datasets, 2 workers": ("datasets", 2),
    "LitData, 2 workers": ("litdata", 2),
}
SETTINGS = ("megabytes", "seq_len", "batch", "rounds", "batches", "resume_samples")
Batches = Iterator[object]


def main() -> int:
    args = parse_arguments()
    if args.contestant:
        run_contestant(args.contestant, args.workers, Path(args.folder), args)
        return 0
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="loader-", dir=args.scratch) as folder:
        make_data(Path(folder), args)
        rounds, facts = measure(Path(folder), args)
    result = summarize(rounds, facts)
    result["resume"] = {"seconds": time_resume(args.resume_samples), "samples": args.resume_samples}
    print_table(result)
    save_result(args.json, {**describe_circumstances(machine, args, SETTINGS), **result})
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=whole_number, default=256, help="of tokens, two bytes each (default: 256)")
    parser.add_argument("--seq-len", type=whole_number, default=1024, help="tokens (default: 1024)")
    parser.add_argument(
        "--batch", type=whole_number, default=12, help="windows of a micro-batch (default: 12, nanoGPT's)"
    )
    parser.add_argument("--rounds", type=whole_number, default=7, help="default: 7")
    parser.add_argument("--batches", type=whole_number, default=300, help="of a round (default: 300)")
    parser.add_argument("--resume-samples", type=whole_or_zero, default=10_000_000, help="default: 10,000,000")
    parser.add_argument("--scratch", metavar="DIR", help="where the data are made; default: the system's")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, metavar="NAME", help=f"of: {', '.join(CONTESTANTS)}")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures there too")
    for name in ("--contestant", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=whole_or_zero, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_data(folder: Path, args: argparse.Namespace) -> None:
    """One stream of tokens, as bytes of text for `data prepare`; every contestant's files are made of its windows."""
    text = np.random.default_rng(0).integers(97, 123, args.megabytes << 19, np.uint8)
    (folder / "text.txt").write_bytes(text.tobytes())
    command = ["data", "prepare", "--input", str(folder / "text.txt"), "--out", str(folder / "set"), "--tokenizer"]
    options = ("bytes", "--seq-len", str(args.seq_len), "--val-fraction", "0", "--shard-mb", "16")
    subprocess.run(
        [sys.executable, "-m", "llmscale", *command, *options],
        check=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.DEVNULL,
    )
    text.astype(np.uint16).tofile(folder / "train.bin")


def measure(folder: Path, args: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, dict[str, object]]]:
    """Seconds of each contestant's rounds, and what each says of itself."""
    facts: dict[str, dict[str, object]] = {}
    jobs: dict[str, Job] = {}
    seconds: dict[str, list[float]] = {}
    try:
        for name in args.only or CONTESTANTS:
            kind, workers = CONTESTANTS[name]
            command = [str(Path(__file__).resolve()), "--contestant", kind, "--workers", str(workers), "--folder"]
            options = [str(folder), "--seq-len", str(args.seq_len), "--batch", str(args.batch)]
            jobs[name] = Job([*command, *options], 1, threads=1, log=folder / "log.txt")
            (facts[name],) = jobs[name].answers()
            if "problem" in facts[name]:
                jobs.pop(name).kill()
        for number in range(args.rounds):
            for name in list(jobs) if number % 2 == 0 else list(jobs)[::-1]:
                (answer,) = jobs[name].order(str(args.batches))
                seconds.setdefault(name, []).append(answer["seconds"])
                facts[name]["resident_bytes"] = answer["resident_bytes"]
    finally:
        for job in jobs.values():
            job.kill()
    return seconds, facts


def summarize(rounds: dict[str, list[float]], facts: dict[str, dict[str, object]]) -> dict[str, object]:
    """Ratios of tokens/s to the baseline's of the same round, and the rest."""
    found: dict[str, dict[str, object]] = {}
    for name, fact in facts.items():
        found[name] = dict(fact)
        if name in rounds and BASELINE in rounds:
            ratios = [base / own for base, own in zip(rounds[BASELINE], rounds[name], strict=True)]
            found[name] |= {"ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
    return {"contestants": found}


def print_table(result: dict[str, object]) -> None:
    contestants = result["contestants"]
    assert isinstance(contestants, dict)
    print(f"{'':30}{'tokens/s':>10}{'(range)':>16}{'first batch s':>15}{'resident MiB':>14}")
    for name, found in contestants.items():
        if "problem" in found:
            print(f"{name:30}  {found['problem']}")
            continue
        spread = f"({found['lowest']:.2f}-{found['highest']:.2f})" if "ratio" in found else ""
        ratio = f"{found['ratio']:.2f} x" if "ratio" in found else "-"
        resident = found["resident_bytes"] / 2**20
        print(f"{name:30}{ratio:>10}{spread:>16}{found['first_batch_s']:15.3f}{resident:14.0f}")
    resume = result["resume"]
    assert isinstance(resume, dict)
    print(f"llmscale's first ids at 90 % of {resume['samples']:,} samples: {resume['seconds']:.4f} s")


def time_resume(num_samples: int) -> float:
    """Seconds from nothing to the ids of the global batch of 512 at 90 % of an epoch, in shards of 32,768 samples."""
    from llmscale.data.order.sample_order import SampleOrder

    sizes = np.full(-(-num_samples // 32_768), 32_768)
    began = time.perf_counter()
    SampleOrder(sizes, seed=1).sample_ids(np.arange(int(0.9 * num_samples), int(0.9 * num_samples) + 512))
    return time.perf_counter() - began


def run_contestant(kind: str, workers: int, folder: Path, args: argparse.Namespace) -> None:
    """Answer with what the first batch took, then each order for so many batches with their seconds."""
    orders = Orders()
    try:
        start, touch = STARTS[kind](folder, workers, args), 0
    except ImportError as error:
        orders.answer({"problem": f"not installed: {error.name or error}"})
        return
    began = time.perf_counter()
    batches = start()
    touch += size_of(next(batches), args)
    orders.answer({"first_batch_s": time.perf_counter() - began})
    while order := orders.wait():
        began = time.perf_counter()
        for _ in range(int(order)):
            touch += size_of(next(batches), args)
        orders.answer({"seconds": time.perf_counter() - began, "resident_bytes": resident_bytes(), "touched": touch})


def size_of(batch: object, args: argparse.Namespace) -> int:
    """Windows; each batch must be what was asked for."""
    import torch

    assert isinstance(batch, torch.Tensor)
    assert batch.dtype == torch.int64
    assert tuple(batch.shape) == (args.batch, args.seq_len + 1)
    return int(batch[0, 0]) >= 0


def resident_bytes() -> int:
    """Of this process and its workers, mapped pages of files included."""
    pages = [Path("/proc/self/statm"), *(Path(f"/proc/{child}/statm") for child in children())]
    return sum(int(path.read_text().split()[1]) for path in pages) * resource.getpagesize()


def children() -> list[str]:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return text.split()


def start_memmap(folder: Path, workers: int, args: argparse.Namespace) -> Callable[[], Batches]:
    """get_batch of nanoGPT's train.py (karpathy/nanoGPT, 93a43d9), with inputs and targets in one window."""
    import torch

    def batches() -> Batches:
        while True:
            # Made anew for every batch, as there, against a leak of numpy's.
            data = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
            places = torch.randint(len(data) - args.seq_len - 1, (args.batch,))
            windows = [torch.from_numpy(data[i : i + args.seq_len + 1].astype(np.int64)) for i in places]
            yield torch.stack(windows)

    return batches


def start_llmscale(folder: Path, workers: int, args: argparse.Namespace) -> Callable[[], Batches]:
    from llmscale.data.loader import Feed, FeedPlan
    from llmscale.data.order.build_order import OrderSettings, build_order
    from llmscale.data.order.rank_sharding import RankLayout
    from llmscale.data.shards.dataset_source import open_set
    from llmscale.data.shards.token_shards import TokenShards

    def batches() -> Batches:
        location = open_set(str(folder / "set"))
        order = build_order(location, OrderSettings(seed=1))
        plan = FeedPlan(RankLayout(0, (1,)), args.batch, 1)
        return (batch.tokens for batch in Feed(TokenShards(location, "train"), order, plan, num_workers=workers))

    return batches


def start_streaming(folder: Path, workers: int, args: argparse.Namespace) -> Callable[[], Batches]:
    import torch
    from torch.utils.data import DataLoader

    from llmscale.data.shards.streaming_import import streaming_module

    dataset_kind = streaming_module("dataset").StreamingDataset

    def batches() -> Batches:
        dataset = dataset_kind(local=str(folder / "set" / "train"), shuffle=True, batch_size=args.batch)
        collate = lambda samples: torch.from_numpy(np.stack([s["tokens"] for s in samples]).astype(np.int64))  # noqa: E731
        while True:
            yield from DataLoader(
                dataset, args.batch, num_workers=workers, collate_fn=collate, drop_last=True,
                persistent_workers=workers > 0,
            )  # fmt: skip

    return batches


def start_datasets(folder: Path, workers: int, args: argparse.Namespace) -> Callable[[], Batches]:
    import torch
    from datasets import Dataset, load_from_disk
    from torch.utils.data import DataLoader

    saved = folder / "arrow"
    if not saved.exists():
        tokens = np.fromfile(folder / "train.bin", np.uint16)
        windows = tokens[: len(tokens) // (args.seq_len + 1) * (args.seq_len + 1)].reshape(-1, args.seq_len + 1)
        Dataset.from_dict({"tokens": list(windows)}).save_to_disk(str(saved))

    def batches() -> Batches:
        dataset = load_from_disk(str(saved)).with_format("numpy")
        collate = lambda samples: torch.from_numpy(np.stack([s["tokens"] for s in samples]).astype(np.int64))  # noqa: E731
        while True:
            yield from DataLoader(
                dataset, args.batch, shuffle=True, num_workers=workers, collate_fn=collate, drop_last=True,
                persistent_workers=workers > 0,
            )  # fmt: skip

    return batches


def only(part: object) -> Iterator[object]:
    """A part of the tokens as LitData's `optimize` wants it; its worker finds it by name."""
    yield part


def start_litdata(folder: Path, workers: int, args: argparse.Namespace) -> Callable[[], Batches]:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

    saved = folder / "litdata"
    if not saved.exists():
        import torch

        tokens = torch.from_numpy(np.fromfile(folder / "train.bin", np.uint16).astype(np.int64))
        optimize(
            fn=only,
            # Copies: a view is sent to the worker with all that it is a view of.
            inputs=[part.clone() for part in tokens.split(1 << 20)],
            output_dir=str(saved),
            chunk_size=(args.seq_len + 1) * 8192,
            item_loader=TokensLoader(),
            num_workers=1,
        )

    def batches() -> Batches:
        dataset = StreamingDataset(
            str(saved), item_loader=TokensLoader(block_size=args.seq_len + 1), shuffle=True, drop_last=True
        )
        while True:
            yield from StreamingDataLoader(dataset, batch_size=args.batch, num_workers=workers)

    return batches


STARTS = {
    "memmap": start_memmap,
    "llmscale": start_llmscale,
    "streaming": start_streaming,
    "datasets": start_datasets,
    "litdata": start_litdata,
}


if __name__ == "__main__":
    sys.exit(main())
