"""`llmscale ladder`: train several sizes for a scaling law of your own, or one size at several learning rates."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale import limits
from llmscale.cluster.hosts import search_path
from llmscale.config.bundled_files import install_command, is_in_checkout
from llmscale.config.command_line import Need, flag, local_path, number, path_or_url, quantity, whole_number
from llmscale.config.user_paths import check_output_folder, write_output_file
from llmscale.errors import ConfigError
from llmscale.planning.scaling_ladder import (
    CONFIGS_NAME,
    LADDER_NAME,
    LEAST_RESAMPLES,
    LEAST_RULE_FLOPS,
    MOST_RESAMPLES,
    RUNS_NAME,
    Ladder,
    LadderRequest,
    LadderRun,
    add_rates,
    is_same_sweep,
    load_ladder,
    plan_ladder,
    plan_sweep,
    save_ladder,
)
from llmscale.report.run_list import read_run
from llmscale.terminal.human_numbers import count_nouns, format_quantity
from llmscale.terminal.table import Column, output_width, print_fitting, table_lines
from llmscale.training.stop_request import STOP_SIGNALS, end_with_parent
from llmscale.untrusted.interpreter import module_command
from llmscale.untrusted.paths import check_regular
from llmscale.untrusted.terminal import print_visible

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from llmscale.config.command_line import FlagParser
    from llmscale.training.inputs import Inputs

#: Status of `ladder fit` when the runs determine no law.
EXIT_UNDETERMINED = 1
#: Status of `ladder run` when another process trains some of the runs.
_OTHERS_TRAIN = 3
_SCRIPT = Path("scripts", "slurm", "train.sbatch")
_ARRAY_NAME = "array.sbatch"
_COLUMNS = (
    Column("run", is_text=True, least=12),
    Column("N"),
    Column("layers x width", drop=3),
    Column("tokens D"),
    Column("D/N"),
    Column("steps", drop=1),
    Column("batch", drop=4),
    Column("lr", drop=2),
    Column("FLOPs"),
    Column("hours"),
)


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `ladder` with its subcommands."""
    actions = subparsers.add_parser("ladder").add_subparsers(metavar="ACTION", required=True)
    text = "choose sizes and token counts for a budget, and write a run file for each"
    example = "llmscale ladder plan --flops 1e18 --data data/mine --out ladder"
    _add_plan_flags(actions.add_parser("plan", help=text, example=example))
    text = "train the runs one after the other, least compute first, and resume what was interrupted"
    run = actions.add_parser(
        "run",
        help=text,
        example="llmscale ladder run ladder",
        epilog=f"status: 0 all finished, {_OTHERS_TRAIN} others still train some, 128 + N stopped by signal N, "
        "else that of the run that failed.",
    )
    run.add_argument("folder", type=local_path, metavar="DIR", help="folder of `ladder plan`")
    _add_train_flags(run)
    run.set_defaults(handler=lambda args: _train(args, load_ladder(args.folder)))
    _add_sweep(actions)
    text = "fit the finished runs: law.json, fit.json, pictures (with matplotlib) and predictions of larger runs"
    fit = actions.add_parser(
        "fit",
        help=text,
        example="llmscale ladder fit ladder",
        epilog=f"status: 0 fitted, {EXIT_UNDETERMINED} the runs do not determine a law, 2 they are too few.",
    )
    fit.add_argument("folder", type=local_path, metavar="DIR", help="folder of `ladder plan`")
    text = "resamples of the residuals for intervals, which law.json keeps"
    flag(fit, "--resamples N", text, whole_number(LEAST_RESAMPLES, MOST_RESAMPLES), 400)
    fit.set_defaults(handler=lambda args: _report(args.folder, load_ladder(args.folder), args.resamples))


def _add_train_flags(parser: FlagParser) -> None:
    text = f"write DIR/{_ARRAY_NAME}, a job array with a task per unfinished run, in place of training"
    flag(parser, "--slurm", text)
    parser.add_argument("words", nargs="*", metavar="-- FLAGS", help="flags of `llmscale train`, such as --num-gpus 8")
    parser.passes_on = "`llmscale train`"


