"""Facts of a host as the doctor's probe prints them, and the rows of the table that checks make of them. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from llmscale.cluster.extension_locks import ExtensionLock
from llmscale.errors import ConfigError

#: Precedes the JSON in the probe's output: a login script may print text before it.
FACTS_MARK = "llmscale-facts "
#: Default rendezvous port of DeepSpeed's launcher.
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class ProbeRequest:
    """Input of the probe, beside the machine itself."""

    peers: tuple[str, ...] = ()
    """Names of all hosts, as in the hostfile."""
    port: int = DEFAULT_PORT
    """Rendezvous port of the ranks on the first host."""
    world_size: int = 1
    ds: str | None = None
    """Path of a ds_config on the host."""
    train_flags: tuple[str, ...] | None = None
    """Flags for train.py; None without a run to check."""
    timeout_s: float = 60.0
    """Time limit of every group of facts; a group that exceeds it is reported as late."""


@dataclass(frozen=True)
class CodeFacts:
    """Versions of Python, llmscale and the libraries."""

    python: str
    executable: str
    package: str
    """Folder of the llmscale package."""
    sha256: str
    """Hash over the names and contents of its sources."""
    libraries: dict[str, str | None]
    """Installed version by distribution; None when it is missing."""
    torch_cuda: str | None
    """CUDA version that torch was built for; None for a CPU build."""
    nccl: str | None
    fits_torchvision: bool = True
    """True if torchvision, a dependency of Streaming, can be imported beside this torch."""


@dataclass(frozen=True)
class ImportFacts:
    """Result of importing torch and DeepSpeed."""

    problem: str | None
    """The exception's last line."""
    cuda_available: bool
    device_count: int
    seconds: float


@dataclass(frozen=True)
class Gpu:
    """One GPU, as nvidia-smi describes it. Sizes in bytes."""

    index: int
    name: str
    memory_bytes: int
    used_bytes: int
    processes: tuple[int, ...]
    """Compute processes that hold memory on it."""
    uncorrected_errors: int | None
    """Uncorrected ECC errors since the driver was loaded; None if the GPU does not count them."""
    needs_reset: bool
    """True if memory pages or rows wait to be retired or remapped, or could not be."""


@dataclass(frozen=True)
class GpuFacts:
    """All GPUs of a host; empty without nvidia-smi."""

    gpus: tuple[Gpu, ...]
    driver: str | None
    problem: str | None
    """Error of nvidia-smi, if it is installed and fails."""


@dataclass(frozen=True)
class Interface:
    """One network interface."""

    name: str
    up: bool
    mtu: int
    address: str | None
    """IPv4 address."""
    bits_per_s: int | None
    """Link speed from the driver; None when unknown."""


@dataclass(frozen=True)
class Route:
    """A host's route to another host, or to itself, by name."""

    address: str | None
    """Address that the name resolves to on this host."""
    source: str | None
    """Own address that packets leave from; None without a route."""


@dataclass(frozen=True)
class NetworkFacts:
    """Names, addresses and interfaces, as this host sees them."""

    hostname: str
    hostname_address: str | None
    """Address that the host's own name resolves to: gloo listens there."""
    first_address: str | None
    """First of `hostname -I`. DeepSpeed's launcher tells it to all other hosts if this is the first host."""
    interfaces: tuple[Interface, ...]
    routes: dict[str, Route]
    gloo_interface: str | None
    nccl_interface: str | None
    tp_interface: str | None
    """Values of GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME and TP_SOCKET_IFNAME."""
    infiniband_bits_per_s: tuple[int, ...]
    """Rate of every active port."""
    port_free: bool
    """True if a server can listen on the requested port."""
    spare_port: int
    """The requested port if it is free, else another free one."""

    def interface_of(self, address: str | None) -> Interface | None:
        """Return the interface that has an address."""
        return next((found for found in self.interfaces if address is not None and found.address == address), None)


@dataclass(frozen=True)
class SystemFacts:
    """Limits, memory, tools and built extensions."""

    open_files: int
    memlock_bytes: int | None
    """Limit of locked memory; None when unlimited."""
    shm_bytes: int
    shm_free_bytes: int
    memory_bytes: int
    """Memory of the host, or a lower limit of its container."""
    cpus: int
    tools: dict[str, str | None]
    """Path by tool: c++, ninja."""
    libaio: bool
    """True if libaio's header is installed."""
    built_ops: tuple[str, ...]
    """DeepSpeed ops with a library in the extension cache or in DeepSpeed's package."""
    locks: tuple[ExtensionLock, ...]
    extensions: str
    """Folder of the extension cache."""


@dataclass(frozen=True)
class DataFacts:
    """The prepared dataset that a run names."""

    name: str
    problem: str | None
    fingerprint: str = ""
    vocab_size: int = 0
    seq_len: int = 0
    num_train_samples: int = 0
    eot_token: int = 0


