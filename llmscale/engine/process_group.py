"""Join the process group: gloo on CPUs, the vendor's library on GPUs, under any launcher or none."""

from __future__ import annotations

import itertools
import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from llmscale.engine.collectives import Disks, gather
from llmscale.engine.deepspeed_patches import quiet_libraries
from llmscale.engine.launcher_variables import check_started_alone
from llmscale.engine.network import LOOPBACK, find_port, is_one_machine, set_network_interface
from llmscale.errors import MachineError

#: Longest wait of a collective for a missing rank. A launcher ends the ranks of its own host at once; this bounds the
#: wait for a host that is gone.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class World:
    """This process's place among all ranks."""

    rank: int
    world_size: int
    local_rank: int
    ranks_per_node: tuple[int, ...]
    """Ranks on each node, in rank order: (8, 8) is two nodes of eight."""
    device: torch.device
    device_name: str
    """The driver's name of the device; "cpu" on a CPU."""
    control: dist.ProcessGroup
    """A gloo group over all ranks for small host-side messages, which never wait for a GPU's queue."""
    disks: Disks
    """Ranks that share a disk for the run folder; one until `claim_run_folder` has looked."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def join_world() -> World:
    """Initialise torch.distributed through DeepSpeed. Collective."""
    set_default_environment()
    set_network_interface()
    quiet_libraries()
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    leave_out_shared_memory_op()
    accelerator = get_accelerator()
    local_rank = int(os.environ["LOCAL_RANK"])
    accelerator.set_device(local_rank)
    if is_gpu():
        backend = accelerator.communication_backend_name()
    else:
        backend = "gloo"
    try:
        _meet_again(backend)
        _meet_on_loopback(backend)
        deepspeed.init_distributed(
            dist_backend=backend,
            auto_mpi_discovery=False,
            timeout=COLLECTIVE_TIMEOUT,
            verbose=False,
        )
        control = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    except (dist.DistError, RuntimeError, OSError) as error:
        raise MachineError(_explain_failed_rendezvous(error)) from error
    return World(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=local_rank,
        ranks_per_node=_gather_ranks_per_node(local_rank, control),
        device=torch.device(accelerator.current_device_name() if is_gpu() else "cpu"),
        device_name=torch.cuda.get_device_name(local_rank) if torch.cuda.is_available() else "cpu",
        control=control,
        disks=Disks((0,) * dist.get_world_size()),
    )


def _meet_again(backend: str) -> None:
    """Join the ranks that torchrun restarted on one node, at keys of their own in its store. Collective.

    From torch 2.13 on, a restart finds the addresses of the ranks before it there, and waits for them. Of several nodes
    each counts restarts for itself, so that they have no key in common: docs/cluster.md says what helps.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    has_agents_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if attempt == "0" or not has_agents_store or os.environ.get("GROUP_WORLD_SIZE") != "1" or dist.is_initialized():
        return
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(address, port, world_size, is_master=False, timeout=COLLECTIVE_TIMEOUT)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"attempt {attempt}", store),
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def _meet_on_loopback(backend: str) -> None:
    """Join ranks that are all on this machine through a store that listens on loopback alone. Collective.

    torch's own listens on every interface, without a password, for as long as the run lives.
    """
    has_agents_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not is_one_machine(os.environ) or has_agents_store or dist.is_initialized():
        return
    port = int(os.environ["MASTER_PORT"])
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    listener = None
    if rank == 0:
        listener = socket.create_server((LOOPBACK, port), backlog=world_size).detach()
    store = dist.TCPStore(
        LOOPBACK,
        port,
        world_size,
        is_master=rank == 0,
        timeout=COLLECTIVE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=_device_to_bind(world_size),
    )


def _device_to_bind(world_size: int) -> torch.device | None:
    """Return the GPU that DeepSpeed's `init_distributed` would bind to the group, and None where it binds none."""
    from deepspeed.accelerator import get_accelerator

    # torch 2.6.1 to 2.7.0 hang with a bound device (pytorch#153960).
    version = torch.torch_version.TorchVersion(torch.__version__)
    hangs = "2.6.0" < version < "2.7.1"
    if world_size == 1 or hangs or get_accelerator().device_name() != "cuda":
        return None
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def _explain_failed_rendezvous(error: Exception) -> str:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    rank, world_size, address, port = (os.environ.get(name, "?") for name in names)
    reason = " ".join(str(error).split("Exception raised from")[0].split())
    return (
        f"rank {rank} of {world_size} could not meet the others at {address}:{port} (MASTER_ADDR and MASTER_PORT): "
        f"{reason[:300]}. Every rank must run, reach that address, and be let through by its firewall; `llmscale "
        "doctor --hostfile FILE` checks it."
    )


def is_gpu() -> bool:
    """Return whether DeepSpeed found a GPU (of any vendor)."""
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().device_name() != "cpu")


def set_default_environment() -> None:
    """Set torch's variables for a world of one, unless a launcher has set them.

    Raises ConfigError under a launcher that starts several processes without torch's variables: each would train
    alone, into the same folder.
    """
    if "RANK" not in os.environ:
        check_started_alone(os.environ)
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(find_port()))
    # DeepSpeed's launcher sets LOCAL_SIZE, torchrun LOCAL_WORLD_SIZE; Streaming reads only the latter.
    for ours, theirs in (("LOCAL_WORLD_SIZE", "LOCAL_SIZE"), ("LOCAL_SIZE", "LOCAL_WORLD_SIZE")):
        if ours not in os.environ and theirs in os.environ:
            os.environ[ours] = os.environ[theirs]


def leave_out_shared_memory_op() -> None:
    """Keep DeepSpeed from building `shm_comm` on a CPU machine.

    The op serves inference only, takes minutes to build on first use, and leaves `/dev/shm/deepspeed_*` segments after
    every run. DeepSpeed builds it if its table of compatible ops has it, so that entry is set to False.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _gather_ranks_per_node(local_rank: int, group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks on each node; a node begins at each rank whose local rank is 0. Collective."""
    local_ranks = gather(group, local_rank)
    starts = [rank for rank, local in enumerate(local_ranks) if local == 0] + [len(local_ranks)]
    return tuple(end - start for start, end in itertools.pairwise(starts))


def leave_world() -> None:
    """End the process group, so that gloo's threads end before the interpreter does."""
    if dist.is_initialized():
        dist.destroy_process_group()
