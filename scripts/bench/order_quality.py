"""Whether the order of samples can be told from a uniform shuffle, beside NumPy's permutation and Streaming's orders.

usage: python scripts/bench/order_quality.py [--json FILE] [--skip losses prepare]

Three questions, on sets whose text is sorted, so that a sample's place in the text is what a batch must not depend on:

- batches: standard deviation of the mean place of a batch over a uniform shuffle's (1.00 is right, below it batches
  are stratified, above it they come from a part of the text), and the largest autocorrelation of these means at lags 1
  to 8, in units of its noise (3 or 4 of them is nothing). Batches of 1 to 2,048, sets of 1 to 10,000 shards.
- losses: a plain loop trains a small GPT on the standard library, batch of 12, and prints the autocorrelation of what
  is left of the losses when their trend is taken off. Each order has the same model and the same number of steps.
- prepare: processor time with and without the shuffle of windows, in turns.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flag_types import output_file
from machine import describe_machine, median_and_range, save_result, show_range

from llmscale.data.order.sample_order import DEFAULT_CANONICAL_NODES, SampleOrder
from llmscale.data.prepare.split_writer import window_keys
from llmscale.data.shards.streaming_import import streaming_module

BATCHES = (1, 8, 12, 24, 48, 128, 512, 2048)
SEEDS = 4
EPOCHS = 2
#: Streaming's own defaults.
STREAMING_ROWS, STREAMING_BLOCK = 64, 1 << 18
STREAMING = ("py1e", "py1br", "py1s", "naive")
LOSS_BATCH, LOSS_STEPS = 12, 600

#: Places in the text of the samples seen in two epochs, for shard sizes and a seed.
Orderer = Callable[[np.ndarray, int], np.ndarray]


def sets() -> dict[str, np.ndarray]:
    """Samples per shard."""
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
    """One of Streaming's shuffles, read as a StreamingDataset of one node reads it."""

    def places(sizes: np.ndarray, seed: int) -> np.ndarray:
        n = int(sizes.sum())
        partition = streaming_module("partition").get_partitions("relaxed", n, STREAMING_ROWS, 1, 1, 1, 1, 0, 1)
        partition = partition.reshape(-1)
        # What pads short rows repeats a sample: each is counted once.
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
    """Standard deviation of batch means over a uniform shuffle's; largest autocorrelation at lags 1 to 8 over noise."""
    count = len(places) // batch
    means = places[: count * batch].reshape(count, batch).mean(axis=1) - (n - 1) / 2
    uniform = np.sqrt((n * n - 1) / 12 / batch * (n - batch) / (n - 1))
    variance = max(float((means**2).mean()), 1e-300)
    lags = [(means[:-lag] * means[lag:]).mean() / variance + batch / (n - batch) for lag in range(1, 9)]
    return float(np.sqrt(variance) / uniform), float(np.abs(lags).max() * np.sqrt(count))


def measure_batches(orderer: Orderer, sizes: np.ndarray) -> dict[str, dict[str, float]]:
    """By batch, over the seeds: root mean square of the ratio, and the median of the largest autocorrelation."""
    n = int(sizes.sum())
    found = [[spread(places, n, batch) for batch in BATCHES] for places in (orderer(sizes, s) for s in range(SEEDS))]
    ratios, lags = np.moveaxis(np.array(found), 2, 0)
    return {
        str(batch): {"ratio": float(np.sqrt((ratios[:, i] ** 2).mean())), "lag": median_and_range(lags[:, i].tolist())}
        for i, batch in enumerate(BATCHES)
    }


def measure_blocks(num_samples: int = 4_000_000, num_shards: int = 1_000) -> dict[str, dict[str, dict[str, float]]]:
    """A set too large for a node: 48 rows, blocks of two shards or so. Places in the text, its windows shuffled as
    `prepare` does or left in order."""
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


def residuals(losses: np.ndarray) -> np.ndarray:
    """Losses less a running mean of 51, the first 100 left out."""
    smooth = np.convolve(losses, np.full(51, 1 / 51), mode="same")
    return (losses - smooth)[100:-25]


def measure_losses(folder: Path) -> dict[str, dict[str, float]]:
    """Autocorrelation at lags 1 to 4 of a nanoGPT-like loop's losses, windows in the order of the text."""
    import torch

    from llmscale.data.shards.cache import open_set
    from llmscale.data.shards.token_shards import TokenShards

    shards = TokenShards(open_set(str(prepare_stdlib(folder / "in_order", shuffle=False))), "train")
    sizes = shards.samples_per_shard
    result = {}
    for name in ("llmscale", "llmscale, first version", "NumPy's permutation"):
        places = ORDERS[name](sizes, 1337)[: LOSS_BATCH * LOSS_STEPS]
        torch.manual_seed(0)
        losses = train(shards.read(places).astype(np.int64).reshape(LOSS_STEPS, LOSS_BATCH, -1))
        left = residuals(losses)
        left = left - left.mean()
        result[name] = {
            str(lag): float((left[:-lag] * left[lag:]).mean() / (left**2).mean()) for lag in range(1, 5)
        } | {"last_100": float(losses[-100:].mean())}
    return result


