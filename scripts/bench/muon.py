"""In how many steps Muon reaches the loss at which AdamW ends: tiny-10m, from several seeds.

usage: python scripts/bench/muon.py [--seeds 1 2 3] [--tokens 400000] [--json FILE]

Both are trained by `llmscale train` on one process, on the same windows in the same order: the Python standard library
in a vocabulary of its own of 4,096 tokens. The first seed tries every learning rate on both, the same ones; each
optimizer's best one trains its other seeds. Muon's own length is then cut to `--share` of AdamW's steps, with a whole
schedule of its own, and must end at no more than AdamW's loss. Prints validation losses in nats per token, and at
which step of its whole run Muon first is where AdamW ends, although its learning rate is still high there. `--json` is
written after every run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from flag_types import fraction, preset_name, whole_number
from machine import describe_circumstances, describe_machine, save_result
from modern_blocks import REPOSITORY, add_tuning_arguments, llmscale, prepare, read_validations

MODEL = "tiny-10m"
ADAMW, MUON, SHORT = "adamw", "muon", "muon, fewer steps"

#: Validation losses by run, learning rate and seed: step -> loss.
Curves = dict[str, dict[str, dict[str, dict[str, float]]]]


def train(args: argparse.Namespace, data: Path, name: str, rate: float, seed: int) -> dict[str, float]:
    """One run; its validation losses by step."""
    whole = -(-args.tokens // args.batch_tokens)
    steps = max(1, round(args.share * whole)) if name == SHORT else whole
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        llmscale(
            *("train", "--nproc-per-node", "1", "--ds", str(REPOSITORY / "ds_configs" / "zero0.json")),
            *("--model", args.model, "--data", str(data), "--run", str(run), "--seed", str(seed)),
            *("--optimizer", ADAMW if name == ADAMW else MUON),
            *("--lr", str(rate), "--schedule", "cosine", "--warmup-steps", str(max(1, steps // 10))),
            *("--steps", str(steps), "--global-batch-tokens", str(args.batch_tokens)),
            *("--precision", args.precision, "--num-workers", "0", "--save-every", "0", "--no-async-save"),
            *("--val-every", str(max(1, whole // args.validations)), "--val-samples", str(args.val_samples)),
        )
        return read_validations(run)


def last(curve: dict[str, float]) -> float:
    return curve[max(curve, key=int)]


def best_rate(curves: Curves, name: str, seed: int) -> str:
    return min(curves[name], key=lambda rate: last(curves[name][rate][str(seed)]))


def first_at_or_below(curve: dict[str, float], loss: float) -> int | None:
    """The first validated step; None: never."""
    return next((int(step) for step in sorted(curve, key=int) if curve[step] <= loss), None)


def print_table(curves: Curves, seeds: list[int]) -> None:
    print(f"\n{'last validation loss':22}{'lr':>9}" + "".join(f"{f'seed {seed}':>10}" for seed in seeds))
    for name, rates in curves.items():
        for rate, by_seed in rates.items():
            cells = (f"{last(by_seed[str(seed)]):10.4f}" if str(seed) in by_seed else f"{'':10}" for seed in seeds)
            print(f"{name:22}{rate:>9}" + "".join(cells))


def shares(curves: Curves, first_seed: int, seed: int) -> dict[str, float | None]:
    """Of AdamW's steps: after which Muon's whole run is where AdamW ends, and what the short run is ahead by."""
    adamw = curves[ADAMW][best_rate(curves, ADAMW, first_seed)][str(seed)]
    rate = best_rate(curves, MUON, first_seed)
    goal, step = last(adamw), first_at_or_below(curves[MUON][rate][str(seed)], last(adamw))
    short = curves[SHORT][rate][str(seed)]
    return {
        "share_of_whole_run": step / int(max(adamw, key=int)) if step else None,
        "short_run_ahead_by": goal - last(short),
    }


def print_shares(found: dict[str, dict[str, float | None]], share: float) -> None:
    for seed, of in found.items():
        whole, ahead = of["share_of_whole_run"], of["short_run_ahead_by"]
        assert ahead is not None
        reached = f"by {whole:.0%} of the steps" if whole else "never"
        print(
            f"seed {seed}: Muon is where AdamW ends {reached} of a schedule as long as AdamW's; with {share:.0%} of "
            f"the steps and a schedule of its own it ends {ahead:+.4f} nats per token ahead"
        )
    is_met = all((of["short_run_ahead_by"] or 0) >= 0 for of in found.values())
    print(f"AdamW's loss in at most {share:.0%} of the steps from every seed: {'met' if is_met else 'NOT met'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_tuning_arguments(parser, rates=[5e-4, 1e-3, 2e-3, 4e-3], val_samples=128)
    parser.add_argument("--share", type=fraction, default=0.75, help="of AdamW's steps, for Muon (default: 0.75)")
    parser.add_argument("--model", type=preset_name, default=MODEL, help=f"default: {MODEL}")
    parser.add_argument("--validations", type=whole_number, default=20, help="of a run (default: 20)")
    args = parser.parse_args()
    machine = describe_machine()
    settings = [name for name in vars(args) if name != "json"]
    curves: Curves = {name: {str(rate): {} for rate in args.learning_rates} for name in (ADAMW, MUON, SHORT)}
    found: dict[str, dict[str, float | None]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = prepare(Path(folder), args.vocabulary)
        for seed in args.seeds:
            for name in curves:
                is_tuned = seed != args.seeds[0] or name == SHORT
                tuned = MUON if name == SHORT else name
                rates = [best_rate(curves, tuned, args.seeds[0])] if is_tuned else list(curves[name])
                for rate in rates:
                    curve = curves[name][rate][str(seed)] = train(args, data, name, float(rate), seed)
                    print(f"{name}, learning rate {rate}, seed {seed}: {last(curve):.4f}", flush=True)
                    figures = {"validation_loss": curves, "shares": found}
                    save_result(args.json, {**describe_circumstances(machine, args, settings), **figures})
            found[str(seed)] = shares(curves, args.seeds[0], seed)
        figures = {"validation_loss": curves, "shares": found}
        save_result(args.json, {**describe_circumstances(machine, args, settings), **figures})
    print_table(curves, args.seeds)
    print_shares(found, args.share)


if __name__ == "__main__":
    sys.exit(main())
