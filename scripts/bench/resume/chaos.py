"""Kill a run at random moments, restart it elsewhere each time, and compare it with an untouched run.

    python -m scripts.bench.resume.chaos --faults 50 --seed 1
    python -m scripts.bench.resume.chaos --faults 20 --worlds 1,3,5       # 5 ranks do not divide the batch of 12

Each fault is SIGKILL of one rank or all, during start-up, training or the writing of a checkpoint. Each restart draws a
ds_config, a number of ranks, and how many of them divide a sequence; with --block experts also how many divide the
experts. The ranks are real processes on gloo, the weights are fp32. At the end it checks that

- every step consumed exactly the samples of the untouched run, so each was seen once per epoch,
- the last losses equal the untouched run's within --tolerance (relative). With --block experts give 1e-2: rounding
  differs between numbers of ranks, and once it flips the choice of an expert, undisturbed runs drift apart, too,
- no finished checkpoint was ever damaged.

Exit status 1 if one of these fails.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from llmscale.checkpoint.inventory import list_checkpoints
from llmscale.checkpoint.manifest import checkpoints_folder, find_damage, step_of
from scripts.bench.harness import (
    REPOSITORY,
    describe_machine,
    free_port,
    machine_line,
    output_file,
    prepare_small_text,
    rank_environment,
    read_losses,
    save_result,
    whole_number,
    whole_or_zero,
    words,
)
from scripts.bench.resume.samples import read_samples

#: Flags of a run by kind of block; "experts" has DeepSeek V3's router.
BLOCKS = {
    "gpt2": (),
    "experts": (*words("--num-experts 4 --expert-width 40 --router-score sigmoid --router-bias --balance-loss 1e-3"),),
}
DS_CONFIGS = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
GLOBAL_BATCH = 12
SAVE_EVERY = 5
STEPS_PER_FAULT = 40
#: Latest step of an attempt at which its fault comes, so that every fault finds a running attempt.
MOST_STEPS = 30
#: A launcher kills the other ranks of a host within a second.
LAUNCHER_DELAY_S = 1.0
DEADLINE_S = 180


@dataclass(frozen=True)
class Setting:
    """Configuration of an attempt."""

    ds_config: str
    world_size: int
    split: int = 1
    """Ranks that divide a sequence."""
    experts: int = 1
    """Ranks that divide the experts."""


@dataclass
class Fault:
    """A fault and its consequences."""

    number: int
    setting: Setting
    victims: str
    moment: str
    died_at_step: int | None
    """Last step in metrics.jsonl when the run was killed; None when it had not trained yet."""
    newest_checkpoint: int | None
    """Step from which the next attempt resumes."""
    seconds: float
    """Seconds from the start of this attempt to its end."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=whole_number, default=50)
    parser.add_argument("--seed", type=whole_or_zero, default=0)
    parser.add_argument("--block", choices=[*BLOCKS], default="gpt2", help="kind of layers (default: gpt2)")
    parser.add_argument("--worlds", type=parse_worlds, default=[1, 2, 3, 4], help="numbers of ranks (default: 1,2,3,4)")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative difference of the last losses")
    parser.add_argument("--json", type=output_file, help="write the faults and the findings to this file")
    args = parser.parse_args()
    machine = describe_machine()
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        folder = Path(scratch)
        prepare_small_text(folder)
        total_steps = STEPS_PER_FAULT * args.faults
        straight = run_to_end(folder, "straight", args.block, total_steps, Setting("zero1", 1))
        faults = []
        for number in range(1, args.faults + 1):
            fault = inject(folder, draw_setting(draw, args), number, draw, args.block, total_steps)
            at = fault.setting
            print(
                f"{number:>3} {at.ds_config:<14} x{at.world_size}/{at.split}/{at.experts} {fault.victims:<7} "
                f"{fault.moment:<10} died at step {fault.died_at_step!s:>5}, "
                f"resumes from {fault.newest_checkpoint!s:>5}, {fault.seconds:5.1f} s",
                flush=True,
            )
            faults.append(fault)
        broken = run_to_end(folder, "chaos", args.block, total_steps, draw_setting(draw, args))
        findings = compare(straight, broken, total_steps, args.tolerance)
    for line in findings.values():
        print(line)
    print(machine_line(machine))
    failed = any(line.startswith("FAILED") for line in findings.values())
    save_result(
        args.json,
        {"machine": machine, "seed": args.seed, "findings": findings, "faults": [asdict(fault) for fault in faults]},
    )
    return int(failed)


def parse_worlds(text: str) -> list[int]:
    """Return the numbers of `1,3,5`. Raises ValueError."""
    return [whole_number(word) for word in text.split(",")]


def draw_setting(draw: random.Random, args: argparse.Namespace) -> Setting:
    """Return a legal setting: the model has two heads, and stage 0 divides no experts."""
    ds_config, world_size = draw.choice(DS_CONFIGS), draw.choice(args.worlds)
    sizes = [size for size in (1, 2) if world_size % size == 0]
    split, divides_experts = draw.choice(sizes), args.block == "experts" and ds_config != "zero0"
    return Setting(ds_config, world_size, split, draw.choice(sizes) if divides_experts else 1)


