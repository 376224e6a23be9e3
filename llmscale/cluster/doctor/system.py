"""Limits, shared memory, compiler, built ops and stale locks of a host: gather and check them, and build ops.

`python -m llmscale.cluster.doctor.system OP...` builds DeepSpeed ops on a host.
"""

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

from llmscale.cluster.doctor.facts import (
    CheckRow,
    HostFacts,
    SystemFacts,
    format_by_host,
    format_hosts,
    green,
    red,
    yellow,
)
from llmscale.cluster.extension_locks import STALE_LOCK_S, extensions_folder, find_locks
from llmscale.cluster.remote import HostRunner, process_limit
from llmscale.config.deepspeed.resolve import DsConfig
from llmscale.engine.deepspeed_patches import quiet_libraries

#: Docker's default is 64 MiB, too little for NCCL's buffers and the data workers' batches.
SHM_BYTES = 256 * 2**20
#: Descriptors of one rank besides its connections: shards, libraries, logs.
OPEN_FILES_BASE = 512
#: Connections per peer: NCCL or gloo for tensors, gloo for control, the store, the group of checkpoints.
OPEN_FILES_PER_RANK = 8
#: Memory that NCCL registers for InfiniBand.
MEMLOCK_BYTES = 16 * 2**30
_INSTALL_TOOLS = "apt-get install g++ libaio-dev, and pip install ninja in the environment of the ranks."


def check_system(facts: Mapping[str, HostFacts], world_size: int, ops: Sequence[str]) -> Iterator[CheckRow]:
    """Yield all rows; `ops` are those that the ds_config needs."""
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
            f"the limit is {format_by_host(short, name_all=True)}, {world_size} ranks need about {needed:,}",
            f"ulimit -n {max(65536, needed)} before the start; for logins through ssh in /etc/security/limits.conf "
            "(nofile), for services LimitNOFILE=.",
        )
    else:
        yield green("open files", f"limit {min(system.open_files for system in systems.values()):,}")


def _check_memlock(facts: Mapping[str, HostFacts]) -> Iterator[CheckRow]:
    """Yield a red row for a small limit of locked memory: registering memory for InfiniBand locks it."""
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
            f"the limit is {format_by_host(short, name_all=True)}, InfiniBand registers gigabytes",
            "ulimit -l unlimited; in /etc/security/limits.conf (memlock), docker run --ulimit memlock=-1.",
        )


def _check_shm(systems: Mapping[str, SystemFacts]) -> Iterator[CheckRow]:
    small = False
    for host, system in systems.items():
        size = f"{system.shm_bytes / 2**20:.0f} MiB"
        if system.shm_bytes < SHM_BYTES:
            small = True
            fix = "docker run --shm-size=8g (or --ipc=host); else mount -o remount,size=8G /dev/shm"
            yield red("/dev/shm", f"{host}: {size} in total", fix)
        elif system.shm_free_bytes < SHM_BYTES:
            small = True
            yield red(
                "/dev/shm",
                f"{host}: {system.shm_free_bytes / 2**20:.0f} of {size} free",
                f"On {host}: ls -l /dev/shm, and remove the files of dead processes (deepspeed_*, nccl-*, torch_*).",
            )
    if not small:
        least = min(system.shm_free_bytes for system in systems.values())
        yield green("/dev/shm", f"{least / 2**30:.1f} GiB free")


def _find_stale_locks(systems: Mapping[str, SystemFacts]) -> dict[str, list[str]]:
    """Return hosts by path for the locks of dead builds. No host's process holds them: the cache may be shared."""
    held = {lock.path for system in systems.values() for lock in system.locks if lock.held}
    stale: dict[str, list[str]] = {}
    for host, system in systems.items():
        for lock in system.locks:
            if lock.path not in held and lock.age_s > STALE_LOCK_S:
                stale.setdefault(lock.path, []).append(host)
    return stale


def _check_locks(systems: Mapping[str, SystemFacts]) -> Iterator[CheckRow]:
    stale = _find_stale_locks(systems)
    for path, hosts in stale.items():
        yield red(
            "extension locks",
            f"{path} on {format_hosts(hosts)} was left by a killed build: every start would wait for it endlessly",
            f"rm {path} (or llmscale doctor --build-ops, which removes it and builds the missing ops)",
        )
    if not stale:
        yield green("extension locks", "no stale lock")


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
    impossible = {host: lacks for host in missing if (lacks := _missing_tools(systems[host]))}
    if impossible:
        where = format_by_host(impossible, name_all=True)
        yield red(
            "ops",
            f"missing {where}: DeepSpeed cannot build {', '.join(ops)} there, which NVMe offload needs",
            _INSTALL_TOOLS,
        )
    buildable = {host: lacking for host, lacking in missing.items() if host not in impossible}
    if buildable:
        where = format_by_host(buildable, name_all=True)
        yield yellow(
            "ops",
            f"not built yet: {where}; all ranks would compile at the first start, for minutes",
            "Build them now, once: the same command with --build-ops.",
        )


def _missing_tools(system: SystemFacts) -> str:
    missing = [name for name, path in sorted(system.tools.items()) if path is None]
    return ", ".join(missing if system.libaio else [*missing, "libaio.h"])


