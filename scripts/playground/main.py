"""Command line of the playground: up N, run, break, down. See playground.sh."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from scripts.playground.hosts import Playground, PlaygroundHost, login_environment, why_impossible  # noqa: E402
from scripts.playground.kernel import pid_space  # noqa: E402

FOLDER = Path("/var/tmp/llmscale-playground")


def main() -> int:
    parser = argparse.ArgumentParser(prog="playground.sh", description="Real hosts on one machine. Needs root.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="make N hosts node-0 .. and a hostfile")
    up.add_argument("num_hosts", type=int, nargs="?", default=2, metavar="N")
    up.add_argument("--slots", type=int, default=1, help="slots per host in the hostfile (default: 1)")
    up.set_defaults(handler=make_hosts)
    run = commands.add_parser("run", help="run a command on a host, in this folder: run [--on node-1] -- COMMAND ...")
    run.add_argument("--on", default="node-0", metavar="HOST")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    run.set_defaults(handler=run_command)
    for name, text in (
        ("cut", "unplug a host's network cable"),
        ("mend", "plug it in again"),
        ("off", "cut a host's power"),
        ("on", "restore it"),
    ):
        breaker = commands.add_parser(name, help=text)
        breaker.add_argument("host", metavar="HOST")
        breaker.set_defaults(handler=change_host, change=name)
    commands.add_parser("down", help="remove all hosts").set_defaults(handler=remove_hosts)
    args = parser.parse_args()
    reason = why_impossible()
    if reason:
        print(f"error: {reason}.", file=sys.stderr)
        return 2
    return int(args.handler(args))


def make_hosts(args: argparse.Namespace) -> int:
    if (FOLDER / "state.json").exists():
        print("error: hosts are running already; `playground.sh down` removes them.", file=sys.stderr)
        return 2
    playground = Playground(args.num_hosts, FOLDER, shared=[Path.cwd()], detached=True)
    try:
        playground.up()
    except BaseException:
        playground.down()
        raise
    hostfile = playground.write_hostfile(FOLDER / "hostfile", args.slots)
    save(playground)
    print(f"{', '.join(host.name for host in playground.hosts)} are running; hostfile: {hostfile}")
    return 0


def run_command(args: argparse.Namespace) -> int:
    """Run with this shell's PATH and PYTHONPATH, so that the same Python is found."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        print("error: no command. Give one after --: playground.sh run -- hostname", file=sys.stderr)
        return 2
    host = find_host(load(), args.on)
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "TERM") if name in os.environ}
    return subprocess.run(host.command(command, cwd=Path.cwd()), env=login_environment(environment)).returncode


def change_host(args: argparse.Namespace) -> int:
    playground = load()
    host = find_host(playground, args.host)
    if args.change == "on" and not host.is_on:
        playground.power_on(host)
    elif args.change != "on":
        {"cut": host.cut_link, "mend": host.restore_link, "off": host.power_off}[args.change]()
    save(playground)
    return 0


def remove_hosts(_args: argparse.Namespace) -> int:
    if (FOLDER / "state.json").exists():
        load().down()
    shutil.rmtree(FOLDER, ignore_errors=True)
    return 0


def save(playground: Playground) -> None:
    state = {
        "shared": [str(path) for path in playground.shared],
        "switch_pid": playground.switch_pid,
        "hosts": [{**asdict(host), "folder": str(host.folder)} for host in playground.hosts],
        # After a reboot a number may name another process, but not a namespace.
        "spaces": {host.name: pid_space(host.init_pid) for host in playground.hosts if host.is_on},
    }
    (FOLDER / "state.json").write_text(json.dumps(state))


def load() -> Playground:
    """Return the running playground. Raises SystemExit without one."""
    try:
        state = json.loads((FOLDER / "state.json").read_text())
    except FileNotFoundError:
        raise SystemExit("error: no hosts are running; `playground.sh up 3` makes three.") from None
    hosts = [PlaygroundHost(**{**host, "folder": Path(host["folder"])}) for host in state["hosts"]]
    if any(pid_space(host.init_pid) != state["spaces"][host.name] for host in hosts if host.is_on):
        shutil.rmtree(FOLDER)
        raise SystemExit(
            "error: the hosts have ended (was this machine restarted?); `playground.sh up` makes new ones."
        )
    playground = Playground(len(hosts), FOLDER, shared=[Path(path) for path in state["shared"]], detached=True)
    playground.hosts, playground.switch_pid = hosts, state["switch_pid"]
    return playground


def find_host(playground: Playground, name: str) -> PlaygroundHost:
    for host in playground.hosts:
        if host.name == name:
            return host
    raise SystemExit(f"error: no host '{name}'. Legal: {', '.join(host.name for host in playground.hosts)}.")


if __name__ == "__main__":
    sys.exit(main())
