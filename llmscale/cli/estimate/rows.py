"""`llmscale estimate`: the table of rows, for every strategy or for the user's ds_configs, and what is made from it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.cli.estimate.as_json import comparison_as_dict, ranking_as_dict, search_as_dict
from llmscale.cli.estimate.request import EstimateRequest, read_request
from llmscale.cli.estimate.table import comparison_lines, legend_lines, moment_lines, row_lines
from llmscale.cli.train_command import data_words, model_words, train_command
from llmscale.config.choices import preset_words
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.hf_model import is_published
from llmscale.config.optimizers import ADAMW
from llmscale.config.presets import PRESETS
from llmscale.config.user_paths import check_output_file, write_output_file
from llmscale.dry_run.on_demand import with_recordings
from llmscale.memory.format_bytes import format_size
from llmscale.planning.recommend import Misfit, Ranking, find_misfit, nearest_fit, rank_configs
from llmscale.planning.search import Candidate, Search, strategy_ds_config
from llmscale.report.save_figure import check_plot
from llmscale.terminal.colour import paint
from llmscale.terminal.table import output_width, print_fitting, wrap_line, wrap_lines

if TYPE_CHECKING:  # a plain estimate does not wait for what only --dry-run and --emit need
    from llmscale.dry_run.on_demand import Comparison

EXIT_NOTHING_FITS = 1
#: Beside those of the model, what train.py must be told again of what the user said here.
_TOLD_KEYS = ("precision", "optimizer", "loss_chunk_tokens")


def run(args: argparse.Namespace) -> int:
    """0 when something fits, 1 when nothing does."""
    if args.emit is not None:
        check_output_file("--emit", args.emit, overwrite=args.force)
    if args.plot is not None:
        check_plot(args.plot)
    request = read_request(args)
    ranking = with_recordings(lambda: rank_configs(request.search), model_words(request.model_keys))
    names = _names([ds.source for ds, _ in request.search.files])
    dry_runs = _dry_runs(request.search, ranking) if args.dry_run else []
    if args.json:
        values = search_as_dict(request.search) | ranking_as_dict(ranking, names)
        print(json.dumps(values | {"dry_runs": [comparison_as_dict(dry_run) for dry_run in dry_runs]}, indent=1))
    else:
        print_fitting(_lines(request, ranking, names, dry_runs))
    if args.plot is not None:
        _plot(args.plot, request, ranking, names)
    if args.emit is not None and ranking.recommended is not None:
        _emit(args.emit, ranking.recommended.fit, request.search.nvme_path)
    if not args.json:
        for line in _last_lines(request, ranking, args.emit):
            print(line)
    return 0 if ranking.recommendation else EXIT_NOTHING_FITS


def _names(paths: list[str]) -> list[str] | None:
    """The files' names, with their folders where two are called alike; None where there are no files."""
    names = [Path(path).name for path in paths]
    return [name if names.count(name) == 1 else path for name, path in zip(names, paths, strict=True)] or None


def _dry_runs(search: Search, ranking: Ranking) -> list[Comparison]:
    """Of every file, else of the recommended row, else of the one that misses least."""
    from llmscale.dry_run.on_demand import compare_with_dry_run

    fits = ranking.fits
    if not search.files:
        fits = [ranking.recommended.fit if ranking.recommended else nearest_fit(fits)]
    return [compare_with_dry_run(fit, search.job.shape) for fit in fits]


def _emit(path: Path, fit: Candidate, nvme_path: str) -> None:
    """Write the row's ds_config, all of it or nothing. Raises ConfigError."""
    config = strategy_ds_config(fit.strategy, fit.step.precision, nvme_path)
    parse_ds_config(config, str(path))
    write_output_file("--emit", path, json.dumps(config, indent=2) + "\n")


def _lines(
    request: EstimateRequest, ranking: Ranking, names: list[str] | None, dry_runs: list[Comparison]
) -> Iterator[str]:
    job = request.search.job
    shape, model = job.shape, str(request.given.get("model", "model"))
    yield (
        f"{model}: {shape.num_parameters:,} parameters ({shape.n_layer} layers, {shape.n_head} heads, width "
        f"{shape.n_embd}, vocabulary {shape.vocab_size:,}), sequences of {shape.seq_len:,}"
    )
    reshaped = preset_words(model, shape, "a") if model in PRESETS else None
    if reshaped:
        yield f"  {reshaped}"
    if is_published(model) and shape.vocab_size != shape.padded_vocab_size:
        yield f"  its table of {shape.vocab_size:,} rows is padded to {shape.padded_vocab_size:,} here"
    precisions = " and ".join(sorted({fit.step.precision for fit in ranking.fits}))
    optimizer = "" if job.optimizer is ADAMW else f"{job.optimizer.name}, "
    yield (
        f"on {request.machines_in_words}, {precisions}, {optimizer}global batch {job.global_batch_size:,} sequences "
        f"= {job.global_batch_size * shape.seq_len:,} tokens"
    )
    yield ""
    chosen = ranking.recommendation.index if ranking.recommendation else None
    yield from row_lines(ranking.configs, chosen, names)
    yield ""
    yield from legend_lines(ranking.configs)
    if names is not None:
        for fit, name in zip(ranking.fits, names, strict=True):
            yield from _explain(fit, name)
    for dry_run in dry_runs:
        yield ""
        yield from comparison_lines(dry_run)
    yield ""


