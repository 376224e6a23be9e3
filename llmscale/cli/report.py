"""`llmscale report RUN...`: results of runs, in the terminal, as a page, as a picture or as JSON."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.checkpoint.inventory import list_checkpoints
from llmscale.checkpoint.manifest import CHECKPOINTS_NAME
from llmscale.checkpoint.remote_run import fetch_run
from llmscale.cli.runs import print_runs, runs_below
from llmscale.config.command_line import flag, local_path, run_place
from llmscale.config.user_paths import check_output_file, url_of, write_output_file
from llmscale.error_handling import print_error
from llmscale.errors import ConfigError, LlmscaleError
from llmscale.files.folder_lock import LOCK_NAME
from llmscale.report.history import WALL_TIME, RunHistory, load_history, load_run_manifest
from llmscale.report.run_list import MOST_RUNS, ListedRun, is_claimed, is_run_folder, stamp_run
from llmscale.terminal.status_line import show_if_slow
from llmscale.terminal.table import output_width, print_fitting
from llmscale.training.run_folder import (
    ATTEMPTS_NAME,
    CONFIG_NAME,
    DS_CONFIG_NAME,
    FAILURE_NAME,
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

#: Seconds between two loads of a page of a run that lives.
_RELOAD_S = 10
#: Pauses between two looks at the records, on this disk and in a store, and what clears a terminal.
_WATCH_S = 2.0
_WATCH_REMOTE_S = 30.0
_CLEAR = "\x1b[H\x1b[2J\x1b[3J"
#: Places that the user named, each with the runs below it; none below a run.
_Selection = list[tuple[Path, list[ListedRun]]]
_OUTPUTS = ("html", "png", "svg", "json")
#: Largest width of the chart, and width of its axis.
_CHART_WIDTH = 64
_CHART_MARGIN = 12
#: Limit of a text that the model wrote.
_MOST_LETTERS = 2_000


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `report`."""
    parser = subparsers.add_parser(
        "report",
        description="Without a file, print each run's curve; in files, draw several runs over each other.",
    )
    parser.add_argument("runs", type=run_place, nargs="+", metavar="RUN", help="run folder, or a folder of runs")
    flag(parser, "--watch", "report again whenever records change, until Ctrl-C; a page reloads while its runs live")
    files = parser.add_argument_group("files")
    for name, what in (
        ("html", "a self-contained page with every chart"),
        ("png", "the main charts as a picture (needs matplotlib)"),
        ("svg", "the main charts as a drawing (needs matplotlib)"),
        ("json", "the numbers of the charts"),
    ):
        flag(files, f"--{name} FILE", what, local_path)
    parser.set_defaults(handler=_run, is_of_runs=False)


def _run(args: argparse.Namespace) -> int:
    wanted = {name: path for name in _OUTPUTS if (path := getattr(args, name)) is not None}
    _check(args.runs, wanted)
    selection = _find(args.runs)
    _check([run.path for _, runs in selection for run in runs][:MOST_RUNS], wanted)
    # Before the report, so that what is written while it is made counts as a change.
    seen = _stamps(selection)
    _report(selection, wanted, is_watched=args.watch)
    if args.watch:
        with suppress(KeyboardInterrupt):
            _watch(args.runs, seen, wanted)
    return 0


def _find(places: Sequence[Path]) -> _Selection:
    """Return each place with the runs below it, none for a run itself. Raises LlmscaleError."""
    selection: _Selection = []
    for place in places:
        if url_of(place) or (place.is_dir() and not is_run_folder(place)):
            runs = runs_below(place)
        else:
            runs = []
        # Without runs it counts as one, whose reading explains what is missing.
        is_run = not runs or [run.path for run in runs] == [place]
        selection.append((fetch_run(place), []) if is_run else (place, runs))
    return selection


def _report(selection: _Selection, wanted: Mapping[str, Path], *, is_watched: bool) -> None:
    """Print or write the report of runs, and of runs below folders; a page that is watched reloads while they live."""
    if not wanted:
        for number, (place, runs) in enumerate(selection):
            if len(selection) > 1:
                print_visible(f"{'' if number == 0 else chr(10)}{make_visible_line(str(place))}")
            if runs:
                print_runs(runs, place)
            else:
                _print_run(place)
        return
    # Importing this takes longer than a report in the terminal.
    from llmscale.report.data import build_report

    folders = list(dict.fromkeys(_paths(selection)))
    with _announced_reading(folders):
        report = build_report(folders[:MOST_RUNS], [run for _, runs in selection for run in runs])
    lives = is_watched and any(map(is_claimed, folders))
    writers: dict[str, Callable[[Path, Mapping[str, object]], None]] = {**_WRITERS}
    writers["html"] = partial(_write_page, reload_s=_RELOAD_S if lives else None)
    for name, path in wanted.items():
        writers[name](path, report)
        print_visible(f"{path}: {path.stat().st_size / 1e3:,.0f} KB" if path.is_file() else f"{path}")


