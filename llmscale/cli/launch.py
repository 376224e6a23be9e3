"""`llmscale launch`: arguments, signals and printing of the supervisor."""

from __future__ import annotations

import argparse
import os
import re
import signal
from collections.abc import Sequence

from llmscale.cluster.hostfile import Host, parse_hostfile
from llmscale.cluster.launch.attempt import Limits
from llmscale.cluster.launch.ranks import STARTERS, count_gpus
from llmscale.cluster.launch.supervisor import LaunchOptions, RetryPolicy, Supervisor
from llmscale.cluster.launch.transport import LAUNCHERS, agent_command_by, slurm_hosts
from llmscale.cluster.remote import PACKAGE, deepspeed_env_files, gather_environment
from llmscale.config import flag_type, limits
from llmscale.config.flag_parser import FlagParser, Need
from llmscale.config.launcher_variables import check_is_only_copy
from llmscale.files.patient_output import make_output_patient
from llmscale.training.stop_request import STOP_SIGNALS
from llmscale.untrusted.terminal import print_visible

#: In the names of variables whose values nobody else should see.
_KEY_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL")


def add_parser(subcommands: argparse._SubParsersAction[FlagParser]) -> None:
    parser = subcommands.add_parser(
        "launch",
        description="Start train.py on every host, watch it, and start it again from its last checkpoint when a rank, "
        "a host or the network fails: on the hosts that are left, with the same global batch and the same samples.",
        epilog="Everything after -- is for train.py: llmscale launch --hostfile hosts -- --ds zero2 "
        "--steps 1000. Exit status: 0 finished, or stopped by a signal and saved; 2 for what you must mend; else 1.",
    )
    where = parser.add_argument_group("where")
    where.add_argument(
        "--hostfile",
        type=flag_type.path,
        metavar="FILE|NAME",
        help="`name slots=N` per host; 8xa100 and the like are llmscale's own (default: this machine)",
    )
    where.add_argument("--launcher", choices=LAUNCHERS, help="to the hosts (default: slurm in a job, else ssh)")
    where.add_argument("--starter", choices=STARTERS, default="deepspeed", help="what starts a host's ranks there")
    where.add_argument(
        "--slots",
        type=flag_type.whole(1, limits.MAX_GPUS_PER_NODE),
        metavar="N",
        help="ranks per host without a hostfile (default: its GPUs)",
    )
    where.add_argument(
        "--min-hosts",
        type=flag_type.whole(1, limits.MAX_NODES),
        default=1,
        metavar="N",
        help="wait rather than go on with fewer",
    )
    where.add_argument(
        "--master-addr",
        type=flag_type.name,
        metavar="ADDRESS",
        help="of the first host (default: as the others reach it)",
    )
    where.add_argument(
        "--master-port", type=flag_type.whole(1, 65535), metavar="PORT", help="another when it is taken (default: any)"
    )
    where.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="one more variable for the ranks, besides NCCL_*, HF_*, WANDB_* and their kin and .deepspeed_env; keys by "
        "NAME alone: others can read a command line",
    )
    _add_limits(parser)
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="of train.py")
    parser.needs = [
        Need("slots", "with --hostfile", lambda args: not args.hostfile),
        Need("launcher", "--hostfile FILE", lambda args: args.hostfile or args.launcher == "slurm"),
    ]
    parser.passes_on = "train.py"
    parser.set_defaults(handler=_launch)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is a fault, and how often it is tried again")
    for flag, default, lowest, text in (
        (
            "--start-timeout-s",
            1800.0,
            0.001,
            "a rank must do its first step, or more of a download, in this time",
        ),
        ("--hang-timeout-s", 600.0, 0.001, "the longest time between two steps, validation and saves included"),
        ("--lost-after-s", 30.0, 4.0, "a host that is silent for so long is lost"),
        ("--connect-timeout-s", 45.0, 0.001, "a host that does not answer by then is left out"),
        ("--wait-for-hosts-s", 1800.0, 0.0, "how long a restart waits for --min-hosts"),
    ):
        kind = flag_type.number(lowest, limits.MAX_SECONDS)
        group.add_argument(flag, type=kind, default=default, metavar="S", help=f"{text} (default: {default:g})")
    group.add_argument(
        "--max-restarts", type=flag_type.whole(0, 10**6), default=20, metavar="N", help="in all (default: 20)"
    )
    group.add_argument(
        "--same-step-limit",
        type=flag_type.whole(1, 10**6),
        default=3,
        metavar="N",
        help="give up when so many attempts in a row end after the same step (default: 3)",
    )


def _launch(args: argparse.Namespace) -> int:
    check_is_only_copy(os.environ, "llmscale launch")
    # Nobody may read any more, or the disk of a log be full; the run must go on.
    make_output_patient()
    _warn_of_keys(args.env)
    launcher = args.launcher or ("slurm" if not args.hostfile and "SLURM_JOB_NODELIST" in os.environ else "ssh")
    options = LaunchOptions(
        hosts=_hosts(args, launcher),
        agent_command=agent_command_by(launcher),
        script=str(PACKAGE / "train.py"),
        arguments=args.arguments,
        environment=gather_environment(os.environ, extra=args.env, env_files=deepspeed_env_files()),
        starter=args.starter,
        limits=Limits(args.start_timeout_s, args.hang_timeout_s, args.lost_after_s),
        policy=RetryPolicy(args.max_restarts, args.same_step_limit),
        connect_timeout_s=args.connect_timeout_s,
        wait_for_hosts_s=args.wait_for_hosts_s,
        min_hosts=args.min_hosts,
        master_addr=args.master_addr,
        master_port=args.master_port,
    )
    return Supervisor(options, _note_signals(), _show).run()


def _hosts(args: argparse.Namespace, launcher: str) -> tuple[Host, ...]:
    if args.hostfile:
        return parse_hostfile(args.hostfile)
    if launcher == "slurm":
        return slurm_hosts(os.environ, args.slots)
    return (Host("localhost", args.slots or count_gpus() or 1),)


def _warn_of_keys(settings: Sequence[str]) -> None:
    """A command line is there for all to read, for as long as the run lasts."""
    for name in (word.partition("=")[0] for word in settings if "=" in word):
        if _KEY_NAME.search(name.upper()):
            _show(
                f"WARNING: --env {name}=... can be read by every user of this machine. Set {name} in this shell and "
                f"write --env {name}."
            )


def _note_signals() -> list[str]:
    """From now on SIGTERM, SIGINT, SIGUSR1, and SIGHUP unless nohup has it ignored, are noted in the returned list; a
    second SIGINT ends at once, and the agents, whose connection then closes, end their ranks."""
    received: list[str] = []

    def note(number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT" and name in received:
            os._exit(128 + number)
        received.append(name)

    for number in (*STOP_SIGNALS, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, note)
    return received


def _show(line: str) -> None:
    print_visible(line, flush=True)
