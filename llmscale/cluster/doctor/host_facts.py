"""What the doctor knows of a host: plain typed facts, gathered there by `llmscale.cluster.doctor.probe`. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from llmscale.cluster.extension_locks import ExtensionLock
from llmscale.errors import ConfigError

#: Stands before the JSON in the probe's output: a login script may print something of its own first.
FACTS_MARK = "llmscale-facts "
#: Where DeepSpeed's launcher lets ranks meet unless it is told another.
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class ProbeRequest:
    """What the probe shall look at beside the machine itself."""

    peers: tuple[str, ...] = ()
    """Every host's name, as the hostfile has it."""
    port: int = DEFAULT_PORT
    """Where the ranks will meet on the first host."""
    world_size: int = 1
    ds: str | None = None
    """A ds_config, as this host would find it."""
    train_flags: tuple[str, ...] | None = None
    """Flags for train.py; None when there is no run to check."""
    timeout_s: float = 60.0
    """No group of facts may take longer: what hangs is reported as late."""


@dataclass(frozen=True)
class CodeFacts:
    """What Python and which llmscale runs there."""

    python: str
    executable: str
    package: str
    """Folder of the llmscale package."""
    sha256: str
    """Over the names and contents of its sources."""
    libraries: dict[str, str | None]
    """Installed version by distribution; None: not there."""
    torch_cuda: str | None
    """CUDA version that torch was built for; None for a CPU build."""
    nccl: str | None
    fits_torchvision: bool = True
    """Whether torchvision, which Streaming brings, can be imported beside this torch."""


@dataclass(frozen=True)
class ImportFacts:
    """What happened when torch and DeepSpeed were really imported."""

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
    """Uncorrected ECC errors since the driver was loaded; None where the GPU does not count them."""
    needs_reset: bool
    """Memory pages or rows wait to be retired or remapped, or could not be."""


@dataclass(frozen=True)
class GpuFacts:
    """All GPUs. Without nvidia-smi there are none."""

    gpus: tuple[Gpu, ...]
    driver: str | None
    problem: str | None
    """nvidia-smi is there but failed."""


@dataclass(frozen=True)
class Interface:
    """One network interface."""

    name: str
    up: bool
    mtu: int
    address: str | None
    """IPv4."""
    bits_per_s: int | None
    """As the driver reports it; None when it does not."""


@dataclass(frozen=True)
class Route:
    """How this host reaches another, or itself, by its name."""

    address: str | None
    """What the name resolves to here."""
    source: str | None
    """Own address that packets to it leave from; None when there is no way."""


@dataclass(frozen=True)
class NetworkFacts:
    """Names, addresses and interfaces, as this host sees them."""

    hostname: str
    hostname_address: str | None
    """What the host's own name resolves to: where gloo listens."""
    first_address: str | None
    """First of `hostname -I`: what DeepSpeed's launcher tells all others, when this is the first host."""
    interfaces: tuple[Interface, ...]
    routes: dict[str, Route]
    gloo_interface: str | None
    """GLOO_SOCKET_IFNAME."""
    nccl_interface: str | None
    """NCCL_SOCKET_IFNAME."""
    infiniband_bits_per_s: tuple[int, ...]
    """Rate of every active port."""
    port_free: bool
    """Whether a server can listen on the requested port."""
    spare_port: int
    """That port when it is free, else another that is."""

    def interface_of(self, address: str | None) -> Interface | None:
        """The interface that has an address."""
        return next((found for found in self.interfaces if address is not None and found.address == address), None)


@dataclass(frozen=True)
class SystemFacts:
    """Limits, memory, tools and built extensions."""

    open_files: int
    memlock_bytes: int | None
    """None: unlimited."""
    shm_bytes: int
    shm_free_bytes: int
    memory_bytes: int
    """All of the host's; the container's limit where there is a lower one."""
    cpus: int
    tools: dict[str, str | None]
    """Path by tool: c++, ninja."""
    libaio: bool
    """Whether libaio's header is there."""
    built_ops: tuple[str, ...]
    """DeepSpeed ops whose library lies in the extension cache, or came with DeepSpeed."""
    locks: tuple[ExtensionLock, ...]
    extensions: str
    """The cache's folder."""


@dataclass(frozen=True)
class DataFacts:
    """The prepared set that a run names."""

    name: str
    problem: str | None
    fingerprint: str = ""
    vocab_size: int = 0
    seq_len: int = 0
    num_train_samples: int = 0
    eot_token: int = 0


@dataclass(frozen=True)
class FolderFacts:
    """The run folder, or the nearest folder above it that exists."""

    run: str
    exists_at: str
    writable: bool
    free_bytes: int
    checkpoints_bytes: int
    """What the finished checkpoints of this run's current history take already, and give back as they expire."""
    num_checkpoints: int


@dataclass(frozen=True)
class FileFacts:
    """A configuration file on this host."""

    path: str
    problems: tuple[str, ...]
    """One line each, from the same checks that train.py makes."""
    sha256: str | None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunFacts:
    """What train.py would find with its flags on this host."""

    config: FileFacts
    """The run file and flags; the file's hash when there is one."""
    data: DataFacts | None
    folder: FolderFacts | None
    problem: str | None
    """What else would stop it (llmscale.training.prepare_run)."""


@dataclass(frozen=True)
class HostFacts:
    """All groups of facts of one host. None: not asked for, or not gathered in time (see late)."""

    code: CodeFacts | None = None
    imports: ImportFacts | None = None
    gpus: GpuFacts | None = None
    network: NetworkFacts | None = None
    system: SystemFacts | None = None
    ds: FileFacts | None = None
    run: RunFacts | None = None
    late: dict[str, str] | None = None
    """Why a group is missing, by its name: it took too long, or the probe failed."""


_FACTS = TypeAdapter(HostFacts)
_REQUEST = TypeAdapter(ProbeRequest)


def print_facts(facts: HostFacts) -> str:
    """One line that parse_facts finds again."""
    return FACTS_MARK + _FACTS.dump_json(facts).decode()


def parse_facts(output: str) -> HostFacts:
    """The facts in a probe's output. Raises ConfigError when there are none, or those of another llmscale."""
    lines = [line for line in output.splitlines() if line.startswith(FACTS_MARK)]
    if not lines:
        raise ConfigError("the probe printed no facts")
    try:
        return _FACTS.validate_json(lines[-1].removeprefix(FACTS_MARK))
    except ValidationError as error:
        raise ConfigError(f"the probe is that of another llmscale ({error.error_count()} facts differ)") from None


def print_request(request: ProbeRequest) -> str:
    """JSON for the probe's command line."""
    return _REQUEST.dump_json(request).decode()


def parse_request(text: str) -> ProbeRequest:
    """The request on the probe's command line. Raises ConfigError."""
    try:
        return _REQUEST.validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"the request is that of another llmscale ({error.error_count()} entries differ).") from None
