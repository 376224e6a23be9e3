"""Which of DeepSpeed's compiled ops a ds_config needs, given that llmscale trains with torch's own AdamW, and what
keeps them from being built. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from llmscale.cluster.doctor.host_facts import SystemFacts
from llmscale.cluster.extension_locks import STALE_LOCK_S
from llmscale.config.deepspeed.schema import DsConfig

#: `async_io` reads and writes NVMe files, and loads `pin_memory` itself.
NVME_OPS = ("pin_memory", "async_io")


def needed_ops(ds: DsConfig) -> tuple[str, ...]:
    """Names of the ops, in the order they are built. Without NVMe offload there are none."""
    return NVME_OPS if "nvme" in (ds.offload_optimizer_device, ds.offload_param_device) else ()


def find_stale_locks(systems: Mapping[str, SystemFacts]) -> dict[str, list[str]]:
    """Locks of dead builds: hosts by path. One that any host's process holds is live: the cache may be shared."""
    held = {lock.path for system in systems.values() for lock in system.locks if lock.held}
    stale: dict[str, list[str]] = {}
    for host, system in systems.items():
        for lock in system.locks:
            if lock.path not in held and lock.age_s > STALE_LOCK_S:
                stale.setdefault(lock.path, []).append(host)
    return stale
