"""Check what the engine of a run computes, on its own ranks on every host. No torch but in the ranks.

`python -m llmscale.cluster.doctor.numbers`, on every host at once, starts a process per rank; rank 0 prints the report.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from llmscale.cluster.launch.ranks import find_port
from llmscale.cluster.remote import ask_hosts, read_request
from llmscale.errors import ConfigError, LlmscaleError, MachineError
from llmscale.numerics.report import LAST, ONE_RANK, Report, Try
from llmscale.untrusted.interpreter import module_command

_MODULE = "llmscale.cluster.doctor.numbers"
#: Holds a rank's job.
_JOB_VARIABLE = "LLMSCALE_NUMERICS_JOB"
#: Precedes the JSON of the report.
_RESULT_MARK = "llmscale-numerics "
_POLL_S = 0.1


def prove(hosts: Mapping[str, int], flags: Sequence[str], timeout_s: float) -> Report:
    """Check a run on `hosts`, each with its number of ranks; what is wrong on several is tried on one rank, too.

    `timeout_s` is the time of all passes and tries on the same ranks.

    Raises ConfigError for a run that cannot be, and MachineError for ranks without a report.
    """
    job: dict[str, Any] = {"flags": list(flags), "tries": None, "is_undivided": False, "timeout_s": timeout_s}
    report = _ask(hosts, job)
    first = report.first_wrong
    if first is None or report.setting or sum(hosts.values()) == 1 or first.link in ("loss", "gradient"):
        return report
    alone = _ask({next(iter(hosts)): 1}, {**job, "tries": (), "is_undivided": True})
    tries = (*report.tries, Try(ONE_RANK, "wrong" if alone.first_wrong else "right"))
    if alone.first_wrong is not None:
        tries += _ask(hosts, {**job, "tries": LAST}).tries
    return replace(report, tries=tries)


def _ask(hosts: Mapping[str, int], job: Mapping[str, Any]) -> Report:
    """Run the ranks, and return rank 0's report."""
    first = next(iter(hosts))
    host_of = [host for host, count in hosts.items() for _ in range(count)]
    # The first host is this machine or, as in `deepspeed`, one that its name reaches.
    master = "127.0.0.1" if len(hosts) == 1 else first
    common = {**job, "master": master, "port": find_port(), "world_size": len(host_of)}
    requests = {host: {**common, "ranks": [r for r, at in enumerate(host_of) if at == host]} for host in hosts}
    answers = ask_hosts(_MODULE, requests, job["timeout_s"])
    refused = next((answer for answer in answers.values() if answer.returncode == 2), None)
    if refused is not None:
        raise ConfigError(refused.describe().removeprefix("error: "))
    failed = {host: answer.describe() for host, answer in answers.items() if answer.returncode}
    lines = [line for line in answers[first].stdout.splitlines() if line.startswith(_RESULT_MARK)]
    if failed or not lines:
        reasons = "; ".join(f"{host}: {reason}" for host, reason in failed.items()) or "no report"
        raise MachineError(
            f"the ranks did not finish the check of their numbers: {reasons}. --timeout gives them more time."
        )
    try:
        return TypeAdapter(Report).validate_json(lines[-1].removeprefix(_RESULT_MARK))
    except ValidationError:
        raise MachineError("the ranks did not print a report that this llmscale can read.") from None


def main() -> int:
    """Start this host's ranks, or be one of them (its variable is set)."""
    is_rank = _JOB_VARIABLE in os.environ
    job = json.loads(os.environ[_JOB_VARIABLE]) if is_rank else read_request()
    # The kernel ends what hangs, even where no thread of Python can run.
    signal.alarm(math.ceil(job["timeout_s"]))
    if not is_rank:
        return _start_ranks(job)
    try:
        _be_rank(job)
    except LlmscaleError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _start_ranks(request: Mapping[str, Any]) -> int:
    """Run this host's ranks as children; when one fails, end the others, which would wait for it."""
    children = []
    for local_rank, rank in enumerate(request["ranks"]):
        size = len(request["ranks"])
        variables = {
            _JOB_VARIABLE: json.dumps(request),
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(request["world_size"]),
            "LOCAL_WORLD_SIZE": str(size),
            "LOCAL_SIZE": str(size),
            "MASTER_ADDR": request["master"],
            "MASTER_PORT": str(request["port"]),
        }
        threads = str(max(1, len(os.sched_getaffinity(0)) // size))
        environment = {"OMP_NUM_THREADS": threads, **os.environ, **variables}
        children.append(subprocess.Popen(module_command(_MODULE), env=environment))
    codes = [child.poll() for child in children]
    while None in codes and not any(codes):
        time.sleep(_POLL_S)
        codes = [child.poll() for child in children]
    for child in children:
        if any(codes) and child.poll() is None:
            child.kill()
        child.wait()
    return next((code for code in codes if code), 0)


def _be_rank(job: Mapping[str, Any]) -> None:
    """Join the other ranks, check, and print the report on rank 0. Imports torch. Collective."""
    from llmscale.engine.process_group import join_world, leave_world
    from llmscale.numerics.block import read_case
    from llmscale.numerics.check import check_run, undivided

    case = read_case(job["flags"])
    case = undivided(case) if job["is_undivided"] else case
    world = join_world()
    report = check_run(case, world, None if job["tries"] is None else tuple(job["tries"]))
    if world.is_main:
        print(_RESULT_MARK + json.dumps(asdict(report)), flush=True)
    leave_world()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads may abort the interpreter's own way out.
    os._exit(code)
