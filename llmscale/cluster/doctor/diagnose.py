"""Ask all hosts at once to check themselves, and make one table of their reports. No torch in this process.

`python -m llmscale.cluster.doctor.diagnose` is the probe, which checks its host and prints a report.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import ValidationError

from llmscale.cluster.doctor.all_reduce import measure_all_reduce
from llmscale.cluster.doctor.machine import (
    check_cores,
    check_gpus,
    check_imports,
    check_network,
    check_shared_memory,
    check_software,
    first_address,
)
from llmscale.cluster.doctor.report import (
    REPORT,
    SEVERITY,
    CheckRow,
    HostReport,
    ProbeRequest,
    green,
    merge_reports,
    red,
    split_error,
    yellow,
)
from llmscale.cluster.doctor.run import check_ds_config, check_run, read_run
from llmscale.cluster.launch.ranks import find_port, is_free, list_gpus
from llmscale.cluster.remote import SSH_FAILED, TIMED_OUT, Finished, ask_hosts, is_this_machine, read_request
from llmscale.errors import LlmscaleError

#: Time limit of a login. A slower one would delay every start as much.
_LOGIN_TIMEOUT_S = 20.0
#: Rows that prevent the all-reduce when they are red: ranks could not meet, and trying would only time out.
_BEFORE_ALL_REDUCE = frozenset({"address", "imports", "versions", "gpus"})
#: Precedes the JSON in the probe's output: a login script may print text before it.
_REPORT_MARK = "llmscale-report "


def diagnose(
    request: ProbeRequest, *, network_test: bool = True, promised_bytes_per_s: float | None = None
) -> list[CheckRow]:
    """Run all checks on all hosts. Return the rows from green to red, otherwise in the order of the checks.

    `promised_bytes_per_s`: expected bandwidth per host and direction; None to measure only.
    """
    rows: list[CheckRow] = []
    reports = _probe(request, rows)
    rows += merge_reports(reports)
    if reports and network_test:
        obstacles = sorted({row.name for row in rows if row.status == "fail"} & _BEFORE_ALL_REDUCE)
        if obstacles:
            rows.append(yellow("all-reduce", "not measured", f"First repair: {', '.join(obstacles)}."))
        else:
            rows += measure_all_reduce(request.hosts, reports, promised_bytes_per_s)
    return sorted(rows, key=lambda row: SEVERITY.index(row.status))


def _probe(request: ProbeRequest, rows: list[CheckRow]) -> dict[str, HostReport]:
    """Return the report of every host whose probe ran; add rows for the others."""
    requests = {host: asdict(replace(request, host=host)) for host in request.hosts}
    answers = ask_hosts("llmscale.cluster.doctor.diagnose", requests, request.timeout_s + _LOGIN_TIMEOUT_S)
    reports: dict[str, HostReport] = {}
    for host, answer in answers.items():
        lines = [line for line in answer.stdout.splitlines() if line.startswith(_REPORT_MARK)]
        try:
            if lines and not answer.returncode:
                reports[host] = REPORT.validate_json(lines[-1].removeprefix(_REPORT_MARK))
            else:
                rows.append(_explain_silence(host, answer, answer.describe()))
        except ValidationError:
            rows.append(_explain_silence(host, answer, "its llmscale is another one"))
    if reports and not (len(answers) == 1 and is_this_machine(*answers)):
        rows.append(green("reach", f"{len(reports)} of {len(answers)} hosts answer through ssh"))
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


# ---------------------------------------------------------------- the probe on each host


def examine(request: ProbeRequest) -> HostReport:
    """Run all checks, each announced on stderr: the last line tells what a stuck disk or driver has stopped."""
    _announce("looking at the installed software")
    rows = [*check_software()]
    _announce("asking the GPU driver")
    gpus, problem = list_gpus(request.timeout_s)
    rows += [*check_gpus(gpus, problem, request.slots), check_cores(request.slots)]
    _announce("importing what train.py imports")
    rows += check_imports(gpus, request.timeout_s)
    _announce("looking up names and addresses")
    rows += [*check_network(request), check_shared_memory()]
    _announce("reading the run's configuration, data and folder")
    config = None
    try:
        config = read_run(request.train_flags) if request.train_flags else None
    except LlmscaleError as error:
        rows.append(red("run config", *split_error(str(error))))
    if config is not None:
        rows += check_run(config, request)
    elif request.ds is not None:
        rows += check_ds_config(Path(request.ds))
    return HostReport(
        rows=tuple(rows),
        num_gpus=len(gpus),
        address=first_address(),
        spare_port=request.port if is_free(request.port) else find_port(),
        folder=os.path.abspath(config.run) if config else None,
    )


def _announce(check: str) -> None:
    print(check, file=sys.stderr, flush=True)


def main() -> None:
    """Print the report of this host."""
    request = ProbeRequest(**read_request())
    limit = threading.Timer(request.timeout_s, os._exit, (TIMED_OUT,))
    limit.daemon = True
    limit.start()
    print(_REPORT_MARK + REPORT.dump_json(examine(request)).decode(), flush=True)


if __name__ == "__main__":
    main()
