"""Test that a run under `llmscale launch` survives its machines: one fault per run, compared with an untouched run.

    sudo python -m scripts.bench.resume.cluster_chaos --faults 32 --seed 1

The hosts are the playground's: namespaces with their own addresses, sshd and processes; the supervisor runs on node-0.
Each fault has its own run, with a ds_config, a number of hosts and a moment drawn from the seed.
Each run must end with status 0, with exactly the untouched run's samples at every step and its losses within
--tolerance (relative, fp32), and must leave no process, watch folder or shared memory on any host, or the exit status
is 1.

The script runs in its own mount namespace: run folders are on a small file system that can be filled to the last byte.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from scripts.bench.harness import (
    REPOSITORY,
    describe_machine,
    machine_line,
    output_file,
    prepare_small_text,
    python_environment,
    save_result,
)
from scripts.bench.resume.cluster_run import GOOD, STEPS, Chaos, Fault, train_arguments
from scripts.playground.hosts import why_impossible

OWN_NAMESPACE = "LLMSCALE_CHAOS_NAMESPACE"


def kill_rank(chaos: Chaos) -> int:
    launch = chaos.launch()
    chaos.wait_for_moment()
    os.kill(chaos.rank_of(chaos.victim), signal.SIGKILL)
    return chaos.wait(launch)


def stop_rank(chaos: Chaos) -> int:
    # A rank stopped during start-up is only found by the long time limit on starts.
    chaos.fault.moment = "training" if chaos.fault.moment == "start-up" else chaos.fault.moment
    launch = chaos.launch()
    chaos.wait_for_moment()
    os.kill(chaos.rank_of(chaos.victim), signal.SIGSTOP)
    return chaos.wait(launch)


def cut_link(chaos: Chaos) -> int:
    launch = chaos.launch()
    chaos.wait_for_moment()
    chaos.victim.cut_link()
    return chaos.wait(launch)


def kill_host(chaos: Chaos) -> int:
    """Kill all processes of a host, sshd included. If the supervisor was there, launch again on another host."""
    launch = chaos.launch()
    chaos.wait_for_moment()
    for pid in chaos.victim.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if chaos.fault.host != "node-0":
        return chaos.wait(launch)
    launch.wait()
    return chaos.wait(chaos.launch(on=1))


def kill_supervisor(chaos: Chaos) -> int:
    chaos.fault.host = "node-0"
    launch = chaos.launch()
    chaos.wait_for_moment()
    os.kill(chaos.supervisor(chaos.playground.hosts[0]), signal.SIGKILL)
    launch.wait()
    time.sleep(chaos.draw.uniform(0.0, 2.0))
    return chaos.wait(chaos.launch())


def fill_disk(chaos: Chaos) -> int:
    """Fill the run folder's file system while a checkpoint is written; make room again later."""
    chaos.fault.moment, chaos.fault.host = "saving", "-"
    launch = chaos.launch()
    chaos.wait_for_moment()
    filler = chaos.disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 10, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    time.sleep(chaos.draw.uniform(2.0, 8.0))
    filler.unlink()
    code = chaos.wait(launch)
    # A run that has ended before there was room again asks the user for another start, to save its last steps.
    return chaos.wait(chaos.launch()) if code == 2 else code


def plant_lock(chaos: Chaos) -> int:
    """Plant the lock of a build that was killed an hour ago in the cache of NVMe offload's ops."""
    chaos.fault.moment, chaos.fault.host, chaos.fault.ds_config = "start-up", "-", "zero3_nvme"
    cache, nvme = chaos.folder / "extensions", chaos.folder / "nvme"
    nvme.mkdir()
    shutil.copytree(chaos.set_folder / "extensions", cache)
    for op in ("pin_memory", "async_io"):
        (cache / op / "lock").touch()
        os.utime(cache / op / "lock", (time.time() - 3600,) * 2)
    config = json.loads((REPOSITORY / "ds_configs" / "zero3_nvme.json").read_text())
    for name in ("offload_optimizer", "offload_param"):
        config["zero_optimization"][name]["nvme_path"] = str(nvme)
    ds = chaos.folder / "nvme.json"
    ds.write_text(json.dumps(config))
    return chaos.wait(chaos.launch(ds=ds, environment={"TORCH_EXTENSIONS_DIR": str(cache)}))


