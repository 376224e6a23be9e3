"""Ask all hosts at once for their facts, and check the answers together. No torch in this process.

`python -m llmscale.cluster.doctor.diagnose REQUEST_JSON` is the probe: it runs on a host and prints the host's facts.
It gathers every group of facts in a thread with a time limit, because a stuck network disk or driver stops its caller.
A group that does not answer is reported as late, and the process ends all the same.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from llmscale.cluster.doctor.devices import check_gpus, gather_gpus
from llmscale.cluster.doctor.facts import (
    DEFAULT_PORT,
    SEVERITY,
    CheckRow,
    HostFacts,
    ProbeRequest,
    parse_facts,
    parse_request,
    print_facts,
    print_request,
    yellow,
)
from llmscale.cluster.doctor.network import check_network, gather_network, measure_all_reduce
from llmscale.cluster.doctor.run import (
    check_data,
    check_ds_config,
    check_plan,
    check_run_config,
    check_run_folder,
    gather_ds,
    gather_run,
    try_shared_folder,
)
from llmscale.cluster.doctor.software import (
    ClockReading,
    check_clocks,
    check_late,
    check_probes,
    check_reach,
    check_software,
    gather_code,
    gather_imports,
)
from llmscale.cluster.doctor.system import build_on_hosts, check_system, gather_system, needed_ops
from llmscale.cluster.hostfile import Host, parse_hostfile
from llmscale.cluster.remote import FAN_OUT, SSH_OPTIONS, Finished, HostRunner, is_this_machine, process_limit
from llmscale.config.deepspeed.resolve import DsConfig, read_ds_config
from llmscale.config.run_config import RunConfig, parse_run_config
from llmscale.errors import ConfigError, LlmscaleError
from llmscale.training.inputs import read_origin

#: Time limit of a login. A slower one would delay every start as much.
_LOGIN_TIMEOUT_S = 20.0
_DRIVER_TIMEOUT_S = 20.0
#: Rows that prevent the all-reduce when they are red: ranks could not meet, and trying would only time out.
_BEFORE_ALL_REDUCE = frozenset({"names", "interface", "imports", "libraries", "torch sees gpus", "gpus"})


@dataclass(frozen=True)
class DoctorOptions:
    """The resolved arguments of `llmscale doctor`."""

    hostfile: Path | None = None
    """None for this machine."""
    ds: Path | None = None
    train_flags: tuple[str, ...] = ()
    """Flags of train.py, among them --config; empty without a run to check."""
    port: int = DEFAULT_PORT
    network_test: bool = True
    promised_bytes_per_s: float | None = None
    """Expected bandwidth per host and direction; None to take the speed of the links."""
    build_ops: bool = False
    timeout_s: float = 60.0
    """Time limit of a host for gathering its facts."""


@dataclass(frozen=True)
class Diagnosis:
    """Rows and facts of all hosts."""

    hosts: tuple[Host, ...]
    rows: tuple[CheckRow, ...]
    """From green to red, otherwise in the order of the checks."""
    facts: Mapping[str, HostFacts] = field(default_factory=dict)


@dataclass(frozen=True)
class _Run:
    """The run as this machine can parse it. The hosts' answers report its errors."""

    config: RunConfig | None
    ds_path: Path | None
    ds: DsConfig | None


def diagnose(options: DoctorOptions, runner: HostRunner | None = None) -> Diagnosis:
    """Run all checks. Raises ConfigError for an unusable hostfile or contradictory options."""
    runner = runner or HostRunner()
    if options.build_ops and options.ds is None and not options.train_flags:
        raise ConfigError("--build-ops needs --ds or --run-config: the ds_config says which ops are needed.")
    hosts = _find_hosts(options.hostfile)
    run = _read_run(options)
    rows: list[CheckRow] = []
    reached = _log_in(hosts, runner, rows)
    request = ProbeRequest(
        peers=tuple(host.name for host in hosts),
        port=options.port,
        world_size=sum(host.slots for host in hosts),
        ds=str(run.ds_path) if run.ds_path else None,
        train_flags=options.train_flags or None,
        timeout_s=options.timeout_s,
    )
    facts = _probe(runner, reached, request, rows)
    ops = needed_ops(run.ds) if run.ds else ()
    if options.build_ops and facts:
        rows += build_on_hosts(runner, facts, ops)
        facts = _probe(runner, list(facts), request, [])
    if facts:
        rows += _check_facts(hosts, facts, request, run, ops)
        rows += check_run_folder(facts, try_shared_folder(runner, facts))
        if options.network_test:
            rows += _test_network(runner, hosts, facts, options, rows)
    rows.sort(key=lambda row: SEVERITY.index(row.status))
    return Diagnosis(hosts, tuple(rows), facts)


def _find_hosts(hostfile: Path | None) -> tuple[Host, ...]:
    """Return the hosts of the hostfile, or this machine with all its GPUs."""
    if hostfile is not None:
        return parse_hostfile(hostfile)
    return (Host(socket.gethostname(), max(1, len(gather_gpus(_DRIVER_TIMEOUT_S).gpus))),)


def _read_run(options: DoctorOptions) -> _Run:
    config, ds = None, None
    with contextlib.suppress(ConfigError):
        config = parse_run_config(options.train_flags) if options.train_flags else None
    ds_path = options.ds or (config.ds if config else None)
    with contextlib.suppress(ConfigError):
        ds = read_ds_config(ds_path) if ds_path else None
    try:
        config = read_origin(config)[0] if config else None
    except LlmscaleError:
        # Every host reports this error.
        config = None
    return _Run(config, ds_path, ds)