def _watch(places: Sequence[Path], seen: list[object], wanted: Mapping[str, Path]) -> None:
    """Report again whenever the records of a run change, with at most a tenth of a core."""
    took_s = 0.0
    pause_s = _WATCH_REMOTE_S if any(map(url_of, places)) else _WATCH_S
    while True:
        # Who reads a pipe sees it now; if nobody reads it, this raises BrokenPipeError.
        print(end="", flush=True)
        time.sleep(max(pause_s, 9 * took_s))
        began = time.monotonic()
        try:
            selection = _find(places)
            if seen != (seen := _stamps(selection)):
                if not wanted:
                    print(_CLEAR if sys.stdout.isatty() else "\n", end="")
                _report(selection, wanted, is_watched=True)
        except BrokenPipeError:
            raise
        except (LlmscaleError, OSError) as error:
            # A file that is removed or replaced meanwhile is another change.
            print_error(str(error))
        took_s = time.monotonic() - began


def _stamps(selection: _Selection) -> list[object]:
    return [(path, stamp_run(path), is_claimed(path)) for path in _paths(selection)]


def _paths(selection: _Selection) -> list[Path]:
    return [path for place, runs in selection for path in ([run.path for run in runs] or [place])]


def _check(runs: Sequence[Path], wanted: Mapping[str, Path]) -> None:
    """Refuse files that cannot be written, before anything is read."""
    if len(runs) > MOST_RUNS:
        raise ConfigError(f"{len(runs)} runs are more than a report shows; name at most {MOST_RUNS}.")
    for name, path in wanted.items():
        check_output_file(f"--{name}", path, overwrite=True)
        for run in runs:
            check_apart(f"--{name} {path}", path.resolve(), run)
    places = [path.resolve() for path in wanted.values()]
    if len(set(places)) < len(places):
        named = ", ".join(f"--{name} {path}" for name, path in wanted.items())
        raise ConfigError(f"two of {named} are the same file; name another for each.")
    if {"png", "svg"} & wanted.keys():
        from llmscale.report.save_figure import import_pyplot

        import_pyplot("--png and --svg need")


def check_apart(named: str, place: Path, run: Path, proposed: str = "report.html") -> None:
    """Refuse a file that the run itself wrote: a report beside them is welcome. Raises ConfigError."""
    files = (METRICS_NAME, CONFIG_NAME, STARTS_NAME, DS_CONFIG_NAME, LOCK_NAME, FAILURE_NAME, ATTEMPTS_NAME)
    folder = run.resolve()
    if not place.is_relative_to(folder):
        return
    name, *inner = place.relative_to(folder).parts
    if name in ((CHECKPOINTS_NAME, LOGS_NAME, *ORIGIN_FOLDERS) if inner else files):
        raise ConfigError(f"{named} is a file of the run itself; name another file, such as {folder / proposed}.")


def _write_page(path: Path, report: Mapping[str, object], reload_s: int | None) -> None:
    from llmscale.report.html_page import build_page

    runs = report["runs"]
    assert isinstance(runs, list)
    if len(runs) == 1:
        title = str(runs[0]["name"])
    else:
        title = f"{len(runs)} runs"
    write_output_file("--html", path, build_page(report, f"{title} - llmscale report", reload_s))


def _write_json(path: Path, report: Mapping[str, object]) -> None:
    write_output_file("--json", path, json.dumps(report, allow_nan=False, indent=1) + "\n")


def _write_picture(format: str, path: Path, report: Mapping[str, object]) -> None:
    from llmscale.report.run_plot import plot_runs

    plot_runs(path, report, format)


_WRITERS: Mapping[str, Callable[[Path, Mapping[str, object]], None]] = {
    "png": partial(_write_picture, "png"),
    "svg": partial(_write_picture, "svg"),
    "json": _write_json,
}


