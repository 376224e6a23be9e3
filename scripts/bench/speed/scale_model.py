"""Model the throughput of every ZeRO stage over four networks, from 8 to 4,096 GPUs. Nothing is measured.

    python -m scripts.bench.speed.scale_model [--model llama3-8b] [--gpu h100-80gb] [--plot FILE]

Every GPU has the same number of sequences in a step, whatever the number of GPUs (weak scaling). Each point is the
fastest row of `llmscale estimate` that fits without offload. Printed are tokens/s per GPU, its share of the rate of 8
GPUs, and the known error. `--plot` needs matplotlib (`pip install -e '.[plot]'`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from llmscale import limits
from llmscale.config import command_line
from llmscale.config.batch_plan import ParallelLayout, build_batch_plan
from llmscale.config.hardware import Cluster, Interconnect, get_gpu, get_interconnect
from llmscale.config.presets import get_preset
from llmscale.config.resolve import resolve_step
from llmscale.planning.recommend import RankedConfig, rank_trials
from llmscale.planning.search import Strategy, Trial, build_strategy, try_strategies
from llmscale.planning.step_time import RATE_ERROR
from llmscale.report.save_figure import save_figure
from scripts.bench.harness import describe_machine, gpu_name, output_file, picture_file, preset_name, save_result

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GPUS_PER_NODE = 8
#: GPUs of the largest run that the throughput model was fitted to.
LARGEST_FITTED_GPUS = 512
NETWORKS = ("ib-400g", "ib-100g", "roce-100g", "ethernet-25g")
sequences = command_line.whole_number(1, limits.MAX_BATCH // GPUS[-1])
#: Okabe and Ito's.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7")


@dataclass(frozen=True)
class Point:
    """Fastest row of a stage over a network."""

    network: str
    stage: str
    gpus: int
    micro_batch_size: int
    checkpointing: str
    tokens_per_second_per_gpu: float
    mfu: float | None


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=preset_name, default="llama3-8b")
    parser.add_argument("--gpu", type=gpu_name, default="h100-80gb")
    parser.add_argument("--sequences-per-gpu", type=sequences, default=4, help="in a step (default 4)")
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--plot", type=picture_file, help="draw a picture (.png, .svg, .pdf)")
    return parser.parse_args(argv)


def estimate(args: argparse.Namespace, interconnect: Interconnect, gpus: int) -> Iterator[Point]:
    """Return a point for every stage that fits."""
    preset, gpu = get_preset(args.model), get_gpu(args.gpu)
    cluster = Cluster(gpu, GPUS_PER_NODE, interconnect, gpus // GPUS_PER_NODE)
    shape, ds = preset.shape(preset.vocab_size), build_strategy(Strategy(3, "none", "none", "none"), "bf16")
    assert ds is not None
    batch, ranks = args.sequences_per_gpu * gpus, ParallelLayout(gpus)
    plan = build_batch_plan(global_batch_size=batch, ranks=ranks, seq_len=shape.seq_len, micro_batch_size=1)
    trial = Trial(resolve_step(ds, shape, plan, "none"))
    hpz_ranks = GPUS_PER_NODE if cluster.num_nodes > 1 else 1
    best: dict[str, RankedConfig] = {}
    for config in rank_trials(try_strategies(trial, hpz_ranks=hpz_ranks), cluster).configs:
        stage, throughput = config.fit.strategy.stage_words, config.throughput
        if throughput is None or not config.fit.fits or config.fit.strategy.offload != "-":
            continue
        known = best[stage].throughput if stage in best else None
        if known is None or known.tokens_per_second < throughput.tokens_per_second:
            best[stage] = config
    for stage, config in best.items():
        throughput = config.throughput
        assert throughput is not None
        yield Point(
            network=interconnect.name,
            stage=stage,
            gpus=gpus,
            micro_batch_size=config.fit.plan.micro_batch_size,
            checkpointing=config.fit.step.checkpointing,
            tokens_per_second_per_gpu=throughput.tokens_per_second / gpus,
            mfu=throughput.mfu,
        )


def lines_of(points: list[Point]) -> dict[tuple[str, str], dict[int, Point]]:
    """Return the points by network and stage, then by number of GPUs."""
    lines: dict[tuple[str, str], dict[int, Point]] = {}
    for point in points:
        lines.setdefault((point.network, point.stage), {})[point.gpus] = point
    return lines


def print_table(points: list[Point], args: argparse.Namespace) -> None:
    print(f"{args.model} in bf16, {args.sequences_per_gpu} sequences per GPU and step, nodes of 8 x {args.gpu}:")
    print("estimated tokens/s per GPU, and below them the share of what 8 GPUs reach. Nothing is measured.\n")
    print(f"{'network':<14}{'ZeRO':<7}" + "".join(f"{gpus:>8,}" for gpus in GPUS) + "  GPUs")
    for (network, stage), line in lines_of(points).items():
        first = line[min(line)].tokens_per_second_per_gpu
        rates = [f"{line[gpus].tokens_per_second_per_gpu:,.0f}" if gpus in line else "-" for gpus in GPUS]
        shares = [f"{line[gpus].tokens_per_second_per_gpu / first:.0%}" if gpus in line else "" for gpus in GPUS]
        print(f"{network:<14}{stage:<7}" + "".join(f"{rate:>8}" for rate in rates))
        print(" " * 21 + "".join(f"{share:>8}" for share in shares))
    print(f"\nError of tokens/s: {RATE_ERROR}.")


def plot(path: Path, points: list[Point], args: argparse.Namespace) -> None:
    """Draw one panel per network with one line per stage."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(NETWORKS), figsize=(14, 4.2), sharey=True, layout="constrained")
    stages = list(dict.fromkeys(point.stage for point in points))
    lines = lines_of(points)
    for axes, network in zip(panels, NETWORKS, strict=True):
        for stage, colour in zip(stages, COLOURS, strict=False):
            line = lines.get((network, stage), {})
            rates = [point.tokens_per_second_per_gpu for point in line.values()]
            axes.plot(list(line), rates, color=colour, marker="o", markersize=3, label=f"ZeRO {stage}")
        axes.set(xscale="log", xlabel="GPUs", xlim=(GPUS[0] / 1.3, 1.3 * GPUS[-1]), ylim=(0, None))
        axes.set_xticks(GPUS[::3], [f"{gpus:,}" for gpus in GPUS[::3]])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.axvspan(
            LARGEST_FITTED_GPUS, 1.3 * GPUS[-1], color="0.5", alpha=0.12, label="more GPUs than any row of the fit"
        )
        axes.set_title(f"{network}\n{get_interconnect(network).description}", fontsize=8, loc="left")
    panels[0].set_ylabel("tokens/s per GPU, estimated")
    panels[-1].legend(fontsize=8, frameon=False)
    words = f"{args.model} in bf16 on {args.gpu}, {args.sequences_per_gpu} sequences per GPU and step: not measured"
    figure.suptitle(words, fontsize=10, x=0.01, ha="left")
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    describe_machine()
    points = [point for name in NETWORKS for gpus in GPUS for point in estimate(args, get_interconnect(name), gpus)]
    if not points:
        sys.exit(
            f"{args.model} fits at no stage on up to {GPUS[-1]:,} GPUs of {args.gpu}. Name a larger one with --gpu."
        )
    print_table(points, args)
    settings = {name: getattr(args, name) for name in ("model", "gpu", "sequences_per_gpu")}
    save_result(args.json, {"settings": settings, "points": [asdict(point) for point in points]})
    if args.plot:
        plot(args.plot, points, args)


if __name__ == "__main__":
    main()
