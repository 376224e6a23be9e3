"""Whether a GPT of today's blocks beats GPT-2's at equal tokens: tiny-10m beside tiny-modern-10m, from several seeds.

usage: python scripts/bench/modern_blocks.py [--seeds 1 2 3] [--tokens 400000] [--json FILE]

Both have 6 blocks of 384, 6 heads and a context of 256, and are trained by `llmscale train` on one process, on the same
windows in the same order: the Python standard library in a vocabulary of its own of 4,096 tokens. The first seed tries
every learning rate on both; each model's best one trains its other seeds. Prints the validation loss after the last
step, in nats per token. `--json` is written after every run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from flag_types import output_file, positive, whole_number, whole_or_zero
from machine import describe_circumstances, describe_machine, save_result

REPOSITORY = Path(__file__).resolve().parents[2]
SEQ_LEN = 256
GPT2, MODERN = "tiny-10m", "tiny-modern-10m"

#: Validation loss by model, learning rate and seed.
Losses = dict[str, dict[str, dict[str, float]]]


def llmscale(*arguments: str) -> None:
    """Run a command of the toolkit; a failure shows what it printed."""
    answer = subprocess.run(
        [sys.executable, "-m", "llmscale", *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if answer.returncode:
        sys.exit(f"llmscale {' '.join(arguments)} ended with status {answer.returncode}:\n{answer.stdout}")


def prepare(folder: Path, vocabulary: int) -> Path:
    tokenizer, out = str(folder / "tokenizer"), folder / "set"
    llmscale(
        *("data", "train-tokenizer", "--input", "python-stdlib", "--vocab-size", str(vocabulary), "--out", tokenizer)
    )
    llmscale(
        *("data", "prepare", "--input", "python-stdlib", "--tokenizer", tokenizer, "--workers", "1"),
        *("--seq-len", str(SEQ_LEN), "--out", str(out)),
    )
    return out


def train(args: argparse.Namespace, data: Path, model: str, rate: float, seed: int) -> float:
    """One run; its last validation loss."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        steps = -(-args.tokens // args.batch_tokens)
        llmscale(
            *("train", "--nproc-per-node", "1", "--ds", str(REPOSITORY / "ds_configs" / "zero0.json")),
            *("--model", model, "--data", str(data), "--run", str(run), "--seed", str(seed)),
            *("--lr", str(rate), "--schedule", "cosine", "--warmup-steps", str(max(1, steps // 10))),
            *("--steps", str(steps), "--global-batch-tokens", str(args.batch_tokens)),
            *("--precision", args.precision, "--num-workers", "0", "--save-every", "0", "--no-async-save"),
            *("--val-every", str(steps), "--val-samples", str(args.val_samples)),
        )
        losses = read_validations(run)
    return losses[max(losses, key=int)]


def read_validations(run: Path) -> dict[str, float]:
    """Validation losses by step."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {str(record["step"]): float(record["loss"]) for record in records if record["kind"] == "validation"}


def best_rate(losses: dict[str, dict[str, float]], seed: int) -> str:
    return min(losses, key=lambda rate: losses[rate][str(seed)])


def print_table(losses: Losses, seeds: list[int]) -> None:
    print(f"\n{'validation loss':18}{'lr':>9}" + "".join(f"{f'seed {seed}':>10}" for seed in seeds))
    for model, rates in losses.items():
        for rate, by_seed in rates.items():
            cells = (f"{by_seed[str(seed)]:10.4f}" if str(seed) in by_seed else f"{'':10}" for seed in seeds)
            print(f"{model:18}{rate:>9}" + "".join(cells))
    gaps = [gap for seed in seeds if (gap := lead(losses, seeds[0], seed)) is not None]
    if gaps:
        print("today's blocks ahead by " + ", ".join(f"{gap:+.4f}" for gap in gaps) + " nats per token")


def lead(losses: Losses, first_seed: int, seed: int) -> float | None:
    """GPT-2's loss less the other's, each at its best learning rate; None while a run is missing."""
    try:
        gpt2, modern = (losses[model][best_rate(losses[model], first_seed)][str(seed)] for model in (GPT2, MODERN))
    except (KeyError, ValueError):
        return None
    return gpt2 - modern


def add_tuning_arguments(parser: argparse.ArgumentParser, *, rates: list[float], val_samples: int) -> None:
    """What both of two rivals are trained on, with which learning rates and seeds; where the figures go."""
    parser.add_argument("--seeds", type=whole_or_zero, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--tokens", type=whole_number, default=400_000, help="of a whole run (default: 400,000)")
    parser.add_argument(
        "--batch-tokens", type=whole_windows, default=2048, help=f"of a step: windows of {SEQ_LEN} (default: 2,048)"
    )
    parser.add_argument("--learning-rates", type=positive, nargs="+", default=rates, metavar="LR")
    parser.add_argument(
        "--precision",
        choices=["fp32", "bf16", "autocast"],
        default="autocast",
        help="default: autocast; fp32 takes twice the time",
    )
    parser.add_argument("--vocabulary", type=whole_number, default=4096, help="tokens (default: 4,096)")
    parser.add_argument(
        "--val-samples", type=whole_number, default=val_samples, help="sequences (default: %(default)s)"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures there too")


def whole_windows(text: str) -> int:
    """Tokens of whole windows."""
    tokens = whole_number(text)
    if tokens % SEQ_LEN:
        raise argparse.ArgumentTypeError(f"must be a multiple of the windows' {SEQ_LEN} tokens, not '{text}'")
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_tuning_arguments(parser, rates=[1e-3, 3e-3], val_samples=256)
    args = parser.parse_args()
    machine = describe_machine()
    settings = [name for name in vars(args) if name != "json"]
    losses: Losses = {model: {str(rate): {} for rate in args.learning_rates} for model in (GPT2, MODERN)}
    with tempfile.TemporaryDirectory() as folder:
        data = prepare(Path(folder), args.vocabulary)
        for seed in args.seeds:
            tried = {
                model: list(rates) if seed == args.seeds[0] else [best_rate(rates, args.seeds[0])]
                for model, rates in losses.items()
            }
            for model, rate in ((model, rate) for model, rates in tried.items() for rate in rates):
                loss = train(args, data, model, float(rate), seed)
                losses[model][rate][str(seed)] = loss
                print(f"{model}, learning rate {rate}, seed {seed}: {loss:.4f}", flush=True)
                save_result(args.json, {**describe_circumstances(machine, args, settings), "validation_loss": losses})
    print_table(losses, args.seeds)


if __name__ == "__main__":
    sys.exit(main())
