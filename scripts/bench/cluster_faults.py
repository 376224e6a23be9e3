"""The faults of cluster_chaos.py: each starts a run, strikes at its moment, and waits for the end."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from llmscale.cluster.doctor.system import NVME_OPS
from scripts.bench.cluster_run import REPOSITORY, Chaos


def kill_rank(chaos: Chaos) -> int:
    launch = chaos.launch()
    chaos.wait_for_moment()
    os.kill(chaos.rank_of(chaos.victim), signal.SIGKILL)
    return chaos.wait(launch)


def stop_rank(chaos: Chaos) -> int:
    # A rank that is stopped while it starts is found by the bound on starts, which is long.
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
    """Its sshd and all else: nothing can be started there any more. With the supervisor's host the next launch is
    started on another."""
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
    """Fill the run folder's file system to the last byte while a checkpoint is written; room is made again later."""
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
    return chaos.wait(launch)


def plant_lock(chaos: Chaos) -> int:
    """A lock of a build that was killed an hour ago, in the cache of an op that this run loads: NVMe offload's."""
    chaos.fault.moment, chaos.fault.host, chaos.fault.ds_config = "start-up", "-", "zero3_nvme"
    cache, nvme = chaos.folder / "extensions", chaos.folder / "nvme"
    nvme.mkdir()
    shutil.copytree(chaos.set_folder / "extensions", cache)
    for op in NVME_OPS:
        (cache / op / "lock").touch()
        os.utime(cache / op / "lock", (time.time() - 3600,) * 2)
    config = json.loads((REPOSITORY / "ds_configs" / "zero3_nvme.json").read_text())
    for name in ("offload_optimizer", "offload_param"):
        config["zero_optimization"][name]["nvme_path"] = str(nvme)
    ds = chaos.folder / "nvme.json"
    ds.write_text(json.dumps(config))
    return chaos.wait(chaos.launch(ds=ds, environment={"TORCH_EXTENSIONS_DIR": str(cache)}))


def take_port(chaos: Chaos) -> int:
    chaos.fault.moment, chaos.fault.host = "start-up", "node-0"
    port = chaos.draw.randrange(20000, 30000)
    code = f"import socket, time; s = socket.create_server(('', {port})); print(1, flush=True); time.sleep(1000)"
    squatter = chaos.playground.hosts[0].popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert squatter.stdout is not None
    squatter.stdout.readline()
    status = chaos.wait(chaos.launch("--master-port", str(port)))
    for pid in chaos.playground.hosts[0].pids_running("create_server"):
        os.kill(pid, signal.SIGKILL)
    squatter.wait()
    return status


STRIKES: dict[str, Callable[[Chaos], int]] = {
    "rank killed": kill_rank,
    "rank stopped": stop_rank,
    "link cut": cut_link,
    "host killed": kill_host,
    "supervisor killed": kill_supervisor,
    "disk full": fill_disk,
    "stale lock": plant_lock,
    "port taken": take_port,
}
