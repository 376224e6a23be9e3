"""`llmscale doctor`: check whether this cluster and this configuration will start."""

from __future__ import annotations

import argparse
import json
import socket
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.config.command_line import Need, flag, local_path, nonblank, number, whole_number
from llmscale.config.hardware import INTERCONNECTS, get_interconnect
from llmscale.config.user_paths import check_output_file, write_output_file
from llmscale.limits import MAX_GPUS_PER_NODE, MAX_SECONDS
from llmscale.terminal.colour import Style, paint
from llmscale.terminal.human_numbers import count_nouns, with_singulars
from llmscale.terminal.table import output_width
from llmscale.untrusted.terminal import make_visible

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from llmscale.cluster.doctor.report import CheckRow, ProbeRequest, Status
    from llmscale.config.command_line import FlagParser

_COLOURS: dict[Status, Style] = {"ok": "green", "warn": "yellow", "fail": "red"}
_MAX_WIDTH = 120
_LEAST_TEXT = 24
#: Ranks of --numerics on a machine without GPUs.
_RANKS_ON_CPU = 2
#: Default of --timeout, without and with --numerics: for all of its passes and tries.
_TIMEOUT_S = 60.0
_NUMERICS_TIMEOUT_S = 900.0
#: Fields of a row that --json prints.
_JSON_KEYS = ("name", "status", "found", "fix")


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        description="Checks this machine, or every host of a hostfile at once through ssh, and prints one table with "
        "the fix for each problem. Exit status: 0 no failure, 1 failures, 2 the check could not run.",
    )
    flag(parser, "--hostfile FILE|NAME", "hosts to check; default: this machine", local_path)
    flag(parser, "--ds FILE|NAME", "ds_config to check, on every host", local_path)
    flag(parser, "--fixed FILE", "write the file that llmscale takes in place of --ds, and check nothing", local_path)
    flag(parser, "--force", "let --fixed overwrite")
    flag(parser, "--run-config FILE", "run file to check (train.py's --config)", local_path)
    flag(parser, "--json", "print the rows as JSON")
    flag(parser, "--no-network-test", "leave out the timed all-reduce")
    flag(parser, "--numerics", "instead compare what the run's engine computes with the truth, on the run's own ranks")
    flag(
        parser,
        "--ranks N",
        "ranks of --numerics on this machine; default: its GPUs, else 2",
        whole_number(1, MAX_GPUS_PER_NODE),
    )
    networks = ", ".join(network.name for network in INTERCONNECTS)
    text = f"expected network between hosts, to compare the all-reduce with: {networks}"
    flag(parser, "--interconnect NAME", text, nonblank)
    flag(parser, "--port N", "port where the ranks will meet", whole_number(1, 65535), 29500)
    text = f"seconds that a host may take; default: {_TIMEOUT_S:g}, with --numerics {_NUMERICS_TIMEOUT_S:g}"
    flag(parser, "--timeout S", text, number(0.001, MAX_SECONDS))
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags for train.py, to check")
    parser.needs = [
        Need("interconnect", "with --no-network-test", lambda args: not args.no_network_test),
        Need("fixed", "--ds FILE"),
        Need("ranks", "--numerics"),
        Need("ranks", "with --hostfile", lambda args: args.hostfile is None),
        Need("numerics", "with --fixed", lambda args: args.fixed is None),
        Need("interconnect", "with --numerics", lambda args: not args.numerics),
        Need("no_network_test", "with --numerics", lambda args: not args.numerics),
        Need("force", "--fixed FILE"),
    ]
    parser.passes_on = "train.py"
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    if args.fixed is not None:
        return _write_fixed(args.ds, args.fixed, overwrite=args.force)
    if args.numerics:
        return _prove_numbers(args)
    from llmscale.cluster.doctor.diagnose import diagnose
    from llmscale.cluster.doctor.report import worst

    request = _request(args)
    # The rate of one adapter: a host with one per GPU is faster than promised.
    if args.interconnect:
        network = get_interconnect(args.interconnect)
    else:
        network = None
    promised = network.bytes_per_s if network else None
    rows = diagnose(request, network_test=not args.no_network_test, promised_bytes_per_s=promised)
    if args.json:
        hosts = [{"name": name, "slots": slots} for name, slots in request.hosts.items()]
        plain = [{key: value for key, value in asdict(row).items() if key in _JSON_KEYS} for row in rows]
        print(json.dumps({"status": worst(rows), "hosts": hosts, "rows": plain}, indent=1))
    else:
        for line in table_lines(rows, width=min(_MAX_WIDTH, output_width() or _MAX_WIDTH)):
            print(line)
        print(_summary(request, rows))
    return 1 if worst(rows) == "fail" else 0


