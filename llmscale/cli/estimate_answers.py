"""The answers of `llmscale estimate`: rows, GPUs, networks, largest models, longest sequences. No torch."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.architecture.hf_config import HFModel
from llmscale.architecture.layers import ParameterTensors
from llmscale.cli.answers import CATEGORIES, align, gib, show, table
from llmscale.cli.estimate_request import EstimateRequest, read_cluster, read_request
from llmscale.cli.flags import describe_data, given_keys, train_command
from llmscale.config.batch_plan import sequence_parallel_sizes
from llmscale.config.bundled_files import DS_CONFIGS
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.deepspeed.schema import Precision
from llmscale.config.describe_defaults import describe_parameters, describe_preset
from llmscale.config.hardware import GPU, GPU_TABLE_HEAD, Cluster, gpu_table_rows, usable_precision
from llmscale.config.hf_model import is_published
from llmscale.config.optimizers import ADAMW
from llmscale.config.presets import PRESETS
from llmscale.config.run_config import build_run_config
from llmscale.config.user_paths import check_output_file, write_output_file
from llmscale.errors import ConfigError
from llmscale.memory.breakdown import GIB, Breakdown, format_size
from llmscale.memory.estimate import CONTEXT_BYTES, RESERVED_PER_ALLOCATED, MemoryEstimate, estimate_memory
from llmscale.memory.explain import explain_activations
from llmscale.planning.recommend import (
    Misfit,
    RankedConfig,
    Ranking,
    choose_between,
    distinct_rows,
    fastest_by_link,
    fastest_by_split,
    find_misfit,
    nearest_fit,
    rank_trials,
)
from llmscale.planning.scaling import GPT3, scaling_family
from llmscale.planning.search import (
    MARGIN,
    PROCESS_BYTES,
    Candidate,
    HFConfig,
    LargestModel,
    LongestSequences,
    Strategy,
    find_hf_configs,
    find_largest_models,
    find_longest,
    most_room,
    strategy_ds_config,
    with_inputs_on_host,
)
from llmscale.planning.step_time import RATE_ERROR, Throughput
from llmscale.report.save_figure import check_plot
from llmscale.terminal.colour import paint
from llmscale.terminal.table import output_width, print_fitting, wrap_line

if TYPE_CHECKING:  # a plain estimate does not wait for what only --dry-run needs
    from llmscale.dry_run.comparison import Comparison

EXIT_NOTHING_FITS = 1
#: Width of a table of rows in a file or a pipe; with --wide no column is left out.
_TABLE_WIDTH, _ANY_WIDTH = 100, 1_000_000


_STRATEGY_HEADS = {
    "strategy.stage_words": "ZeRO",
    "strategy.offload": "offload",
    "strategy.activation_checkpointing": "checkpt",
}
_ROW_HEADS = {"gpu": "GPU", "usd_per_gpu_hour": "$/h", "ds_config": "ds_config", **_STRATEGY_HEADS, "batch": "batch"}
_ROW_HEADS |= {"filler_share": "fillers"}
#: Columns that `total` consists of.
_PART_HEADS = {f"estimate.peak.{name}": head for name, head in CATEGORIES.items()} | {
    "estimate.reserve_bytes": "reserve",
    "estimate.context_bytes": "context",
}
_TOTAL_HEADS = {"estimate.total_bytes": "total", "verdict": "  fits"}
_RATE_HEADS = {
    "host_bytes_per_node": "host",
    "nvme_bytes_per_node": "NVMe",
    "tokens_per_second": "tok/s",
    "mfu": "MFU",
    "usd_per_billion_tokens": "$ per 1B",
}


@dataclass(frozen=True)
class Row:
    """A run on the GPUs, with its memory and its speed."""

    ds_config: str | None
    strategy: Strategy
    precision: Precision
    micro_batch_size: int
    gradient_accumulation_steps: int
    filler_share: float
    grad_accum_dtype: str
    estimate: MemoryEstimate
    fits: bool
    has_margin: bool
    spare_bytes: int
    host_bytes_per_node: int
    nvme_bytes_per_node: int
    throughput: Throughput | None
    gpu: str | None
    """Name of the GPU, where several are compared."""
    usd_per_gpu_hour: float | None
    usd_per_billion_tokens: float | None
    """Price of the GPUs for a billion tokens; None if it does not fit, or without the price of a GPU-hour."""
    verdict: str
    """Sentence on whether it fits, and by how much."""

    @property
    def batch(self) -> str:
        return f"{self.micro_batch_size} x {self.gradient_accumulation_steps}"

    @property
    def tokens_per_second(self) -> float | None:
        """Return the rate of a row that fits."""
        return self.throughput.tokens_per_second if self.throughput and self.fits else None

    @property
    def mfu(self) -> float | None:
        """Return the MFU of a row that fits."""
        return self.throughput.mfu if self.throughput and self.fits else None


def make_row(
    row: RankedConfig, name: str | None = None, gpu: str | None = None, usd_per_gpu_hour: float | None = None
) -> Row:
    """Return the record of a ranked run."""
    fit, rate = row.fit, row.throughput
    usd = None
    if rate and fit.fits and usd_per_gpu_hour:
        usd = usd_per_gpu_hour * fit.cluster.world_size / 3600 / rate.tokens_per_second * 1e9
    return Row(
        ds_config=name,
        strategy=fit.strategy,
        precision=fit.step.precision,
        micro_batch_size=fit.plan.micro_batch_size,
        gradient_accumulation_steps=fit.plan.gradient_accumulation_steps,
        filler_share=fit.plan.filler_share,
        grad_accum_dtype=fit.step.engine_config.grad_accum_dtype,
        estimate=fit.estimate,
        fits=fit.fits,
        has_margin=fit.has_margin,
        spare_bytes=fit.spare_bytes,
        host_bytes_per_node=fit.host_bytes_per_node,
        nvme_bytes_per_node=fit.nvme_bytes_per_node,
        throughput=rate,
        gpu=gpu,
        usd_per_gpu_hour=usd_per_gpu_hour,
        usd_per_billion_tokens=usd,
        verdict=_verdict(fit),
    )


def _verdict(fit: Candidate) -> str:
    if fit.spare_bytes < 0:
        return f"  no, {-fit.spare_bytes / GIB:,.1f} over"
    host = fit.host_spare_bytes
    if host is not None and host < 0:
        return f"  no, host {-host / GIB:,.0f} over"
    tight = "" if fit.has_margin else ", host tight" if fit.has_gpu_margin else ", tight"
    return f"  {fit.spare_bytes / GIB:.1f} free{tight}"


def _row_heads(*, wide: bool) -> dict[str, str]:
    peak = {"estimate.peak_moment": "peak in"} if wide else {}
    return _ROW_HEADS | (_PART_HEADS if wide else {}) | _TOTAL_HEADS | peak | _RATE_HEADS


def question_values(request: EstimateRequest) -> dict[str, object]:
    """Return model, machines and assumptions."""
    cluster, step = request.cluster, request.trials[0].step
    return {
        "shape": step.shape,
        "global_batch_size": step.plan.global_batch_size,
        "optimizer": step.optimizer.name,
        "gpu": cluster.gpu,
        "interconnect": cluster.interconnect.name,
        "machines": {
            "num_nodes": cluster.num_nodes,
            "gpus_per_node": cluster.gpus_per_node,
            "gpu_bytes": cluster.gpu_bytes,
            "host_bytes": cluster.host_bytes,
            "world_size": cluster.world_size,
        },
        "assumed": {
            "reserved_per_allocated": RESERVED_PER_ALLOCATED,
            "margin": MARGIN,
            "host_bytes_per_process": PROCESS_BYTES,
        },
    }


@dataclass(frozen=True)
class RowsAnswer:
    """Every row of a question, and the one to take."""

    request: EstimateRequest
    ranking: Ranking
    rows: list[Row]

    @property
    def chosen(self) -> int | None:
        return self.ranking.recommendation.index if self.ranking.recommendation else None

    def values(self) -> dict[str, object]:
        """Return what JSON has."""
        chosen = self.ranking.recommendation
        recommended = None if chosen is None else {"row": chosen.index, "why": chosen.why}
        return question_values(self.request) | {"rows": self.rows, "recommended": recommended}


def find_rows(request: EstimateRequest, gpu: str | None = None, usd_per_gpu_hour: float | None = None) -> RowsAnswer:
    """Fit and rank every run of a question. `gpu`: its name, where several are compared."""
    ranking = rank_trials(request.trials, request.cluster)
    names: Sequence[str | None] = request.names or [None] * len(ranking.configs)
    rows = [make_row(row, name, gpu, usd_per_gpu_hour) for row, name in zip(ranking.configs, names, strict=True)]
    return RowsAnswer(request, ranking, rows)


def answer_rows(args: argparse.Namespace, gpu: GPU) -> int:
    """Print the row to take and those to choose between; return 0 if something fits, else 1."""
    if args.emit is not None:
        check_output_file("--emit", args.emit, overwrite=args.force)
    if args.plot is not None:
        check_plot(args.plot)
    answer = find_rows(read_request(args, gpu), usd_per_gpu_hour=args.price[0] if args.price else None)
    dry_runs = _dry_runs(answer) if args.dry_run else []
    if args.emit is not None and answer.ranking.recommended is not None:
        _emit(args.emit, answer.ranking.recommended.fit, answer.request.nvme_path)
    if args.json:
        comparisons = [_comparison_values(dry_run) for dry_run in dry_runs]
        show(answer.values() | {"dry_runs": comparisons}, (), is_json=True)
    else:
        print_fitting(_question_lines(answer))
        print_fitting(_recommendation_lines(answer, args.emit))
        for line in _table_lines(answer, is_complete=args.all or args.wide, wide=args.wide):
            print(line)
        print_fitting(_detail_lines(answer, args, dry_runs))
    if args.plot is not None:
        _plot(args.plot, answer)
    return 0 if answer.ranking.recommendation else EXIT_NOTHING_FITS


def _question_lines(answer: RowsAnswer) -> Iterator[str]:
    request, ranking = answer.request, answer.ranking
    step, model = request.trials[0].step, str(request.keys.get("model", "model"))
    shape = step.shape
    yield (
        f"{model}: {describe_parameters(shape)} ({shape.n_layer} layers, {shape.n_head} heads, width "
        f"{shape.n_embd}, vocabulary {shape.vocab_size:,}), sequences of {shape.seq_len:,}"
    )
    if model in PRESETS and (reshaped := describe_preset(model, shape, "a")):
        yield f"  {reshaped}"
    if is_published(model) and shape.vocab_size != shape.padded_vocab_size:
        yield f"  its table of {shape.vocab_size:,} rows is padded to {shape.padded_vocab_size:,} here"
    tensors = ParameterTensors(shape.architecture, step.optimizer.frozen)
    if tensors.frozen:
        frozen = shape.num_parameters - tensors.num_trainable
        yield f"  {frozen:,} of them frozen; activations are counted as if all were trained, which is an upper bound"
    # ds_configs may set their own.
    sizes = sorted({fit.plan.global_batch_size for fit in ranking.fits})
    batches, tokens = (" or ".join(f"{size * each:,}" for size in sizes) for each in (1, shape.seq_len))
    optimizer = "" if step.optimizer.name == ADAMW.name else f"{step.optimizer.name}, "
    precisions = " and ".join(sorted({fit.step.precision for fit in ranking.fits}))
    yield f"on {request.machines_in_words}, {precisions}, {optimizer}global batch {batches} sequences = {tokens} tokens"
    yield from request.assumption_lines()
    if step.plan.ranks.sequence_parallel_size > 1:
        yield step.plan.ranks.describe_split(shape.seq_len, shape.n_head, shape.n_kv_head)
    yield ""


def _recommendation_lines(answer: RowsAnswer, emitted: Path | None) -> Iterator[str]:
    """Yield the row to take, its memory, its margin and its command; or the bytes that are missing."""
    request, ranking = answer.request, answer.ranking
    if ranking.recommendation is None or ranking.recommended is None or answer.chosen is None:
        yield from _misfit_lines(find_misfit(ranking.fits, is_restricted=request.is_restricted))
        yield ""
        return
    fit, row = ranking.recommended.fit, answer.rows[answer.chosen]
    name = f"{row.ds_config}: {fit.strategy.describe()}" if row.ds_config else fit.strategy.describe()
    rate = f"; {row.tokens_per_second:,.0f} tokens/s" if row.tokens_per_second else ""
    mfu = f", {row.mfu:.0%} MFU" if row.mfu else ""
    price = f", ${row.usd_per_billion_tokens:,.0f} per billion tokens" if row.usd_per_billion_tokens else ""
    memory = f"{gib(row.estimate.total_bytes)} of {fit.cluster.gpu_bytes / GIB:.1f} GiB"
    choice = f"* {name}, micro-batch {row.batch}: {memory}, {row.verdict.strip()}{rate}{mfu}{price}"
    yield from (paint(line, "green", sys.stdout) for line in wrap_line(choice, output_width()))
    yield f"  {ranking.recommendation.why[0].upper()}{ranking.recommendation.why[1:]}"
    ds, note = _ds_path(fit, request, emitted)
    yield f"  {train_command(ds, fit, request.keys)}"
    yield f"  ({note}{describe_data(fit.step.shape, request.model_keys)})"
    yield ""


def _ds_path(fit: Candidate, request: EstimateRequest, emitted: Path | None) -> tuple[str, str]:
    """Return the ds_config file of a row for its command, and a note on where it comes from."""
    if request.names:
        return fit.ds.source, ""
    if emitted is not None:
        return str(emitted), f"{emitted} is written; "
    # A flag's precision goes before that of the file.
    precision = "bf16" if "precision" in request.keys else fit.step.precision
    wanted = strategy_ds_config(fit.strategy, precision, request.nvme_path)
    for name in DS_CONFIGS.names():
        if _is_like(json.loads((DS_CONFIGS.folder / f"{name}.json").read_text()), wanted):
            return name, ""
    return "ds.json", "--emit ds.json writes it; "


def _is_like(bundled: Mapping[str, object], wanted: Mapping[str, object]) -> bool:
    """Return whether a bundled ds_config has these keys; "auto" switches the default precision on."""
    return bundled.keys() == wanted.keys() and all(
        bundled[key] == value or (key == "bf16" and bundled[key] == {"enabled": "auto"})
        for key, value in wanted.items()
    )


def _misfit_lines(misfit: Misfit) -> Iterator[str]:
    """Yield the missing bytes and the cheapest change."""
    nearest, change, more = misfit.nearest, misfit.change, misfit.more_nodes
    if nearest.spare_bytes < 0:
        missing = f"{format_size(-nearest.spare_bytes)} more per GPU"
    else:
        missing = f"{format_size(-(nearest.host_spare_bytes or 0))} more host memory per node"
    where = f"{nearest.strategy.describe()}, micro-batch {nearest.plan.micro_batch_size}"
    yield f"Nothing fits. The row that misses least needs {missing}: {where}."
    if change is not None:
        yield f"The smallest change that fits: {change.describe()}: {change.fit.strategy.describe()}."
    elif more is None:
        yield (
            "More GPUs do not help: a shorter --seq-len does, GPUs that divide sequences (--max-seq-len compares) or a "
            "smaller model (--max-model finds the largest)."
        )
    else:
        yield (
            f"The cheapest change: {more.cluster.world_size} GPUs (--num-nodes {more.cluster.num_nodes}), "
            f"{more.strategy.describe()}, micro-batch {more.plan.micro_batch_size} "
            f"({format_size(more.spare_bytes)} to spare)."
        )


def _table_lines(answer: RowsAnswer, *, is_complete: bool, wide: bool) -> Iterator[str]:
    """Yield the rows in GiB; `*` marks the recommended one."""
    rows, ranking = answer.rows, answer.ranking
    distinct = [*range(len(rows))] if answer.request.names else distinct_rows(ranking)
    indices = distinct if is_complete or answer.request.names else choose_between(ranking)
    group = "strategy.zero_stage" if is_complete and not answer.request.names else ""
    chosen = None if answer.chosen is None else rows[answer.chosen]
    width = _ANY_WIDTH if wide else output_width() or _TABLE_WIDTH
    shown = [rows[index] for index in indices]
    yield from table(_row_heads(wide=wide), shown, is_marked=lambda row: row is chosen, group=group, width=width)
    yield ""
    hidden = len(distinct) - len(indices)
    more = [f"--all: {hidden} more rows"] if hidden else []
    yield (
        "GiB per GPU at the peak, host and NVMe per node; batch: micro-batch x accumulation. "
        f"{'; '.join([*more, '--wide: all parts', '--why: what is assumed', '--explain: activations'])}."
    )


def _detail_lines(answer: RowsAnswer, args: argparse.Namespace, dry_runs: list[Comparison]) -> Iterator[str]:
    """Yield what was asked for beside the rows."""
    fits = answer.ranking.fits
    fit = fits[answer.chosen] if answer.chosen is not None else nearest_fit(fits)
    if fit.step.shape.num_experts:
        yield from _load_lines(fit)
    if args.why:
        yield ""
        yield from _why_lines(answer.rows, fit.cluster)
    if args.explain:
        yield ""
        yield from _explain_lines(fit)
    for row, explained in zip(answer.rows, fits, strict=True):
        if row.ds_config is not None:
            yield from _moment_lines(row, explained)
    for dry_run in dry_runs:
        yield ""
        yield from _comparison_lines(dry_run)


def _load_lines(fit: Candidate) -> Iterator[str]:
    """Yield what an uneven load of the experts changes."""
    size = fit.plan.ranks.expert_parallel_size
    if size == 1:
        yield "experts: an uneven load does not change these bytes, because one GPU computes all of them."
        return
    worst = estimate_memory(fit.step, fit.cluster.gpu.capability, worst_load=True)
    spare = fit.cluster.gpu_bytes - worst.total_bytes
    verdict = f"{spare / GIB:.1f} free" if spare >= 0 else f"{-spare / GIB:,.1f} over"
    yield (
        f"experts: each group of {size} GPUs divides them, and the rows assume equal loads. If all tokens of a group "
        f"went to one GPU's experts, {fit.strategy.describe()} would take {gib(worst.total_bytes)} GiB, {verdict}."
    )


def margin_line() -> str:
    """Return a note on the memory that a row must leave."""
    return (
        f"Micro-batches leave {MARGIN:.0%} of a GPU and of a node free, because no GPU has calibrated these estimates; "
        "tight: less is free."
    )


def _host_words(cluster: Cluster) -> str:
    """Return how the host memory of offloaded states is checked."""
    if not cluster.host_bytes:
        return "not checked: --host-memory-gib"
    processes = f"{cluster.gpus_per_node} x {format_size(PROCESS_BYTES)} for processes (assumed)"
    return f"with {processes} checked against {format_size(cluster.host_bytes)} (--host-memory-gib)"


def _why_lines(rows: Sequence[Row], cluster: Cluster) -> Iterator[str]:
    """Yield what the numbers rest on, and what is assumed."""
    yield (
        f"Two parts of total are assumed, not measured: {RESERVED_PER_ALLOCATED - 1:.0%} that the allocator holds "
        f"beyond the tensors, and {format_size(CONTEXT_BYTES)} for CUDA, its libraries and NCCL. The tensors are "
        "DeepSpeed's and the model's, by formulas (docs/memory.md)."
    )
    yield (
        "activ counts blocks that run eagerly; compiled ones (train's --compile) keep no more, and at stage 3 gather a "
        "block at a time."
    )
    types = {row.grad_accum_dtype for row in rows if row.gradient_accumulation_steps > 1}
    if types:
        yield (
            f"gradients of several micro-steps are summed in {' or '.join(sorted(types))}, counted in grad and comm "
            "(data_types.grad_accum_dtype of the ds_config)."
        )
    if any(row.filler_share for row in rows):
        yield "fillers: work beyond that of the batch, which does not divide over the GPUs; counted in tok/s and MFU."
    yield margin_line()
    if any(row.host_bytes_per_node for row in rows):
        yield f"host is for what is offloaded; {_host_words(cluster)}."
    rates = [row.throughput for row in rows if row.throughput]
    if rates:
        gains = sorted(f"{rate.compiled_tokens_per_second / rate.tokens_per_second:.2f}" for rate in rates)
        gain = gains[0] if gains[0] == gains[-1] else f"{gains[0]} to {gains[-1]}"
        yield f"tok/s of all GPUs together and MFU are estimated: {RATE_ERROR}."
        yield (
            f"tok/s is that of eager blocks. Compiled ones (train's --compile) are estimated at {gain} times as much, "
            "from torchtitan's published speeds and, at stage 3, from what they gather."
        )


def _explain_lines(fit: Candidate) -> Iterator[str]:
    """Yield the known formula of activations beside ours."""
    plan, shape = fit.plan, fit.step.shape
    yield (
        f"Activations of micro-batch b = {plan.micro_batch_size}, s = {shape.seq_len:,} tokens, width h = "
        f"{shape.n_embd}, a = {shape.n_head} heads, {shape.n_layer} layers, {fit.step.precision}, in GiB. By "
        "Korthikanti et al. 2022 a layer saves s b h (34 + 5 a s / h) bytes in 16 bit, twice that in fp32:"
    )
    for term in explain_activations(fit.step, fit.cluster.gpu.capability):
        yield f"{'= ' if term.is_sum else '  '}{term.num_bytes / GIB:8,.1f}  {term.words}"
    peak = fit.estimate.peak
    others = peak.total_bytes - peak.activations_bytes - peak.logits_bytes
    yield (
        f"Beside them {gib(others)} of parameters, gradients, states and buffers at the peak "
        f"({fit.estimate.peak_moment}), where {gib(peak.total_bytes)} are allocated."
    )


def _moment_lines(row: Row, fit: Candidate) -> Iterator[str]:
    """Yield one ds_config, moment by moment, in GiB; `*` marks the peak."""
    yield ""
    yield (
        f"{row.ds_config}: {fit.strategy.describe()}, {row.precision}, gradients summed in {row.grad_accum_dtype}; "
        f"{fit.plan.describe()}"
    )
    for warning in (*fit.ds.warnings, *fit.ds.batch_notices(fit.plan)):
        yield f"  warning: {warning}"
    moments = [
        ["*" if name == row.estimate.peak_moment else "", name, *_breakdown_cells(moment), gib(moment.total_bytes)]
        for name, moment in row.estimate.moments.items()
    ]
    yield from align(["", "moment", *CATEGORIES.values(), "allocated"], moments)


def _breakdown_cells(breakdown: Breakdown) -> list[str]:
    """Return the cells below CATEGORIES."""
    return [gib(getattr(breakdown, name)) for name in CATEGORIES]


def _dry_runs(answer: RowsAnswer) -> list[Comparison]:
    """Dry-run every file; without files, the recommended row, or the one that misses least."""
    from llmscale.dry_run.comparison import compare_with_dry_run

    fits, recommended = answer.ranking.fits, answer.ranking.recommended
    if not answer.request.names:
        fits = [recommended.fit if recommended else nearest_fit(fits)]
    return [compare_with_dry_run(fit) for fit in fits]


def _comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Yield both breakdowns of each phase, in GiB."""
    fit = comparison.fit
    yield (
        f"dry run: {fit.strategy.describe()}, micro-batch {fit.plan.micro_batch_size}; the real DeepSpeed engine on "
        f"fake tensors as rank 0 of {fit.plan.ranks.world_size}, {comparison.dry_run.seconds:.0f} s"
    )
    cells: list[list[str]] = []
    for phase, (counted, calculated) in comparison.phases.items():
        difference = f"{calculated.total_bytes / counted.total_bytes - 1:+.1%}"
        cells.append([phase, "dry run", *_breakdown_cells(counted), gib(counted.total_bytes), ""])
        cells.append(["", "closed form", *_breakdown_cells(calculated), gib(calculated.total_bytes), difference])
    yield from align(["phase", "by", *CATEGORIES.values(), "allocated", "difference"], cells)


