"""Name what DeepSpeed's engine does beside a plain loop: processor time of a step by operator, one rank.

    python -m scripts.bench.speed.engine_operators

Each contestant of engine_overhead.py runs alone under torch's profiler. Printed are the operators whose milliseconds a
step differ most from the plain loop's, in percent of its step. The profiler itself takes time in every operator.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.bench.harness import REPOSITORY, describe_machine, free_port, machine_line, prepare_text, rank_environment
from scripts.bench.speed.engine_overhead import CONTESTANTS, WARMUP_STEPS, WINDOWS, save_samples, train_arguments

PLAIN = "plain loop"
ENGINES = ("engine, ZeRO-1", "engine, ZeRO-2", "engine, ZeRO-3")
STEPS = 10
#: Arguments of engine_overhead's runs: model, ranks and number of steps.
RUN = {"model": "tiny-10m", "layers": 4, "precision": "fp32", "batch": 8, "world_size": 1, "rounds": STEPS, "steps": 1}
#: Matrix products, attention and activations are the model's own, and vary with the load.
OF_THE_MODEL = ("mm", "attention", "gelu", "layer_norm")


class Profile:
    """Pace of a contestant that profiles its steps after the first ones."""

    def __init__(self) -> None:
        import torch

        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self._steps = 0
        self.operators: dict[str, float] = {}

    def step_done(self) -> None:
        self._steps += 1
        if self._steps == WARMUP_STEPS:
            self._profiler.start()
        if self._steps == WARMUP_STEPS + STEPS:
            self._profiler.stop()
            averages = self._profiler.key_averages()
            self.operators = {average.key: average.self_cpu_time_total / 1000 / STEPS for average in averages}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contestant", choices=[PLAIN, *ENGINES], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        profile_contestant(args.contestant, args.folder)
        return 0
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="engine-operators-") as scratch:
        folder = Path(scratch)
        save_samples(argparse.Namespace(**RUN, data=prepare_text(folder, 256)), folder)
        operators = {name: run_contestant(name, folder) for name in (PLAIN, *ENGINES)}
    plain_ms = sum(operators[PLAIN].values())
    print(f"{PLAIN}: {plain_ms:.0f} ms a step")
    for name in ENGINES:
        print(f"{name}, beyond the plain loop in % of its step:")
        for operator, extra in differences(operators[name], operators[PLAIN])[:8]:
            print(f"  {100 * extra / plain_ms:6.2f}  {operator}")
    print(machine_line(machine))
    return 0


def differences(operators: dict[str, float], plain: dict[str, float]) -> list[tuple[str, float]]:
    """Return the operators that are not the model's own, with milliseconds beyond the plain loop's, largest first."""
    names = [name for name in operators if not any(part in name for part in OF_THE_MODEL)]
    extra = {name: operators[name] - plain.get(name, 0.0) for name in names}
    return sorted(extra.items(), key=lambda item: -item[1])


def run_contestant(name: str, folder: Path) -> dict[str, float]:
    """Profile a contestant in a process of its own; return milliseconds a step by operator."""
    command = [sys.executable, "-m", __spec__.name, "--contestant", name, "--folder", str(folder)]
    environment = {**os.environ, **rank_environment(0, 1, free_port()), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, stdout=sys.stderr)
    answer: dict[str, float] = json.loads((folder / f"{name}.json").read_text())
    return answer


def profile_contestant(name: str, folder: Path) -> None:
    from scripts.bench.speed.training_loops import CONTESTANT_LOOPS, Contest, prepare

    data = next(path.parent for path in folder.glob("*/manifest.json"))
    arguments = train_arguments(argparse.Namespace(**RUN, data=data), name, folder)
    profile = Profile()
    contest = Contest(prepare(arguments, 1), arguments, folder / WINDOWS, profile)
    CONTESTANT_LOOPS[CONTESTANTS[name][0]](contest)
    (folder / f"{name}.json").write_text(json.dumps(profile.operators))


if __name__ == "__main__":
    sys.exit(main())
