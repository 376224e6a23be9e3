"""Facts about this host's limits, memory, tools and torch's cache of built extensions. Linux, no torch."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sys
from pathlib import Path

from llmscale.cluster.doctor.build_ops import NVME_OPS
from llmscale.cluster.doctor.host_facts import SystemFacts
from llmscale.cluster.extension_locks import extensions_folder, find_locks

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