def _comparison_values(comparison: Comparison) -> dict[str, object]:
    return {
        "zero_stage": comparison.fit.strategy.zero_stage,
        "seconds": comparison.dry_run.seconds,
        "resident": comparison.dry_run.resident,
        "phases": {
            phase: {"dry_run": counted, "closed_form": calculated}
            for phase, (counted, calculated) in comparison.phases.items()
        },
    }


def _emit(path: Path, fit: Candidate, nvme_path: str) -> None:
    """Write the row's ds_config atomically. Raises ConfigError."""
    config = strategy_ds_config(fit.strategy, fit.step.precision, nvme_path)
    parse_ds_config(config, str(path))
    write_output_file("--emit", path, json.dumps(config, indent=2) + "\n")


def _plot(path: Path, answer: RowsAnswer) -> None:
    from llmscale.report.memory_plot import MemoryBar, plot_memory

    bars = [
        MemoryBar(
            label=_label(row),
            peak=row.estimate.peak,
            reserve_bytes=row.estimate.reserve_bytes,
            context_bytes=row.estimate.context_bytes,
            fits=row.fits,
            recommended=index == answer.chosen,
        )
        for index, row in enumerate(answer.rows)
    ]
    request = answer.request
    seq_len, model = request.trials[0].step.shape.seq_len, request.keys.get("model", "")
    title = f"{model} on {request.machines_in_words}, sequences of {seq_len:,}"
    plot_memory(path, bars, request.cluster.gpu_bytes, title)