def start(folder: Path, run: str, block: str, total_steps: int, setting: Setting) -> list[subprocess.Popen]:
    """Start the ranks of an attempt, with one log per rank."""
    port = free_port()
    command = [sys.executable, str(REPOSITORY / "llmscale" / "train.py")]
    command += ["--ds", str(REPOSITORY / "ds_configs" / f"{setting.ds_config}.json"), "--data", str(folder / "set")]
    command += ["--model", "tiny-1m", "--n-layer", "2", "--n-head", "2", "--n-embd", "32", "--precision", "fp32"]
    command += BLOCKS[block]
    command += ["--global-batch-size", str(GLOBAL_BATCH), "--steps", str(total_steps), "--lr", "1e-3"]
    command += ["--log-every", "1", "--save-every", str(SAVE_EVERY), "--val-every", "0", "--num-workers", "0"]
    command += ["--check-every", "1", "--run", str(folder / run), "--sequence-parallel-size", str(setting.split)]
    command += ["--expert-parallel-size", str(setting.experts)]
    ranks = []
    for rank in range(setting.world_size):
        environment = rank_environment(rank, setting.world_size, port) | {"PYTHONUNBUFFERED": "1"}
        with (folder / f"rank-{rank}.log").open("w") as log:
            ranks.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=REPOSITORY,
                    start_new_session=True,
                )
            )
    return ranks


def run_to_end(folder: Path, run: str, block: str, total_steps: int, setting: Setting) -> Path:
    """Train to the last step. Exits with the log if the run fails."""
    ranks = start(folder, run, block, total_steps, setting)
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"{run} ended with {codes}:\n{(folder / 'rank-0.log').read_text()[-3000:]}")
    return folder / run


def inject(folder: Path, setting: Setting, number: int, draw: random.Random, block: str, total_steps: int) -> Fault:
    """Start an attempt and kill it at a random moment; return the fault."""
    began = time.monotonic()
    moment = draw.choices(["start-up", "training", "saving"], weights=[1, 5, 4])[0]
    victims = draw.choice(["one", "all"])
    steps_before = len(read_losses(folder / "chaos"))
    ranks = start(folder, "chaos", block, total_steps, setting)
    chosen = ranks if victims == "all" else [draw.choice(ranks)]
    moment = wait_for(moment, folder, ranks, draw, steps_before)
    for rank in chosen:
        kill(rank)
    time.sleep(0 if victims == "all" else LAUNCHER_DELAY_S)
    for rank in ranks:
        kill(rank)
        rank.wait()
    return Fault(
        number=number,
        setting=setting,
        victims=victims,
        moment=moment,
        died_at_step=last_step(folder),
        newest_checkpoint=check_checkpoints(folder),
        seconds=time.monotonic() - began,
    )


def wait_for(moment: str, folder: Path, ranks: list[subprocess.Popen], draw: random.Random, steps_before: int) -> str:
    """Wait for the moment of the fault; return which it was, as a save may be missed."""
    if moment == "start-up":
        time.sleep(draw.uniform(0.5, 6.0))
        return moment
    log, deadline = folder / "rank-0.log", time.monotonic() + DEADLINE_S

    def steps_done() -> int:
        return len(read_losses(folder / "chaos")) - steps_before

    first = draw.randint(1, MOST_STEPS if moment == "training" else MOST_STEPS // 2)
    until(lambda: steps_done() >= first, ranks, deadline, log)
    if moment == "training":
        return moment
    saves = checkpoints_folder(folder / "chaos")
    until(lambda: any(saves.glob(".step-*.partial")) or steps_done() >= MOST_STEPS, ranks, deadline, log)
    is_saving = any(saves.glob(".step-*.partial"))
    time.sleep(draw.uniform(0.0, 0.02))
    return "saving" if is_saving else "training"


def until(condition, ranks: list[subprocess.Popen], deadline: float, log: Path) -> None:
    while not condition():
        if time.monotonic() > deadline or any(rank.poll() is not None for rank in ranks):
            raise SystemExit(f"the attempt ended before its fault:\n{log.read_text()[-3000:]}")
        time.sleep(0.002)


def kill(rank: subprocess.Popen) -> None:
    """SIGKILL a rank and whatever it started."""
    if rank.poll() is None:
        os.killpg(rank.pid, signal.SIGKILL)


def last_step(folder: Path) -> int | None:
    return max(read_losses(folder / "chaos"), default=None)


def check_checkpoints(folder: Path) -> int | None:
    """Return the step of the newest finished checkpoint. Exits if a finished one is damaged."""
    finished = list_checkpoints(folder / "chaos")
    for checkpoint in finished:
        damage = find_damage(checkpoint)
        if damage:
            raise SystemExit(f"FAILED: a finished checkpoint is damaged: {damage}")
    return step_of(finished[0]) if finished else None


def compare(straight: Path, broken: Path, total_steps: int, tolerance: float) -> dict[str, str]:
    """Return the findings, one line each."""
    expected, consumed = read_samples(straight), read_samples(broken)
    wrong = [s for s in range(total_steps) if s not in consumed or not np.array_equal(consumed[s], expected[s])]
    counts = np.bincount(np.concatenate([consumed[step] for step in sorted(consumed)]))
    samples = (
        f"samples: all {total_steps} steps consumed exactly the untouched run's; "
        f"each of {len(counts)} samples was seen {counts.min()} or {counts.max()} times"
    )
    if wrong or len(consumed) != total_steps:
        samples = f"FAILED: steps {wrong[:5]}... consumed other samples"
    if counts.max() - counts.min() > 1:
        samples = f"FAILED: samples were seen between {counts.min()} and {counts.max()} times"
    reference, losses = read_losses(straight), read_losses(broken)
    last = range(total_steps - 9, total_steps + 1)
    worst = max(abs(losses[step] - reference[step]) / reference[step] for step in last)
    verdict = "FAILED: loss" if worst > tolerance else "loss"
    loss = (
        f"{verdict}: {losses[total_steps]:.6f} at the last step, untouched {reference[total_steps]:.6f}; largest "
        f"relative difference of the last ten steps {worst:.1e} (tolerance {tolerance:.0e})"
    )
    return {"samples": samples, "loss": loss, "checkpoints": "checkpoints: no finished one was ever damaged"}


if __name__ == "__main__":
    sys.exit(main())