def _announced_reading(runs: Sequence[Path]) -> AbstractContextManager[None]:
    """Announce the reading, which takes seconds for a long run."""
    if len(runs) == 1:
        what = make_visible_line(str(runs[0]))
    else:
        what = f"{len(runs)} runs"
    return show_if_slow(f"reading {what}")


def _print_run(run: Path) -> None:
    with _announced_reading([run]):
        history = load_history(run)
    manifest = load_run_manifest(run)
    entropy = _entropy(manifest, "train")
    if entropy:
        frequencies = ", --- unigram entropy: what word frequencies alone would give"
    else:
        frequencies = ""
    print_fitting([f"loss, nats per token: * training, o validation{frequencies}"])
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
    print_fitting(f"metrics          {note}" for note in history.notes())
    _print_last_text(run, history)


def _print_last_text(run: Path, history: RunHistory) -> None:
    """Print the newest text that the model wrote in training, or how to get one."""
    samples = [
        (step, text) for step, record in history.of_kind("sample") if isinstance(text := record.get("text"), str)
    ]
    if not samples:
        print_visible(f"text             no samples yet: `llmscale sample {run}`, or --sample-every N in training")
        return
    step, text = samples[-1]
    print_visible(f"\ntext at step {step:,}\n{text[:_MOST_LETTERS]}")


def _wall_time(history: RunHistory) -> list[str]:
    """Return the line on the wall time since the first start, without uses below 0.05 %."""
    shares = history.wall_shares()
    uses = [f"{share:.1%} {WALL_TIME[use]}" for use, share in shares.items() if share >= 0.0005 or use == "steps"]
    if uses:
        return [f"wall time        {', '.join(uses)}"]
    return []


def _entropy(manifest: Manifest | None, split: str) -> float | None:
    """Return a split's unigram entropy in nats: the loss of a model that knows only the tokens' frequencies."""
    if manifest:
        return manifest.unigram_entropy(split)
    return None


def _compare(loss: float, entropy: float | None) -> str:
    """Compare a loss with the unigram entropy, if that is known."""
    if entropy is None:
        return ""
    side = "below" if loss < entropy else "ABOVE"
    return f"  ({abs(entropy - loss):.3f} {side} the unigram entropy, {entropy:.3f})"


def draw_chart(
    series: Mapping[str, Sequence[tuple[int, float]]], level: float | None = None, *, width: int = 64, height: int = 14
) -> str:
    """Return lines of text, `height` rows of `width` columns with axes, or an empty string without points.

    `series` maps a one-character marker to (step, value) points; later markers are drawn over earlier ones. Points that
    share a column are averaged, values that are not finite are left out. `level` is a horizontal line of dashes.
    """
    finite = {marker: [p for p in points if math.isfinite(p[1])] for marker, points in series.items()}
    steps = [step for points in finite.values() for step, _ in points]
    if not steps:
        return ""
    values = [value for points in finite.values() for _, value in points] + ([] if level is None else [level])
    low = min(values)
    high = max(values)
    first = min(steps)
    last = max(steps)
    grid = [[" "] * width for _ in range(height)]
    if level is not None:
        grid[_place(high - level, high - low, height)] = ["-"] * width
    for marker, points in finite.items():
        columns: dict[int, list[float]] = {}
        for step, value in points:
            columns.setdefault(_place(step - first, last - first, width), []).append(value)
        for column, held in columns.items():
            grid[_place(high - sum(held) / len(held), high - low, height)][column] = marker
    return "\n".join([*_rows(grid, low, high), _axis(first, last, width)])


def _place(offset: float, span: float, cells: int) -> int:
    """Return the cell of `offset` within [0, span], one of `cells`."""
    if span == 0:
        return 0
    return min(round(offset / span * (cells - 1)), cells - 1)


def _rows(grid: list[list[str]], low: float, high: float) -> list[str]:
    """Return the rows, with labels at the top, in the middle and at the bottom."""
    last = len(grid) - 1
    labels = {row: f"{high - (high - low) * row / max(last, 1):.2f}" for row in (0, last // 2, last)}
    return [f"{labels.get(row, ''):>8} |{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]


def _axis(first: int, last: int, width: int) -> str:
    left = str(first)
    right = str(last)
    return f"{'':>8} +{'-' * width}\n{'step':>8}  {left}{right:>{max(width - len(left), len(right) + 1)}}"
