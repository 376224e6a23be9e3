"""`llmscale report RUN...`: results of runs, in the terminal, as a page, as a picture or as JSON."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.checkpoint.inventory import list_checkpoints
from llmscale.checkpoint.manifest import CHECKPOINTS_NAME
from llmscale.config.command_line import flag, local_path, run_place
from llmscale.config.user_paths import check_output_file, write_output_file
from llmscale.data.sample_log import FOLDER as SAMPLES_NAME
from llmscale.data.sample_log import read_recorded
from llmscale.errors import ConfigError
from llmscale.report.ascii_chart import draw_chart
from llmscale.report.history import WALL_TIME, RunHistory, load_history, load_run_manifest
from llmscale.terminal.status_line import show_if_slow
from llmscale.terminal.table import output_width, print_fitting
from llmscale.training.run_folder import (
    ATTEMPTS_NAME,
    CONFIG_NAME,
    DS_CONFIG_NAME,
    FAILURE_NAME,
    LOCK_NAME,
    LOGS_NAME,
    METRICS_NAME,
    ORIGIN_FOLDERS,
    STARTS_NAME,
)
from llmscale.untrusted.terminal import make_visible_line, print_visible

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from llmscale.config.command_line import FlagParser
    from llmscale.data.shards.manifest import Manifest

_OUTPUTS = ("html", "png", "svg", "json")
#: Largest width of the chart, and width of its axis.
_CHART_WIDTH, _CHART_MARGIN = 64, 12


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `report`."""
    parser = subparsers.add_parser(
        "report",
        description="Without a file, print each run's curve; in files, draw several runs over each other.",
        epilog="Example: llmscale report runs/a runs/b --html report.html",
    )
    parser.add_argument("runs", type=run_place, nargs="+", metavar="RUN", help="run folder")
    files = parser.add_argument_group("files")
    for name, what in (
        ("html", "a self-contained page with every chart"),
        ("png", "the main charts as a picture (needs matplotlib)"),
        ("svg", "the main charts as a drawing (needs matplotlib)"),
        ("json", "the numbers of the charts"),
    ):
        flag(files, f"--{name} FILE", what, local_path)
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    wanted = {name: path for name in _OUTPUTS if (path := getattr(args, name)) is not None}
    _check(args.runs, wanted)
    if not wanted:
        for number, run in enumerate(args.runs):
            if len(args.runs) > 1:
                print_visible(f"{'' if number == 0 else chr(10)}{make_visible_line(str(run))}")
            _print_run(run)
        return 0
    # Importing this takes longer than a report in the terminal.
    from llmscale.report.data import build_report

    with _announced_reading(args.runs):
        report = build_report(args.runs)
    for name, path in wanted.items():
        _WRITERS[name](path, report)
        print_visible(f"{path}: {path.stat().st_size / 1e3:,.0f} KB" if path.is_file() else f"{path}")
    return 0


def _check(runs: Sequence[Path], wanted: Mapping[str, Path]) -> None:
    """Refuse files that cannot be written, before anything is read."""
    from llmscale.report.data import MOST_RUNS

    if len(runs) > MOST_RUNS:
        raise ConfigError(f"{len(runs)} runs are more than a report shows; name at most {MOST_RUNS}.")
    for name, path in wanted.items():
        check_output_file(f"--{name}", path, overwrite=True)
        for run in runs:
            _check_apart(f"--{name} {path}", path.resolve(), run)
    places = [path.resolve() for path in wanted.values()]
    if len(set(places)) < len(places):
        named = ", ".join(f"--{name} {path}" for name, path in wanted.items())
        raise ConfigError(f"two of {named} are the same file; name another for each.")
    if {"png", "svg"} & wanted.keys():
        from llmscale.report.run_plot import import_pyplot

        import_pyplot()


def _check_apart(said: str, place: Path, run: Path) -> None:
    """Refuse a file that the run itself wrote: a report beside them is welcome."""
    files = (METRICS_NAME, CONFIG_NAME, STARTS_NAME, DS_CONFIG_NAME, LOCK_NAME, FAILURE_NAME, ATTEMPTS_NAME)
    folder = run.resolve()
    if not place.is_relative_to(folder):
        return
    name, *inner = place.relative_to(folder).parts
    if name in ((CHECKPOINTS_NAME, SAMPLES_NAME, LOGS_NAME, *ORIGIN_FOLDERS) if inner else files):
        raise ConfigError(f"{said} is a file of the run itself; name another file, such as {folder / 'report.html'}.")


