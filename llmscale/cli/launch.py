"""`llmscale launch`: arguments, signals and printing of the supervisor."""

from __future__ import annotations

import argparse
import os
import re
import signal
from collections.abc import Sequence

from llmscale import limits
from llmscale.cluster.hosts import (
    LAUNCHERS,
    PACKAGE,
    deepspeed_env_files,
    gather_environment,
    host_command_by,
    parse_hostfile,
    slurm_hosts,
)
from llmscale.cluster.launch.ranks import count_gpus
from llmscale.cluster.launch.supervisor import LaunchOptions, Supervisor
from llmscale.config.command_line import FlagParser, Need, flag, local_path, nonblank, number, whole_number
from llmscale.config.run_arguments import parse_run_config
from llmscale.engine.launcher_variables import check_is_only_copy
from llmscale.error_handling import make_output_resilient
from llmscale.training.inputs import with_prepared_text
from llmscale.training.stop_request import STOP_SIGNALS, Interrupts
from llmscale.untrusted.terminal import print_visible

#: Parts of the names of variables with secret values.
_KEY_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL")


def add_parser(subcommands: argparse._SubParsersAction[FlagParser]) -> None:
    parser = subcommands.add_parser(
        "launch",
        description="Start train.py on every host, watch it, and start it again from its last checkpoint when a rank, "
        "a host or the network fails: on the remaining hosts, with the same global batch and the same samples.",
        epilog="Everything after -- is for train.py. Exit status: 0 finished, or stopped by a signal and saved; 2 for "
        "your mistakes; else 1.",
    )
    where = parser.add_argument_group("where")
    text = "`name slots=N` per host; 8xa100 and the like are llmscale's own; default: this machine"
    flag(where, "--hostfile FILE|NAME", text, local_path)
    flag(where, "--launcher", "how to reach the hosts; default: slurm in a job, else ssh", choices=LAUNCHERS)
    text = "ranks per host without a hostfile; default: its GPUs"
    flag(where, "--slots N", text, whole_number(1, limits.MAX_GPUS_PER_NODE))
    flag(where, "--min-hosts N", "wait rather than begin or continue with fewer", whole_number(1, limits.MAX_NODES), 1)
    flag(where, "--master-addr ADDRESS", "address of the first host; default: as the others reach it", nonblank)
    text = "port of the first host; default: a free one"
    flag(where, "--master-port PORT", text, whole_number(1, 65535))
    text = (
        "one more variable for the ranks, besides NCCL_*, HF_*, WANDB_* and the like and .deepspeed_env. Give keys by "
    )
    flag(
        where, "--env NAME[=VALUE]", f"{text}NAME alone: other users can read a command line", None, [], action="append"
    )
    _add_limits(parser)
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="flags for train.py")
    parser.needs = [
        Need("slots", "with --hostfile", lambda args: not args.hostfile),
        Need("launcher", "--hostfile FILE", lambda args: args.hostfile or args.launcher == "slurm"),
    ]
    parser.passes_on = "train.py"
    parser.set_defaults(handler=_launch)


def _add_limits(parser: FlagParser) -> None:
    group = parser.add_argument_group("what counts as a failure, and how often it is retried")
    seconds = number(0.0, limits.MAX_SECONDS)
    above_0 = number(0.001, limits.MAX_SECONDS)
    flag(group, "--start-timeout-s S", "train.py's flag, which is the time for a start", seconds)
    flag(group, "--hang-timeout-s S", "train.py's flag, which is the time for a step", seconds)
    text = "time without a sign of life after which a host is lost"
    flag(group, "--lost-after-s S", text, number(4.0, limits.MAX_SECONDS), 30.0)
    flag(group, "--connect-timeout-s S", "time for a host to answer, or it is left out", above_0, 45.0)
    text = "time to wait for --min-hosts; without it, on a restart"
    flag(group, "--wait-for-hosts-s S", text, seconds, 1800.0)
    flag(group, "--max-restarts N", "restarts in all", whole_number(0, 10**6), 20)
    text = "give up when this many attempts in a row end after the same step"
    flag(group, "--same-step-limit N", text, whole_number(1, 10**6), 3)


def _launch(args: argparse.Namespace) -> int:
    check_is_only_copy(os.environ, "llmscale launch")
    # The run must continue if its terminal closes or the disk of its log is full.
    make_output_resilient()
    _warn_of_keys(args.env)
    launcher = args.launcher or ("slurm" if not args.hostfile and "SLURM_JOB_NODELIST" in os.environ else "ssh")
    passed_on = {"--start-timeout-s": args.start_timeout_s, "--hang-timeout-s": args.hang_timeout_s}
    ours = [word for name, value in passed_on.items() if value is not None for word in (name, f"{value:g}")]
    options = LaunchOptions(
        hosts=_hosts(args, launcher),
        host_command=host_command_by(launcher),
        script=str(PACKAGE / "train.py"),
        arguments=[*ours, *args.arguments],
        environment=gather_environment(os.environ, extra=args.env, env_files=deepspeed_env_files()),
        max_restarts=args.max_restarts,
        same_step_limit=args.same_step_limit,
        connect_timeout_s=args.connect_timeout_s,
        lost_after_s=args.lost_after_s,
        wait_for_hosts_s=args.wait_for_hosts_s,
        min_hosts=args.min_hosts,
        master_addr=args.master_addr,
        master_port=args.master_port,
    )
    # Before signals are only noted: text may take hours.
    prepared = with_prepared_text(parse_run_config(options.arguments))
    return Supervisor(options, prepared, _note_signals(), _show).run()


def _hosts(args: argparse.Namespace, launcher: str) -> dict[str, int]:
    if args.hostfile:
        return parse_hostfile(args.hostfile)
    if launcher == "slurm":
        return slurm_hosts(os.environ, args.slots)
    return {"localhost": args.slots or count_gpus() or 1}


def _warn_of_keys(settings: Sequence[str]) -> None:
    """Warn of secrets on the command line, which every user can read while the run lasts."""
    for name in (word.partition("=")[0] for word in settings if "=" in word):
        if _KEY_NAME.search(name.upper()):
            _show(
                f"WARNING: --env {name}=... can be read by every user of this machine. Set {name} in this shell and "
                f"write --env {name}."
            )


def _note_signals() -> list[str]:
    """Install handlers that append SIGTERM, SIGINT, SIGUSR1 and SIGHUP to the returned list.

    SIGHUP stays ignored under nohup. A third SIGINT ends the process at once; the hosts then lose their connection
    and end their ranks.
    """
    received: list[str] = []
    interrupts = Interrupts()

    def note(number: int, _frame: object) -> None:
        received.append(signal.Signals(number).name)
        if number == signal.SIGINT:
            if interrupts.add():
                os._exit(128 + number)
            interrupts.answer()

    for stop in (*STOP_SIGNALS, signal.SIGHUP):
        if signal.getsignal(stop) is not signal.SIG_IGN:
            signal.signal(stop, note)
    return received


def _show(line: str) -> None:
    print_visible(line, flush=True)