def power_off(chaos: Chaos) -> int:
    """Power off the machine of the supervisor, and launch again on another one."""
    chaos.fault.host = "node-0"
    launch = chaos.launch()
    chaos.wait_for_moment()
    chaos.victim.power_off()
    launch.wait()
    return chaos.wait(chaos.launch(on=1))


STRIKES: dict[str, Callable[[Chaos], int]] = {
    "rank killed": kill_rank,
    "rank stopped": stop_rank,
    "link cut": cut_link,
    "host killed": kill_host,
    "supervisor killed": kill_supervisor,
    "disk full": fill_disk,
    "stale lock": plant_lock,
    "machine off": power_off,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative difference of any loss")
    parser.add_argument("--kind", choices=list(STRIKES), action="append", help="only these kinds")
    parser.add_argument("--json", type=output_file, help="write the table to this file")
    args = parser.parse_args()
    reason = why_impossible()
    if reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    if OWN_NAMESPACE not in os.environ:
        os.environ[OWN_NAMESPACE] = "1"
        os.execvp(
            "unshare",
            ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", __spec__.name, *sys.argv[1:]],
        )
    machine, faults = describe_machine(), []
    with tempfile.TemporaryDirectory(prefix="cluster-chaos-") as scratch:
        folder = Path(scratch)
        prepare_small_text(folder)
        reference = train_untouched(folder)
        kinds = args.kind or list(STRIKES)
        if "stale lock" in kinds:
            build_ops(folder)
        draw = random.Random(args.seed)
        print_head()
        for number in range(1, args.faults + 1):
            chaos = Chaos(folder, reference, draw, number, kinds)
            fault = chaos.play(STRIKES[chaos.fault.kind], args.tolerance)
            faults.append(fault)
            print_row(fault)
    failed = [fault for fault in faults if fault.verdict != GOOD]
    worst = max((fault.worst_loss_difference or 0.0 for fault in faults), default=0.0)
    print(f"{len(faults) - len(failed)} of {len(faults)} runs ended as if nothing had happened")
    print(f"largest relative difference of a loss from the untouched run's: {worst:.1e}")
    print(machine_line(machine))
    table = {"seed": args.seed, "steps": STEPS, "tolerance": args.tolerance, "machine": machine}
    save_result(args.json, {**table, "faults": [asdict(fault) for fault in faults]})
    return int(bool(failed))


def build_ops(folder: Path) -> None:
    """Build the ops of NVMe offload, on which stale locks are planted."""
    build = "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load(verbose=False)"
    command = [sys.executable, "-c", build]
    environment = python_environment(TORCH_EXTENSIONS_DIR=str(folder / "extensions"))
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
        f"{'':>3} {'fault':<17} {'moment':<8} {'host':<6} {'hosts':<5} {'ds':<10} {'step':>4} "
        f"{'noticed':>7} {'training again':>14} {'total':>6}  ends"
    )


def print_row(fault: Fault) -> None:
    noticed = "-" if fault.noticed_after_s is None else f"{fault.noticed_after_s:.1f} s"
    again = "-" if fault.training_again_after_s is None else f"{fault.training_again_after_s:.1f} s"
    hosts = f"{fault.num_hosts}->{fault.hosts_at_the_end}"
    print(
        f"{fault.number:>3} {fault.kind:<17} {fault.moment:<8} {fault.host:<6} {hosts:<5} {fault.ds_config:<10} "
        f"{fault.at_step or '-':>4} {noticed:>7} {again:>14} "
        f"{fault.total_s:5.1f} s  {', '.join(fault.ends)}; {fault.verdict}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
