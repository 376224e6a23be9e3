"""Compare what two recipes learn: today's blocks and GPT-2's, or Muon and AdamW.

    python -m scripts.bench.learning.recipes blocks --tokens 800000 --learning-rates 1e-3 3e-3
    python -m scripts.bench.learning.recipes muon --tokens 250000

blocks: tiny-10m beside tiny-modern-10m, both 6 blocks of 384 with 6 heads and a context of 256. muon: both optimizers
on tiny-10m; Muon's run is then cut to --share of AdamW's steps, with its own complete schedule, and must end no higher.

`llmscale train` trains all of them in one process on the same windows in the same order: the Python standard library in
a vocabulary of 4,096 tokens. The first seed tries every learning rate on both; each recipe's best one trains its other
seeds. Printed are last validation losses in nats per token. The file of --json is written after every run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from scripts.bench.harness import (
    describe_circumstances,
    describe_machine,
    fraction,
    machine_line,
    output_file,
    positive,
    preset_name,
    read_losses,
    run_llmscale,
    save_result,
    whole_number,
    whole_or_zero,
    words,
)

SEQ_LEN = 256
GPT2, MODERN = "tiny-10m", "tiny-modern-10m"
ADAMW, MUON, SHORT = "adamw", "muon", "muon, fewer steps"
RECIPES = {"blocks": (GPT2, MODERN), "muon": (ADAMW, MUON, SHORT)}
DEFAULT_RATES = {"blocks": [1e-3, 3e-3], "muon": [5e-4, 1e-3, 2e-3, 4e-3]}

#: Validation losses by step.
Curve = dict[int, float]
#: Curves by recipe, learning rate and seed.
Curves = dict[str, dict[str, dict[str, Curve]]]


def main() -> int:
    args = parse_arguments()
    machine = describe_machine()
    settings = [name for name in vars(args) if name != "json"]
    curves: Curves = {name: {str(rate): {} for rate in args.learning_rates} for name in RECIPES[args.question]}
    first_seed = args.seeds[0]
    with tempfile.TemporaryDirectory() as folder:
        data = prepare(Path(folder), args)
        for seed in args.seeds:
            for name in curves:
                is_tuned = seed != first_seed or name == SHORT
                rates = (
                    [best_rate(curves, MUON if name == SHORT else name, first_seed)] if is_tuned else [*curves[name]]
                )
                for rate in rates:
                    curve = train(args, data, name, rate, seed)
                    curves[name][rate][str(seed)] = curve
                    print(f"{name}, learning rate {rate}, seed {seed}: {last(curve):.4f}", flush=True)
                    circumstances = describe_circumstances(machine, args, settings)
                    save_result(args.json, {**circumstances, "validation_loss": curves})
    print_table(curves, args.seeds)
    if args.question == "blocks":
        print_lead(curves, args.seeds, MODERN, GPT2)
    else:
        print_shares(curves, args)
    print(machine_line(machine))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=list(RECIPES))
    parser.add_argument("--seeds", type=whole_or_zero, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--tokens", type=whole_number, default=400_000, help="tokens of a run (default: 400,000)")
    parser.add_argument("--batch-tokens", type=multiple_of_window, default=2048, help="of a step (default: 2,048)")
    parser.add_argument("--learning-rates", type=positive, nargs="+", metavar="LR")
    precisions = ["fp32", "bf16", "autocast"]
    parser.add_argument("--precision", choices=precisions, default="autocast", help="default: autocast")
    parser.add_argument("--vocabulary", type=whole_number, default=4096, help="tokens (default: 4,096)")
    parser.add_argument("--val-samples", type=whole_number, default=256, help="sequences (default: 256)")
    parser.add_argument("--validations", type=whole_number, default=20, help="validations of a run (default: 20)")
    parser.add_argument("--share", type=fraction, default=0.75, help="Muon's steps over AdamW's (default: 0.75)")
    parser.add_argument("--model", type=preset_name, default=GPT2, help=f"model of muon (default: {GPT2})")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the raw measurements to this file")
    args = parser.parse_args()
    args.learning_rates = args.learning_rates or DEFAULT_RATES[args.question]
    return args


def multiple_of_window(text: str) -> int:
    """Return a number of tokens that is a multiple of the window."""
    tokens = whole_number(text)
    if tokens % SEQ_LEN:
        raise argparse.ArgumentTypeError(f"must be a multiple of the windows' {SEQ_LEN} tokens, not '{text}'")
    return tokens


def prepare(folder: Path, args: argparse.Namespace) -> Path:
    """Train a tokenizer on the standard library and prepare it; return the dataset."""
    source, tokenizer = ("--input", "python-stdlib"), str(folder / "tokenizer")
    run_llmscale("data", "train-tokenizer", *source, "--vocab-size", str(args.vocabulary), "--out", tokenizer)
    settings = words(f"--seq-len {SEQ_LEN} --workers 1")
    run_llmscale("data", "prepare", *source, "--tokenizer", tokenizer, "--out", str(folder / "set"), *settings)
    return folder / "set"


def train(args: argparse.Namespace, data: Path, name: str, rate: str, seed: int) -> Curve:
    """Train a run; return its validation losses by step."""
    full = -(-args.tokens // args.batch_tokens)
    steps = max(1, round(args.share * full)) if name == SHORT else full
    settings = (
        f"--nproc-per-node 1 --ds zero0 --model {args.model if args.question == 'muon' else name} "
        f"--optimizer {MUON if name in (MUON, SHORT) else ADAMW} --seed {seed} --lr {rate} --schedule cosine "
        f"--warmup-steps {max(1, steps // 10)} --steps {steps} --global-batch-tokens {args.batch_tokens} "
        f"--precision {args.precision} --num-workers 0 --save-every 0 --no-async-save "
        f"--val-every {max(1, full // args.validations)} --val-samples {args.val_samples}"
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        run_llmscale("train", *words(settings), "--data", str(data), "--run", str(run))
        return read_losses(run, "validation")


def last(curve: Curve) -> float:
    return curve[max(curve)]


def best_rate(curves: Curves, name: str, seed: int) -> str:
    return min(curves[name], key=lambda rate: last(curves[name][rate][str(seed)]))


def print_table(curves: Curves, seeds: list[int]) -> None:
    print(f"\n{'last validation loss':22}{'lr':>9}" + "".join(f"{f'seed {seed}':>10}" for seed in seeds))
    for name, rates in curves.items():
        for rate, by_seed in rates.items():
            if by_seed:
                cells = (f"{last(by_seed[str(seed)]):10.4f}" if str(seed) in by_seed else " " * 10 for seed in seeds)
                print(f"{name:22}{rate:>9}" + "".join(cells))


def print_lead(curves: Curves, seeds: list[int], new: str, old: str) -> None:
    """Print the differences of the last losses of two recipes, each at its best learning rate."""
    best = {name: curves[name][best_rate(curves, name, seeds[0])] for name in curves}
    gaps = [last(best[old][str(seed)]) - last(best[new][str(seed)]) for seed in seeds]
    print(f"{new} ahead by " + ", ".join(f"{gap:+.4f}" for gap in gaps) + " nats per token")


def print_shares(curves: Curves, args: argparse.Namespace) -> None:
    """Print after which share of AdamW's steps Muon reaches its last loss, and where Muon's short run ends."""
    adamw, muon = (curves[name][best_rate(curves, name, args.seeds[0])] for name in (ADAMW, MUON))
    short = curves[SHORT][best_rate(curves, MUON, args.seeds[0])]
    leads = []
    for seed in map(str, args.seeds):
        goal = last(adamw[seed])
        step = next((step for step, loss in sorted(muon[seed].items()) if loss <= goal), None)
        reached = f"after {step / max(adamw[seed]):.0%} of the steps" if step else "never"
        leads.append(goal - last(short[seed]))
        print(
            f"seed {seed}: Muon reaches AdamW's last loss {reached} of a schedule as long as AdamW's; with "
            f"{args.share:.0%} of the steps and its own schedule it ends {leads[-1]:+.4f} nats per token ahead"
        )
    print(
        f"AdamW's loss in at most {args.share:.0%} of its steps, every seed: {'met' if min(leads) >= 0 else 'NOT met'}"
    )


if __name__ == "__main__":
    sys.exit(main())
