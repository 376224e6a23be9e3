"""Ask all hosts at once to check themselves, and make one table of their reports. No torch in this process.

`python -m llmscale.cluster.doctor.diagnose REQUEST_JSON` is the probe, which checks its host and prints a report.
Every group of checks has a thread and a time limit, because a stuck network disk or driver stops its caller. A group
that does not answer is reported, and the process ends all the same.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmscale.cluster.doctor.all_reduce import measure_all_reduce
from llmscale.cluster.doctor.machine import (
    check_gpus,
    check_imports,
    check_limits,
    check_network,
    check_software,
    first_address,
    list_gpus,
)
from llmscale.cluster.doctor.report import (
    DEFAULT_PORT,
    SEVERITY,
    CheckRow,
    HostReport,
    ProbeRequest,
    SharedValue,
    format_hosts,
    green,
    merge_reports,
    parse_report,
    parse_request,
    print_report,
    print_request,
    red,
    split_error,
    yellow,
)
from llmscale.cluster.doctor.run import check_ds_config, check_run, read_run
from llmscale.cluster.hostfile import Host, parse_hostfile
from llmscale.cluster.launch.ranks import find_port
from llmscale.cluster.remote import SSH_FAILED, Finished, HostRunner, is_this_machine, process_limit
from llmscale.errors import ConfigError, LlmscaleError

#: Time limit of a login. A slower one would delay every start as much.
_LOGIN_TIMEOUT_S = 20.0
_DRIVER_TIMEOUT_S = 20.0
#: Rows that prevent the all-reduce when they are red: ranks could not meet, and trying would only time out.
_BEFORE_ALL_REDUCE = frozenset({"address", "imports", "versions", "gpus"})


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
    """Expected bandwidth per host and direction; None to measure only."""
    timeout_s: float = 60.0
    """Time limit of a host for its checks."""


@dataclass(frozen=True)
class Diagnosis:
    """Rows about all hosts."""

    hosts: tuple[Host, ...]
    rows: tuple[CheckRow, ...]
    """From green to red, otherwise in the order of the checks."""


def diagnose(options: DoctorOptions, runner: HostRunner | None = None) -> Diagnosis:
    """Run all checks. Raises ConfigError for an unusable hostfile."""
    runner = runner or HostRunner()
    hosts = _find_hosts(options.hostfile)
    rows: list[CheckRow] = []
    reports = _probe(runner, hosts, options, rows)
    rows += merge_reports(reports)
    if reports:
        rows += _try_shared_folder(runner, reports)
    if reports and options.network_test:
        obstacles = sorted({row.name for row in rows if row.status == "fail"} & _BEFORE_ALL_REDUCE)
        row: CheckRow | None = yellow("all-reduce", "not measured", f"First repair: {', '.join(obstacles)}.")
        if not obstacles:
            row = measure_all_reduce(runner, hosts, reports, options.promised_bytes_per_s)
        rows += [row] if row else []
    rows.sort(key=lambda row: SEVERITY.index(row.status))
    return Diagnosis(hosts, tuple(rows))


def _find_hosts(hostfile: Path | None) -> tuple[Host, ...]:
    """Return the hosts of the hostfile, or this machine with all its GPUs."""
    if hostfile is not None:
        return parse_hostfile(hostfile)
    return (Host(socket.gethostname(), max(1, len(list_gpus(_DRIVER_TIMEOUT_S)[0]))),)


def _probe(
    runner: HostRunner, hosts: Sequence[Host], options: DoctorOptions, rows: list[CheckRow]
) -> dict[str, HostReport]:
    """Return the report of every host whose probe ran; add rows for the others."""
    request = ProbeRequest(
        hosts=tuple(host.name for host in hosts),
        world_size=sum(host.slots for host in hosts),
        port=options.port,
        ds=str(options.ds) if options.ds else None,
        train_flags=options.train_flags or None,
        timeout_s=options.timeout_s,
    )
    arguments = {host.name: [print_request(replace(request, host=host.name, slots=host.slots))] for host in hosts}
    timeout_s = options.timeout_s + _SPARE_S + _LOGIN_TIMEOUT_S
    answers = runner.modules("llmscale.cluster.doctor.diagnose", arguments, timeout_s)
    reports: dict[str, HostReport] = {}
    for host, answer in answers.items():
        try:
            if answer.returncode:
                raise ConfigError(answer.describe())
            reports[host] = parse_report(answer.stdout)
        except ConfigError as error:
            rows.append(_explain_silence(host, answer, str(error)))
    if reports and not (len(hosts) == 1 and is_this_machine(hosts[0].name)):
        rows.append(green("reach", f"{len(reports)} of {len(hosts)} hosts answer through ssh"))
    return reports


def _explain_silence(host: str, answer: Finished, problem: str) -> CheckRow:
    """Return the row of a host without a report."""
    fix = (
        f"Put the same llmscale and the same Python environment at the same path on every host ({sys.executable}): "
        "rsync -a, or a shared file system."
    )
    if answer.returncode == SSH_FAILED:
        fix = f"`ssh {host} true` must work without a question: start the host, correct its name, copy your key."
    elif answer.timed_out:
        fix = f"Log in to {host} and look for a stuck disk or driver (ps -eo stat,cmd | grep '^D'); a reboot helps."
    return red("reach", f"{host}: {problem}", fix)


#: Seconds for a network file system to show a new file to another host, and for a host to answer.
_LOOK_TIMEOUT_S = 30.0
#: Writes into the folder, or into its nearest parent that exists, and prints which.
_WRITE = 'd=$1; while [ ! -d "$d" ]; do d=$(dirname -- "$d"); done; touch -- "$d/$2" && printf %s "$d"'
#: Opening the folder asks a network file system's server again.
_LOOK = 'for try in 1 2 3 4 5 6 7 8 9 10; do [ -e "$1/$2" ] && exit 0; ls "$1" >/dev/null 2>&1; sleep 0.5; done; exit 1'


def _try_shared_folder(runner: HostRunner, reports: Mapping[str, HostReport]) -> Iterator[CheckRow]:
    """Write a file to the first host's run folder, and look for it on the other hosts."""
    folders = {host: report.folder for host, report in reports.items() if report.folder}
    if len(folders) < 2:
        return
    writer, *others = folders
    name = f".llmscale-doctor-{secrets.token_hex(8)}"
    written = runner.shell([writer], _WRITE, [str(folders[writer]), name], _LOOK_TIMEOUT_S)[writer]
    folder = written.stdout
    if written.returncode:
        found = f"{folders[writer]} on {writer} is not writable: {written.describe()}"
        yield red("run folder", found, "Name another folder with --run, or give the user permission (chown).")
        return
    try:
        answers = runner.shell(others, _LOOK, [folder, name], _LOOK_TIMEOUT_S)
    finally:
        runner.shell([writer], 'rm -f -- "$1/$2"', [folder, name], _LOOK_TIMEOUT_S)
    blind = [host for host, answer in answers.items() if answer.returncode]
    if blind:
        yield yellow(
            "run folder",
            f"{folder} is not one shared file system: a file of {writer} is not there on {format_hosts(blind)}. Each"
            " host keeps its own ranks' part of every checkpoint",
            "To survive the loss of a host, put --run on NFS, Lustre or the like, or in a store (--run s3://...).",
        )
    else:
        yield green("run folder", f"{folder} is one shared file system")