def _prove_numbers(args: argparse.Namespace) -> int:
    """Check the run's numbers on its ranks, print the report, and return 1 if a link is wrong. Raises LlmscaleError."""
    from llmscale.cluster.doctor.on_ranks import prove
    from llmscale.cluster.launch.ranks import count_gpus
    from llmscale.numerics.report import table_lines

    request = _request(args)
    hosts = request.hosts
    flags = list(request.train_flags)
    if request.ds is not None and not flags:
        flags = ["--ds", request.ds]
    if args.hostfile is None:
        hosts = {"localhost": args.ranks or count_gpus() or _RANKS_ON_CPU}
    report = prove(hosts, flags, args.timeout or _NUMERICS_TIMEOUT_S)
    if args.json:
        print(json.dumps({**asdict(report), "setting": report.setting}, indent=1))
    else:
        for line in table_lines(report):
            print(make_visible(line))
    return 1 if report.first_wrong else 0


def _write_fixed(path: Path, out: Path, *, overwrite: bool) -> int:
    """Write the ds_config that llmscale takes in place of another, and print what is changed. Raises ConfigError."""
    from llmscale.config.deepspeed.foreign import DELETED
    from llmscale.config.deepspeed.resolve import fix_ds_config, load_ds_config, parse_ds_config

    check_output_file("--fixed", out, overwrite=overwrite)
    fixed, changes = fix_ds_config(load_ds_config(path))
    write_output_file("--fixed", out, json.dumps(fixed, indent=2) + "\n")
    for change in changes:
        edits = ", ".join(
            f"{name} deleted" if value is DELETED else f"{name} is {json.dumps(value)}"
            for name, value in change.edits.items()
        )
        print(make_visible(f"{edits}: {change.text}"))
    for warning in parse_ds_config(fixed, str(out)).warnings:
        print(make_visible(f"note: {warning}"))
    print(f"written: {out}, with {count_nouns(len(changes), 'change')}")
    return 0


def _request(args: argparse.Namespace) -> ProbeRequest:
    """Return the question to the hosts. Raises ConfigError for misspelt flags and missing files."""
    from llmscale.cluster.doctor.report import ProbeRequest
    from llmscale.cluster.hosts import parse_hostfile
    from llmscale.cluster.launch.ranks import count_gpus
    from llmscale.config.deepspeed.resolve import load_ds_config
    from llmscale.config.run_arguments import load_run_file, parse_run_flags

    flags = list(args.flags)
    given = parse_run_flags(flags)
    for path in filter(None, (args.ds, given.get("ds"))):
        load_ds_config(Path(str(path)))
    for path in filter(None, (args.run_config, given.get("config"))):
        load_run_file(Path(str(path)))
    if args.run_config is not None:
        flags = ["--config", str(args.run_config), *flags]
    if flags and args.ds is not None:
        flags += ["--ds", str(args.ds)]
    if args.hostfile:
        hosts = parse_hostfile(args.hostfile)
    else:
        hosts = {socket.gethostname(): max(1, count_gpus())}
    if args.ds:
        ds = str(args.ds)
    else:
        ds = None
    return ProbeRequest(
        hosts=hosts, port=args.port, ds=ds, train_flags=tuple(flags), timeout_s=args.timeout or _TIMEOUT_S
    )


def table_lines(rows: Sequence[CheckRow], *, width: int) -> list[str]:
    """Return the lines of the table: status, name, finding, and the fix below it."""
    first = max((len(row.name) for row in rows), default=0) + 8
    lines = []
    for row in rows:
        # Findings contain text from other hosts.
        text = textwrap.wrap(make_visible(row.found), max(_LEAST_TEXT, width - first)) or [""]
        if row.fix:
            fix = make_visible(f"fix: {row.fix}")
            text += textwrap.wrap(fix, max(_LEAST_TEXT, width - first), subsequent_indent="     ")
        if row.status == "fail":
            word = row.status.upper()
        else:
            word = row.status
        head = f"{paint(word, _COLOURS[row.status], sys.stdout)}{' ' * (6 - len(word))}{row.name:{first - 6}}"
        lines.append(head + text[0])
        lines += [" " * first + line for line in text[1:]]
    return lines


def _summary(request: ProbeRequest, rows: Sequence[CheckRow]) -> str:
    count = {status: sum(row.status == status for row in rows) for status in _COLOURS}
    machines = f"{len(request.hosts)} hosts, {request.world_size} ranks"
    findings = f"{count['ok']} ok, {count['warn']} warnings, {count['fail']} to repair"
    return with_singulars(f"\n{machines}: {findings}")
