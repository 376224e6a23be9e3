"""Tables and JSON of `llmscale estimate`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from llmscale.architecture.shape import GPTShape
from llmscale.config.hardware import GPU_TABLE_HEAD, gpu_table_rows
from llmscale.memory.breakdown import GIB, Breakdown, format_size
from llmscale.memory.estimate import RESERVED_PER_ALLOCATED, MemoryEstimate, estimate_memory
from llmscale.planning.recommend import RankedConfig, Ranking
from llmscale.planning.search import MARGIN, PROCESS_BYTES, Candidate, Machines, Search, Strategy
from llmscale.planning.step_time import Throughput
from llmscale.terminal.table import Column, output_width, table_lines

if TYPE_CHECKING:
    from llmscale.dry_run.on_demand import Comparison
    from llmscale.planning.search import LargestModel, LongestSequences

#: Headings of a Breakdown's fields, in their order.
CATEGORIES = ("param", "grad", "optim", "activ", "logits", "comm", "temp")
#: Columns of text, which are aligned to the left.
_TEXT = {
    *("", "offload", "checkpt", "peak in", "  fits", "moment", "ds_config"),
    *("preset", "phase", "by", "GPU", "source", "network"),
}
#: Columns to leave out of a table that is too wide, in this order; whether a row fits, and its rate, stay.
_DROPPED_FIRST = (
    *("source", "preset", "peak in", "temp", "comm", "logits", "context", "reserve", "NVMe", "optim", "grad"),
    *(
        "param",
        "activ",
        "host",
        "loss",
        "tokens D",
        "D/N",
        "layers",
        "heads",
        "width",
        "MFU",
        "difference",
        "fillers",
        "total",
    ),
)
#: Smallest widths of columns that may be cut.
_LEAST = {"source": 20, "ds_config": 16}
#: Width of the table of rows in a file or a pipe, without --wide.
_TABLE_WIDTH = 100
#: Width of the table of rows with --wide: no column is left out.
_ANY_WIDTH = 1_000_000


def align(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> Iterator[str]:
    """Yield the lines of a table that fits `width`; default: the terminal's."""
    order = {name: len(_DROPPED_FIRST) - place for place, name in enumerate(_DROPPED_FIRST)}
    columns = [Column(name, name in _TEXT, order.get(name, 0), _LEAST.get(name, 0)) for name in head]
    return table_lines(columns, rows, width or output_width())


def row_lines(
    rows: Sequence[RankedConfig], recommended: int | None, names: Sequence[str] | None = None, *, wide: bool = False
) -> Iterator[str]:
    """Yield one line per row, in GiB; `*` marks the recommended one. `names` are the files of ds_configs.

    `wide` adds the columns that `total` consists of, at any width.
    """
    some_host = any(row.fit.host_bytes_per_node for row in rows)
    some_nvme = any(row.fit.nvme_bytes_per_node for row in rows)
    some_rate, some_fillers = any(row.throughput for row in rows), any(row.fit.plan.filler_share for row in rows)
    head = ["", *(["ds_config"] if names else []), "ZeRO", "offload", "checkpt", "batch"]
    head += ["fillers"] * some_fillers
    head += [*CATEGORIES, "reserve", "context"] * wide + ["total", "  fits"] + ["peak in"] * wide
    head += ["host"] * some_host + ["NVMe"] * some_nvme + ["tok/s", "MFU"] * some_rate
    table: list[list[str]] = []
    for index, row in enumerate(rows):
        if not names and index and row.fit.strategy.zero_stage != rows[index - 1].fit.strategy.zero_stage:
            table.append([])
        cells = [
            "*" if index == recommended else "",
            *([names[index]] if names else []),
            *_row_cells(row, wide, some_fillers),
        ]
        cells += [gib(row.fit.host_bytes_per_node)] * some_host + [gib(row.fit.nvme_bytes_per_node)] * some_nvme
        table.append(cells + _rate_cells(row) * some_rate)
    yield from align(head, table, _ANY_WIDTH if wide else output_width() or _TABLE_WIDTH)


