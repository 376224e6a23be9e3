"""`llmscale estimate`: the table of rows, for every strategy or for the user's ds_configs, and what is made from it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from llmscale.cli.estimate.as_json import request_as_dict, rows_as_dict
from llmscale.cli.estimate.emit import emit_ds_config
from llmscale.cli.estimate.request import Request, read_ds_files, read_request
from llmscale.cli.estimate.simulation import Simulation, simulate, simulation_lines
from llmscale.cli.estimate.table import legend_lines, moment_lines, row_lines
from llmscale.cli.train_command import data_words, train_command
from llmscale.config.choices import preset_words
from llmscale.config.user_paths import check_output_file
from llmscale.memory.format_bytes import format_size
from llmscale.planning.largest_micro_batch import Fit, find_fits, find_largest_fit
from llmscale.planning.ranked_configs import Row, Rows, build_rows
from llmscale.planning.recommend import find_cheapest_change, find_enough_nodes, nearest_fit
from llmscale.planning.strategy import CHECKPOINTING

EXIT_NOTHING_FITS = 1
#: What train.py must be told again of what the user said here.
_GIVEN_KEYS = ("model", "n_layer", "n_head", "n_embd", "activation", "dropout", "bias", "precision")


def run(args: argparse.Namespace) -> int:
    """0 when something fits, 1 when nothing does."""
    request = read_request(args)
    if args.emit is not None:
        check_output_file("--emit", args.emit, overwrite=args.force)
    if args.plot is not None:
        check_output_file("--plot", args.plot, overwrite=True)
    rows, names = _build(args, request)
    simulations = _simulate(request, rows, names) if args.dry_run else []
    if args.json:
        simulated = [simulation.as_dict() for simulation in simulations]
        print(json.dumps(request_as_dict(request) | rows_as_dict(rows, names) | {"dry_runs": simulated}, indent=1))
    else:
        for line in _lines(request, rows, names, simulations):
            print(line)
    if args.plot is not None:
        _plot(args.plot, request, rows, names)
    if args.emit is not None and rows.recommended is not None:
        emit_ds_config(args.emit, rows.recommended.fit, args.nvme_path)
    if not args.json:
        for line in _last_lines(args, request, rows):
            print(line)
    return 0 if rows.recommendation else EXIT_NOTHING_FITS


def _build(args: argparse.Namespace, request: Request) -> tuple[Rows, list[str] | None]:
    """The rows; and the files' names where --ds gives them."""
    job, mode = request.job, request.config.activation_checkpointing
    if args.ds is None:
        fits = find_fits(job, request.precision, args.nvme_path, (mode,) if mode else CHECKPOINTING)
    else:
        fits = [find_largest_fit(ds, job, mode) for ds, mode in read_ds_files(args.ds, request)]
    names = None if args.ds is None else [_short(path, args.ds) for path in args.ds]
    return build_rows(fits, job, request.gpu, request.interconnect), names


def _short(path: Path, paths: list[Path]) -> str:
    """The file's name, with its folder where two are called alike."""
    return path.name if [other.name for other in paths].count(path.name) == 1 else str(path)


def _simulate(request: Request, rows: Rows, names: list[str] | None) -> list[Simulation]:
    """Of every file, else of the recommended row, else of the one that misses least."""
    fits = [row.fit for row in rows.rows]
    if names is None:
        fits = [rows.recommended.fit if rows.recommended else nearest_fit(fits)]
    return [simulate(fit, request.job.shape) for fit in fits]


def _lines(request: Request, rows: Rows, names: list[str] | None, simulations: list[Simulation]) -> Iterator[str]:
    shape, job = request.job.shape, request.job
    model = request.config.model if "model" in request.config.model_fields_set else "model"
    yield (
        f"{model}: {shape.num_parameters:,} parameters ({shape.n_layer} layers, {shape.n_head} heads, width "
        f"{shape.n_embd}, vocabulary {shape.vocab_size:,}), sequences of {shape.seq_len:,}"
    )
    reshaped = preset_words(model, shape, "a") if model != "model" else None
    if reshaped:
        yield f"  {reshaped}"
    precisions = " and ".join(sorted({row.fit.layout.precision for row in rows.rows}))
    yield (
        f"on {request.machines_in_words}, {precisions}, global batch {job.global_batch_size:,} sequences = "
        f"{job.global_batch_size * shape.seq_len:,} tokens"
    )
    yield ""
    chosen = rows.recommendation.index if rows.recommendation else None
    yield from row_lines(rows.rows, chosen, names)
    yield ""
    yield from legend_lines(rows.rows)
    if names is not None:
        for row, name in zip(rows.rows, names, strict=True):
            yield from _explain(row, name)
    for simulation in simulations:
        yield ""
        yield from simulation_lines(simulation)
    yield ""


