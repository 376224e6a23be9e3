"""Checks of the host that they run on: software, GPUs, network and limits. No torch in this process."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from llmscale.cluster.doctor.report import CheckRow, ProbeRequest, green, red, shared, split_error
from llmscale.cluster.hosts import PACKAGE, run_command
from llmscale.cluster.launch.ranks import Gpu, allowed_cpus, bind_ranks, binding_variable
from llmscale.config.bundled_files import install_command
from llmscale.engine.network import check_interfaces, interface_addresses, is_free, source_address
from llmscale.errors import ConfigError
from llmscale.terminal.human_numbers import count_nouns
from llmscale.training.run_folder import library_versions, source_hashes
from llmscale.untrusted.interpreter import code_command

#: Libraries whose version changes results or the protocol between ranks. Other libraries change a file format at most.
_STRICT = ("torch", "deepspeed", "mosaicml-streaming")
_SAME_ENVIRONMENT = "Put one environment and one source tree at the same path on every host (rsync -a --delete)."
#: Index with builds of torch and torchvision that fit each other, without CUDA.
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: Run in a separate process: an import can hang, crash, or take GPU memory.
_IMPORT_CODE = """
import os
from llmscale.engine.deepspeed_patches import quiet_libraries
quiet_libraries()
import torch, deepspeed
import llmscale.training.open_session
from importlib.util import find_spec
try:
    find_spec("torchvision") and __import__("torchvision")
except Exception as error:
    print("torchvision", str(error).partition(chr(10))[0], flush=True)
print("gpus", torch.cuda.device_count(), flush=True)
os._exit(0)
"""
#: Memory that an idle GPU may hold: the driver's own.
_IDLE_BYTES = 2 * 2**30
#: Docker's default is 64 MiB, too little for NCCL's buffers and the data workers' batches.
_SHM_BYTES = 256 * 2**20
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_software() -> Iterator[CheckRow]:
    """Check which Python, sources and libraries are installed, without importing them."""
    sources = hashlib.sha256(json.dumps(source_hashes(PACKAGE)).encode()).hexdigest()
    yield shared("versions", "python", platform.python_version(), _SAME_ENVIRONMENT)
    yield shared("versions", "llmscale", f"sources {sources[:12]}", _SAME_ENVIRONMENT)
    for library, version in library_versions().items():
        if version is None and library in _STRICT:
            yield red("versions", f"{library} is not installed", f"Install it: {install_command('train')}")
        elif version is not None:
            fix = f"Install one version on every host: pip install {library}=={version}"
            yield shared("versions", library, version, fix, "fail" if library in _STRICT else "warn")


def check_imports(gpus: Sequence[Gpu], timeout_s: float) -> Iterator[CheckRow]:
    """Check train.py's imports, and that torch sees the GPUs that the driver lists."""
    done = run_command(code_command(_IMPORT_CODE), timeout_s)
    answer = done.stdout.splitlines()
    if done.returncode or not answer:
        if done.returncode:
            problem = done.describe()
        else:
            problem = "no output"
        yield red(
            "imports", f"train.py's imports fail: {problem}", f"Repair it, for example: {install_command('train')}"
        )
        return
    yield green("imports", "train.py's imports work")
    for line in answer:
        if line.startswith("torchvision "):
            why = f"does not fit this torch, and transformers fails with it: {line.removeprefix('torchvision ')}"
            fix = f"pip uninstall torchvision: llmscale needs none. Or install its build for this torch: {_CPU_INDEX}"
            yield red("torchvision", why, fix)
    if gpus and answer[-1] == "gpus 0":
        yield red(
            "gpus",
            f"torch finds no GPU with driver {gpus[0].driver}, and would train on the CPU",
            "Update the driver, or install a torch build for its CUDA; CUDA_VISIBLE_DEVICES must not be empty.",
        )


def check_gpus(gpus: Sequence[Gpu], problem: str | None, slots: int) -> Iterator[CheckRow]:
    """Check that each slot has a free GPU; a host without any is fine as long as no other host has one.

    `problem` is nvidia-smi's, if it fails.
    """
    if problem:
        fix = "sudo modprobe nvidia, or reboot after a driver update; dmesg | grep -i nvrm says why."
        yield red("gpus", f"nvidia-smi fails: {problem}", fix)
        return
    fix = "Install the NVIDIA driver where GPUs are missing, or delete these hosts from the hostfile."
    yield shared("gpus", "training", "on GPUs over NCCL" if gpus else "on CPUs over gloo, without GPUs", fix)
    if not gpus:
        return
    kinds = ", ".join(sorted({f"{gpu.name} {gpu.memory_bytes / 2**30:.0f} GiB" for gpu in gpus}))
    slowest = "All ranks run at the speed of the slowest GPU and within the memory of the smallest."
    yield shared("gpus", "kind", kinds, slowest, "warn")
    if len(gpus) < slots:
        fix = f"Write slots={len(gpus)} for it in the hostfile, or find out where the others are."
        yield red("gpus", f"{len(gpus)} GPUs for {slots} slots", fix)
    busy = [gpu for gpu in gpus if gpu.used_bytes > _IDLE_BYTES]
    if busy:
        indices = ", ".join(str(gpu.index) for gpu in busy)
        used = max(gpu.used_bytes for gpu in busy) / 2**30
        fix = "Wait until they are free, or end the processes that nvidia-smi lists."
        yield red("gpus", f"GPU {indices} in use, up to {used:.1f} GiB", fix)