def _row_cells(row: RankedConfig, wide: bool, some_fillers: bool) -> list[str]:
    fit, estimate = row.fit, row.fit.estimate
    mode = fit.strategy.checkpointing
    return [
        *(fit.strategy.stage_words, fit.strategy.offload, "-" if mode == "none" else mode),
        f"{fit.plan.micro_batch_size} x {fit.plan.gradient_accumulation_steps}",
        *[f"{fit.plan.filler_share:.0%}"] * some_fillers,
        *[*breakdown_cells(estimate.peak), gib(estimate.reserve_bytes), gib(estimate.context_bytes)] * wide,
        *(gib(estimate.total_bytes), f"  {verdict(fit)}"),
        *[estimate.peak_moment] * wide,
    ]


def _rate_cells(row: RankedConfig) -> list[str]:
    if row.throughput is None or not row.fit.fits:
        return ["-", "-"]
    mfu = row.throughput.mfu
    mark = "~" if row.throughput.beyond else ""
    return [f"{mark}{row.throughput.tokens_per_second:,.0f}", "-" if mfu is None else f"{mfu:.0%}"]


def verdict(fit: Candidate) -> str:
    """Return whether a row fits, and by how much."""
    if fit.spare_bytes < 0:
        return f"no, {-fit.spare_bytes / GIB:,.1f} over"
    host = fit.host_spare_bytes
    if host is not None and host < 0:
        return f"no, host {-host / GIB:,.0f} over"
    tight = "" if fit.has_margin else ", host tight" if fit.has_gpu_margin else ", tight"
    return f"{fit.spare_bytes / GIB:.1f} free{tight}"


def legend_lines(rows: Sequence[RankedConfig], *, wide: bool = False) -> Iterator[str]:
    """Yield the meaning of the columns, and their assumptions; `wide`: of all columns."""
    yield "GiB per GPU at the peak; host and NVMe in GiB per node; batch: micro-batch x accumulation."
    if any(row.fit.plan.filler_share for row in rows):
        yield "fillers: work beyond that of the batch, which does not divide over the GPUs; counted in tok/s and MFU."
    reserve = f"{RESERVED_PER_ALLOCATED - 1:.0%}"
    context = format_size(rows[0].fit.estimate.context_bytes)
    yield (
        f"{'reserve and context' if wide else 'Two parts of total'} are assumed, not measured: {reserve} that the "
        f"allocator holds beyond the tensors, and {context} for CUDA, its libraries and NCCL."
    )
    if wide:
        yield (
            "activ counts blocks that run eagerly; compiled ones (train's --compile) keep no more, and at stage 3 "
            "gather a block at a time."
        )
        yield from _gradient_lines([row.fit for row in rows])
    else:
        yield "--wide shows all parts of total, and the moment of the peak."
    yield margin_line()
    if any(row.fit.host_bytes_per_node for row in rows):
        yield f"host is for what is offloaded; {host_words(rows[0].fit.machines)}."
    if any(row.throughput for row in rows):
        estimates = [row.throughput for row in rows if row.throughput]
        yield "tok/s (all GPUs together) and MFU are estimated."
        yield _compiled_line(estimates)
        yield from _calibration_lines(estimates)


def margin_line() -> str:
    """Return a note on the memory that a row must leave."""
    return (
        f"Micro-batches leave {MARGIN:.0%} of a GPU and of a node free, because no GPU has calibrated these estimates; "
        "tight: less is free."
    )


def host_words(machines: Machines) -> str:
    """Return how the host memory of offloaded states is checked."""
    if not machines.host_bytes:
        return "not checked: --host-memory-gib"
    processes = f"{machines.gpus_per_node} x {format_size(PROCESS_BYTES)} for processes (assumed)"
    return f"with {processes} checked against {format_size(machines.host_bytes)} (--host-memory-gib)"


def load_lines(fit: Candidate) -> Iterator[str]:
    """Yield what an uneven load of the experts changes."""
    size = fit.plan.ranks.expert_parallel_size
    if size == 1:
        yield "experts: an uneven load does not change these bytes, because one GPU computes all of them."
        return
    worst = estimate_memory(fit.step, fit.machines.capability, worst_load=True)
    spare = fit.machines.gpu_bytes - worst.total_bytes
    verdict = f"{spare / GIB:.1f} free" if spare >= 0 else f"{-spare / GIB:,.1f} over"
    yield (
        f"experts: each group of {size} GPUs divides them, and the rows assume equal loads. If all tokens of a group "
        f"went to one GPU's experts, {fit.strategy.describe()} would take {gib(worst.total_bytes)} GiB, {verdict}."
    )