def train(batches: np.ndarray) -> np.ndarray:
    """The loss of each step of a GPT of two layers, [steps]."""
    import torch

    vocab, width, positions = int(batches.max()) + 1, 64, batches.shape[2] - 1

    class Gpt(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch.nn.Embedding(vocab, width)
            self.positions = torch.nn.Embedding(positions, width)
            layer = torch.nn.TransformerEncoderLayer(width, 2, 4 * width, 0.0, batch_first=True, norm_first=True)
            self.blocks = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = torch.nn.Linear(width, vocab)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            mask = torch.nn.Transformer.generate_square_subsequent_mask(positions)
            hidden = self.tokens(tokens) + self.positions.weight
            return self.head(self.blocks(hidden, mask=mask, is_causal=True))

    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in torch.from_numpy(batches):
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def prepare_stdlib(out: Path, *, shuffle: bool, seq_len: int = 64) -> Path:
    from llmscale.data.prepare.prepare_set import PrepareOptions, prepare
    from llmscale.data.prepare.sources.open_source import open_source
    from llmscale.data.tokenizers.load_tokenizer import load_tokenizer

    options = PrepareOptions(seq_len=seq_len, shuffle=shuffle)
    prepare(open_source("python-stdlib"), out, load_tokenizer("bytes"), options, num_workers=1)
    return out


def measure_prepare(folder: Path, rounds: int = 3) -> dict[str, float]:
    """Processor seconds of `prepare` in one process, in turns; bytes are tokens, so tokenising hides least."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for shuffle in (True, False):
            begin_s = time.process_time()
            prepare_stdlib(folder / f"{number}{shuffle}", shuffle=shuffle, seq_len=1024)
            seconds[shuffle].append(time.process_time() - begin_s)
    return {
        "shuffled_over_in_order": min(seconds[True]) / min(seconds[False]),
        "in_order_s": min(seconds[False]),
        "shuffled_s": min(seconds[True]),
    }


def print_batches(title: str, rows: dict[str, dict[str, dict[str, float]]]) -> None:
    print(f"\n{title}: ratio of standard deviations, largest autocorrelation over its noise (range of the seeds)")
    print(f"{'':26}" + "".join(f"{batch:>26}" for batch in BATCHES))
    for name, row in rows.items():
        print(
            f"{name:26}"
            + "".join(f"{row[str(b)]['ratio']:.2f} {show_range(row[str(b)]['lag'], '.1f')}".rjust(26) for b in BATCHES)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures there too")
    parser.add_argument("--skip", nargs="*", default=[], choices=["losses", "prepare"], help="leave these out")
    parser.add_argument("--sets", nargs="*", choices=list(sets()), help="only these sets (default: all)")
    args = parser.parse_args()
    result: dict[str, object] = {"machine": describe_machine(), "epochs": EPOCHS, "seeds": SEEDS}
    batches = {}
    for title, sizes in sets().items():
        if args.sets is None or title in args.sets:
            batches[title] = {name: measure_batches(orderer, sizes) for name, orderer in ORDERS.items()}
            print_batches(title, batches[title])
    result["batches"] = batches
    if args.sets is None:
        result["blocks"] = blocks = measure_blocks()
        print_batches("1,000 shards read in blocks, too large for a node", blocks)
    with tempfile.TemporaryDirectory() as folder:
        if "losses" not in args.skip:
            result["losses"] = losses = measure_losses(Path(folder))
            print(
                f"\nLosses, batch of {LOSS_BATCH}, {LOSS_STEPS} steps: autocorrelation at lags 1 to 4, last mean loss"
            )
            for name, row in losses.items():
                print(
                    f"{name:26}" + "".join(f"{row[str(lag)]:+8.2f}" for lag in range(1, 5)) + f"{row['last_100']:9.3f}"
                )
        if "prepare" not in args.skip:
            result["prepare"] = made = measure_prepare(Path(folder))
            print(
                f"\nprepare with the shuffle over prepare without: {made['shuffled_over_in_order']:.2f} processor time"
            )
    save_result(args.json, result)


if __name__ == "__main__":
    sys.exit(main())
