"""Result files, and what they say about the machine they came from. No torch."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "mosaicml-streaming", "numpy")


def describe_machine() -> dict[str, object]:
    """Processor, cores, GPUs, versions, and the load that other programs put on the machine right now."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpu_names(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def describe_circumstances(
    machine: Mapping[str, object], args: argparse.Namespace, settings: Iterable[str]
) -> dict[str, object]:
    """The machine as it was before a measurement, its load after it, and the flags named `settings`."""
    return {
        "machine": {**machine, "load_average_after": [round(load, 2) for load in os.getloadavg()]},
        "settings": {name: getattr(args, name) for name in settings},
    }


def median_and_range(values: Iterable[float]) -> dict[str, float]:
    """Return the median of repeated measurements with the smallest and the largest one."""
    found = list(values)
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def show_range(found: Mapping[str, float], form: str = ".2f") -> str:
    """Return "median (smallest-largest)", as every result prints a median."""
    return f"{found['median']:{form}} ({found['min']:{form}}-{found['max']:{form}})"


def peak_bytes() -> int:
    """Return the largest resident memory that this process, or a child of it that has ended, has had.

    Its own is the kernel's mark for this program. ru_maxrss begins with that of the process that started it.
    """
    status = Path("/proc/self/status").read_text()
    own_kib = int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1])
    return max(own_kib, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024


def save_result(path: Path | None, result: Mapping[str, object]) -> None:
    """As JSON, when a script was told where (--json)."""
    if path:
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(result, indent=1) + "\n")
        partial.replace(path)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def gpu_names() -> list[str]:
    """What the driver calls each GPU of this machine."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")[:-1]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
