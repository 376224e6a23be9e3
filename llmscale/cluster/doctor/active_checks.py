"""What only trying can tell: whether the run folder is shared, how fast the hosts exchange data, whether ops build."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence

from pydantic import TypeAdapter, ValidationError

from llmscale.cluster.doctor.all_reduce import RESULT_MARK, SPARE_S
from llmscale.cluster.doctor.ask import Asker, last_words
from llmscale.cluster.doctor.host_facts import DEFAULT_PORT, HostFacts
from llmscale.cluster.doctor.network import (
    AllReduceResult,
    check_all_reduce,
    explain_failed_all_reduce,
    promised_bytes_per_s,
)
from llmscale.cluster.doctor.rows import CheckRow, green, red
from llmscale.cluster.doctor.run import SharedFolder
from llmscale.cluster.doctor.system import find_stale_locks
from llmscale.cluster.hostfile import Host

#: Seconds that a network file system may take to show a new file to another host, and for a host to answer.
_LOOK_TIMEOUT_S = 30.0
_ALL_REDUCE_TIMEOUT_S = 60
_BUILD_TIMEOUT_S = 900

_RESULT = TypeAdapter(AllReduceResult)

_WRITE = 'touch -- "$1"'
#: Opening the folder asks a network file system's server again.
_LOOK = 'for try in 1 2 3 4 5 6 7 8 9 10; do [ -e "$1" ] && exit 0; ls "$2" >/dev/null 2>&1; sleep 0.5; done; exit 1'
_REMOVE = 'rm -f -- "$1"'


def try_shared_folder(asker: Asker, facts: Mapping[str, HostFacts]) -> SharedFolder | None:
    """Write a file where the run folder is, or will be, and look for it on the others. None with fewer than two hosts
    that have a run folder to look at."""
    folders = {host: found.run.folder for host, found in facts.items() if found.run and found.run.folder}
    if len(folders) < 2:
        return None
    writer, *others = folders
    folder = folders[writer].exists_at
    path = f"{folder.rstrip('/')}/.llmscale-doctor-{secrets.token_hex(8)}"
    try:
        written = asker.shell([writer], _WRITE, [path], _LOOK_TIMEOUT_S)[writer]
        if written.returncode:
            return SharedFolder(folder, writer, last_words(written), {})
        looked = asker.shell(others, _LOOK, [path, folder], _LOOK_TIMEOUT_S)
        return SharedFolder(folder, writer, None, {host: answer.returncode == 0 for host, answer in looked.items()})
    finally:
        asker.shell([writer], _REMOVE, [path], _LOOK_TIMEOUT_S)


def try_all_reduce(
    asker: Asker, hosts: Sequence[Host], facts: Mapping[str, HostFacts], promised: float | None
) -> CheckRow | None:
    """A timed all-reduce over all GPUs of the hosts that answered, or over one process per host without GPUs. None when
    there is nobody to exchange data with. `promised` bytes/s per host, or None: what the links themselves say."""
    ready = [host for host in hosts if host.name in facts]
    on_gpus = all(found.gpus and found.gpus.gpus for found in facts.values())
    ranks = {host.name: host.slots if on_gpus else 1 for host in ready}
    world_size = sum(ranks.values())
    if world_size < 2:
        return None
    backend = "nccl" if on_gpus else "gloo"
    master, port = _meeting_place(facts, ready[0].name)
    arguments: dict[str, list[str]] = {}
    first_rank = 0
    for name, count in ranks.items():
        arguments[name] = [
            *("--backend", backend, "--master", master, "--port", str(port)),
            *("--first-rank", str(first_rank), "--ranks", str(count), "--world-size", str(world_size)),
            *("--timeout-s", str(_ALL_REDUCE_TIMEOUT_S)),
        ]
        first_rank += count
    answers = asker.modules("llmscale.cluster.doctor.all_reduce", arguments, _ALL_REDUCE_TIMEOUT_S + SPARE_S + 10)
    failed = {name: last_words(answer) for name, answer in answers.items() if answer.returncode}
    lines = [line for line in answers[ready[0].name].stdout.splitlines() if line.startswith(RESULT_MARK)]
    if failed or not lines:
        return explain_failed_all_reduce(failed or {ready[0].name: "no result"}, port)
    result: AllReduceResult | None
    try:
        result = _RESULT.validate_json(lines[-1].removeprefix(RESULT_MARK))
    except ValidationError:
        result = None
    if result is None or min(result.seconds, result.latency_s, result.world_size) <= 0:
        return explain_failed_all_reduce({ready[0].name: "a result that no llmscale prints"}, port)
    return check_all_reduce(result, promised or promised_bytes_per_s(facts, backend))


def _meeting_place(facts: Mapping[str, HostFacts], first_host: str) -> tuple[str, int]:
    """Address, as deepspeed would take it, and port: the first address of the first host; loopback for one alone."""
    network = facts[first_host].network
    if network is None:
        return first_host, DEFAULT_PORT
    return (network.first_address or first_host) if len(facts) > 1 else "127.0.0.1", network.spare_port


def build_everywhere(asker: Asker, facts: Mapping[str, HostFacts], ops: Sequence[str]) -> Iterator[CheckRow]:
    """Remove the locks of dead builds, build `ops` on every host, and say how that went."""
    systems = {host: found.system for host, found in facts.items() if found.system}
    locks = find_stale_locks(systems)
    arguments = {
        host: [
            *ops,
            *(word for path, owners in locks.items() if host in owners for word in ("--remove-lock", path)),
            *("--timeout-s", str(_BUILD_TIMEOUT_S)),
        ]
        for host in facts
    }
    answers = asker.modules("llmscale.cluster.doctor.system", arguments, _BUILD_TIMEOUT_S + 15)
    for path, owners in locks.items():
        yield green("build", f"removed {path} on {', '.join(owners)}")
    for host, answer in answers.items():
        if answer.returncode:
            yield red(
                "build",
                f"{host}: {last_words(answer)}",
                "apt-get install g++ libaio-dev, and pip install ninja in the environment of the ranks.",
            )
        elif ops:
            yield green("build", f"{host}: {last_words(answer)}")
    if not ops:
        yield green("build", "this ds_config needs no compiled DeepSpeed op")
