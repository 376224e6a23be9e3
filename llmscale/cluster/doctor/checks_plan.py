"""Rows about what the run would need: the batch arithmetic, disk, memory. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from llmscale.cluster.doctor.checks_memory import check_memory
from llmscale.cluster.doctor.checks_run import folders_of
from llmscale.cluster.doctor.host_facts import HostFacts
from llmscale.cluster.doctor.rows import CheckRow, green, red, split_error
from llmscale.cluster.hostfile import Host
from llmscale.config.deepspeed.schema import DsConfig
from llmscale.config.optimizers import get_optimizer
from llmscale.config.resolve import SetFacts, resolve_batch, resolve_schedule, resolve_shape
from llmscale.config.run_config import RunConfig
from llmscale.errors import ConfigError
from llmscale.memory.format_bytes import format_size
from llmscale.planning.disk_usage import checkpoints_at_once

#: What else a save asks for (llmscale.planning.disk_usage.SPARE_BYTES), and the run's logs and samples.
SPARE_BYTES = 128 * 2**20


def check_plan(
    hosts: Sequence[Host], facts: Mapping[str, HostFacts], config: RunConfig, ds: DsConfig | None
) -> Iterator[CheckRow]:
    """All rows, as far as what they rest on is known: the data set's facts, a legal ds_config."""
    data = [found.run.data for found in facts.values() if found.run and found.run.data and not found.run.data.problem]
    if not data:
        return
    known = SetFacts(data[0].vocab_size, data[0].seq_len, data[0].num_train_samples, data[0].eot_token)
    try:
        shape = resolve_shape(config, known)
        plan = resolve_batch(config, shape.seq_len, sum(host.slots for host in hosts))
        total_steps = resolve_schedule(config, plan, known.num_train_samples).total_steps
    except ConfigError as error:
        yield red("batch", *split_error(str(error)))
        return
    yield green("batch", plan.describe())
    checkpoint_bytes = get_optimizer(config.optimizer).state_bytes(shape.architecture)
    yield from check_disk(facts, hosts[0].name, config, checkpoint_bytes, total_steps)
    if ds is not None:
        yield from check_memory(hosts, facts, config, ds, known)


def check_disk(
    facts: Mapping[str, HostFacts], first_host: str, config: RunConfig, checkpoint_bytes: int, total_steps: int
) -> Iterator[CheckRow]:
    """Free space where the run folder is, against all checkpoints that will lie there at once."""
    folders = folders_of(facts)
    if first_host not in folders:
        return
    folder = folders[first_host]
    count = checkpoints_at_once(config, total_steps)
    needed_bytes = checkpoint_bytes * count + SPARE_BYTES
    free_bytes = folder.free_bytes + folder.checkpoints_bytes
    found = (
        f"{format_size(free_bytes)} free for {count} checkpoint{'s' if count > 1 else ''} of "
        f"{format_size(checkpoint_bytes)} each ({format_size(needed_bytes)} with logs) at {folder.exists_at}"
    )
    if free_bytes < needed_bytes:
        yield red(
            "disk",
            found,
            "Free some space, name a folder on a larger disk with --run, or keep fewer: --keep-last, --keep-every.",
        )
    else:
        yield green("disk", found)