def _label(row: Row) -> str:
    strategy, offload = row.strategy, row.strategy.offload.replace("-", "")
    mode = "" if strategy.activation_checkpointing == "none" else f"{strategy.activation_checkpointing} ckpt"
    where = [row.ds_config] if row.ds_config else [f"ZeRO {strategy.stage_words}", offload]
    return ", ".join(part for part in (*where, mode, f"batch {row.micro_batch_size}") if part)


def answer_gpus(args: argparse.Namespace, gpus: Sequence[GPU]) -> int:
    """Print the row to take on each kind of GPU; return 0 if one fits, else 1."""
    rows = []
    for gpu, price in zip(gpus, args.price or [None] * len(gpus), strict=True):
        answer = find_rows(read_request(args, gpu), gpu.name, price)
        fits = answer.ranking.fits
        rows.append(answer.rows[fits.index(nearest_fit(fits)) if answer.chosen is None else answer.chosen])
    request, step = answer.request, answer.request.trials[0].step
    prices = [row.usd_per_billion_tokens or math.inf for row in rows]
    rates = [row.tokens_per_second or 0 for row in rows]
    best = prices.index(min(prices)) if args.price else rates.index(max(rates))
    lines = [
        f"{request.keys.get('model')}: {describe_parameters(step.shape)}, sequences of {step.shape.seq_len:,}, on "
        f"{request.cluster.in_words('each GPU')}, global batch {step.plan.global_batch_size:,}: the row to take, or "
        f"the one that misses least; * {'least expensive' if args.price else 'fastest'}",
        *request.assumption_lines(),
        "",
        *table(_row_heads(wide=False), rows, is_marked=lambda row: row.fits and row is rows[best]),
        "",
        "GiB per GPU at the peak; tok/s are estimated. One --gpu has its command, and the rows to choose between.",
    ]
    values = question_values(request)
    show(
        {key: values[key] for key in ("shape", "global_batch_size", "assumed")} | {"gpus": rows},
        lines,
        is_json=args.json,
    )
    return 0 if any(row.fits for row in rows) else EXIT_NOTHING_FITS


