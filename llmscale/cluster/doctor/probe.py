"""Run on a host, print what is there: `python -m llmscale.cluster.doctor.probe REQUEST_JSON`. No torch in this process.

Every group of facts is gathered in its own thread with a time limit, because a stuck network disk or driver stops
whoever asks it: what does not answer is reported as late, and the process ends all the same.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from llmscale.cluster.doctor.devices import gather_gpus
from llmscale.cluster.doctor.host_facts import HostFacts, ProbeRequest, parse_request, print_facts
from llmscale.cluster.doctor.network import gather_network
from llmscale.cluster.doctor.process_limit import process_limit
from llmscale.cluster.doctor.run import gather_ds, gather_run
from llmscale.cluster.doctor.software import gather_code, gather_imports
from llmscale.cluster.doctor.system import gather_system
from llmscale.errors import LlmscaleError

#: Seconds beyond the request's limit after which the kernel ends the probe, should it not end itself.
SPARE_S = 10


def gather_facts(request: ProbeRequest) -> HostFacts:
    """All groups at once, each within `request.timeout_s`."""
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
    """Results by group, and why the others are missing."""
    found: dict[str, object] = {}
    late: dict[str, str] = {}

    def run(name: str, gather: Callable[[], object]) -> None:
        try:
            found[name] = gather()
        except Exception as error:  # a fact that cannot be read is a finding, not the end of the others
            late[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"

    threads = {name: threading.Thread(target=run, args=(name, gather), daemon=True) for name, gather in groups.items()}
    deadline = time.monotonic() + timeout_s
    for thread in threads.values():
        thread.start()
    for name, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            late[name] = f"no answer within {timeout_s:.0f} s"
    return {name: value for name, value in found.items() if name not in late}, late


def main() -> None:
    """Print the facts, then leave at once: a thread that hangs must not hold the process."""
    try:
        request = parse_request(sys.argv[1])
        with process_limit(int(request.timeout_s) + SPARE_S):
            print(print_facts(gather_facts(request)), flush=True)
    except LlmscaleError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    os._exit(0)


if __name__ == "__main__":
    main()