def _add_sweep(actions: _SubParsersAction[FlagParser]) -> None:
    text = "train one small size at several learning rates, resume what was interrupted, and give the best rate"
    sweep = actions.add_parser(
        "sweep",
        help=text,
        example="llmscale ladder sweep rates --flops 1e16 --data data/mine",
        epilog=f"status: 0 a rate was found, {EXIT_UNDETERMINED} no rate has the least loss between two others, "
        f"{_OTHERS_TRAIN} others still train some, 128 + N stopped by signal N.",
    )
    sweep.add_argument("folder", type=local_path, metavar="DIR", help="folder of the sweep, new or to continue")
    flag(sweep, "--flops C", "training FLOPs of each run, 6 N D; for a new sweep", quantity(1, 1e36))
    flag(sweep, "--data FOLDER|URL", "dataset; for a new sweep", path_or_url)
    text = "run file with other keys of all runs: block, precision, ds, val_samples; lr is the middle of the rates"
    flag(sweep, "--config FILE", text, local_path)
    flag(sweep, "--tokens-per-parameter X", "those of each run", number(0.01, 1e6), 20.0)
    text = "learning rates, also further ones of a sweep; default: five, from an eighth to twice that of the rule"
    flag(sweep, "--rates LR", text, number(0, limits.MAX_LEARNING_RATE, above=True), nargs="+")
    _add_train_flags(sweep)
    sweep.needs = [Need("flops config tokens_per_parameter", "--data FOLDER|URL"), Need("data", "--flops C")]
    sweep.set_defaults(handler=_sweep)


def _add_plan_flags(parser: FlagParser) -> None:
    flag(parser, "--flops C", "training FLOPs of all runs together, 6 N D each", quantity(1, 1e36))
    flag(parser, "--hours H", "hours for all runs, in place of --flops", number(1e-3, 1e6))
    text = "training FLOPs per second (6 N times the tokens/s of a short run), for --hours and for the cost in hours"
    flag(parser, "--flops-per-second R", text, quantity(1, 1e24))
    flag(parser, "--data FOLDER|URL", "dataset", path_or_url, required=True)
    flag(parser, "--out DIR", "new folder of the ladder", local_path, required=True)
    text = "run file with other keys of all runs: block, precision, ds, val_samples; lr is that of the least compute"
    flag(parser, "--config FILE", text, local_path)
    text = "isoflop: sizes at equal compute (Chinchilla's approach 2); horizons: sizes with four token counts each (1)"
    flag(parser, "--design", text, default="isoflop", choices=["isoflop", "horizons"])
    flag(parser, "--groups N", "amounts of compute of isoflop, each 4 times the one before", whole_number(2, 20), 3)
    flag(parser, "--sizes N", "sizes of a group, each twice the one before", whole_number(3, 20), 5)
    flag(parser, "--tokens-per-parameter X", "those of a group's middle size", number(0.01, 1e6), 20.0)
    flag(parser, "--no-held-out", "no larger run to predict, which takes 4 times the compute of the largest other")
    parser.needs = [Need("hours", "--flops-per-second"), Need("hours", "with --flops", lambda args: not args.flops)]
    parser.set_defaults(handler=_plan)


def _plan(args: argparse.Namespace) -> int:
    if args.flops is None and args.hours is None:
        raise ConfigError("a ladder of which budget? Give --flops C, or --hours H with --flops-per-second R.")
    check_output_folder("--out", args.out)
    if (args.out / LADDER_NAME).exists():
        raise ConfigError(f"--out {args.out} holds a ladder. `llmscale ladder run` resumes it; name a new folder.")
    if args.out.is_dir() and (others := sorted(os.listdir(args.out))):
        raise ConfigError(f"--out {args.out} holds other files, such as {others[0]}. Name a new folder.")
    flops = args.flops or args.hours * 3600 * args.flops_per_second
    request, keys, inputs = _read_request(args, args.out, flops)
    request = replace(request, design=args.design, groups=args.groups, sizes=args.sizes)
    request = replace(request, has_held_out=not args.no_held_out)
    ladder = plan_ladder(request, inputs.config.data, inputs.sets.manifest.tokenizer)
    save_ladder(args.out, ladder, keys)
    available = inputs.sets.num_train_samples * request.like.seq_len
    print_fitting(_plan_lines(args.out, ladder, args.flops_per_second, available))
    return 0


def _read_request(
    args: argparse.Namespace, folder: Path, flops: float
) -> tuple[LadderRequest, dict[str, object], Inputs]:
    """Return what --config and --data decide, the keys of --config, and the inputs. Raises ConfigError."""
    from llmscale.config.optimizers import get_optimizer
    from llmscale.config.run_arguments import load_run_file
    from llmscale.config.run_config import build_run_config
    from llmscale.config.run_keys import keys_of_ladder
    from llmscale.training.inputs import read_inputs
    from llmscale.training.start import resolve_ranks

    if args.config:
        keys = load_run_file(args.config)
    else:
        keys = {}
    if decided := [key for key in keys_of_ladder() if key in keys]:
        raise ConfigError(f"--config {args.config}: the ladder decides {', '.join(decided)}. Remove that.")
    if "://" in args.data:
        data = args.data
    else:
        data = str(Path(args.data).absolute())
    own = {"data": data, "run": folder / RUNS_NAME / "none"}
    config = build_run_config({**keys, **own}, f"--config {args.config}: ", own)
    inputs = read_inputs(config)
    request = LadderRequest(
        flops=flops,
        like=resolve_ranks(inputs, 1).shape,
        tokens_per_parameter=args.tokens_per_parameter,
        lr=config.lr,
        rate_factor=get_optimizer(config.optimizer).default_rate_factor,
    )
    return request, keys, inputs