def answer_largest(args: argparse.Namespace, gpu: GPU) -> int:
    """Print the largest model for each strategy; return 0 if something fits, else 1."""
    request = read_request(args, gpu)
    model = None if args.model is None else str(args.model)
    family = scaling_family(model)
    models = find_largest_models(request.trials, request.cluster, family)
    values = question_values(request) | {"largest_models": models}
    del values["shape"]
    show(values, _largest_lines(request, model, family, models), is_json=args.json)
    return 0 if any(model.fit for model in models) else EXIT_NOTHING_FITS


def _largest_lines(
    request: EstimateRequest, model: str | None, family: str, models: Sequence[LargestModel]
) -> Iterator[str]:
    step, is_fixed = request.trials[0].step, request.trials[0].is_fixed
    what = "The largest GPT" if model is None else f"The largest model like {model}"
    yield (
        f"{what} that fits {request.machines_in_words}, {step.precision}: sequences of {step.shape.seq_len:,}, "
        f"vocabulary {step.shape.vocab_size:,}, micro-batch {step.plan.micro_batch_size if is_fixed else 1}"
    )
    yield from request.assumption_lines()
    yield ""
    best = max((row.num_parameters or 0 for row in models), default=0)
    heads = _STRATEGY_HEADS | {
        "size": "parameters",
        "shape.n_layer": "layers",
        "shape.n_head": "heads",
        "shape.n_embd": "width",
        "total_bytes": "total",
        "fit.host_bytes_per_node": "host",
        "fit.nvme_bytes_per_node": "NVMe",
        "preset": "preset",
    }
    yield from table(heads, models, is_marked=lambda row: row.num_parameters == best, group="strategy.zero_stage")
    yield ""
    fit = next((row.fit for row in models if row.fit), None)
    if fit is not None and fit.plan.gradient_accumulation_steps > 1:
        yield (
            f"global batch {fit.plan.global_batch_size:,}: {fit.plan.gradient_accumulation_steps} micro-steps, whose "
            f"gradients are summed in {fit.step.engine_config.grad_accum_dtype}."
        )
    yield _shapes_line(model, family)
    yield f"total: GiB of one GPU; host and NVMe: GiB of one node, {_host_words(request.cluster)}."
    yield f"{margin_line()} A model that barely fits leaves no room for a larger micro-batch."
    yield "preset: the largest that is not larger."


