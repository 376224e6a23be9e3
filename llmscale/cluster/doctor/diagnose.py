"""Ask all hosts at once to check themselves, and make one table of their reports. No torch in this process.

`python -m llmscale.cluster.doctor.diagnose` is the probe, which checks its host and prints a report.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ValidationError

from llmscale.cluster.doctor.all_reduce import measure_all_reduce
from llmscale.cluster.doctor.machine import (
    check_gpus,
    check_imports,
    check_network,
    check_shared_memory,
    check_software,
    first_address,
    list_gpus,
)
from llmscale.cluster.doctor.report import (
    DEFAULT_PORT,
    REPORT,
    SEVERITY,
    CheckRow,
    HostReport,
    ProbeRequest,
    SharedValue,
    format_hosts,
    green,
    merge_reports,
    red,
    split_error,
    yellow,
)
from llmscale.cluster.doctor.run import check_ds_config, check_run, read_run
from llmscale.cluster.hostfile import Host, parse_hostfile
from llmscale.cluster.launch.ranks import find_port, is_free
from llmscale.cluster.remote import (
    SSH_FAILED,
    TIMED_OUT,
    Finished,
    ask_hosts,
    is_this_machine,
    read_request,
    run_on_hosts,
)
from llmscale.errors import LlmscaleError

#: Time limit of a login. A slower one would delay every start as much.
_LOGIN_TIMEOUT_S = 20.0
_DRIVER_TIMEOUT_S = 20.0
#: Rows that prevent the all-reduce when they are red: ranks could not meet, and trying would only time out.
_BEFORE_ALL_REDUCE = frozenset({"address", "imports", "versions", "gpus"})
#: Precedes the JSON in the probe's output: a login script may print text before it.
_REPORT_MARK = "llmscale-report "


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


def diagnose(options: DoctorOptions) -> Diagnosis:
    """Run all checks. Raises ConfigError for an unusable hostfile."""
    if options.hostfile is not None:
        hosts = parse_hostfile(options.hostfile)
    else:
        hosts = (Host(socket.gethostname(), max(1, len(list_gpus(_DRIVER_TIMEOUT_S)[0]))),)
    rows: list[CheckRow] = []
    reports = _probe(hosts, options, rows)
    rows += merge_reports(reports)
    if reports:
        rows += _try_shared_folder(reports)
    if reports and options.network_test:
        obstacles = sorted({row.name for row in rows if row.status == "fail"} & _BEFORE_ALL_REDUCE)
        row: CheckRow | None = yellow("all-reduce", "not measured", f"First repair: {', '.join(obstacles)}.")
        if not obstacles:
            row = measure_all_reduce(hosts, reports, options.promised_bytes_per_s)
        rows += [row] if row else []
    rows.sort(key=lambda row: SEVERITY.index(row.status))
    return Diagnosis(hosts, tuple(rows))


def _probe(hosts: Sequence[Host], options: DoctorOptions, rows: list[CheckRow]) -> dict[str, HostReport]:
    """Return the report of every host whose probe ran; add rows for the others."""
    requests = {
        host.name: asdict(
            ProbeRequest(
                hosts=tuple(host.name for host in hosts),
                host=host.name,
                slots=host.slots,
                world_size=sum(host.slots for host in hosts),
                port=options.port,
                ds=str(options.ds) if options.ds else None,
                train_flags=options.train_flags or None,
                timeout_s=options.timeout_s,
            )
        )
        for host in hosts
    }
    reports: dict[str, HostReport] = {}
    for host, answer in ask_hosts(
        "llmscale.cluster.doctor.diagnose", requests, options.timeout_s + _LOGIN_TIMEOUT_S
    ).items():
        lines = [line for line in answer.stdout.splitlines() if line.startswith(_REPORT_MARK)]
        try:
            if lines and not answer.returncode:
                reports[host] = REPORT.validate_json(lines[-1].removeprefix(_REPORT_MARK))
            else:
                rows.append(_explain_silence(host, answer, answer.describe()))
        except ValidationError:
            rows.append(_explain_silence(host, answer, "it has another llmscale, whose report is another"))
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
    elif answer.returncode == TIMED_OUT:
        fix = f"Log in to {host} and look for a stuck disk or driver (ps -eo stat,cmd | grep '^D'); a reboot helps."
    return red("reach", f"{host}: {problem}", fix)


#: Seconds for a network file system to show a new file to another host, and for a host to answer.
_LOOK_TIMEOUT_S = 30.0
#: Writes into the folder, or into its nearest parent that exists, and prints which.
_WRITE = 'd=$1; while [ ! -d "$d" ]; do d=$(dirname -- "$d"); done; touch -- "$d/$2" && printf %s "$d"'
#: Opening the folder asks a network file system's server again.
_LOOK = 'for try in 1 2 3 4 5 6 7 8 9 10; do [ -e "$1/$2" ] && exit 0; ls "$1" >/dev/null 2>&1; sleep 0.5; done; exit 1'
_REMOVE = 'rm -f -- "$1/$2"'


def _try_shared_folder(reports: Mapping[str, HostReport]) -> Iterator[CheckRow]:
    """Write a file to the first host's run folder, and look for it on the other hosts."""
    folders = {host: report.folder for host, report in reports.items() if report.folder}
    if len(folders) < 2:
        return
    writer, *others = folders
    name = f".llmscale-doctor-{secrets.token_hex(8)}"
    written = _run_script([writer], _WRITE, str(folders[writer]), name)[writer]
    folder = written.stdout
    if written.returncode:
        text = f"{folders[writer]} on {writer} is not writable: {written.describe()}"
        yield red("run folder", text, "Name another folder with --run, or give the user permission (chown).")
        return
    answers = _run_script(others, _LOOK, folder, name)
    _run_script([writer], _REMOVE, folder, name)
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


