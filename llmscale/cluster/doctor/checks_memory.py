"""Row about the memory estimate against the GPUs and the hosts that were found. Pure function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from llmscale.cluster.doctor.host_facts import HostFacts
from llmscale.cluster.doctor.rows import CheckRow, green, red, split_error, yellow
from llmscale.cluster.hostfile import Host
from llmscale.config.deepspeed.schema import DsConfig
from llmscale.config.hardware import find_gpu
from llmscale.config.resolve import SetFacts, resolve_run
from llmscale.config.run_config import RunConfig
from llmscale.errors import ConfigError
from llmscale.memory.activations.recorded import NotRecorded
from llmscale.memory.format_bytes import describe_breakdown, format_size
from llmscale.planning.largest_micro_batch import Job, Machines, fit_at
from llmscale.planning.recommend import find_smallest_change


def check_memory(
    hosts: Sequence[Host], facts: Mapping[str, HostFacts], config: RunConfig, ds: DsConfig, known: SetFacts
) -> Iterator[CheckRow]:
    """The estimate against the smallest GPU, and what is offloaded against the smallest host. No row without GPUs."""
    gpus = [gpu for found in facts.values() if found.gpus for gpu in found.gpus.gpus]
    if not gpus:
        return
    smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
    host_bytes = min((found.system.memory_bytes for found in facts.values() if found.system), default=None)
    world_size = sum(host.slots for host in hosts)
    known_gpu = find_gpu(smallest.name)
    capability = known_gpu.capability if known_gpu else None
    machines = Machines(len(hosts), hosts[0].slots, smallest.memory_bytes, host_bytes, capability)
    if machines.world_size != world_size:
        # Hosts of different sizes: what is offloaded is then not compared with a host's memory.
        machines = Machines(world_size, 1, smallest.memory_bytes, capability=capability)
    try:
        run = resolve_run(config, ds, known, world_size)
        plan = run.plan
        machine_job = (run.shape, plan.global_batch_size, machines, plan.micro_batch_size)
        job = Job(*machine_job, run.optimizer, run.loss.chunk_tokens)
        fit = fit_at(run.ds, job, run.checkpointing, plan.micro_batch_size)
        change = None if fit.fits else find_smallest_change(run.ds, job, run.checkpointing, plan.micro_batch_size)
    except NotRecorded as error:
        yield yellow("memory", "not estimated", str(error))
        return
    except ConfigError as error:
        yield red("memory", *split_error(str(error)))
        return
    found = f"{format_size(fit.estimate.total_bytes)} of {format_size(smallest.memory_bytes)} on {smallest.name}"
    if fit.fits:
        yield green("memory", found)
        return
    host_spare = fit.host_spare_bytes
    if host_spare is not None and host_spare < 0:
        found += f"; {format_size(fit.host_bytes_per_node)} of host memory, {format_size(-host_spare)} too much"
    yield red(
        "memory",
        f"{found}: {describe_breakdown(fit.estimate.peak)}",
        change.describe() if change else "No strategy fits: more GPUs, larger ones, or a smaller model.",
    )