def _shapes_line(model: str | None, family: str) -> str:
    """Return the source of the sizes."""
    if family != GPT3:
        return (
            f"Shapes: the {family} presets, and between them depth, heads and MLP as functions of the width; beyond "
            "the widest in proportion to it."
        )
    whose = "" if model is None or model.startswith("gpt3-") else f"; blocks are {model}'s"
    return f"Shapes: GPT-3's table, and between its points depth as a function of the width{whose}."


def answer_longest(args: argparse.Namespace, gpu: GPU) -> int:
    """Print the longest sequence of each strategy by GPUs that divide it; return 0 if one fits, else 1."""
    # The batch does not matter: each group of GPUs has the micro-batch alone.
    args.global_batch_size = read_cluster(args, gpu).world_size * (args.micro_batch_size or 1)
    request = read_request(args, gpu)
    cluster, step, is_fixed = request.cluster, request.trials[0].step, request.trials[0].is_fixed
    every_size = sequence_parallel_sizes(cluster.world_size, step.shape.n_head)
    sizes = [step.plan.ranks.sequence_parallel_size] if args.sequence_parallel_size else every_size
    trials = request.trials if request.names else [*with_inputs_on_host(request.trials, request.nvme_path)]
    rows = find_longest(trials, cluster, sizes)
    fastest = fastest_by_split(request.trials, cluster, sizes)
    rates = {size: row.throughput.tokens_per_second for size, row in fastest.items() if row and row.throughput}
    lines = [
        f"The longest sequence that fits {request.machines_in_words}, {step.precision}, in tokens: micro-batch "
        f"{step.plan.micro_batch_size if is_fixed else 1}, no accumulation; by the GPUs that divide a sequence",
        *request.assumption_lines(),
        "",
        *_longest_lines(rows, sizes),
        "",
        margin_line(),
        f"Host memory is {_host_words(cluster)}.",
    ]
    if any(row.cpu_checkpointing for row in rows):
        lines.append('full, host: the ds_config has "activation_checkpointing": {"cpu_checkpointing": true}.')
    lines += ["", *_fastest_lines(fastest, rates, step.shape.seq_len, cluster.interconnect.name)]
    show(question_values(request) | {"longest": rows, "tokens_per_second": rates}, lines, is_json=args.json)
    return 0 if any(any(row.seq_len.values()) for row in rows) else EXIT_NOTHING_FITS


