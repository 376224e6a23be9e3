"""GPUs: gather them with nvidia-smi; check that each slot has one, free, healthy and visible to torch.

Hosts without GPUs are fine as long as no host has one.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from llmscale.cluster.doctor.facts import CheckRow, Gpu, GpuFacts, HostFacts, differ, format_by_host, green, red, yellow
from llmscale.cluster.hostfile import Host

#: Memory that an idle GPU may hold: the driver's own.
IDLE_BYTES = 2 * 2**30


def check_gpus(hosts: Sequence[Host], facts: Mapping[str, HostFacts]) -> Iterator[CheckRow]:
    """Yield all rows about the GPUs of all hosts."""
    known = {host.name: facts[host.name].gpus for host in hosts if host.name in facts}
    found = {name: gpus for name, gpus in known.items() if gpus is not None}
    for name, gpus in found.items():
        if gpus.problem:
            yield red(
                "gpus",
                f"{name}: nvidia-smi fails: {gpus.problem}",
                f"On {name}: sudo modprobe nvidia, or reboot after a driver update; dmesg | grep -i nvrm says why.",
            )
    if not any(gpus.gpus for gpus in found.values()):
        if found and not any(gpus.problem for gpus in found.values()):
            yield green("gpus", "none: training on CPUs over gloo")
        return
    yield from _check_presence(hosts, {name: gpus.gpus for name, gpus in found.items() if not gpus.problem})
    yield from _check_drivers({name: gpus.driver for name, gpus in found.items() if gpus.driver})
    yield from _check_visible(facts)
    busy = [row for name, gpus in found.items() for row in _check_free(name, gpus.gpus)]
    yield from busy or [green("gpus free", "no GPU is used by another process")]
    ill = [row for name, gpus in found.items() for row in _check_healthy(name, gpus.gpus)]
    counted = all(gpu.uncorrected_errors is not None for gpus in found.values() for gpu in gpus.gpus)
    yield from ill or [green("ecc", "no errors" if counted else "no errors; some GPUs do not count them")]


def _check_presence(hosts: Sequence[Host], gpus_of: Mapping[str, tuple[Gpu, ...]]) -> Iterator[CheckRow]:
    short = False
    for host in hosts:
        num_gpus = len(gpus_of.get(host.name, ()))
        if host.name in gpus_of and num_gpus < host.slots:
            short = True
            fix = f"Write `{host.name} slots={num_gpus}` in the hostfile, or find out where the others are."
            if num_gpus == 0:
                fix = f"Install the NVIDIA driver on {host.name}, or delete it from the hostfile."
            yield red("gpus", f"{host.name}: {num_gpus} GPUs for {host.slots} slots", fix)
    kinds = {
        name: ", ".join(sorted({f"{gpu.name} {gpu.memory_bytes / 2**30:.0f} GiB" for gpu in gpus}))
        for name, gpus in gpus_of.items()
        if gpus
    }
    if differ(kinds):
        yield yellow(
            "gpus",
            format_by_host(kinds),
            "All ranks run at the speed of the slowest GPU and within the memory of the smallest.",
        )
    elif not short:
        yield green("gpus", f"{sum(len(gpus) for gpus in gpus_of.values())} x {format_by_host(kinds)}")


def _check_drivers(drivers: Mapping[str, str]) -> Iterator[CheckRow]:
    if differ(drivers):
        yield yellow("driver", format_by_host(drivers), "Install the same NVIDIA driver on every host.")
    elif drivers:
        yield green("driver", format_by_host(drivers))


def _check_visible(facts: Mapping[str, HostFacts]) -> Iterator[CheckRow]:
    """Yield red rows for hosts whose torch would silently train on the CPU: a CPU build, or too old a driver."""
    for name, found in facts.items():
        if not (found.gpus and found.gpus.gpus and found.imports and found.imports.problem is None):
            continue
        cuda = found.code.torch_cuda if found.code else None
        if cuda is None:
            yield red(
                "torch sees gpus",
                f"{name}: torch was built without CUDA",
                "Install a CUDA build: pip install torch --index-url https://download.pytorch.org/whl/cu126",
            )
        elif not found.imports.cuda_available:
            yield red(
                "torch sees gpus",
                f"{name}: torch for CUDA {cuda} finds no GPU with driver {found.gpus.driver}",
                f"Update the driver on {name}, or install a torch for an older CUDA; CUDA_VISIBLE_DEVICES must not be "
                "empty.",
            )


def _check_free(name: str, gpus: Sequence[Gpu]) -> Iterator[CheckRow]:
    busy = [gpu for gpu in gpus if gpu.processes or gpu.used_bytes > IDLE_BYTES]
    if busy:
        indices = ", ".join(str(gpu.index) for gpu in busy)
        pids = sorted({pid for gpu in busy for pid in gpu.processes})
        used = max(gpu.used_bytes for gpu in busy) / 2**30
        end = f"kill {' '.join(map(str, pids))}" if pids else "fuser -v /dev/nvidia*"
        owners = f" by process {', '.join(map(str, pids))}" if pids else ""
        yield red(
            "gpus free",
            f"{name}: GPU {indices} in use{owners}, up to {used:.1f} GiB",
            f"On {name}: wait until it is free, or end the process ({end}).",
        )


def _check_healthy(name: str, gpus: Sequence[Gpu]) -> Iterator[CheckRow]:
    for gpu in gpus:
        reset = f"Drain {name} and reset the GPU (nvidia-smi --gpu-reset -i {gpu.index})"
        if gpu.uncorrected_errors:
            yield red(
                "ecc",
                f"{name}: GPU {gpu.index} had {gpu.uncorrected_errors} uncorrected memory errors",
                f"{reset}; if they come back, have it replaced.",
            )
        elif gpu.needs_reset:
            yield red("ecc", f"{name}: GPU {gpu.index} has memory rows waiting to be remapped", f"{reset} or reboot.")


_MIB = 2**20
_GPU_FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version")
#: A query of its own: an old driver refuses the whole query if it does not know one field.
_HEALTH_FIELDS = (
    "uuid",
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.pending",
    "remapped_rows.pending",
    "remapped_rows.failure",
)
_PROCESS_FIELDS = ("gpu_uuid", "pid")


def gather_gpus(timeout_s: float) -> GpuFacts:
    """Return the GPUs of this host with their memory, processes and errors."""
    if shutil.which("nvidia-smi") is None:
        return GpuFacts((), None, None)
    try:
        listed = _query("--query-gpu", _GPU_FIELDS, timeout_s)
    except (OSError, subprocess.SubprocessError) as error:
        return GpuFacts((), None, _explain(error))
    health = _query_if_known("--query-gpu", _HEALTH_FIELDS, timeout_s)
    health_of = {row[0]: row[1:] for row in health}
    processes = _query_if_known("--query-compute-apps", _PROCESS_FIELDS, timeout_s)
    gpus = []
    for index, uuid, name, total, used, _ in listed:
        errors, *pending = health_of.get(uuid, ["[N/A]"])
        gpus.append(
            Gpu(
                index=int(index),
                name=name,
                memory_bytes=(_number(total) or 0) * _MIB,
                used_bytes=(_number(used) or 0) * _MIB,
                processes=tuple(int(pid) for owner, pid in processes if owner == uuid and pid.isdigit()),
                uncorrected_errors=_number(errors),
                needs_reset=any(answer.lower() in ("yes", "1") for answer in pending),
            )
        )
    return GpuFacts(tuple(gpus), listed[0][-1] if listed else None, None)


def _number(text: str) -> int | None:
    """Parse an integer; None for `[N/A]` and `[Not Supported]`."""
    return int(text) if text.isdigit() else None


def _query_if_known(kind: str, fields: tuple[str, ...], timeout_s: float) -> list[list[str]]:
    """Return the rows of one query, or none if this driver refuses it."""
    try:
        return _query(kind, fields, timeout_s)
    except (OSError, subprocess.SubprocessError):
        return []


def _query(kind: str, fields: tuple[str, ...], timeout_s: float) -> list[list[str]]:
    """Return the rows of one query. Raises OSError or SubprocessError."""
    done = subprocess.run(
        ["nvidia-smi", f"{kind}={','.join(fields)}", "--format=csv,noheader,nounits"],
        check=True,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    rows = [[cell.strip() for cell in line.split(", ")] for line in done.stdout.splitlines() if line.strip()]
    return [row for row in rows if len(row) == len(fields)]


def _explain(error: OSError | subprocess.SubprocessError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.stdout or error.stderr or "").strip().splitlines()
        return lines[0] if lines else f"nvidia-smi ended with status {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"nvidia-smi gave no answer within {error.timeout:.0f} s"
    return f"nvidia-smi: {error}"