def _write_page(path: Path, report: Mapping[str, object]) -> None:
    from llmscale.report.html_page import build_page

    runs = report["runs"]
    assert isinstance(runs, list)
    title = str(runs[0]["name"]) if len(runs) == 1 else f"{len(runs)} runs"
    write_output_file("--html", path, build_page(report, f"{title} - llmscale report"))


def _write_json(path: Path, report: Mapping[str, object]) -> None:
    write_output_file("--json", path, json.dumps(report, allow_nan=False, indent=1) + "\n")


def _write_picture(format: str, path: Path, report: Mapping[str, object]) -> None:
    from llmscale.report.run_plot import plot_runs

    plot_runs(path, report, format)


_WRITERS: Mapping[str, Callable[[Path, Mapping[str, object]], None]] = {
    "html": _write_page,
    "png": partial(_write_picture, "png"),
    "svg": partial(_write_picture, "svg"),
    "json": _write_json,
}


def _announced_reading(runs: Sequence[Path]) -> AbstractContextManager[None]:
    """Announce the reading, which takes seconds for a long run."""
    what = make_visible_line(str(runs[0])) if len(runs) == 1 else f"{len(runs)} runs"
    return show_if_slow(f"reading {what}")


def _print_run(run: Path) -> None:
    with _announced_reading([run]):
        history = load_history(run)
    manifest = load_run_manifest(run)
    entropy = _entropy(manifest, "train")
    print_fitting(["loss, nats per token: * training, o validation" + (", --- unigram entropy" if entropy else "")])
    width = min(_CHART_WIDTH, (output_width() or 200) - _CHART_MARGIN)
    print(draw_chart({"*": list(history.train.items()), "o": list(history.validation.items())}, entropy, width=width))
    losses = list(history.train.values())
    last_step = list(history.train)[-1]
    lines = ["", f"training loss    {losses[0]:.3f} -> {losses[-1]:.3f}{_compare(losses[-1], entropy)}"]
    if history.validation:
        final = list(history.validation.values())[-1]
        lines.append(f"validation loss  {final:.3f}{_compare(final, _entropy(manifest, 'val'))}")
    rate = history.median_tokens_per_second
    speed = "speed not known" if math.isnan(rate) else f"{rate:,.0f} tokens/s"
    lines.append(f"progress         {last_step:,} steps, {history.tokens_seen[last_step]:,} tokens, {speed}")
    lines += _wall_time(history)
    print_fitting(lines)
    saved = list_checkpoints(run)
    print_visible(f"checkpoint       {saved[0] if saved else 'none yet'}")
    _print_gaps(run, history)


def _wall_time(history: RunHistory) -> list[str]:
    """Return the line on the wall time since the first start, without uses below 0.05 %."""
    shares = history.wall_shares()
    said = [f"{share:.1%} {WALL_TIME[use]}" for use, share in shares.items() if share >= 0.0005 or use == "steps"]
    return [f"wall time        {', '.join(said)}"] if said else []


def _print_gaps(run: Path, history: RunHistory) -> None:
    """Print what is missing from the run's records."""
    print_fitting(f"metrics          {note}" for note in history.notes())
    gaps = read_recorded(run).gaps
    if gaps:
        print_visible(f"sample record    INCOMPLETE: {'; '.join(gaps)} missing")


def _entropy(manifest: Manifest | None, split: str) -> float | None:
    """Return a split's unigram entropy in nats: the loss of a model that knows only the tokens' frequencies."""
    return manifest.splits[split].unigram_entropy_nats if manifest and split in manifest.splits else None


def _compare(loss: float, entropy: float | None) -> str:
    """Compare a loss with the unigram entropy, if that is known."""
    if entropy is None:
        return ""
    side = "below" if loss < entropy else "ABOVE"
    return f"  ({abs(entropy - loss):.3f} {side} the unigram entropy of its tokens, {entropy:.3f})"