def _explain(fit: Candidate, name: str) -> Iterator[str]:
    """One ds_config moment by moment."""
    yield ""
    yield (
        f"{name}: {fit.strategy.describe()}, {fit.step.precision}, "
        f"gradients summed in {fit.step.engine_config.grad_accum_dtype}; {fit.plan.describe()}"
    )
    for warning in fit.ds.warnings:
        yield f"  warning: {warning}"
    yield from moment_lines(fit.estimate.moments, fit.estimate.peak_moment)


def _last_lines(request: EstimateRequest, ranking: Ranking, emitted: Path | None) -> Iterator[str]:
    """What to take, or what is missing."""
    search = request.search
    if ranking.recommendation is None or ranking.recommended is None:
        yield from wrap_lines(_shortfall_lines(find_misfit(search, ranking.fits)), output_width())
        return
    fit = ranking.recommended.fit
    ds_path = Path(fit.ds.source) if search.files else emitted
    name = Path(fit.ds.source).name if search.files else fit.strategy.describe()
    choice = f"* {name}, micro-batch {fit.plan.micro_batch_size}: {ranking.recommendation.why}"
    yield from (paint(line, "green", sys.stdout) for line in wrap_line(choice, output_width()))
    if emitted is not None:
        yield f"  written: {emitted}"
    if ds_path is not None:
        keys = request.model_keys
        told = {key: request.given[key] for key in _TOLD_KEYS if key in request.given}
        yield f"  {train_command(str(ds_path), fit, keys | told)}"
        yield f"  {data_words(search.job.shape, keys)}"
    else:
        yield from wrap_line("  --emit FILE writes its ds_config and prints the train.py command.", output_width())


def _shortfall_lines(shortfall: Misfit) -> Iterator[str]:
    """By how much, and the cheapest change."""
    nearest, change = shortfall.nearest, shortfall.change
    if nearest.spare_bytes < 0:
        missing = f"{format_size(-nearest.spare_bytes)} more per GPU"
    else:
        missing = f"{format_size(-(nearest.host_spare_bytes or 0))} more host memory per node"
    where = f"{nearest.strategy.describe()}, micro-batch {nearest.plan.micro_batch_size}"
    yield f"Nothing fits. The row that misses least needs {missing}: {where}."
    if change is not None:
        yield f"The smallest change that fits: {change.describe()}: {change.fit.strategy.describe()}."
    elif shortfall.more_nodes is None:
        yield "More GPUs do not help: a shorter --seq-len or a smaller model does (--max-model finds the largest)."
    else:
        machines, fit = shortfall.more_nodes
        yield (
            f"The cheapest change: {machines.world_size} GPUs (--num-nodes {machines.num_nodes}), "
            f"{fit.strategy.describe()}, micro-batch {fit.plan.micro_batch_size} "
            f"({format_size(fit.spare_bytes)} to spare)."
        )


def _plot(path: Path, request: EstimateRequest, ranking: Ranking, names: list[str] | None) -> None:
    from llmscale.report.memory_plot import MemoryBar, plot_memory

    chosen = ranking.recommendation.index if ranking.recommendation else None
    bars = [
        MemoryBar(
            label=_label(fit, names[index] if names else None),
            peak=fit.estimate.peak,
            reserve_bytes=fit.estimate.reserve_bytes,
            context_bytes=fit.estimate.context_bytes,
            fits=fit.fits,
            recommended=index == chosen,
        )
        for index, fit in enumerate(ranking.fits)
    ]
    job, model = request.search.job, request.given.get("model", "")
    title = f"{model} on {request.machines_in_words}, sequences of {job.shape.seq_len:,}"
    plot_memory(path, bars, job.machines.gpu_bytes, title)


def _label(fit: Candidate, name: str | None) -> str:
    strategy = fit.strategy
    parts = [name] if name else [f"ZeRO {strategy.stage_words}", strategy.offload if strategy.offload != "-" else ""]
    if strategy.checkpointing != "none":
        parts.append(f"{strategy.checkpointing} ckpt")
    return ", ".join([*filter(None, parts), f"batch {fit.plan.micro_batch_size}"])