@dataclass(frozen=True)
class FolderFacts:
    """The run folder, or its nearest parent that exists."""

    run: str
    exists_at: str
    writable: bool
    free_bytes: int
    checkpoints_bytes: int
    """Size of the finished checkpoints in this run's current history; expiring ones free it again."""
    num_checkpoints: int


@dataclass(frozen=True)
class FileFacts:
    """A configuration file on this host."""

    path: str
    problems: tuple[str, ...]
    """One line for each problem that train.py would report."""
    sha256: str | None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunFacts:
    """A run as train.py would find it on this host with the given flags."""

    config: FileFacts
    """The run file and flags, with the file's hash if there is one."""
    data: DataFacts | None
    folder: FolderFacts | None
    problem: str | None
    """Any other error that would stop the run (llmscale.training.start)."""


@dataclass(frozen=True)
class HostFacts:
    """All groups of facts of one host. A group is None if it was not requested, or not gathered in time (see late)."""

    code: CodeFacts | None = None
    imports: ImportFacts | None = None
    gpus: GpuFacts | None = None
    network: NetworkFacts | None = None
    system: SystemFacts | None = None
    ds: FileFacts | None = None
    run: RunFacts | None = None
    late: dict[str, str] | None = None
    """Reason for each missing group, by its name: it took too long, or the probe failed."""


_FACTS = TypeAdapter(HostFacts)
_REQUEST = TypeAdapter(ProbeRequest)


def print_facts(facts: HostFacts) -> str:
    """Return one line for `parse_facts`."""
    return FACTS_MARK + _FACTS.dump_json(facts).decode()


def parse_facts(output: str) -> HostFacts:
    """Return the facts in a probe's output. Raises ConfigError if they are missing or from another llmscale."""
    lines = [line for line in output.splitlines() if line.startswith(FACTS_MARK)]
    if not lines:
        raise ConfigError("the probe printed no facts")
    try:
        return _FACTS.validate_json(lines[-1].removeprefix(FACTS_MARK))
    except ValidationError as error:
        raise ConfigError(f"the probe belongs to another llmscale ({error.error_count()} facts differ)") from None


def print_request(request: ProbeRequest) -> str:
    """Return JSON for the probe's command line."""
    return _REQUEST.dump_json(request).decode()


def parse_request(text: str) -> ProbeRequest:
    """Return the request on the probe's command line. Raises ConfigError."""
    try:
        return _REQUEST.validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"the request is from another llmscale ({error.error_count()} entries differ).") from None


Status = Literal["ok", "warn", "fail"]
#: From green to red.
SEVERITY: tuple[Status, ...] = ("ok", "warn", "fail")
#: Number of host names written out before "and N more".
_MAX_NAMES = 6


@dataclass(frozen=True)
class CheckRow:
    """One row of the table: a check, its result, and the fix."""

    name: str
    status: Status
    found: str
    fix: str = ""
    """One or two sentences; never empty in a red row."""


def green(name: str, found: str) -> CheckRow:
    """Return a row for a check that passed."""
    return CheckRow(name, "ok", found)


def yellow(name: str, found: str, fix: str) -> CheckRow:
    """Return a row for a fault with which a run starts, but slower or less safely."""
    return CheckRow(name, "warn", found, fix)


def red(name: str, found: str, fix: str) -> CheckRow:
    """Return a row for a fault with which a run does not start, or will not finish."""
    return CheckRow(name, "fail", found, fix)


def split_error(text: str) -> tuple[str, str]:
    """Split an error's text into finding and fix: its first sentence, and the others."""
    found, *rest = re.split(r"(?<=[.!?]) (?=[A-Z`'(])", text, maxsplit=1)
    return found, rest[0] if rest else "Correct the value that it names."


def worst(rows: Iterable[CheckRow]) -> Status:
    """Return the most severe status among rows; ok without rows."""
    return max((row.status for row in rows), key=SEVERITY.index, default="ok")


def format_hosts(names: Iterable[str]) -> str:
    """Join host names with commas, the first few of many."""
    names = list(names)
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def format_by_host(values: Mapping[str, object], *, name_all: bool = False) -> str:
    """Format `{"a": 1, "b": 1, "c": 2}` as "1 on a, b; 2 on c".

    A value that all hosts share comes without their names, unless `name_all`.
    """
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(str(value), []).append(host)
    if len(hosts) == 1 and not name_all:
        return next(iter(hosts))
    return "; ".join(f"{value} on {format_hosts(names)}" for value, names in hosts.items())


def differ(values: Mapping[str, object]) -> bool:
    """Return whether hosts have different values."""
    return len({str(value) for value in values.values()}) > 1