def _run_script(hosts: Sequence[str], script: str, *arguments: str) -> dict[str, Finished]:
    """Run a line of `sh` on hosts, with its arguments as $1, $2 and so on."""
    return run_on_hosts({host: ["sh", "-c", script, "sh", *arguments] for host in hosts}, _LOOK_TIMEOUT_S)


# ---------------------------------------------------------------- the probe on each host


def examine(request: ProbeRequest) -> HostReport:
    """Run all checks, each announced on stderr: the last line tells what a stuck disk or driver has stopped."""
    findings: list[CheckRow | SharedValue] = []
    config = None
    _announce("looking at the installed software")
    findings += check_software()
    _announce("importing what train.py imports")
    findings += check_imports(request.timeout_s)
    _announce("asking the GPU driver")
    findings += check_gpus(request.slots, request.timeout_s)
    _announce("looking up names and addresses")
    findings += check_network(request)
    findings.append(check_shared_memory())
    _announce("reading the run's configuration, data and folder")
    try:
        config = None if request.train_flags is None else read_run(request.train_flags)
    except LlmscaleError as error:
        findings.append(red("run config", *split_error(str(error))))
    if config is not None:
        findings += check_run(config, request)
    elif request.ds is not None:
        findings += check_ds_config(Path(request.ds))
    return HostReport(
        rows=tuple(finding for finding in findings if isinstance(finding, CheckRow)),
        shared=tuple(finding for finding in findings if isinstance(finding, SharedValue)),
        num_gpus=len(list_gpus(request.timeout_s)[0]),
        address=first_address(),
        spare_port=request.port if is_free(request.port) else find_port(),
        folder=os.path.abspath(config.run) if config else None,
    )


def _announce(check: str) -> None:
    print(check, file=sys.stderr, flush=True)


def main() -> None:
    """Print the report of this host."""
    request = ProbeRequest(**read_request())
    # The kernel ends a probe that hangs outside of Python.
    signal.alarm(int(request.timeout_s) + 1)
    print(_REPORT_MARK + REPORT.dump_json(examine(request)).decode(), flush=True)


if __name__ == "__main__":
    main()
