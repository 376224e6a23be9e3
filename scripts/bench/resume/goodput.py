"""Goodput under faults at the rate of Llama 3's training: measured in a compressed run, derived for the real rate.

    python -m scripts.bench.resume.goodput --minutes 10 --mtbf-s 60

Llama 3 405B was interrupted 419 times unexpectedly in 54 days on 16,384 GPUs (arXiv:2407.21783, section 3.3.4): a mean
time between failures (MTBF) of 11,135 s, 3.1 hours. Hours of training fit into minutes as follows:

- A small GPT trains under `llmscale launch`. SIGKILL hits a random rank at random moments, start-up included, with
  exponentially distributed gaps whose mean is --mtbf-s. This MTBF is compressed; nothing else is. Restarts, saves and
  steps take the time that they take, so the goodput of this run is far below that of a real one.
- Goodput and costs come from the run's own records, as `llmscale report` reads them: per fault the time for starts and
  downtime, and the redone steps; per save the time for which training stood still.
- A run with saves every T seconds, of which each stalls training for S, with restarts of R seconds loses
  S / T + (R + T / 2) / MTBF of its time: half an interval is redone per fault. This formula is checked against the
  compressed run, then applied at Llama 3's MTBF with the measured R and S, and with T from --save-every-minutes.

The derived goodput is that of llmscale's mechanism with a restart as short as here, on one host with a small model.
Loading the code and the checkpoint on thousands of hosts takes longer: the last line says how long a restart may take
until goodput falls below 97 %. Exit status 1 if the derived goodput is below 97 %.
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
from contextlib import suppress
from pathlib import Path

from llmscale.cluster.launch.supervisor import read_attempts
from llmscale.report.history import WALL_TIME, load_history
from llmscale.training.run_folder import METRICS_NAME
from scripts.bench.harness import (
    REPOSITORY,
    describe_machine,
    machine_line,
    output_file,
    positive,
    prepare_small_text,
    python_environment,
    read_losses,
    save_result,
    whole_number,
    whole_or_zero,
)
from scripts.bench.resume.cluster_run import is_rank
from scripts.playground.kernel import command_line

LLAMA3_INTERRUPTIONS, LLAMA3_DAYS = 419, 54
LLAMA3_MTBF_S = LLAMA3_DAYS * 86_400 / LLAMA3_INTERRUPTIONS
GOAL = 0.97
RANKS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=positive, default=10.0, help="duration of the compressed run")
    parser.add_argument("--mtbf-s", type=positive, default=60.0, help="mean time between its faults")
    parser.add_argument("--save-every", type=whole_number, default=100, help="its steps between saves")
    parser.add_argument("--save-every-minutes", type=positive, default=5.0, help="save interval at Llama 3's rate")
    parser.add_argument("--seed", type=whole_or_zero, default=0)
    parser.add_argument("--json", type=output_file, help="write the measurements to this file")
    args = parser.parse_args()
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="goodput-") as scratch:
        folder = Path(scratch)
        faults = train_with_faults(folder, args)
        result = measure(folder / "run", faults, args)
    interval_s = args.save_every_minutes * 60
    share_lost = lost(result["restart_s"], interval_s, result["save_s"], LLAMA3_MTBF_S)
    left_s = LLAMA3_MTBF_S * (1 - GOAL / (1 - result["waiting_share"]) - result["save_s"] / interval_s)
    derived = {
        "mtbf_s": LLAMA3_MTBF_S,
        "save_interval_s": interval_s,
        "goodput": (1 - share_lost) * (1 - result["waiting_share"]),
        "longest_restart_s": left_s - interval_s / 2,
    }
    show(result, derived, args)
    print(machine_line(machine))
    save_result(args.json, {"machine": machine, "compressed": result, "llama3": derived})
    return int(derived["goodput"] < GOAL)


def train_with_faults(folder: Path, args: argparse.Namespace) -> int:
    """Train for the given time, killing ranks; return the number of faults. Exits with the output if the run fails."""
    data, run, draw = prepare_small_text(folder), folder / "run", random.Random(args.seed)
    command = [sys.executable, "-m", "llmscale.cli.main", "launch", "--slots", str(RANKS), "--max-restarts", "100000"]
    command += ["--same-step-limit", "1000", "--", "--ds", str(REPOSITORY / "ds_configs" / "zero1.json")]
    command += ["--data", str(data), "--model", "tiny-1m", "--n-layer", "2", "--n-head", "2", "--n-embd", "64"]
    command += ["--precision", "fp32", "--global-batch-size", "16", "--steps", "10000000", "--lr", "1e-4"]
    command += ["--log-every", "1", "--save-every", str(args.save_every), "--val-every", "0", "--num-workers", "0"]
    faults = 0
    with (folder / "output.txt").open("w") as output:
        launch = subprocess.Popen(
            [*command, "--run", str(run)],
            env=python_environment(OMP_NUM_THREADS="1"),
            cwd=REPOSITORY,
            stdout=output,
            stderr=output,
        )
    try:
        while launch.poll() is None and not read_losses(run):
            time.sleep(0.1)
        end = time.monotonic() + args.minutes * 60
        while launch.poll() is None:
            wait_s = draw.expovariate(1 / args.mtbf_s)
            if time.monotonic() + wait_s > end:
                break
            time.sleep(wait_s)
            faults += kill_rank(run, draw)
        time.sleep(max(0.0, end - time.monotonic()))
        # The last fault's restart belongs to the measurement.
        before = num_steps(run)
        while launch.poll() is None and num_steps(run) == before:
            time.sleep(0.1)
        launch.send_signal(signal.SIGTERM)
        if launch.wait(120):
            raise SystemExit(f"the run failed:\n{(folder / 'output.txt').read_text()[-3000:]}")
    finally:
        if launch.poll() is None:
            launch.kill()
    return faults


def num_steps(run: Path) -> int:
    """Return the number of logged steps, redone ones included."""
    return (run / METRICS_NAME).read_bytes().count(b'"kind": "train"')


def kill_rank(run: Path, draw: random.Random) -> int:
    """SIGKILL a random rank as soon as there is one; return 1."""
    while True:
        pids = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_ours(pid, run)]
        if pids:
            with suppress(ProcessLookupError):
                os.kill(draw.choice(pids), signal.SIGKILL)
                return 1
        time.sleep(0.05)


def _is_ours(pid: int, run: Path) -> bool:
    with suppress(OSError):
        line = command_line(pid)
        return str(run) in line and is_rank(line)
    return False


def measure(run: Path, faults: int, args: argparse.Namespace) -> dict:
    """Return shares and costs of the compressed run, in seconds per fault and per save."""
    history = load_history(run)
    shares, wall_s = history.wall_shares(), sum(history.wall.seconds.values())
    seconds = {use: share * wall_s for use, share in shares.items()}
    (_, first), *_ = history.of_kind("event", "start")
    steps = history.steps.steps[-1]
    step_s = (seconds["steps"] + seconds["waiting"]) / steps
    # The first start costs no fault anything.
    first_s = float(str(first["startup_s"]))
    restart_s = (seconds["starts"] - first_s) / max(1, faults)
    overhead_s = seconds["waiting"] + seconds["other"]
    save_s = seconds["saves"] / max(1, steps // args.save_every)
    return {
        "wall_s": wall_s,
        "faults": faults,
        "attempts": len(read_attempts(run)),
        "mtbf_s": (wall_s - first_s) / max(1, faults),
        "steps": steps,
        "step_s": step_s,
        "shares": shares,
        "goodput_without_start": seconds["steps"] / (wall_s - first_s),
        "restart_s": restart_s,
        "redone_s": seconds["redone"] / max(1, faults),
        "save_s": save_s,
        "save_interval_s": step_s * args.save_every,
        "waiting_share": overhead_s / (seconds["steps"] + overhead_s),
    }


def lost(restart_s: float, interval_s: float, save_s: float, mtbf_s: float) -> float:
    """Return the share of time that saves, restarts and redone steps take."""
    return save_s / interval_s + (restart_s + interval_s / 2) / mtbf_s


def show(result: dict, derived: dict, args: argparse.Namespace) -> None:
    """Print both goodputs with what they follow from."""
    shares = ", ".join(f"{share:.1%} {WALL_TIME[use]}" for use, share in result["shares"].items() if share >= 0.0005)
    here = lost(result["restart_s"], result["save_interval_s"], result["save_s"], result["mtbf_s"])
    expected = (1 - here) * (1 - result["waiting_share"])
    mtbf_s, half_s = result["mtbf_s"], result["save_interval_s"] / 2
    for line in (
        f"compressed run: {result['faults']} faults in {result['wall_s']:.0f} s, one every {mtbf_s:.0f} s; Llama 3's "
        f"MTBF is {LLAMA3_MTBF_S / mtbf_s:.0f} times as long",
        f"  {result['steps']:,} steps of {result['step_s'] * 1e3:.0f} ms, {RANKS} ranks, {result['attempts']} attempts",
        f"  {shares}",
        f"  goodput without the first start: measured {result['goodput_without_start']:.1%}, by formula {expected:.1%}",
        f"  per fault {result['restart_s']:.1f} s until training again and {result['redone_s']:.2f} s redone (half a "
        f"save interval is {half_s:.2f} s); per save {result['save_s'] * 1e3:.0f} ms",
        f"at Llama 3's rate ({LLAMA3_INTERRUPTIONS} interruptions in {LLAMA3_DAYS} days, one every "
        f"{LLAMA3_MTBF_S:,.0f} s), with these costs and a save every {args.save_every_minutes:g} minutes: goodput "
        f"{derived['goodput']:.2%}",
        f"  {GOAL:.0%} holds while a restart takes at most {derived['longest_restart_s']:.0f} s",
    ):
        print(line)


if __name__ == "__main__":
    sys.exit(main())