def _gradient_lines(fits: Sequence[Candidate]) -> Iterator[str]:
    """Yield a note on the type in which gradients are summed."""
    types = {fit.step.engine_config.grad_accum_dtype for fit in fits if fit.plan.gradient_accumulation_steps > 1}
    if types:
        yield (
            f"gradients of several micro-steps are summed in {' or '.join(sorted(types))}, counted in grad and comm "
            "(data_types.grad_accum_dtype of the ds_config)."
        )


def _compiled_line(found: Sequence[Throughput]) -> str:
    """Return a note on the estimated gain of train's --compile."""
    gains = sorted(f"{row.compiled_tokens_per_second / row.tokens_per_second:.2f}" for row in found)
    gain = gains[0] if gains[0] == gains[-1] else f"{gains[0]} to {gains[-1]}"
    return (
        f"tok/s is that of eager blocks. Compiled ones (train's --compile) are estimated at {gain} times as much, from "
        "torchtitan's published speeds and, at stage 3, from what they gather."
    )


def _calibration_lines(found: Sequence[Throughput]) -> Iterator[str]:
    """Yield the sources of the estimates with their known errors, one line for all rows with the same source."""
    by_basis: dict[str, dict[str, dict[str, None]]] = {}
    for row in found:
        errors = by_basis.setdefault(row.rests_on, {})
        errors.setdefault(row.error, {}).update(dict.fromkeys(row.beyond))
    for rests_on, errors in by_basis.items():
        mark = "  ~" if any(errors.values()) else " "
        parts = [f"{', '.join(sorted(beyond))}; {error}" if beyond else error for error, beyond in errors.items()]
        if len(parts) == 1:
            yield f"{mark} {rests_on}{':' if any(errors.values()) else ';'} {parts[0]}."
        else:
            yield f"{mark} {rests_on}:"
            yield from (f"      {part}." for part in parts)