def _sweep(args: argparse.Namespace) -> int:
    ladder = _read_sweep(args)
    status = _train(args, ladder)
    if status or args.slurm:
        return status
    return _report(args.folder, ladder)


def _read_sweep(args: argparse.Namespace) -> Ladder:
    """Return the sweep, after it is written if it is new or has new rates. Raises ConfigError for another one."""
    from llmscale.config.run_arguments import load_run_file

    folder = args.folder
    rates = args.rates or []
    if (folder / LADDER_NAME).exists():
        ladder = load_ladder(folder)
    else:
        ladder = None
    if ladder is not None and ladder.design != "rates":
        raise ConfigError(f"{folder} holds a ladder of sizes. Name a new folder for the sweep.")
    if args.data is not None:
        check_output_folder("DIR", folder)
        request, keys, inputs = _read_request(args, folder, args.flops)
        planned = plan_sweep(request, rates, inputs.config.data, inputs.sets.manifest.tokenizer)
        if ladder is not None and not is_same_sweep(ladder, planned):
            raise ConfigError(f"{folder} holds a sweep of other data, compute or model. Name a new folder.")
    elif ladder is None:
        raise ConfigError(f"{folder} holds no sweep. A new one needs --flops C and --data FOLDER|URL.")
    else:
        keys = load_run_file(folder / CONFIGS_NAME / f"{ladder.runs[0].name}.yaml")
        planned = ladder
    ladder = add_rates(ladder or planned, rates)
    save_ladder(folder, ladder, keys)
    return ladder


def _report(folder: Path, ladder: Ladder, resamples: int = 0) -> int:
    """Fit the finished runs, write what they say, and return the status."""
    from llmscale.report.ladder_fit import OUTPUTS, fit_ladder, fit_rates

    _check_outputs(folder, *OUTPUTS)
    fit = fit_rates(folder, ladder) if ladder.design == "rates" else fit_ladder(folder, ladder, resamples)
    fit.write(folder)
    print_fitting(fit.lines(folder))
    if find_spec("matplotlib") is None:
        print(f"no picture without matplotlib: {install_command('plot')}")
    else:
        fit.plot(folder)
    return 0 if fit.is_determined else EXIT_UNDETERMINED


def _plan_lines(out: Path, ladder: Ladder, rate: float | None, available: int) -> Iterator[str]:
    """Yield the table of runs, their cost, and what to do next."""
    rows = [
        [
            run.name,
            format_quantity(run.num_parameters),
            f"{run.n_layer} x {run.n_embd}",
            format_quantity(run.tokens),
            f"{run.tokens / run.num_parameters:.3g}",
            f"{run.steps:,}",
            f"{run.global_batch_size:,}",
            f"{run.lr:.2e}",
            f"{run.flops:.2e}",
            f"{run.flops / rate / 3600:.2g}" if rate else "-",
        ]
        for run in ladder.runs
    ]
    yield from table_lines(_COLUMNS, rows, output_width())
    total = sum(run.flops for run in ladder.runs)
    hours = f" = {total / rate / 3600:.3g} hours at {rate:.3g} FLOP/s" if rate else ""
    yield f"{count_nouns(len(ladder.runs), 'run')}, {total:.3g} FLOPs{hours}; {ladder.rule}."
    if min(run.flops for run in ladder.runs) < LEAST_RULE_FLOPS and "least compute" not in ladder.rule:
        yield (
            f"WARNING: that rule was fitted above {LEAST_RULE_FLOPS:g} FLOPs; far below, its rates are too high. Try a "
            "few on the first run, and give the best as lr in --config FILE."
        )
    passes = max(run.tokens for run in ladder.runs) / available
    if passes > 1:
        yield f"WARNING: the largest run reads {ladder.data} {passes:.1f} times; repeated tokens teach less."
    yield f"llmscale ladder run {shlex.quote(str(out))}"


