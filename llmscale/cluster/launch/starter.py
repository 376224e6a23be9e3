"""The command line that starts one host's ranks: DeepSpeed's per-host launcher, or torchrun."""

from __future__ import annotations

import base64
import json
import sys

from llmscale.cluster.launch.messages import Start

STARTERS = ("deepspeed", "torchrun")


def starter_command(start: Start) -> list[str]:
    """What to run on host number `start.node_rank`."""
    program = [start.script, *start.arguments]
    if start.starter == "torchrun":
        # Without -- torchrun would take --run for one of its own flags, abbreviated.
        return [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(start.hosts)}"),
            *(f"--node-rank={start.node_rank}", f"--nproc-per-node={start.ranks_per_host}", "--max-restarts=0"),
            *(f"--master-addr={start.master_addr}", f"--master-port={start.master_port}", "--"),
            *program,
        ]
    # What `deepspeed` itself starts on each host, by pdsh or with --no_ssh. Started without `deepspeed` in between,
    # which returns 0 when this was killed.
    world = {host: list(range(start.ranks_per_host)) for host in start.hosts}
    encoded = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
    return [
        *(sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={encoded}"),
        *(f"--node_rank={start.node_rank}", f"--master_addr={start.master_addr}"),
        *(f"--master_port={start.master_port}", "--log_level=warning", *program),
    ]
