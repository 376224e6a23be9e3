"""`llmscale train`: all ranks of a run on this machine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llmscale.cluster.hosts import PACKAGE
from llmscale.cluster.launch.ranks import (
    LocalRanks,
    count_gpus,
    rank_command,
    rank_environment,
    remove_stale_locks,
)
from llmscale.config.command_line import FlagParser, whole_number
from llmscale.config.run_arguments import parse_run_config
from llmscale.engine.launcher_variables import check_is_only_copy, read_launcher_variables
from llmscale.engine.network import find_port
from llmscale.error_handling import make_output_resilient
from llmscale.errors import ConfigError
from llmscale.limits import MAX_GPUS_PER_NODE
from llmscale.report.run_list import notify_of_end
from llmscale.terminal.human_numbers import count_nouns
from llmscale.terminal.status_line import show_status
from llmscale.training.inputs import announce_after_s, with_prepared_text
from llmscale.training.start import check_space, lines_at_end, prepare_start
from llmscale.training.stop_request import stop_signals
from llmscale.untrusted.terminal import print_visible

#: The flag of this command, and its name in DeepSpeed's launcher; all other flags are train.py's.
_OWN_FLAGS = ("--nproc-per-node", "--num-gpus")
_num_processes = whole_number(1, MAX_GPUS_PER_NODE)


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser("train", add_help=False)
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(handler=_train)


def _train(args: argparse.Namespace) -> int:
    """Check everything before a rank is started, so that mistakes are reported once. Raises LlmscaleError."""
    with _ending_at_signals():
        return _run_ranks(args.arguments)


def _run_ranks(words: Sequence[str]) -> int:
    asked, arguments = _split_flags(words)
    config = parse_run_config(arguments, _parser())
    # A run must not fail because its output cannot be written.
    make_output_resilient()
    check_is_only_copy(os.environ, "llmscale train")
    run = with_prepared_text(config)
    config = run.config
    with show_status(
        "checking the configuration and the data", after_s=announce_after_s(config), is_plain=config.plain
    ):
        num_ranks = _count_ranks(asked)
        start = prepare_start(run, num_ranks)
        finished = lines_at_end(start)
        if not finished:
            check_space(start)
    if finished:
        print_visible("\n".join(finished))
        return 0
    for lock in remove_stale_locks():
        _show(f"removed {lock}, left by a build that was killed")
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_port()), "WORLD_SIZE": str(num_ranks)}
    environments = rank_environment(os.environ, range(num_ranks), meeting)
    read_launcher_variables(environments[0])
    deaths: list[str] = []

    def show_death(line: str) -> None:
        deaths.append(line)
        _show(f"error: {line}")

    status = LocalRanks(rank_command(PACKAGE / "train.py", arguments), environments, show_death).run()
    notify_of_end(config, status, deaths[0] if deaths else None)
    return status


@contextmanager
def _ending_at_signals() -> Iterator[None]:
    """End at signals until the ranks are started; a container's first process would otherwise ignore them."""

    def end(number: int, _frame: object) -> None:
        _show(f"stopped by {signal.Signals(number).name} before the ranks were started")
        raise SystemExit(0)

    before = {number: signal.signal(number, end) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _parser() -> FlagParser:
    """Return the parser; `_split_flags` has already removed the values of this command's own flag."""
    from llmscale.cli.main import COMMANDS  # which imports this module

    parser = FlagParser(
        prog="llmscale train",
        add_help=False,
        example=f"llmscale {COMMANDS['train'].example}",
        epilog="Words such as nats, MFU and micro-batch are explained in docs/glossary.md.",
        description="Train on this machine: one process per GPU, or on the CPU. Ctrl-C (SIGINT), SIGTERM, SIGHUP and "
        "SIGUSR1 save and end the run with exit status 0; a third Ctrl-C ends it at once.",
    )
    add_own_flags(parser)
    return parser


def add_own_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flag that train.py does not have."""
    parser.add_argument(
        *_OWN_FLAGS, type=_num_processes, metavar="N", help="processes; default: one per GPU, or 1 without GPUs"
    )


def _split_flags(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """Return the number of processes, or None, and the words for train.py. Raises ConfigError."""
    asked = None
    first = ""
    rest = []
    remaining = iter(words[1:] if words[:1] == ["--"] else words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name.replace("_", "-") not in _OWN_FLAGS:
            rest.append(word)
            continue
        if equals:
            given = value
        else:
            given = next(remaining, "")
        if first and first != name:
            raise ConfigError(f"{first} and {name} are the same setting twice. Give it once.")
        if first:
            raise ConfigError(f"{name} is given twice: {asked} and {given}. Give it once.")
        first = name
        try:
            asked = _num_processes(given)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"argument {name}: {error}.") from None
    return asked, rest


def _count_ranks(asked: int | None) -> int:
    """Return the number of ranks. Raises ConfigError for more ranks than GPUs, on a machine with GPUs."""
    num_gpus = count_gpus()
    if asked is None:
        return num_gpus or 1
    if 0 < num_gpus < asked:
        where = " in CUDA_VISIBLE_DEVICES" if "CUDA_VISIBLE_DEVICES" in os.environ else ""
        raise ConfigError(
            f"{_OWN_FLAGS[0]} {asked}: this machine has {count_nouns(num_gpus, 'GPU')}{where}. Give {num_gpus}, or "
            "nothing."
        )
    return asked


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