def _train(args: argparse.Namespace, ladder: Ladder) -> int:
    """Train the unfinished runs one after the other, and return the status; with --slurm, write a job array."""
    from llmscale.config.run_keys import keys_of_ladder

    folder: Path = args.folder
    decided = {f"--{key.replace('_', '-')}" for key in (*keys_of_ladder(), "lr")}
    if fixed := [word for word in args.words if word.partition("=")[0] in decided]:
        raise ConfigError(f"{fixed[0]} follows --, but the run files of the ladder decide it. Remove that.")
    left = [run for run in sorted(ladder.runs, key=lambda r: (r.is_held_out, r.flops)) if not _is_done(folder, run)]
    if args.slurm:
        return _write_array(folder, [run for run in left if not _is_taken(folder, run)], args.words)
    stopped: list[int] = []
    failed: set[str] = set()
    for place, run in enumerate(left, 1):
        # Another process may have trained it since.
        if _is_taken(folder, run) or _is_done(folder, run):
            continue
        print_visible(f"== {run.name} ({place} of {len(left)} left)", flush=True)
        status = run_command(["train", *_words(folder, run), *args.words], stopped)
        if ladder.design == "rates" and not stopped and read_run(folder / RUNS_NAME / run.name).state == "failed":
            # A rate that is too large diverges; that is a result.
            print_visible(f"{run.name} failed and is left out")
            failed.add(run.name)
        elif status or stopped or not _is_done(folder, run):
            print_visible(f"stopped in {run.name}; the same command continues", file=sys.stderr)
            return 128 + stopped[0] if stopped else status or 1
    unfinished = [run.name for run in left if run.name not in failed and not _is_done(folder, run)]
    print_visible(f"left: {', '.join(unfinished)}" if unfinished else f"all finished: llmscale ladder fit {folder}")
    return _OTHERS_TRAIN if unfinished else 0


def _is_taken(folder: Path, run: LadderRun) -> bool:
    """Return, after a line, whether another process trains the run now."""
    is_running = read_run(folder / RUNS_NAME / run.name).state == "running"
    if is_running:
        print_visible(f"{run.name} is running already; it is left alone")
    return is_running


def _is_done(folder: Path, run: LadderRun) -> bool:
    listed = read_run(folder / RUNS_NAME / run.name)
    return listed.state == "finished" and listed.step == run.steps


def _words(folder: Path, run: LadderRun) -> list[str]:
    """Return the flags of `llmscale train` for a run."""
    return ["--config", str(folder / CONFIGS_NAME / f"{run.name}.yaml"), "--run", str(folder / RUNS_NAME / run.name)]


def _write_array(folder: Path, left: Sequence[LadderRun], words: Sequence[str]) -> int:
    """Write a job array that calls scripts/slurm/train.sbatch, with its own `#SBATCH` lines. Raises ConfigError."""
    if not is_in_checkout():
        raise ConfigError(f"--slurm needs {_SCRIPT}: call it in the folder of llmscale's repository.")
    if not left:
        print("no run is left to start")
        return 0
    _check_outputs(folder, _ARRAY_NAME)
    directives = [line for line in _SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    cases = [f"{index}) set -- {shlex.join([*_words(folder, run), *words])} ;;" for index, run in enumerate(left)]
    lines = ["#!/usr/bin/env bash", *directives, f"#SBATCH --array=0-{len(left) - 1}", "set -euo pipefail"]
    lines += ['cd "${SLURM_SUBMIT_DIR:?this script is for sbatch}"', "case $SLURM_ARRAY_TASK_ID in", *cases, "esac"]
    write_output_file("--slurm", folder / _ARRAY_NAME, "\n".join([*lines, f'exec bash {_SCRIPT} "$@"', ""]))
    print(f"sbatch {shlex.quote(str(folder / _ARRAY_NAME))}")
    return 0


def _check_outputs(folder: Path, *names: str) -> None:
    """Refuse files of these names that are links or no files, for a ladder's folder may come from anybody."""
    for path in (folder / name for name in names):
        try:
            check_regular(path, follow_links=False)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(f"{path} {error.strerror}, and would be written to. Remove it.") from None


def run_command(words: Sequence[str], received: list[int]) -> int:
    """Run `llmscale ...`, note signals in `received` and pass them on, and return its status, 128 + N for signal N."""
    # In a separate session, Ctrl-C in the terminal reaches this process alone, which passes it on once.
    process = subprocess.Popen(
        module_command("llmscale", *words),
        env={**os.environ, "PYTHONPATH": search_path(os.environ.get("PYTHONPATH"))},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )

    def pass_on(number: int, _frame: object) -> None:
        received.append(number)
        process.send_signal(number)

    numbers = [number for number in (*STOP_SIGNALS, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        status = process.wait()
        return status if status >= 0 else 128 - status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
