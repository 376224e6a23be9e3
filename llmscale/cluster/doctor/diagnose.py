"""Ask every host at once what it has, and judge the answers together. No torch in this process."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from llmscale.cluster.doctor.active_checks import build_everywhere, try_all_reduce, try_shared_folder
from llmscale.cluster.doctor.ask import Asker, last_words
from llmscale.cluster.doctor.devices import check_gpus, gather_gpus
from llmscale.cluster.doctor.host_facts import DEFAULT_PORT, HostFacts, ProbeRequest, parse_facts, print_request
from llmscale.cluster.doctor.network import check_network
from llmscale.cluster.doctor.probe import SPARE_S
from llmscale.cluster.doctor.rows import SEVERITY, CheckRow, yellow
from llmscale.cluster.doctor.run import check_data, check_ds_config, check_plan, check_run_config, check_run_folder
from llmscale.cluster.doctor.software import (
    ClockReading,
    check_clocks,
    check_late,
    check_probes,
    check_reach,
    check_software,
)
from llmscale.cluster.doctor.system import check_system, needed_ops
from llmscale.cluster.hostfile import Host, parse_hostfile
from llmscale.cluster.remote import FAN_OUT, SSH_OPTIONS, Finished, is_this_machine
from llmscale.config.arguments import parse_run_config
from llmscale.config.deepspeed.resolve import DsConfig, read_ds_config
from llmscale.config.run_config import RunConfig
from llmscale.errors import ConfigError, LlmscaleError
from llmscale.training.run_inputs import with_published_model

#: A login that takes longer than this would make every start as slow.
_LOGIN_TIMEOUT_S = 20.0
_DRIVER_TIMEOUT_S = 20.0
#: With one of these red, ranks cannot meet, and trying would only take its time-out.
_BEFORE_ALL_REDUCE = frozenset({"names", "interface", "imports", "libraries", "torch sees gpus", "gpus"})


@dataclass(frozen=True)
class DoctorOptions:
    """What the user wants to know."""

    hostfile: Path | None = None
    """None: this machine."""
    ds: Path | None = None
    train_flags: tuple[str, ...] = ()
    """Flags of train.py, among them --config; empty: no run is checked."""
    port: int = DEFAULT_PORT
    network_test: bool = True
    promised_bytes_per_s: float | None = None
    """What the network between the hosts should carry per host and direction; None: what the links say."""
    build_ops: bool = False
    timeout_s: float = 60.0
    """How long a host may take to gather its facts."""


@dataclass(frozen=True)
class Diagnosis:
    """The answer."""

    hosts: tuple[Host, ...]
    rows: tuple[CheckRow, ...]
    """From green to red, otherwise in the order of the checks."""
    facts: Mapping[str, HostFacts] = field(default_factory=dict)


@dataclass(frozen=True)
class _Run:
    """The run as far as it can be understood on this machine; what is wrong with it, the hosts' answers say."""

    config: RunConfig | None
    ds_path: Path | None
    ds: DsConfig | None


def diagnose(question: DoctorOptions, asker: Asker | None = None) -> Diagnosis:
    """Everything. Raises ConfigError for a hostfile that cannot be used, or a question that makes no sense."""
    asker = asker or Asker()
    if question.build_ops and question.ds is None and not question.train_flags:
        raise ConfigError("--build-ops needs --ds or --run-config: the ds_config says which ops are needed.")
    hosts = _find_hosts(question.hostfile)
    run = _read_run(question)
    rows: list[CheckRow] = []
    reached = _log_in(hosts, asker, rows)
    request = ProbeRequest(
        peers=tuple(host.name for host in hosts),
        port=question.port,
        world_size=sum(host.slots for host in hosts),
        ds=str(run.ds_path) if run.ds_path else None,
        train_flags=question.train_flags or None,
        timeout_s=question.timeout_s,
    )
    facts = _probe(asker, reached, request, rows)
    ops = needed_ops(run.ds) if run.ds else ()
    if question.build_ops and facts:
        rows += build_everywhere(asker, facts, ops)
        facts = _probe(asker, list(facts), request, [])
    if facts:
        rows += _judge(hosts, facts, request, run, ops)
        rows += check_run_folder(facts, try_shared_folder(asker, facts))
        if question.network_test:
            rows += _test_network(asker, hosts, facts, question, rows)
    rows.sort(key=lambda row: SEVERITY.index(row.status))
    return Diagnosis(hosts, tuple(rows), facts)


