"""`llmscale runs [FOLDER]`: every run below a folder, the newest first."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.config.command_line import flag, run_place
from llmscale.config.user_paths import shown, url_of
from llmscale.terminal.colour import Style, paint
from llmscale.terminal.human_numbers import show_value
from llmscale.terminal.table import Column, output_width, table_lines, wrap_line
from llmscale.untrusted.terminal import make_visible_line, print_visible

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from llmscale.config.command_line import FlagParser
    from llmscale.report.run_list import ListedRun

_COLUMNS = (
    Column("run", is_text=True, least=16),
    Column("state", is_text=True),
    Column("step"),
    Column("loss"),
    Column("goodput", drop=3),
    Column("last seen", is_text=True, drop=1),
    Column("command", is_text=True, drop=2, least=24),
)
_STYLES: dict[str, Style] = {"running": "green", "failed": "red", "lost": "red", "unreadable": "red"}


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `runs`."""
    parser = subparsers.add_parser(
        "runs",
        description="Every run below a folder with its step, last logged loss, state and command, the newest first. "
        "goodput: share of the wall time that went into steps that count. failed: an error ended it, shown below the "
        "table. lost: it was killed, or its host is gone. `llmscale report RUN` shows one.",
    )
    parser.add_argument(
        "folder",
        type=run_place,
        nargs="?",
        default=Path("runs"),
        metavar="FOLDER",
        help="folder or URL; default: runs",
    )
    flag(parser, "--json", "print JSON")
    parser.set_defaults(handler=_run, is_of_runs=False)


def runs_below(folder: Path) -> list[ListedRun]:
    """Return the runs below a folder, or the copies of those below its URL, the newest first. Raises LlmscaleError."""
    from llmscale.report.run_list import find_runs

    if url_of(folder):
        from llmscale.checkpoint.remote_run import fetch_runs_below

        fetch_runs_below(folder, lambda line: print_visible(line, file=sys.stderr))
    return find_runs(folder)


def _run(args: argparse.Namespace) -> int:
    runs = runs_below(args.folder)
    if args.json:
        print(json.dumps([run.as_dict() for run in runs], indent=1, allow_nan=False))
        return 0
    if not runs:
        print(f"No runs below {make_visible_line(shown(args.folder))}. `llmscale train --run FOLDER` makes one.")
    else:
        print_runs(runs, args.folder)
    return 0


def print_runs(runs: Sequence[ListedRun], folder: Path) -> None:
    """Print a table of the runs below a folder, and why each failed."""
    head, *lines = table_lines(_COLUMNS, [_row(run, folder) for run in runs], output_width())
    print(head)
    for number, line in enumerate(lines):
        if number < len(runs):
            style = _STYLES.get(runs[number].state)
        else:
            style = None
        print(paint(line, style, sys.stdout) if style else line)
    for run in runs:
        for note in filter(None, (run.error and f"failed: {run.error}", run.problem)):
            for line in wrap_line(f"{_name(run, folder)}: {make_visible_line(note)}", output_width()):
                print(line)


def _row(run: ListedRun, folder: Path) -> list[str]:
    total = "" if run.total_steps is None else f" of {run.total_steps:,}"
    step = "-" if run.step is None else f"{run.step:,}"
    if run.loss is None:
        loss = "-"
    elif math.isnan(run.loss):
        loss = "not finite"
    else:
        loss = show_value(run.loss)
    goodput = "-" if run.goodput is None else f"{run.goodput:.1%}"
    if run.last_seen is None:
        seen = "-"
    else:
        seen = f"{run.last_seen.astimezone():%Y-%m-%d %H:%M}"
    return [_name(run, folder), run.state, f"{step}{total}", loss, goodput, seen, run.command or "-"]


def _name(run: ListedRun, folder: Path) -> str:
    """Return the run's path, relative to the folder that the user named."""
    return make_visible_line(str(run.path.relative_to(folder)) if run.path != folder else shown(folder))
