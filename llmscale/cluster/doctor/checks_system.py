"""Rows about each host's limits, shared memory, compiler, built ops and the locks of dead builds. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from llmscale.cluster.doctor.host_facts import HostFacts, SystemFacts
from llmscale.cluster.doctor.rows import CheckRow, green, listed, placed, red, yellow
from llmscale.cluster.extension_locks import STALE_LOCK_S

#: Docker gives 64 MiB, too little for NCCL's buffers and the data workers' batches.
SHM_BYTES = 256 * 2**20
#: Descriptors that one rank takes beside its connections: shards, libraries, logs.
OPEN_FILES_BASE = 512
#: Connections per peer: NCCL or gloo for tensors, gloo for control, the store, checkpoints' group.
OPEN_FILES_PER_RANK = 8
#: What NCCL registers for InfiniBand.
MEMLOCK_BYTES = 16 * 2**30


def check_system(facts: Mapping[str, HostFacts], world_size: int, ops: Sequence[str]) -> Iterator[CheckRow]:
    """All rows; `ops` are those that the ds_config needs."""
    systems = {host: found.system for host, found in facts.items() if found.system}
    if not systems:
        return
    yield from _check_open_files(systems, world_size)
    yield from _check_memlock(facts)
    yield from _check_shm(systems)
    yield from _check_locks(systems)
    yield from _check_ops(systems, ops)


def _check_open_files(systems: Mapping[str, SystemFacts], world_size: int) -> Iterator[CheckRow]:
    needed = OPEN_FILES_BASE + OPEN_FILES_PER_RANK * world_size
    short = {host: system.open_files for host, system in systems.items() if system.open_files < needed}
    if short:
        yield red(
            "open files",
            f"the limit is {placed(short)}, {world_size} ranks need about {needed:,}",
            f"ulimit -n {max(65536, needed)} before the start; for logins through ssh in /etc/security/limits.conf "
            "(nofile), for services LimitNOFILE=.",
        )
    else:
        yield green("open files", f"limit {min(system.open_files for system in systems.values()):,}")


def _check_memlock(facts: Mapping[str, HostFacts]) -> Iterator[CheckRow]:
    """Registering memory for InfiniBand locks it."""
    short = {
        host: f"{found.system.memlock_bytes / 2**20:.0f} MiB"
        for host, found in facts.items()
        if found.system
        and found.system.memlock_bytes is not None
        and found.system.memlock_bytes < MEMLOCK_BYTES
        and found.network
        and found.network.infiniband_bits_per_s
    }
    if short:
        yield red(
            "locked memory",
            f"the limit is {placed(short)}, InfiniBand registers gigabytes",
            "ulimit -l unlimited; in /etc/security/limits.conf (memlock), docker run --ulimit memlock=-1.",
        )


def _check_shm(systems: Mapping[str, SystemFacts]) -> Iterator[CheckRow]:
    small = False
    for host, system in systems.items():
        if system.shm_bytes < SHM_BYTES:
            small = True
            yield red(
                "/dev/shm",
                f"{host}: {system.shm_bytes / 2**20:.0f} MiB in all",
                "docker run --shm-size=8g (or --ipc=host); else mount -o remount,size=8G /dev/shm",
            )
        elif system.shm_free_bytes < SHM_BYTES:
            small = True
            yield red(
                "/dev/shm",
                f"{host}: {system.shm_free_bytes / 2**20:.0f} of {system.shm_bytes / 2**20:.0f} MiB free",
                f"On {host}: ls -l /dev/shm, and remove what dead processes left (deepspeed_*, nccl-*, torch_*).",
            )
    if not small:
        least = min(system.shm_free_bytes for system in systems.values())
        yield green("/dev/shm", f"{least / 2**30:.1f} GiB free")


def find_stale_locks(systems: Mapping[str, SystemFacts]) -> dict[str, list[str]]:
    """Locks of dead builds: hosts by path. One that any host's process holds is live: the cache may be shared."""
    held = {lock.path for system in systems.values() for lock in system.locks if lock.held}
    stale: dict[str, list[str]] = {}
    for host, system in systems.items():
        for lock in system.locks:
            if lock.path not in held and lock.age_s > STALE_LOCK_S:
                stale.setdefault(lock.path, []).append(host)
    return stale


def _check_locks(systems: Mapping[str, SystemFacts]) -> Iterator[CheckRow]:
    stale = find_stale_locks(systems)
    for path, hosts in stale.items():
        yield red(
            "extension locks",
            f"{path} on {listed(hosts)} is left from a build that died: every start would wait for it for ever",
            f"rm {path} (or llmscale doctor --build-ops, which removes it and builds what is needed)",
        )
    if not stale:
        yield green("extension locks", "none is stale")


def _check_ops(systems: Mapping[str, SystemFacts], ops: Sequence[str]) -> Iterator[CheckRow]:
    if not ops:
        return
    missing = {
        host: lacking
        for host, system in systems.items()
        if (lacking := ", ".join(op for op in ops if op not in system.built_ops))
    }
    if not missing:
        yield green("ops", f"{', '.join(ops)} built on every host")
        return
    impossible = {host: lacks for host in missing if (lacks := _lacking_tools(systems[host]))}
    if impossible:
        yield red(
            "ops",
            f"missing {placed(impossible)}: DeepSpeed cannot build {', '.join(ops)} there, which NVMe offload needs",
            "apt-get install g++ libaio-dev, and pip install ninja in the environment of the ranks.",
        )
    buildable = {host: lacking for host, lacking in missing.items() if host not in impossible}
    if buildable:
        yield yellow(
            "ops",
            f"not built yet: {placed(buildable)}; all ranks would compile at the first start, for minutes",
            "Build them now, once: the same command with --build-ops.",
        )


def _lacking_tools(system: SystemFacts) -> str:
    lacks = [name for name, path in sorted(system.tools.items()) if path is None]
    return ", ".join(lacks if system.libaio else [*lacks, "libaio.h"])
