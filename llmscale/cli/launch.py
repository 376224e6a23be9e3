"""`llmscale launch`: arguments, signals and printing of the supervisor."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from llmscale.cluster.environment import PACKAGE, deepspeed_env_files, gather_environment
from llmscale.cluster.hostfile import Host, parse_hostfile
from llmscale.cluster.launch.attempt_run import Limits
from llmscale.cluster.launch.listener import Listener
from llmscale.cluster.launch.local_gpus import count_gpus
from llmscale.cluster.launch.reach import LAUNCHERS, choose_reach
from llmscale.cluster.launch.retry import RetryPolicy
from llmscale.cluster.launch.slurm_hosts import slurm_hosts
from llmscale.cluster.launch.starter import STARTERS
from llmscale.cluster.launch.supervisor import LaunchOptions, Supervisor
from llmscale.errors import ConfigError
from llmscale.training.stop_request import STOP_SIGNALS


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "launch",
        help="train on many hosts, and go on when one of them fails",
        description="Start train.py on every host, watch it, and start it again from its last checkpoint when a rank, "
        "a host or the network fails: on the hosts that are left, with the same global batch and the same samples.",
        epilog="Everything after -- is for train.py: llmscale launch --hostfile hosts -- --ds ds_configs/zero2.json "
        "--steps 1000. Exit status: 0 finished, or stopped by a signal and saved; 2 for what you must mend; else 1.",
    )
    where = parser.add_argument_group("where")
    where.add_argument("--hostfile", type=Path, metavar="FILE", help="`name slots=N` per host (default: this machine)")
    where.add_argument("--launcher", choices=LAUNCHERS, help="to the hosts (default: slurm in a job, else ssh)")
    where.add_argument("--starter", choices=STARTERS, default="deepspeed", help="what starts a host's ranks there")
    where.add_argument("--slots", type=int, metavar="N", help="ranks per host without a hostfile (default: its GPUs)")
    where.add_argument("--min-hosts", type=int, default=1, metavar="N", help="wait rather than go on with fewer")
    where.add_argument("--master-addr", metavar="ADDRESS", help="of the first host (default: as the others reach it)")
    where.add_argument("--master-port", type=int, metavar="PORT", help="another when it is taken (default: any)")
    where.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="one more variable for the ranks, besides NCCL_*, HF_*, WANDB_* and their kin and .deepspeed_env",
    )
    _add_limits(parser)
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="of train.py")
    parser.set_defaults(handler=_launch)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("what is a fault, and how often it is tried again")
    for flag, default, text in (
        ("--start-timeout-s", 1800.0, "a rank must finish its first step within this time"),
        ("--hang-timeout-s", 600.0, "the longest time between two steps, validation and saves included"),
        ("--lost-after-s", 30.0, "a host that is silent for so long is lost"),
        ("--connect-timeout-s", 45.0, "a host that does not answer by then is left out"),
        ("--wait-for-hosts-s", 1800.0, "how long a restart waits for --min-hosts"),
    ):
        limits.add_argument(flag, type=float, default=default, metavar="S", help=f"{text} (default: {default:g})")
    limits.add_argument("--max-restarts", type=int, default=20, metavar="N", help="in all (default: 20)")
    limits.add_argument(
        "--same-step-limit",
        type=int,
        default=3,
        metavar="N",
        help="give up when so many attempts in a row end after the same step (default: 3)",
    )


def _launch(args: argparse.Namespace) -> int:
    _check_numbers(args)
    launcher = args.launcher or ("slurm" if not args.hostfile and "SLURM_JOB_NODELIST" in os.environ else "ssh")
    listener = Listener() if launcher == "pdsh" else None
    options = LaunchOptions(
        hosts=_hosts(args, launcher),
        reach=choose_reach(launcher, listener.port if listener else None),
        listener=listener,
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
        if args.slots is not None:
            raise ConfigError("--slots is said by the hostfile. Give one of them.")
        return parse_hostfile(args.hostfile)
    if launcher == "slurm":
        return slurm_hosts(os.environ, args.slots)
    return (Host("localhost", args.slots or count_gpus() or 1),)


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("slots", "min_hosts", "same_step_limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: it must be at least 1.")
    for name in ("start_timeout_s", "hang_timeout_s", "connect_timeout_s"):
        if getattr(args, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name):g}: it must be above 0.")
    if args.lost_after_s < 4:
        raise ConfigError(f"--lost-after-s {args.lost_after_s:g}: hosts report once a second; it must be at least 4.")
    if args.max_restarts < 0 or args.wait_for_hosts_s < 0:
        raise ConfigError("--max-restarts and --wait-for-hosts-s cannot be negative.")
    if args.master_port is not None and not 0 < args.master_port < 65536:
        raise ConfigError(f"--master-port {args.master_port}: ports are 1 to 65535.")


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
    try:
        print(line, flush=True)
    except BrokenPipeError:
        # Nobody reads any more; the log files have it, and the run must go on.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