def _log_in(hosts: Sequence[Host], runner: HostRunner, rows: list[CheckRow]) -> list[str]:
    """Return the hosts that ssh reaches, and check their clocks. This machine alone needs no ssh."""
    names = [host.name for host in hosts]
    if len(names) == 1 and is_this_machine(names[0]):
        return names
    with ThreadPoolExecutor(min(len(names), FAN_OUT)) as pool:
        readings = dict(zip(names, pool.map(lambda name: _read_clock(runner, name), names), strict=True))
    rows += check_reach({name: answer for name, (answer, _) in readings.items()})
    rows += check_clocks({name: reading for name, (_, reading) in readings.items() if reading})
    return [name for name, (answer, _) in readings.items() if answer.returncode == 0]


def _read_clock(runner: HostRunner, name: str) -> tuple[Finished, ClockReading | None]:
    """Log in to a host and read its clock, through ssh even on this machine, as DeepSpeed's launcher does."""
    command = ["ssh", "-T", *SSH_OPTIONS, name, "--", "date", "+%s.%N"]
    before_s = time.time()
    answer = runner.run(["localhost"], command, timeout_s=_LOGIN_TIMEOUT_S)["localhost"]
    after_s = time.time()
    try:
        there_s = float(answer.stdout.split()[-1].removesuffix(".%N"))
    except (ValueError, IndexError):
        return answer, None
    uncertainty_s = (after_s - before_s) / 2
    return answer, ClockReading(there_s - (before_s + after_s) / 2, uncertainty_s)


def _probe(
    runner: HostRunner, names: Sequence[str], request: ProbeRequest, rows: list[CheckRow]
) -> dict[str, HostFacts]:
    """Return the facts of every host whose probe ran; add rows for the others."""
    timeout_s = request.timeout_s + _SPARE_S + _LOGIN_TIMEOUT_S
    answers = runner.module(names, "llmscale.cluster.doctor.diagnose", [print_request(request)], timeout_s)
    facts: dict[str, HostFacts] = {}
    problems: dict[str, str] = {}
    for name, answer in answers.items():
        if answer.returncode:
            problems[name] = answer.describe()
            continue
        try:
            facts[name] = parse_facts(answer.stdout)
        except ConfigError as error:
            problems[name] = str(error)
    rows += check_probes(problems)
    return facts


def _check_facts(
    hosts: Sequence[Host], facts: Mapping[str, HostFacts], request: ProbeRequest, run: _Run, ops: Sequence[str]
) -> Iterator[CheckRow]:
    """Yield every row that needs facts alone."""
    yield from check_late(facts)
    yield from check_software(facts)
    yield from check_gpus(hosts, facts)
    yield from check_network(facts, hosts[0].name, request.port)
    yield from check_system(facts, request.world_size, ops)
    yield from check_ds_config(facts)
    plan = list(check_plan(hosts, facts, run.config, run.ds)) if run.config else []
    yield from check_run_config(facts, [f"{row.found} {row.fix}" for row in plan if row.status == "fail"])
    yield from check_data(facts)
    yield from plan


def _test_network(
    runner: HostRunner,
    hosts: Sequence[Host],
    facts: Mapping[str, HostFacts],
    options: DoctorOptions,
    rows: Sequence[CheckRow],
) -> list[CheckRow]:
    """Return the row of the timed all-reduce, unless another fault prevents it."""
    obstacles = sorted({row.name for row in rows if row.status == "fail"} & _BEFORE_ALL_REDUCE)
    if obstacles:
        return [yellow("all-reduce", "not measured", f"First repair: {', '.join(obstacles)}.")]
    measured = measure_all_reduce(runner, hosts, facts, options.promised_bytes_per_s)
    return [measured] if measured else []


# ---------------------------------------------------------------- the probe on each host

#: Seconds after the request's limit until the kernel kills the probe, if it has not ended itself.
_SPARE_S = 10


def gather_facts(request: ProbeRequest) -> HostFacts:
    """Gather all groups of facts at once, each within `request.timeout_s`."""
    groups: dict[str, Callable[[], object]] = {
        "code": gather_code,
        "imports": lambda: gather_imports(request.timeout_s),
        "gpus": lambda: gather_gpus(request.timeout_s),
        "network": lambda: gather_network(request),
        "system": gather_system,
    }
    if request.ds is not None:
        ds = request.ds
        groups["ds"] = lambda: gather_ds(ds)
    if request.train_flags is not None:
        flags = request.train_flags
        groups["run"] = lambda: gather_run(flags, request.world_size)
    found, late = _gather(groups, request.timeout_s)
    return HostFacts(**found, late=late)  # type: ignore[arg-type]  # one gatherer per field, of its type


def _gather(groups: dict[str, Callable[[], object]], timeout_s: float) -> tuple[dict[str, object], dict[str, str]]:
    """Return the results by group, and the reasons why the others are missing."""
    found: dict[str, object] = {}
    late: dict[str, str] = {}

    def run(name: str, gather: Callable[[], object]) -> None:
        try:
            found[name] = gather()
        except Exception as error:  # one unreadable group must not end the others
            late[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"

    threads = {name: threading.Thread(target=run, args=(name, gather), daemon=True) for name, gather in groups.items()}
    deadline = time.monotonic() + timeout_s
    for thread in threads.values():
        thread.start()
    for name, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            late[name] = f"no answer within {timeout_s:.0f} s"
    # A late thread may still add to `found`.
    return {name: found[name] for name in groups if name in found and name not in late}, late


def main() -> None:
    """Print the facts and exit at once: a thread that hangs must not keep the process alive."""
    try:
        request = parse_request(sys.argv[1])
        with process_limit(int(request.timeout_s) + _SPARE_S):
            print(print_facts(gather_facts(request)), flush=True)
    except LlmscaleError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    os._exit(0)


if __name__ == "__main__":
    main()
