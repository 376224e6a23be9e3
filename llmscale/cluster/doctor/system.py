"""Check each host's limits, shared memory, compiler, built ops and stale locks. Facts are gathered on the host."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from llmscale.cluster.doctor.host_facts import HostFacts, SystemFacts
from llmscale.cluster.doctor.process_limit import process_limit
from llmscale.cluster.doctor.rows import CheckRow, green, listed, placed, red, yellow
from llmscale.cluster.extension_locks import STALE_LOCK_S, extensions_folder, find_locks
from llmscale.config.deepspeed.resolve import DsConfig
from llmscale.engine.silence_libraries import quiet_libraries

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


#: llmscale trains with torch's own AdamW. `async_io` reads and writes NVMe files, and loads `pin_memory` itself.
NVME_OPS = ("pin_memory", "async_io")
_BUILDERS = {"pin_memory": "PinMemoryBuilder", "async_io": "AsyncIOBuilder"}


def needed_ops(ds: DsConfig) -> tuple[str, ...]:
    """Names of the ops, in the order they are built. Without NVMe offload there are none."""
    return NVME_OPS if "nvme" in (ds.offload_optimizer_device, ds.offload_param_device) else ()


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was done in one line each; 1 when an op cannot be built here."""
    parser = argparse.ArgumentParser(description="Build ops on this host, and remove the locks of dead builds.")
    parser.add_argument("ops", nargs="*", metavar="OP", help=", ".join(NVME_OPS))
    parser.add_argument("--remove-lock", action="append", default=[], metavar="PATH")
    parser.add_argument("--timeout-s", type=int, default=900)
    args = parser.parse_args(argv)
    for op in args.ops:
        if op not in NVME_OPS:
            parser.error(f"{op} is not one of {', '.join(NVME_OPS)}")
    with process_limit(args.timeout_s):
        for path in args.remove_lock:
            with contextlib.suppress(FileNotFoundError):  # another host that shares the cache was faster
                os.remove(path)
        return _build_and_say(args.ops) if args.ops else 0


def _build_and_say(ops: Sequence[str]) -> int:
    began = time.perf_counter()
    try:
        build(ops)
    except Exception as error:  # a compiler's, a linker's or DeepSpeed's own
        words = str(error).strip().splitlines() or [type(error).__name__]
        print(words[-1], file=sys.stderr)
        return 1
    print(f"{', '.join(ops)} built in {time.perf_counter() - began:.0f} s")
    return 0


def build(names: Sequence[str]) -> None:
    """Compile and load each op. Raises what DeepSpeed's builders raise."""
    quiet_libraries()
    builders = importlib.import_module("deepspeed.ops.op_builder")
    for name in names:
        getattr(builders, _BUILDERS[name])().load(verbose=False)


_SHM = Path("/dev/shm")
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_LIBAIO_HEADERS = ("/usr/include/libaio.h", "/usr/local/include/libaio.h")


def gather_system() -> SystemFacts:
    """Everything that is neither software version, GPU, network nor run."""
    memlock, open_files = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
    shm = shutil.disk_usage(_SHM) if _SHM.is_dir() else None
    folder = extensions_folder()
    return SystemFacts(
        open_files=sys.maxsize if open_files == resource.RLIM_INFINITY else open_files,
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        shm_bytes=shm.total if shm else 0,
        shm_free_bytes=shm.free if shm else 0,
        memory_bytes=_memory(),
        cpus=len(os.sched_getaffinity(0)),
        tools={"c++": shutil.which(os.environ.get("CXX", "c++")), "ninja": _ninja()},
        libaio=any(os.path.exists(header) for header in _LIBAIO_HEADERS),
        built_ops=tuple(sorted(name for name in NVME_OPS if _is_built(folder, name))),
        locks=tuple(find_locks(folder)),
        extensions=str(folder),
    )


def _ninja() -> str | None:
    """On the search path, or beside this Python, where pip puts it."""
    return shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))


def _memory() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max", or another version of cgroups
            total = min(total, int(Path(path).read_text()))
    return total


def _is_built(folder: Path, op: str) -> bool:
    """Whether this Python finds the op's library: in the cache, or built when DeepSpeed was installed."""
    version = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}_*"
    return any(folder.glob(f"{op}/{op}.so")) or any(folder.glob(f"{version}/{op}/{op}.so")) or _came_installed(op)


def _came_installed(op: str) -> bool:
    """DS_BUILD_*=1 at installation leaves the library within the package."""
    return any(any(Path(entry or ".", "deepspeed", "ops").glob(f"*/{op}_op*.so")) for entry in sys.path)


if __name__ == "__main__":
    sys.exit(main())
