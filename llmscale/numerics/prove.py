"""Check the engine of a run on its own ranks: start them on every host, and try other settings when a link breaks.

`python -m llmscale.numerics.prove REQUEST_JSON`, on every host at once, starts one process per rank; rank 0 prints the
report. No torch but in the ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Protocol

from pydantic import TypeAdapter, ValidationError

from llmscale.errors import ConfigError, LlmscaleError, MachineError
from llmscale.numerics.report import LAST, ONE_RANK, Report, Try
from llmscale.untrusted.interpreter import module_command

if TYPE_CHECKING:
    from llmscale.engine.process_group import World
    from llmscale.numerics.block import Case
    from llmscale.numerics.check import CaseResult

_RANK_VARIABLE = "LLMSCALE_NUMERICS_RANK"
#: Precedes the JSON of the report.
_RESULT_MARK = "llmscale-numerics "
#: Seconds that the ranks may take for all passes and tries.
TIMEOUT_S = 900
_POLL_S = 0.1


class Answer(Protocol):
    """Result of a module on one host; `cluster.remote.Finished`."""

    @property
    def returncode(self) -> int: ...
    @property
    def stdout(self) -> str: ...
    def describe(self) -> str: ...


#: Runs a module on several hosts at once, each with its arguments and a time limit.
RunModules = Callable[[str, Mapping[str, Sequence[str]], float], Mapping[str, Answer]]


@dataclass(frozen=True)
class Request:
    """What the ranks of one host are asked."""

    flags: tuple[str, ...]
    """Flags of train.py."""
    first_rank: int
    ranks: int
    world_size: int
    master: str
    """Address of the first host."""
    port: int
    tries: tuple[str, ...] | None = None
    """Settings to try when a link breaks; None for all that suit it."""
    is_undivided: bool = False
    """Whether sequences and experts are complete on every rank, as one rank needs them."""


_REQUEST = TypeAdapter(Request)
_REPORT = TypeAdapter(Report)


def prove(
    run_modules: RunModules,
    hosts: Mapping[str, int],
    flags: Sequence[str],
    *,
    master: str,
    find_port: Callable[[], int],
) -> Report:
    """Check a run on `hosts`, each with its number of ranks. Raises ConfigError or MachineError if it cannot run."""

    def ask(tries: tuple[str, ...] | None, ranks: Mapping[str, int], is_undivided: bool = False) -> Report:
        return _ask(run_modules, ranks, Request(tuple(flags), 0, 0, 0, master, find_port(), tries, is_undivided))

    report = ask(None, hosts)
    first = report.first_wrong
    if first is None or report.setting or sum(hosts.values()) == 1 or first.link in ("loss", "gradient"):
        return report
    alone = ask((), {next(iter(hosts)): 1}, is_undivided=True)
    tries = (*report.tries, Try(ONE_RANK, "wrong" if alone.first_wrong else "right"))
    if alone.first_wrong is not None:
        tries += ask(LAST, hosts).tries
    return replace(report, tries=tries)


def _ask(run_modules: RunModules, hosts: Mapping[str, int], request: Request) -> Report:
    """Run the ranks, and return rank 0's report."""
    arguments, first_rank, world_size = {}, 0, sum(hosts.values())
    for host, ranks in hosts.items():
        own = replace(request, first_rank=first_rank, ranks=ranks, world_size=world_size)
        arguments[host] = [json.dumps(asdict(own))]
        first_rank += ranks
    answers = run_modules("llmscale.numerics.prove", arguments, TIMEOUT_S)
    lines = [line for line in answers[next(iter(hosts))].stdout.splitlines() if line.startswith(_RESULT_MARK)]
    refused = next((answer for answer in answers.values() if answer.returncode == 2), None)
    if refused is not None:
        raise ConfigError(refused.describe().removeprefix("error: "))
    failed = {host: answer.describe() for host, answer in answers.items() if answer.returncode}
    if failed or not lines:
        reasons = "; ".join(f"{host}: {reason}" for host, reason in failed.items()) or "no report"
        raise MachineError(f"the ranks did not finish the check of their numbers: {reasons}.")
    try:
        return _REPORT.validate_json(lines[-1].removeprefix(_RESULT_MARK))
    except ValidationError:
        raise MachineError("the ranks did not print a report that this llmscale can read.") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Start this host's ranks, or be one of them (its variable is set)."""
    words = list(sys.argv[1:] if argv is None else argv)
    request = _REQUEST.validate_json(words[0])
    # The kernel ends what hangs, even where no thread of Python can run.
    signal.alarm(TIMEOUT_S)
    if _RANK_VARIABLE not in os.environ:
        return _start_ranks(request, words)
    try:
        _be_rank(request)
    except LlmscaleError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _start_ranks(request: Request, words: list[str]) -> int:
    """Run this host's ranks as children; when one fails, end the others, which would wait for it."""
    children = []
    for local_rank in range(request.ranks):
        rank = str(request.first_rank + local_rank)
        variables = {
            _RANK_VARIABLE: rank,
            "RANK": rank,
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(request.world_size),
            "LOCAL_WORLD_SIZE": str(request.ranks),
            "LOCAL_SIZE": str(request.ranks),
            "MASTER_ADDR": request.master,
            "MASTER_PORT": str(request.port),
        }
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // request.ranks)))
        environment = {**os.environ, **variables, "OMP_NUM_THREADS": threads}
        command = module_command("llmscale.numerics.prove", *words)
        children.append(subprocess.Popen(command, env=environment))
    codes = [child.poll() for child in children]
    while None in codes and not any(codes):
        time.sleep(_POLL_S)
        codes = [child.poll() for child in children]
    for child in children:
        if any(codes) and child.poll() is None:
            child.kill()
        child.wait()
    return next((code for code in codes if code), 0)