def _longest_lines(rows: Sequence[LongestSequences], sizes: Sequence[int]) -> Iterator[str]:
    """Yield one line per strategy, with a column for each number of GPUs; `*` marks a column's longest."""
    best = {size: max(row.seq_len[size] or 0 for row in rows) for size in sizes}
    cells: list[list[str]] = []
    for before, row in zip([None, *rows], rows, strict=False):
        if before and before.strategy.zero_stage != row.strategy.zero_stage:
            cells.append([])
        lengths = []
        for size in sizes:
            tokens = row.seq_len[size]
            lengths.append(f"{'*' * (tokens == best[size])}{tokens:,}" if tokens else "-")
        cells.append([row.strategy.stage_words, row.strategy.offload, row.checkpointing, *lengths])
    yield from align(["ZeRO", "offload", "checkpt", *(f"on {size}" for size in sizes)], cells)


def _fastest_lines(
    rows: Mapping[int, RankedConfig | None], rates: Mapping[int, float], seq_len: int, interconnect: str
) -> Iterator[str]:
    """Yield the fastest row of a context for each number of GPUs that divide it, and which to take."""
    cells = []
    for size, row in rows.items():
        rate = f"{rates[size]:,.0f}" if size in rates else "-"
        mark = "*" if size in rates and rates[size] == max(rates.values()) else ""
        cells.append([mark, str(size), rate, row.fit.strategy.describe() if row else "nothing fits"])
    yield f"Fastest at {seq_len:,} tokens (--seq-len), between nodes {interconnect}; tok/s of all GPUs, estimated:"
    yield from align(["", "--sequence-parallel-size", "tok/s", "source"], cells)