def moment_lines(moments: Mapping[str, Breakdown], peak: str) -> Iterator[str]:
    """Yield every moment of a step by category, in GiB; `*` marks the peak."""
    head = ["", "moment", *CATEGORIES, "allocated"]
    table = [
        ["*" if name == peak else "", name, *breakdown_cells(moment), gib(moment.total_bytes)]
        for name, moment in moments.items()
    ]
    yield from align(head, table)


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Yield both breakdowns of each phase, in GiB."""
    fit = comparison.fit
    yield (
        f"dry run: {fit.strategy.describe()}, micro-batch {fit.plan.micro_batch_size}; the real DeepSpeed engine on "
        f"fake tensors as rank 0 of {fit.plan.ranks.world_size}, {comparison.dry_run.seconds:.0f} s"
    )
    head = ["", "phase", "by", *CATEGORIES, "allocated", "difference"]
    table: list[list[str]] = []
    phases = comparison.phases
    for phase, (counted, calculated) in phases.items():
        difference = calculated.total_bytes / counted.total_bytes - 1
        table.append(["", phase, "dry run", *breakdown_cells(counted), gib(counted.total_bytes), ""])
        numbers = [*breakdown_cells(calculated), gib(calculated.total_bytes), f"{difference:+.1%}"]
        table.append(["", "", "closed form", *numbers])
    yield from align(head, table)
    least, peak = comparison.dry_run.least_gpu_bytes, max(counted.total_bytes for counted, _ in phases.values())
    yield (
        f"  least that the caching allocator can do with: {gib(least)} GiB, {least / peak - 1:+.1%} "
        f"(assumed above: {RESERVED_PER_ALLOCATED - 1:+.0%})"
    )


def largest_model_lines(models: Sequence[LargestModel]) -> Iterator[str]:
    """Yield one line per strategy."""
    head = [
        "",
        "ZeRO",
        "offload",
        "checkpt",
        "parameters",
        "layers",
        "heads",
        "width",
        "total",
        "host",
        "NVMe",
        "preset",
    ]
    table: list[list[str]] = []
    best = max((model.shape.num_parameters for model in models if model.shape), default=0)
    for index, model in enumerate(models):
        if index and model.strategy.zero_stage != models[index - 1].strategy.zero_stage:
            table.append([])
        strategy, shape = model.strategy, model.shape
        mode = "-" if strategy.checkpointing == "none" else strategy.checkpointing
        cells = [str(strategy.zero_stage), strategy.offload, mode]
        if shape is None or model.fit is None:
            table.append(["", *cells, "nothing fits", *[""] * 7])
            continue
        mark = "*" if shape.num_parameters == best else ""
        billions = shape.num_parameters / 1e9
        size = f"{billions:.3g}B" if billions < 1000 else f"{billions / 1000:.3g}T"
        numbers = [size, str(shape.n_layer), str(shape.n_head), str(shape.n_embd)]
        numbers.append(gib(model.fit.estimate.total_bytes))
        numbers += [gib(model.fit.host_bytes_per_node), gib(model.fit.nvme_bytes_per_node)]
        table.append([mark, *cells, *numbers, model.preset or "-"])
    yield from align(head, table)


def longest_lines(rows: Sequence[LongestSequences], sizes: Sequence[int]) -> Iterator[str]:
    """Yield one line per strategy, with a column for each number of GPUs; `*` marks a column's longest."""
    lengths = [{size: fit.plan.seq_len if fit else 0 for size, fit in row.fits.items()} for row in rows]
    best = {size: max(of_row[size] for of_row in lengths) for size in sizes}
    table: list[list[str]] = []
    for index, (row, of_row) in enumerate(zip(rows, lengths, strict=True)):
        if index and row.strategy.zero_stage != rows[index - 1].strategy.zero_stage:
            table.append([])
        cells = [
            "*" * (of_row[size] == best[size] > 0) + f"{of_row[size]:,}" if of_row[size] else "-" for size in sizes
        ]
        table.append([row.strategy.stage_words, row.strategy.offload, row.checkpointing, *cells])
    yield from align(["ZeRO", "offload", "checkpt", *(f"on {size}" for size in sizes)], table)


def fastest_lines(rows: Mapping[int, RankedConfig | None], seq_len: int, interconnect: str) -> Iterator[str]:
    """Yield the fastest row of a context for each number of GPUs that divide it, and which to take."""
    rates = {size: row.throughput.tokens_per_second for size, row in rows.items() if row and row.throughput}
    table = []
    for size, row in rows.items():
        words = row.fit.strategy.describe() if row else "nothing fits"
        rate = f"{rates[size]:,.0f}" if size in rates else "-"
        mark = "*" if size in rates and rates[size] == max(rates.values()) else ""
        table.append([mark, str(size), rate, words])
    yield f"Fastest at {seq_len:,} tokens (--seq-len), between nodes {interconnect}; tok/s of all GPUs, estimated:"
    yield from align(["", "--sequence-parallel-size", "tok/s", "source"], table)


def longest_as_list(rows: Sequence[LongestSequences]) -> list[dict[str, object]]:
    """Return one entry per strategy, with lengths by GPUs that divide a sequence."""
    return [
        {
            "strategy": strategy_as_dict(row.strategy),
            "cpu_checkpointing": row.ds.cpu_checkpointing,
            "seq_len": {size: fit.plan.seq_len if fit else None for size, fit in row.fits.items()},
        }
        for row in rows
    ]


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


def breakdown_cells(breakdown: Breakdown) -> list[str]:
    """Return the cells below CATEGORIES."""
    return [gib(value) for value in breakdown.as_dict().values()]


def gib(num_bytes: int) -> str:
    """Format bytes as GiB with one decimal; zero is `-`."""
    if num_bytes == 0:
        return "-"
    return f"{num_bytes / GIB:,.1f}" if num_bytes >= 0.05 * GIB else "0.0"


if TYPE_CHECKING:
    from llmscale.dry_run.on_demand import Comparison
    from llmscale.planning.search import LargestModel, LongestSequences