def check_cores(slots: int) -> CheckRow:
    """Show the CPUs and NUMA nodes that `llmscale train` and `launch` bind each rank of this host to."""
    nodes = allowed_cpus()
    shares = bind_ranks(os.environ, slots)
    variable = binding_variable(os.environ)
    if shares:
        ranks = (
            f"rank {rank}: {_format_cpus(share)} (NUMA node {', '.join(map(str, sorted({nodes[c] for c in share})))})"
            for rank, share in enumerate(shares)
        )
        return green("cores", "; ".join(ranks))
    if variable and slots > 1:
        return green("cores", f"ranks are not bound: {variable} is set")
    return green("cores", f"{count_nouns(slots, 'rank')} on {len(nodes)}, not bound")


def _format_cpus(cpus: Sequence[int]) -> str:
    """Format `[0, 1, 2, 8]` as 0-2,8."""
    ordered = sorted(cpus)
    parts = list[str]()
    for cpu in (cpu for cpu in ordered if cpu - 1 not in ordered):
        last = next(end for end in range(cpu, ordered[-1] + 1) if end + 1 not in ordered)
        parts.append(f"{cpu}-{last}" if last > cpu else f"{cpu}")
    return ",".join(parts)


def check_network(request: ProbeRequest) -> Iterator[CheckRow]:
    """Check the ways to the other hosts, the interfaces that variables name, and the rendezvous port."""
    try:
        check_interfaces(os.environ)
    except ConfigError as error:
        yield red("address", *split_error(str(error)))
    faults = [fault for host in request.hosts if host != request.host and (fault := _find_name_fault(host))]
    yield from faults
    if not faults and len(request.hosts) > 1:
        yield green("address", "every host resolves and reaches every other")
    if request.host != next(iter(request.hosts)):
        return
    if is_free(request.port):
        yield green("port", f"{request.port} is free on {request.host}")
    else:
        yield red(
            "port",
            f"{request.port} is in use on {request.host}",
            "Choose another one (--port here, --master_port for deepspeed), or end the process that uses it: "
            f"ss -ltnp 'sport = :{request.port}'",
        )


def _find_name_fault(host: str) -> CheckRow | None:
    """Return the fault of a name: it must lead to another machine, by a route that exists."""
    try:
        address = socket.gethostbyname(host)
    except (OSError, UnicodeError):
        return red("address", f"{host} does not resolve", f"Add {host} to DNS or to /etc/hosts.")
    if address.startswith("127."):
        fix = f"Write {host}'s address in /etc/hosts."
        return red("address", f"{host} resolves to {address}, which is this host itself", fix)
    try:
        source_address(address)
    except OSError:
        fix = "Bring the interface up (ip link, ip route), or correct the address."
        return red("address", f"there is no route to {host} ({address})", fix)
    return None


def first_address() -> str | None:
    """Return the first address that is not a loopback's, which DeepSpeed's launcher tells to all other hosts."""
    return next((address for _, address in interface_addresses() if not address.startswith("127.")), None)


def check_shared_memory() -> CheckRow:
    """Check that /dev/shm has space."""
    shm = shutil.disk_usage("/dev/shm")
    if shm.free >= _SHM_BYTES:
        return green("/dev/shm", f"{shm.free / 2**30:.1f} GiB free")
    fix = (
        "docker run --shm-size=8g (or --ipc=host), else mount -o remount,size=8G /dev/shm; or remove files of dead "
        "processes (deepspeed_*, nccl-*, torch_*)."
    )
    return red("/dev/shm", f"{shm.free / 2**20:.0f} of {shm.total / 2**20:.0f} MiB free", fix)


def host_memory_bytes() -> int:
    """Return the memory of this host, or the lower limit of its container."""
    limits = [int(psutil.virtual_memory().total)]
    for path in map(Path, _CGROUP_LIMITS):
        if path.is_file():
            text = path.read_text().strip()
        else:
            text = ""
        limits += [int(text)] if text.isdigit() else []
    return min(limits)
