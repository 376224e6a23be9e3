"""Facts about this host's GPUs, from nvidia-smi. A host without it has none."""

from __future__ import annotations

import shutil
import subprocess

from llmscale.cluster.doctor.host_facts import Gpu, GpuFacts

_MIB = 2**20
_GPU_FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version")
#: Asked apart: an old driver refuses the whole query when it does not know one field.
_HEALTH_FIELDS = (
    "uuid",
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.pending",
    "remapped_rows.pending",
    "remapped_rows.failure",
)
_PROCESS_FIELDS = ("gpu_uuid", "pid")


def gather_gpus(timeout_s: float) -> GpuFacts:
    """The GPUs with their memory, processes and errors."""
    if shutil.which("nvidia-smi") is None:
        return GpuFacts((), None, None)
    try:
        listed = _query("--query-gpu", _GPU_FIELDS, timeout_s)
    except (OSError, subprocess.SubprocessError) as error:
        return GpuFacts((), None, _explain(error))
    try:
        health = _query("--query-gpu", _HEALTH_FIELDS, timeout_s)
    except (OSError, subprocess.SubprocessError):
        health = []
    try:
        processes = _query("--query-compute-apps", _PROCESS_FIELDS, timeout_s)
    except (OSError, subprocess.SubprocessError):
        processes = []
    return parse_gpus(listed, health, processes)


def parse_gpus(listed: list[list[str]], health: list[list[str]], processes: list[list[str]]) -> GpuFacts:
    """From the rows of three queries, whose columns are _GPU_FIELDS, _HEALTH_FIELDS and _PROCESS_FIELDS."""
    health_of = {row[0]: row[1:] for row in health}
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
    """A whole number; None for `[N/A]` and `[Not Supported]`."""
    return int(text) if text.isdigit() else None


def _query(kind: str, fields: tuple[str, ...], timeout_s: float) -> list[list[str]]:
    """The rows of one query. Raises OSError or SubprocessError."""
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
        words = (error.stdout or error.stderr or "").strip().splitlines()
        return words[0] if words else f"nvidia-smi ended with status {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"nvidia-smi gave no answer within {error.timeout:.0f} s"
    return f"nvidia-smi: {error}"