def search_as_dict(search: Search) -> dict[str, object]:
    """Return model, machines and assumptions."""
    job, machines = search.job, search.job.machines
    return {
        "shape": shape_as_dict(job.shape),
        "global_batch_size": job.global_batch_size,
        "optimizer": job.optimizer.name,
        "gpu": asdict(search.gpu),
        "interconnect": search.interconnect.name,
        "machines": {**asdict(machines), "world_size": machines.world_size},
        "assumed": {
            "reserved_per_allocated": RESERVED_PER_ALLOCATED,
            "margin": MARGIN,
            "host_bytes_per_process": PROCESS_BYTES,
        },
    }


def shape_as_dict(shape: GPTShape) -> dict[str, object]:
    """Return a model with its numbers of parameters."""
    counts = {"num_parameters": shape.num_parameters, "active_parameters": shape.active_parameters}
    return {**asdict(shape), **counts}


def ranking_as_dict(ranking: Ranking, names: list[str] | None) -> dict[str, object]:
    """Return every row, and the recommended one."""
    chosen = ranking.recommendation
    return {
        "rows": [
            {"ds_config": name, **_row_as_dict(row)}
            for row, name in zip(ranking.configs, names or itertools.repeat(None, len(ranking.configs)), strict=True)
        ],
        "recommended": None if chosen is None else {"row": chosen.index, "why": chosen.why},
    }


def largest_models_as_list(models: list[LargestModel]) -> list[dict[str, object]]:
    """Return one entry per strategy."""
    return [
        {
            "strategy": strategy_as_dict(model.strategy),
            "shape": None if model.shape is None else asdict(model.shape),
            "num_parameters": None if model.shape is None else model.shape.num_parameters,
            "preset": model.preset,
            "total_bytes": None if model.fit is None else model.fit.estimate.total_bytes,
        }
        for model in models
    ]


def estimate_as_dict(estimate: MemoryEstimate) -> dict[str, object]:
    """Return the bytes of one rank."""
    return {
        "moments": {name: moment.as_dict() for name, moment in estimate.moments.items()},
        "peak_moment": estimate.peak_moment,
        "peak": estimate.peak.as_dict(),
        "allocated_bytes": estimate.allocated_bytes,
        "reserved_bytes": estimate.reserved_bytes,
        "context_bytes": estimate.context_bytes,
        "total_bytes": estimate.total_bytes,
        "host_bytes": estimate.host_bytes,
        "nvme_bytes": estimate.nvme_bytes,
    }


def _row_as_dict(row: RankedConfig) -> dict[str, object]:
    fit = row.fit
    return {
        "strategy": strategy_as_dict(fit.strategy),
        "precision": fit.step.precision,
        "micro_batch_size": fit.plan.micro_batch_size,
        "gradient_accumulation_steps": fit.plan.gradient_accumulation_steps,
        "filler_share": fit.plan.filler_share,
        "grad_accum_dtype": fit.step.engine_config.grad_accum_dtype,
        "estimate": estimate_as_dict(fit.estimate),
        **_fit_as_dict(fit),
        "throughput": None if row.throughput is None else asdict(row.throughput),
    }


def _fit_as_dict(fit: Candidate) -> dict[str, object]:
    return {
        "fits": fit.fits,
        "has_margin": fit.has_margin,
        "spare_bytes": fit.spare_bytes,
        "host_bytes_per_node": fit.host_bytes_per_node,
        "nvme_bytes_per_node": fit.nvme_bytes_per_node,
    }


def comparison_as_dict(comparison: Comparison) -> dict[str, object]:
    """Return dry run and closed form by phase."""
    return {
        "zero_stage": comparison.fit.strategy.zero_stage,
        "seconds": comparison.dry_run.seconds,
        "resident": comparison.dry_run.resident.as_dict(),
        "least_gpu_bytes": comparison.dry_run.least_gpu_bytes,
        "phases": {
            phase: {"dry_run": counted.as_dict(), "closed_form": calculated.as_dict()}
            for phase, (counted, calculated) in comparison.phases.items()
        },
    }


def strategy_as_dict(strategy: Strategy) -> dict[str, object]:
    """Return a strategy with the names of flags and ds_configs."""
    values = asdict(strategy)
    values["activation_checkpointing"] = values.pop("checkpointing")
    return values
