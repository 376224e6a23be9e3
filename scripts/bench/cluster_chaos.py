#!/usr/bin/env python3
"""Break a cluster under `llmscale launch`, one fault per run, and compare each run with one that nobody touched.

    sudo python scripts/bench/cluster_chaos.py --faults 24 --seed 1

The hosts are the playground's: namespaces with their own addresses, sshd and processes; the supervisor runs on node-0.
Each fault has its own run, with a ds_config, a number of hosts, a way to them and a moment drawn from the seed. Each
run must end with status 0, must have consumed exactly the samples of the untouched run at every step, must reach the
same losses within --tolerance (relative, fp32 weights), and must leave no process, watch folder or shared memory on any
host. Exit status 1 when any of it is not so.

Everything happens in a mount namespace of this script's own: the run folders lie on a small file system that can be
filled to the last byte.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from llmscale.cluster.doctor.system import NVME_OPS  # noqa: E402
from scripts.bench.cluster_faults import STRIKES  # noqa: E402
from scripts.bench.cluster_run import GOOD, STEPS, Chaos, Fault, train_arguments  # noqa: E402
from scripts.bench.flag_types import output_file  # noqa: E402
from scripts.bench.machine import describe_machine, save_result  # noqa: E402
from scripts.playground.hosts import why_impossible  # noqa: E402

OWN_NAMESPACE = "LLMSCALE_CHAOS_NAMESPACE"
KINDS = tuple(STRIKES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative difference of any loss")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these kinds")
    parser.add_argument("--json", type=output_file, help="also write the table to this file")
    args = parser.parse_args()
    reason = why_impossible()
    if reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    if OWN_NAMESPACE not in os.environ:
        os.environ[OWN_NAMESPACE] = "1"
        os.execvp("unshare", ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv])
    faults = []
    with tempfile.TemporaryDirectory(prefix="cluster-chaos-") as scratch:
        folder = Path(scratch)
        prepare_text(folder)
        reference = train_untouched(folder)
        build_ops(folder)
        draw = random.Random(args.seed)
        print_head()
        for number in range(1, args.faults + 1):
            chaos = Chaos(folder, reference, draw, number, args.kind or KINDS)
            fault = chaos.play(STRIKES[chaos.fault.kind], args.tolerance)
            faults.append(fault)
            print_row(fault)
    failed = [fault for fault in faults if fault.verdict != GOOD]
    print(f"{len(faults) - len(failed)} of {len(faults)} runs ended as if nothing had happened")
    table = {"seed": args.seed, "steps": STEPS, "tolerance": args.tolerance, "machine": describe_machine()}
    save_result(args.json, {**table, "faults": [asdict(fault) for fault in faults]})
    return int(bool(failed))


def prepare_text(folder: Path) -> None:
    command = [sys.executable, "-m", "llmscale.cli.main", "data", "prepare", "--input", json.__path__[0]]
    command += ["--out", str(folder / "set"), "--tokenizer", "bytes", "--seq-len", "32", "--val-fraction", "0"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([*command, "--workers", "1"], check=True, env=environment, stdout=subprocess.DEVNULL)


def build_ops(folder: Path) -> None:
    """The ops that NVMe offload needs, which the stale locks are planted on."""
    command = [sys.executable, "-m", "llmscale.cluster.doctor.system", *NVME_OPS]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the ops of NVMe offload cannot be built here (libaio-dev?): {done.stderr.strip()}")


def train_untouched(folder: Path) -> Path:
    run = folder / "untouched"
    arguments = train_arguments(folder, run, REPOSITORY / "ds_configs" / "zero1.json")
    command = [sys.executable, str(REPOSITORY / "llmscale" / "train.py"), *arguments]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the untouched run failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return run


def print_head() -> None:
    print(
        f"{'':>3} {'fault':<17} {'moment':<8} {'host':<6} {'hosts':<5} {'ds':<10} {'way':<14} {'step':>4} "
        f"{'noticed':>7} {'training again':>14} {'total':>6}  ends"
    )


def print_row(fault: Fault) -> None:
    noticed = "-" if fault.noticed_after_s is None else f"{fault.noticed_after_s:.1f} s"
    again = "-" if fault.training_again_after_s is None else f"{fault.training_again_after_s:.1f} s"
    hosts = f"{fault.num_hosts}->{fault.hosts_at_the_end}"
    print(
        f"{fault.number:>3} {fault.kind:<17} {fault.moment:<8} {fault.host:<6} {hosts:<5} {fault.ds_config:<10} "
        f"{fault.launcher + '+' + fault.starter:<14} {fault.at_step or '-':>4} {noticed:>7} {again:>14} "
        f"{fault.total_s:5.1f} s  {', '.join(fault.ends)}; {fault.verdict}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