def _be_rank(request: Request) -> None:
    """Join the other ranks, check, and print the report on rank 0. Imports torch. Collective."""
    from llmscale.engine.process_group import join_world, leave_world
    from llmscale.numerics.block import read_case
    from llmscale.numerics.retries import undivided

    case = read_case(request.flags)
    case = undivided(case) if request.is_undivided else case
    world = join_world()
    report = check_run(case, world, request.tries)
    if world.is_main:
        print(_RESULT_MARK + json.dumps(asdict(report)), flush=True)
    leave_world()


def check_run(case: Case, world: World, tries: tuple[str, ...] | None) -> Report:
    """Check a run in its own precision and in fp32, and try other settings for the first wrong one. Collective."""
    from llmscale.numerics.check import check_case

    results = [(case, check_case(case, world))]
    if results[0][1].precision != "fp32":
        # Another size of vocabulary, without padding.
        in_fp32 = replace(case, precision="fp32", vocab_size=1024)
        results.insert(0, (in_fp32, check_case(in_fp32, world)))
    passes = tuple(result.summary for _, result in results)
    wrong = next((pair for pair in results if pair[1].summary.first_wrong), None)
    return Report(passes) if wrong is None else Report(passes, _try_settings(*wrong, world, tries))


def _try_settings(case: Case, result: CaseResult, world: World, tries: tuple[str, ...] | None) -> tuple[Try, ...]:
    """Repeat a wrong case with other settings until one is right, up to its first wrong step. Collective."""
    from llmscale.numerics.check import check_case
    from llmscale.numerics.retries import changed_cases, settings_for

    first = result.summary.first_wrong
    assert first is not None
    settings = settings_for(first.link, world.world_size) if tries is None else tries
    done: list[Try] = []
    for setting, changed in changed_cases(replace(case, steps=first.step), settings):
        try:
            again = check_case(changed, world)
        except ConfigError:
            continue  # the run cannot have it
        done.append(Try(setting, "wrong" if again.summary.first_wrong else "right"))
        if done[-1].verdict == "right":
            break
    return tuple(done)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads may abort the interpreter's own way out.
    os._exit(code)