def _find_hosts(hostfile: Path | None) -> tuple[Host, ...]:
    """The hostfile's, or this machine with all its GPUs."""
    if hostfile is not None:
        return parse_hostfile(hostfile)
    return (Host(socket.gethostname(), max(1, len(gather_gpus(_DRIVER_TIMEOUT_S).gpus))),)


def _read_run(question: DoctorOptions) -> _Run:
    config, ds = None, None
    with contextlib.suppress(ConfigError):
        config = parse_run_config(question.train_flags) if question.train_flags else None
    ds_path = question.ds or (config.ds if config else None)
    with contextlib.suppress(ConfigError):
        ds = read_ds_config(ds_path) if ds_path else None
    try:
        config = with_published_model(config)[0] if config else None
    except LlmscaleError:
        # Every host says what is wrong with it.
        config = None
    return _Run(config, ds_path, ds)


def _log_in(hosts: Sequence[Host], asker: Asker, rows: list[CheckRow]) -> list[str]:
    """The hosts that ssh reaches, their clocks read on the way. A single host that is this machine needs no ssh."""
    names = [host.name for host in hosts]
    if len(names) == 1 and is_this_machine(names[0]):
        return names
    with ThreadPoolExecutor(min(len(names), FAN_OUT)) as pool:
        readings = dict(zip(names, pool.map(lambda name: _read_clock(asker, name), names), strict=True))
    rows += check_reach({name: answer for name, (answer, _) in readings.items()})
    rows += check_clocks({name: reading for name, (_, reading) in readings.items() if reading})
    return [name for name, (answer, _) in readings.items() if answer.returncode == 0]


def _read_clock(asker: Asker, name: str) -> tuple[Finished, ClockReading | None]:
    """Through ssh even on this machine: DeepSpeed's launcher takes that way to every host."""
    command = ["ssh", "-T", *SSH_OPTIONS, name, "--", "date", "+%s.%N"]
    before_s = time.time()
    answer = asker.run(["localhost"], command, timeout_s=_LOGIN_TIMEOUT_S)["localhost"]
    after_s = time.time()
    try:
        there_s = float(answer.stdout.split()[-1].removesuffix(".%N"))
    except (ValueError, IndexError):
        return answer, None
    uncertainty_s = (after_s - before_s) / 2
    return answer, ClockReading(there_s - (before_s + after_s) / 2, uncertainty_s)


def _probe(asker: Asker, names: Sequence[str], request: ProbeRequest, rows: list[CheckRow]) -> dict[str, HostFacts]:
    """The facts of every host whose probe ran; rows about the others."""
    timeout_s = request.timeout_s + SPARE_S + _LOGIN_TIMEOUT_S
    answers = asker.module(names, "llmscale.cluster.doctor.probe", [print_request(request)], timeout_s)
    facts: dict[str, HostFacts] = {}
    problems: dict[str, str] = {}
    for name, answer in answers.items():
        if answer.returncode:
            problems[name] = last_words(answer)
            continue
        try:
            facts[name] = parse_facts(answer.stdout)
        except ConfigError as error:
            problems[name] = str(error)
    rows += check_probes(problems)
    return facts


def _judge(
    hosts: Sequence[Host], facts: Mapping[str, HostFacts], request: ProbeRequest, run: _Run, ops: Sequence[str]
) -> Iterator[CheckRow]:
    """Every row that follows from facts alone."""
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
    asker: Asker,
    hosts: Sequence[Host],
    facts: Mapping[str, HostFacts],
    question: DoctorOptions,
    rows: Sequence[CheckRow],
) -> list[CheckRow]:
    """The measured row, unless something else keeps ranks from meeting."""
    obstacles = sorted({row.name for row in rows if row.status == "fail"} & _BEFORE_ALL_REDUCE)
    if obstacles:
        return [yellow("all-reduce", "not measured", f"First repair: {', '.join(obstacles)}.")]
    measured = try_all_reduce(asker, hosts, facts, question.promised_bytes_per_s)
    return [measured] if measured else []