def answer_networks(args: argparse.Namespace, gpu: GPU) -> int:
    """Print each ZeRO stage's rate for every network; return 0 if something fits, else 1.

    Raises ConfigError for one node, and for a GPU of unknown rate.
    """
    request = read_request(args, gpu)
    step = request.trials[0].step
    if request.cluster.num_nodes == 1:
        raise ConfigError("--interconnect list compares networks between nodes; this is one node. Give --num-nodes.")
    rates = fastest_by_link(request.trials, request.cluster)
    if rates is None:
        raise ConfigError(
            f"--interconnect list compares tokens/s; the rate of {gpu.name} in {step.precision} is not known."
        )
    values = question_values(request) | {"tokens_per_second": {network.name: best for network, best in rates}}
    del values["interconnect"]
    stages = sorted({stage for _, best in rates for stage in best})
    cells = []
    for network, best in rates:
        marks = {stage: "*" * (rate == max(best.values())) for stage, rate in best.items()}
        numbers = [f"{marks[stage]}{best[stage]:,.0f}" if stage in best else "-" for stage in stages]
        cells.append([network.name, *numbers, network.description])
    lines = [
        f"{describe_parameters(step.shape)} on {request.machines_in_words}, {step.precision}, global batch "
        f"{step.plan.global_batch_size:,} x {step.shape.seq_len:,} tokens",
        *request.assumption_lines(),
        "Estimated tokens/s of each ZeRO stage's fastest row that fits; * the fastest of a line.",
        "",
        *align(["network", *(f"ZeRO {stage}" for stage in stages), "source"], cells),
    ]
    show(values, lines, is_json=args.json)
    if any(best for _, best in rates):
        return 0
    print("Nothing fits: without --interconnect list the table says by how much.", file=sys.stderr)
    return EXIT_NOTHING_FITS