def _explain(row: Row, name: str) -> Iterator[str]:
    """One ds_config moment by moment."""
    fit = row.fit
    yield ""
    yield (
        f"{name}: {fit.strategy.describe()}, {fit.layout.precision}, "
        f"gradients summed in {fit.layout.grad_accum_dtype}; {fit.plan.describe()}"
    )
    for warning in fit.ds.warnings:
        yield f"  warning: {warning}"
    yield from moment_lines(fit.estimate.moments, fit.estimate.peak_moment)


def _last_lines(args: argparse.Namespace, request: Request, rows: Rows) -> Iterator[str]:
    """What to take, or what is missing."""
    if rows.recommendation is None or rows.recommended is None:
        yield from _nothing_fits(args, request, [row.fit for row in rows.rows])
        return
    fit = rows.recommended.fit
    name = args.ds[rows.recommendation.index].name if args.ds else fit.strategy.describe()
    yield f"* {name}, micro-batch {fit.plan.micro_batch_size}: {rows.recommendation.why}"
    ds_path = args.ds[rows.recommendation.index] if args.ds else args.emit
    if args.emit is not None:
        yield f"  written: {args.emit}"
    if ds_path is not None:
        given = {key: getattr(request.config, key) for key in _GIVEN_KEYS if key in request.config.model_fields_set}
        yield f"  {train_command(str(ds_path), fit, given)}"
        yield f"  {data_words(request.job.shape.seq_len, request.job.shape.vocab_size)}"
    else:
        yield "  --emit FILE writes its ds_config and prints the train.py command."


def _nothing_fits(args: argparse.Namespace, request: Request, fits: list[Fit]) -> Iterator[str]:
    """By how much, and the cheapest change."""
    nearest, job = nearest_fit(fits), request.job
    if nearest.spare_bytes < 0:
        missing = f"{format_size(-nearest.spare_bytes)} more per GPU"
    else:
        missing = f"{format_size(-(nearest.host_spare_bytes or 0))} more host memory per node"
    where = f"{nearest.strategy.describe()}, micro-batch {nearest.plan.micro_batch_size}"
    yield f"Nothing fits. The row that misses least needs {missing}: {where}."
    # Where the user fixed something, giving that up may be enough; with all strategies tried, only GPUs are left.
    change = None
    if args.ds is not None or job.micro_batch_size is not None or request.config.activation_checkpointing is not None:
        change = find_cheapest_change(job, fits)
    if change is not None:
        yield f"The smallest change that fits: {change.describe()}: {change.fit.strategy.describe()}."
        return
    enough = find_enough_nodes(job, fits)
    if enough is None:
        yield "More GPUs do not help: a shorter --seq-len or a smaller model does (--max-model finds the largest)."
        return
    machines, fit = enough
    yield (
        f"The cheapest change: {machines.world_size} GPUs (--num-nodes {machines.num_nodes}), "
        f"{fit.strategy.describe()}, micro-batch {fit.plan.micro_batch_size} ({format_size(fit.spare_bytes)} to spare)."
    )


def _plot(path: Path, request: Request, rows: Rows, names: list[str] | None) -> None:
    from llmscale.report.memory_plot import MemoryBar, plot_memory

    chosen = rows.recommendation.index if rows.recommendation else None
    bars = [
        MemoryBar(
            label=_label(row.fit, names[index] if names else None),
            peak=row.fit.estimate.peak,
            reserve_bytes=row.fit.estimate.reserve_bytes,
            context_bytes=row.fit.estimate.context_bytes,
            fits=row.fit.fits,
            recommended=index == chosen,
        )
        for index, row in enumerate(rows.rows)
    ]
    model = request.config.model if "model" in request.config.model_fields_set else ""
    title = f"{model} on {request.machines_in_words}, sequences of {request.job.shape.seq_len:,}"
    plot_memory(path, bars, request.job.machines.gpu_bytes, title)


def _label(fit: Fit, name: str | None) -> str:
    strategy = fit.strategy
    parts = [name] if name else [f"ZeRO {strategy.zero_stage}", strategy.offload if strategy.offload != "-" else ""]
    if strategy.checkpointing != "none":
        parts.append(f"{strategy.checkpointing} ckpt")
    return ", ".join([*filter(None, parts), f"batch {fit.plan.micro_batch_size}"])