#: llmscale trains with torch's own AdamW. `async_io` reads and writes NVMe files, and loads `pin_memory` itself.
NVME_OPS = ("pin_memory", "async_io")
_BUILDERS = {"pin_memory": "PinMemoryBuilder", "async_io": "AsyncIOBuilder"}
_BUILD_TIMEOUT_S = 900


def needed_ops(ds: DsConfig) -> tuple[str, ...]:
    """Return the names of the ops in build order; none without NVMe offload."""
    return NVME_OPS if "nvme" in (ds.offload_optimizer_device, ds.offload_param_device) else ()


def build_on_hosts(runner: HostRunner, facts: Mapping[str, HostFacts], ops: Sequence[str]) -> Iterator[CheckRow]:
    """Remove the locks of dead builds and build `ops` on every host; yield the results."""
    locks = _find_stale_locks({host: found.system for host, found in facts.items() if found.system})
    arguments = {
        host: [
            *ops,
            *(word for path, owners in locks.items() if host in owners for word in ("--remove-lock", path)),
            *("--timeout-s", str(_BUILD_TIMEOUT_S)),
        ]
        for host in facts
    }
    answers = runner.modules("llmscale.cluster.doctor.system", arguments, _BUILD_TIMEOUT_S + 15)
    for path, owners in locks.items():
        yield green("build", f"removed {path} on {', '.join(owners)}")
    for host, answer in answers.items():
        if answer.returncode:
            yield red("build", f"{host}: {answer.describe()}", _INSTALL_TOOLS)
        elif ops:
            yield green("build", f"{host}: {answer.describe()}")
    if not ops:
        yield green("build", "this ds_config needs no compiled DeepSpeed op")


def main(argv: Sequence[str] | None = None) -> int:
    """Build ops on this host, and print one line; return 1 if an op cannot be built here."""
    parser = argparse.ArgumentParser(description="Build ops on this host, and remove the locks of killed builds.")
    parser.add_argument("ops", nargs="*", metavar="OP", help=", ".join(NVME_OPS))
    parser.add_argument("--remove-lock", action="append", default=[], metavar="PATH")
    parser.add_argument("--timeout-s", type=int, default=_BUILD_TIMEOUT_S)
    args = parser.parse_args(argv)
    for op in args.ops:
        if op not in NVME_OPS:
            parser.error(f"{op} is not one of {', '.join(NVME_OPS)}")
    with process_limit(args.timeout_s):
        for path in args.remove_lock:
            with contextlib.suppress(FileNotFoundError):  # another host that shares the cache was faster
                os.remove(path)
        return _build(args.ops) if args.ops else 0


def _build(ops: Sequence[str]) -> int:
    """Compile and load each op."""
    began = time.perf_counter()
    try:
        quiet_libraries()
        builders = importlib.import_module("deepspeed.ops.op_builder")
        for op in ops:
            getattr(builders, _BUILDERS[op])().load(verbose=False)
    except Exception as error:  # raised by the compiler, the linker or DeepSpeed
        lines = str(error).strip().splitlines() or [type(error).__name__]
        print(lines[-1], file=sys.stderr)
        return 1
    print(f"{', '.join(ops)} built in {time.perf_counter() - began:.0f} s")
    return 0


_SHM = Path("/dev/shm")
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_LIBAIO_HEADERS = ("/usr/include/libaio.h", "/usr/local/include/libaio.h")


def gather_system() -> SystemFacts:
    """Return the limits, memory, tools and built extensions of this host."""
    memlock, open_files = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
    shm = shutil.disk_usage(_SHM) if _SHM.is_dir() else None
    # pip puts ninja beside this Python, which need not be on the search path.
    ninja = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    folder = extensions_folder()
    return SystemFacts(
        open_files=sys.maxsize if open_files == resource.RLIM_INFINITY else open_files,
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        shm_bytes=shm.total if shm else 0,
        shm_free_bytes=shm.free if shm else 0,
        memory_bytes=_memory_bytes(),
        cpus=len(os.sched_getaffinity(0)),
        tools={"c++": shutil.which(os.environ.get("CXX", "c++")), "ninja": ninja},
        libaio=any(os.path.exists(header) for header in _LIBAIO_HEADERS),
        built_ops=tuple(sorted(name for name in NVME_OPS if _is_built(folder, name))),
        locks=tuple(find_locks(folder)),
        extensions=str(folder),
    )


def _memory_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max", or another version of cgroups
            total = min(total, int(Path(path).read_text()))
    return total


def _is_built(folder: Path, op: str) -> bool:
    """Return whether this Python finds the op's library: in the cache, or in DeepSpeed's package (DS_BUILD_*=1)."""
    version = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}_*"
    in_package = (any(Path(entry or ".", "deepspeed", "ops").glob(f"*/{op}_op*.so")) for entry in sys.path)
    return any(folder.glob(f"{op}/{op}.so")) or any(folder.glob(f"{version}/{op}/{op}.so")) or any(in_package)


if __name__ == "__main__":
    sys.exit(main())