_STATES_HEADS = {
    "strategy.stage_words": "ZeRO",
    "strategy.offload": "offload",
    **{f"estimate.peak.{name}": head for name, head in CATEGORIES.items() if head not in ("activ", "logits")},
    "estimate.allocated_bytes": "allocated",
    "estimate.peak_moment": "peak in",
    "verdict": "  room",
    "host_bytes_per_node": "host",
    "nvme_bytes_per_node": "NVMe",
}


def answer_states(args: argparse.Namespace, gpu: GPU, model: HFModel) -> int:
    """Print the model states of a family that llmscale does not train; return 0 if they fit, else 1."""
    config = build_run_config(given_keys(args, "estimate"))
    cluster, precision = read_cluster(args, gpu), usable_precision(config.precision, gpu)
    rows = find_hf_configs(model, cluster, precision, config.global_batch_size)
    values = {
        "model": {"name": model.name, "family": model.family, "num_parameters": model.num_parameters},
        "unknown": model.unknown,
        "gpu_bytes": cluster.gpu_bytes,
        "rows": rows,
    }
    lines = [
        f"{model.name}: {model.num_parameters:,} parameters ({model.family}), model states only",
        f"on {cluster.in_words(f'{gpu.name} ({gpu.memory_gib:g} GiB)')}, {precision}",
        "",
        *table(_STATES_HEADS, rows),
        "",
        "GiB per GPU at the peak of parameters, gradients, optimizer states, buffers and temporaries.",
        _accumulation(config.global_batch_size, rows[0]),
        "room: bytes left for activations, logits and loss when the backward pass begins, after the allocator's",
        f"reserve and the context, both assumed. {model.unknown[0].upper()}{model.unknown[1:]}.",
        "",
        _states_summary(rows),
    ]
    show(values, lines, is_json=args.json)
    return 0 if any(row.fits for row in rows) else EXIT_NOTHING_FITS


def _accumulation(global_batch_size: int | None, row: HFConfig) -> str:
    """Return a note on gradient accumulation, which is assumed without --global-batch-size."""
    if row.ds_config.gradient_accumulation_steps == 1:
        return "one micro-step per step, as --global-batch-size has one sequence per GPU: no gradients are summed."
    why = "" if global_batch_size else " (assumed: --global-batch-size says how many)"
    return f"gradients of several micro-steps{why} are summed in {row.ds_config.grad_accum_dtype}."


def _states_summary(rows: list[HFConfig]) -> str:
    best, num_fitting = most_room(rows), sum(row.fits for row in rows)
    stage, room = f"ZeRO stage {best.strategy.zero_stage}", format_size(abs(best.room_for_activations_bytes))
    if not best.fits:
        return (
            f"Nothing fits, not even without activations: {stage} misses least, by {room} per GPU. More GPUs, or "
            "another GPU."
        )
    offload = "without offload" if best.strategy.offload == "-" else f"with offload ({best.strategy.offload})"
    return f"{num_fitting} of {len(rows)} rows fit; {stage} {offload} leaves most room for activations: {room}."


def gpu_lines() -> Iterator[str]:
    """Yield the hardware table, and the sources of its numbers."""
    rows = gpu_table_rows()
    yield from align(GPU_TABLE_HEAD, [[*row[:-1], row[-1].partition(". Memory ")[0]] for row in rows])
    yield ""
    yield "16-bit and fp32: dense TFLOP/s; link: to the other GPUs of a node, in one direction. GiB:"
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row[-1].partition(". Memory ")[2], []).append(row[0])
    for source, gpus in sorted(names.items(), key=lambda item: -len(item[1])):
        yield f"  {source}{': ' + ', '.join(gpus) if len(gpus) < len(rows) / 2 else ''}"