# ---------------------------------------------------------------- the probe on each host

#: Seconds after the request's limit until the kernel kills the probe, if it has not ended itself.
_SPARE_S = 10
_Findings = Iterable[CheckRow | SharedValue]


def examine(request: ProbeRequest) -> HostReport:
    """Run all groups of checks at once, each within `request.timeout_s`."""
    groups: dict[str, Callable[[], _Findings]] = {
        "the Python environment": check_software,
        "train.py's imports": lambda: check_imports(request.timeout_s),
        "the GPU driver": lambda: check_gpus(request.slots, request.timeout_s),
        "name resolution": lambda: check_network(request),
        "/dev/shm and the home folder": lambda: check_limits(request.world_size),
    }
    config = None
    findings: list[CheckRow | SharedValue] = []
    if request.train_flags is not None:
        try:
            config = read_run(request.train_flags)
        except LlmscaleError as error:
            findings.append(red("run config", *split_error(str(error))))
    if ds := request.ds or (config and config.ds):
        groups["the disk of the ds_config"] = lambda: check_ds_config(Path(ds))
    if config is not None:
        run = config
        groups["the disk of the data or run folder"] = lambda: check_run(run, request)
    findings += _run_groups(groups, request.timeout_s)
    return HostReport(
        rows=tuple(finding for finding in findings if isinstance(finding, CheckRow)),
        shared=tuple(finding for finding in findings if isinstance(finding, SharedValue)),
        num_gpus=len(list_gpus(request.timeout_s)[0]),
        address=first_address(),
        spare_port=find_port(request.port)[0],
        folder=os.path.abspath(config.run) if config else None,
    )


def _run_groups(groups: Mapping[str, Callable[[], _Findings]], timeout_s: float) -> list[CheckRow | SharedValue]:
    """Return the findings of all groups, and a red row for each group that fails or hangs."""
    findings: dict[str, list[CheckRow | SharedValue]] = {}

    def run(name: str, check: Callable[[], _Findings]) -> None:
        try:
            findings[name] = list(check())
        except Exception as error:  # one group that cannot be read must not end the others
            problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
            findings[name] = [red("probe", f"{name}: {problem}", f"Check {name} there.")]

    threads = {name: threading.Thread(target=run, args=(name, check), daemon=True) for name, check in groups.items()}
    deadline = time.monotonic() + timeout_s
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [
        red("probe", f"{name}: no answer within {timeout_s:.0f} s", f"Check {name} there: it does not answer.")
        for name in groups
        if name not in findings
    ]
    return [finding for name in groups for finding in list(findings.get(name, ()))] + late


def main() -> None:
    """Print the report and exit at once: a thread that hangs must not keep the process alive."""
    try:
        request = parse_request(sys.argv[1])
        with process_limit(int(request.timeout_s) + _SPARE_S):
            print(print_report(examine(request)), flush=True)
    except LlmscaleError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    os._exit(0)


if __name__ == "__main__":
    main()
