"""How fast training windows are read: ours beside nanoGPT's memory map, StreamingDataset, LitData and datasets.

    python -m scripts.bench.data.loader

Every contestant gives shuffled micro-batches of int64 windows [b, T + 1] from the same tokens on the same disk, each in
a process of its own, in turns. Ratios are taken within a round, by wall clock and by processor time (workers included),
to two baselines: nanoGPT's get_batch, which opens its memory map again for every batch, and the same on a map opened
once. Both take random offsets, and keep no epochs, no order and no place to resume. Workers read ahead between turns,
which their processor time counts and the wall clock does not. Also printed: seconds from the start of a process to its
first batch without imports, resident memory, and our seconds to the first ids at 90 % of --resume-samples samples.
"""

from __future__ import annotations

import argparse
import functools
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from scripts.bench.harness import (
    Job,
    Orders,
    describe_circumstances,
    describe_machine,
    machine_line,
    median_and_range,
    output_file,
    run_llmscale,
    save_result,
    show_range,
    whole_number,
    whole_or_zero,
    words,
)

#: Baselines by their name in the result.
BASELINES = {"once": "map opened once", "each": "nanoGPT memmap"}
CLOCKS = {"seconds": "wall", "processor_s": "processor"}
#: Contestant -> (kind, data workers).
CONTESTANTS = {
    "map opened once": ("memmap-once", 0),
    "nanoGPT memmap": ("memmap", 0),
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
    print(machine_line(machine))
    save_result(args.json, {**describe_circumstances(machine, args, SETTINGS), **result})
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=whole_number, default=256, help="of tokens, two bytes each (default: 256)")
    parser.add_argument("--seq-len", type=whole_number, default=1024, help="tokens (default: 1024)")
    parser.add_argument(
        "--batch", type=whole_number, default=12, help="windows of a micro-batch (default: 12, nanoGPT's)"
    )
    parser.add_argument("--rounds", type=whole_number, default=25, help="default: 25")
    parser.add_argument("--batches", type=whole_number, default=300, help="of a round (default: 300)")
    parser.add_argument("--resume-samples", type=whole_or_zero, default=10_000_000, help="default: 10,000,000")
    parser.add_argument("--scratch", metavar="DIR", help="where the data are made; default: the system's")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, metavar="NAME", help=f"of: {', '.join(CONTESTANTS)}")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the raw measurements to this file")
    for name in ("--contestant", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=whole_or_zero, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_data(folder: Path, args: argparse.Namespace) -> None:
    """Write one stream of tokens for nanoGPT, and prepare it as bytes for the others."""
    text = np.random.default_rng(0).integers(97, 123, args.megabytes << 19, np.uint8)
    (folder / "text.txt").write_bytes(text.tobytes())
    settings = words(f"--tokenizer bytes --seq-len {args.seq_len} --val-fraction 0 --shard-mb 16")
    run_llmscale("data", "prepare", "--input", str(folder / "text.txt"), "--out", str(folder / "set"), *settings)
    text.astype(np.uint16).tofile(folder / "train.bin")


def measure(
    folder: Path, args: argparse.Namespace
) -> tuple[dict[str, list[dict[str, float]]], dict[str, dict[str, object]]]:
    """Return seconds, by both clocks, of each contestant's rounds, and what each says of itself."""
    facts: dict[str, dict[str, object]] = {}
    jobs: dict[str, Job] = {}
    rounds: dict[str, list[dict[str, float]]] = {}
    try:
        for name in args.only or CONTESTANTS:
            kind, workers = CONTESTANTS[name]
            options = ["--contestant", kind, "--workers", str(workers), "--folder", str(folder)]
            options += ["--seq-len", str(args.seq_len), "--batch", str(args.batch)]
            jobs[name] = Job(__spec__.name, options, 1, threads=1, log=folder / "log.txt")
            (facts[name],) = jobs[name].answers()
            if "problem" in facts[name]:
                jobs.pop(name).kill()
        for number in range(args.rounds):
            for name in list(jobs) if number % 2 == 0 else list(jobs)[::-1]:
                (answer,) = jobs[name].order(str(args.batches))
                rounds.setdefault(name, []).append({clock: answer[clock] for clock in CLOCKS})
                facts[name]["resident_bytes"] = answer["resident_bytes"]
    finally:
        for job in jobs.values():
            job.kill()
    return rounds, facts


def summarize(
    rounds: dict[str, list[dict[str, float]]], facts: dict[str, dict[str, object]]
) -> dict[str, dict[str, dict[str, object]]]:
    """Return ratios of tokens/s to the baselines' of the same round, and the rest."""
    ratios_of: dict[str, dict[str, object]] = {}
    for name, fact in facts.items():
        ratios_of[name] = dict(fact)
        for base in (base for base in BASELINES if name in rounds and BASELINES[base] in rounds):
            for clock, name_of_clock in CLOCKS.items():
                pairs = zip(rounds[BASELINES[base]], rounds[name], strict=True)
                ratios_of[name][f"{name_of_clock}_{base}"] = median_and_range(
                    theirs[clock] / own[clock] for theirs, own in pairs
                )
    return {"contestants": ratios_of}


def print_table(result: dict[str, dict[str, dict[str, object]]]) -> None:
    columns = [f"{clock}_{base}" for base in BASELINES for clock in CLOCKS.values()]
    print(f"{'tokens/s, as a multiple of':30}{BASELINES['once']:^40}{BASELINES['each']:^40}")
    heading = "".join(f"{clock + ' (range)':>20}" for _ in BASELINES for clock in CLOCKS.values())
    print(f"{'':30}{heading}{'first batch s':>15}{'resident MiB':>14}")
    for name, numbers in result["contestants"].items():
        if "problem" in numbers:
            print(f"{name:30}  {numbers['problem']}")
            continue
        ratios = "".join(f"{show_range(numbers[key]) if key in numbers else '-':>20}" for key in columns)  # type: ignore[arg-type]
        resident = numbers["resident_bytes"] / 2**20  # type: ignore[operator]
        print(f"{name:30}{ratios}{numbers['first_batch_s']:15.3f}{resident:14.0f}")
    resume = result["resume"]
    print(f"llmscale's first ids at 90 % of {resume['samples']:,} samples: {resume['seconds']:.4f} s")


def time_resume(num_samples: int) -> float:
    """Return seconds to the ids of a global batch of 512 at 90 % of an epoch, in shards of 32,768 samples."""
    from llmscale.data.order.sample_order import SampleOrder

    sizes = np.full(-(-num_samples // 32_768), 32_768)
    began = time.perf_counter()
    SampleOrder(sizes, seed=1).sample_ids(np.arange(int(0.9 * num_samples), int(0.9 * num_samples) + 512))
    return time.perf_counter() - began


def run_contestant(kind: str, workers: int, folder: Path, args: argparse.Namespace) -> None:
    """Answer with the seconds of the first batch, then each order for a number of batches with their seconds."""
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
    busy_s = processor_s()
    while order := orders.wait():
        began = time.perf_counter()
        for _ in range(int(order)):
            touch += size_of(next(batches), args)
        took_s, busy_before_s, busy_s = time.perf_counter() - began, busy_s, processor_s()
        answer = {"seconds": took_s, "processor_s": busy_s - busy_before_s}
        orders.answer({**answer, "resident_bytes": resident_bytes(), "touched": touch})


def size_of(batch: object, args: argparse.Namespace) -> int:
    """Check the type and shape of a batch; touch its memory."""
    import torch

    assert isinstance(batch, torch.Tensor)
    assert batch.dtype == torch.int64
    assert tuple(batch.shape) == (args.batch, args.seq_len + 1)
    return int(batch[0, 0]) >= 0


def resident_bytes() -> int:
    """Return resident memory of this process and its workers, mapped pages of files included."""
    pages = [Path("/proc/self/statm"), *(Path(f"/proc/{child}/statm") for child in children())]
    return sum(int(path.read_text().split()[1]) for path in pages) * resource.getpagesize()


def processor_s() -> float:
    """Return processor seconds of this process and of its workers so far."""
    # The clock of another process, as clock_getcpuclockid makes it.
    return time.process_time() + sum(time.clock_gettime(~int(child) << 3 | 2) for child in children())


def children() -> list[str]:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return text.split()


def start_memmap(
    folder: Path, workers: int, args: argparse.Namespace, *, opens_again: bool = True
) -> Callable[[], Batches]:
    """Run get_batch of nanoGPT's train.py (karpathy/nanoGPT, 93a43d9), with inputs and targets in one window."""
    import torch

    def batches() -> Batches:
        data = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
        while True:
            # nanoGPT opens the map again for every batch, against a leak of numpy.
            if opens_again:
                data = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
            places = torch.randint(len(data) - args.seq_len - 1, (args.batch,))
            windows = [torch.from_numpy(data[i : i + args.seq_len + 1].astype(np.int64)) for i in places]
            yield torch.stack(windows)

    return batches


def start_llmscale(folder: Path, workers: int, args: argparse.Namespace) -> Callable[[], Batches]:
    from llmscale.data.loader import Feed, FeedPlan
    from llmscale.data.order.sample_order import OrderSettings, RankLayout, build_order
    from llmscale.data.shards.cache import open_set
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

    from llmscale.data.prepare.sources.tokens import streaming_module

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
    """Yield a part of the tokens for LitData's `optimize`, whose worker imports this by name."""
    yield part


def start_litdata(folder: Path, workers: int, args: argparse.Namespace) -> Callable[[], Batches]:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

    saved = folder / "litdata"
    if not saved.exists():
        import torch

        tokens = torch.from_numpy(np.fromfile(folder / "train.bin", np.uint16).astype(np.int64))
        optimize(
            fn=only,
            # Copies: pickling a view would send its complete base.
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
    "memmap-once": functools.partial(start_memmap, opens_again=False),
    "llmscale": start_llmscale,
    "streaming": start_streaming,
    "datasets": start_datasets,
    "litdata": start_litdata,
}


if __name__ == "__main__":
    sys.exit(main())
