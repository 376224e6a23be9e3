"""Draw the README's picture: a run that is killed and resumed elsewhere several times, over an untouched run.

    python -m scripts.bench.resume.picture --plot docs/images/resumed.png

Every attempt but the last ends by SIGKILL of all its ranks. Each resumes with other ranks and ZeRO stages, in
fp32. The lower panel is the relative difference of each step's loss from the untouched run's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from scripts.bench.harness import describe_machine, machine_line, picture_file, prepare_small_text, read_losses
from scripts.bench.resume import chaos

BLOCK, STEPS = "gpt2", 300
#: ds_config, ranks, and the step at which all ranks are killed.
ATTEMPTS = (("zero2", 4, 62), ("zero3", 2, 127), ("zero1", 1, 183), ("zero3", 4, 241), ("zero2", 2, STEPS))
COLOURS = ("#0072b2", "#d55e00", "#00805d", "#b3478f", "#8a6d00")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=picture_file, help="draw the picture (.png, .svg, .pdf)")
    args = parser.parse_args()
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="picture-") as scratch:
        folder = Path(scratch)
        prepare_small_text(folder)
        untouched = read_losses(chaos.run_to_end(folder, "untouched", BLOCK, STEPS, chaos.Setting("zero1", 1)))
        starts, losses = [], {}
        for ds_config, ranks, last in ATTEMPTS:
            starts.append(train_until(folder, ds_config, ranks, last))
            # A rewound step is trained again, so the later attempt's losses count.
            losses = read_losses(folder / "chaos")
    differences = {step: abs(losses[step] - untouched[step]) / untouched[step] for step in untouched}
    for (ds_config, ranks, last), start in zip(ATTEMPTS, starts, strict=True):
        ended = "finished" if last == STEPS else f"killed after step {last}"
        print(f"{ds_config} on {ranks} rank{'s' * (ranks > 1)}: from step {start + 1}, {ended}")
    print(f"largest relative difference of a loss from the untouched run's: {max(differences.values()):.1e}")
    print(machine_line(machine))
    if args.plot:
        plot(args.plot, starts, untouched, losses, differences)


def train_until(folder: Path, ds_config: str, ranks: int, last: int) -> int:
    """Resume the run with this ds_config until step `last`, kill all ranks, and return the step it began after."""
    start = chaos.check_checkpoints(folder) or 0
    if last == STEPS:
        chaos.run_to_end(folder, "chaos", BLOCK, STEPS, chaos.Setting(ds_config, ranks))
        return start
    processes = chaos.start(folder, "chaos", BLOCK, STEPS, chaos.Setting(ds_config, ranks))
    log, deadline = folder / "rank-0.log", time.monotonic() + chaos.DEADLINE_S
    chaos.until(lambda: max(read_losses(folder / "chaos"), default=0) >= last, processes, deadline, log)
    for process in processes:
        chaos.kill(process)
        process.wait()
    return start


def plot(
    path: Path, starts: list[int], untouched: dict[int, float], losses: dict[int, float], differences: dict[int, float]
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(
        2, 1, figsize=(9, 4.6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    steps = sorted(untouched)
    upper.plot(steps, [untouched[step] for step in steps], color="#c8c8c8", linewidth=6, label="never interrupted")
    ends = [*starts[1:], STEPS]
    for (ds_config, ranks, last), start, end, colour in zip(ATTEMPTS, starts, ends, COLOURS, strict=True):
        part = range(start + 1, end + 1)
        name = f"ZeRO-{ds_config[-1]}, {ranks} rank{'s' * (ranks > 1)}"
        upper.plot(part, [losses[step] for step in part], color=colour, linewidth=1.4)
        upper.annotate(
            name, ((start + end) / 2, max(untouched.values())), color=colour, ha="center", va="top", fontsize=10
        )
        lower.plot(part, [differences[step] * 1e7 for step in part], color=colour, linewidth=1.2)
        if last < STEPS:
            for panel in (upper, lower):
                panel.axvline(end + 0.5, color="#888888", linewidth=0.8, linestyle=":")
            upper.annotate("SIGKILL", (end, min(untouched.values())), color="#888888", ha="right", fontsize=8)
    upper.set(ylabel="loss, nats per token", title="Killed four times, resumed with other ranks and ZeRO stages")
    upper.legend(loc="center right", frameon=False)
    lower.set(xlabel="step", ylabel="difference, 1e-7", xlim=(0, STEPS), ylim=(0, None))
    for panel in (upper, lower):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
