"""The tables that `llmscale estimate` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from llmscale.config.hardware import GPU_TABLE_HEAD, gpu_table_rows
from llmscale.memory.breakdown import Breakdown
from llmscale.memory.estimate import RESERVED_PER_ALLOCATED
from llmscale.memory.format_bytes import GIB, format_size
from llmscale.planning.recommend import RankedConfig
from llmscale.planning.search import Candidate
from llmscale.planning.step_time import Throughput
from llmscale.terminal.table import Column, output_width, table_lines

if TYPE_CHECKING:
    from llmscale.dry_run.on_demand import Comparison
    from llmscale.planning.search import LargestModel

#: Heads of a Breakdown's fields, in their order.
CATEGORIES = ("param", "grad", "optim", "activ", "logits", "comm", "temp")
#: Columns that hold text; numbers are set to the right.
_TEXT = {
    *("", "offload", "checkpt", "peak in", "  fits", "moment", "ds_config"),
    *("preset", "phase", "by", "GPU", "source", "network"),
}
#: What goes first where a line is too long, and what goes after that: whether a row fits, and how fast it is, stay.
_DROPPED_FIRST = (
    *("source", "preset", "peak in", "temp", "comm", "logits", "context", "reserve", "NVMe", "optim", "grad"),
    *("param", "activ", "host", "loss", "tokens D", "D/N", "layers", "heads", "width", "MFU", "difference", "total"),
)
#: Texts that may be cut, and to how much.
_LEAST = {"source": 20}


def align(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table that fits the terminal."""
    order = {name: len(_DROPPED_FIRST) - place for place, name in enumerate(_DROPPED_FIRST)}
    columns = [Column(name, name in _TEXT, order.get(name, 0), _LEAST.get(name, 0)) for name in head]
    return table_lines(columns, rows, output_width())


def row_lines(
    rows: Sequence[RankedConfig], recommended: int | None, names: Sequence[str] | None = None
) -> Iterator[str]:
    """One line a row, GiB; `names` are ds_configs' files, else stages are set apart. `*` marks the recommended one."""
    some_host = any(row.fit.host_bytes_per_node for row in rows)
    some_nvme = any(row.fit.nvme_bytes_per_node for row in rows)
    some_rate = any(row.throughput for row in rows)
    head = ["", *(["ds_config"] if names else []), "ZeRO", "offload", "checkpt", "batch", *CATEGORIES]
    head += ["reserve", "context", "total", "  fits", "peak in"]
    head += ["host"] * some_host + ["NVMe"] * some_nvme + ["tok/s", "MFU"] * some_rate
    table: list[list[str]] = []
    for index, row in enumerate(rows):
        if not names and index and row.fit.strategy.zero_stage != rows[index - 1].fit.strategy.zero_stage:
            table.append([])
        cells = ["*" if index == recommended else "", *([names[index]] if names else []), *_row_cells(row)]
        cells += [gib(row.fit.host_bytes_per_node)] * some_host + [gib(row.fit.nvme_bytes_per_node)] * some_nvme
        table.append(cells + _rate_cells(row) * some_rate)
    yield from align(head, table)


def _row_cells(row: RankedConfig) -> list[str]:
    fit, estimate = row.fit, row.fit.estimate
    mode = fit.strategy.checkpointing
    return [
        *(fit.strategy.stage_words, fit.strategy.offload, "-" if mode == "none" else mode),
        f"{fit.plan.micro_batch_size} x {fit.plan.gradient_accumulation_steps}",
        *breakdown_cells(estimate.peak),
        *(gib(estimate.reserve_bytes), gib(estimate.context_bytes), gib(estimate.total_bytes)),
        *(f"  {verdict(fit)}", estimate.peak_moment),
    ]


def _rate_cells(row: RankedConfig) -> list[str]:
    if row.throughput is None or not row.fit.fits:
        return ["-", "-"]
    mfu = row.throughput.mfu
    mark = "~" if row.throughput.beyond else ""
    return [f"{mark}{row.throughput.tokens_per_second:,.0f}", "-" if mfu is None else f"{mfu:.0%}"]


def verdict(fit: Candidate) -> str:
    """Whether a row fits, and by how much."""
    if fit.spare_bytes < 0:
        return f"no, {-fit.spare_bytes / GIB:,.1f} over"
    host = fit.host_spare_bytes
    if host is not None and host < 0:
        return f"no, host {-host / GIB:,.0f} over"
    return f"{fit.spare_bytes / GIB:.1f} free"


def legend_lines(rows: Sequence[RankedConfig]) -> Iterator[str]:
    """What the columns mean, and what in them is assumed."""
    yield "GiB per GPU at the peak; host and NVMe in GiB per node; batch: micro-batch x accumulation."
    reserve = f"{RESERVED_PER_ALLOCATED - 1:.0%}"
    context = format_size(rows[0].fit.estimate.context_bytes)
    yield (
        f"reserve and context are assumed, not measured: {reserve} that the allocator holds beyond the tensors, and "
        f"{context} for CUDA, its libraries and NCCL."
    )
    yield (
        "activ counts blocks that run eagerly; compiled ones (train's --compile) keep no more, and at stage 3 gather a "
        "block at a time."
    )
    yield from _gradient_lines([row.fit for row in rows])
    if any(row.fit.host_bytes_per_node for row in rows):
        host = rows[0].fit.machines.host_bytes
        known = f"checked against {format_size(host)} (--host-memory-gib)" if host else "not checked: --host-memory-gib"
        yield f"host is for what is offloaded, beyond the processes themselves; {known}."
    if any(row.throughput for row in rows):
        estimates = [row.throughput for row in rows if row.throughput]
        yield "tok/s (all GPUs together) and MFU are estimated."
        yield _compiled_line(estimates)
        yield from _calibration_lines(estimates)


def _gradient_lines(fits: Sequence[Candidate]) -> Iterator[str]:
    """In which type gradients of several micro-steps are summed."""
    types = {fit.step.engine_config.grad_accum_dtype for fit in fits if fit.plan.gradient_accumulation_steps > 1}
    if types:
        yield (
            f"gradients of several micro-steps are summed in {' or '.join(sorted(types))}, counted in grad and comm "
            "(data_types.grad_accum_dtype of the ds_config)."
        )


def _compiled_line(found: Sequence[Throughput]) -> str:
    """What train's --compile is estimated to bring."""
    gains = sorted(f"{row.compiled_tokens_per_second / row.tokens_per_second:.2f}" for row in found)
    gain = gains[0] if gains[0] == gains[-1] else f"{gains[0]} to {gains[-1]}"
    return (
        f"tok/s is that of eager blocks; compiled ones (train's --compile) are estimated at {gain} times as much, by "
        "what torchtitan published and, at stage 3, by what they gather."
    )


def _calibration_lines(found: Sequence[Throughput]) -> Iterator[str]:
    """What the estimates rest on, and how far off it is known to be: once for all that are alike but for the ways in
    which they lie beyond the rows."""
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
    """Every moment of a step by category, GiB; `*` marks the peak."""
    head = ["", "moment", *CATEGORIES, "allocated"]
    table = [
        ["*" if name == peak else "", name, *breakdown_cells(moment), gib(moment.total_bytes)]
        for name, moment in moments.items()
    ]
    yield from align(head, table)


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Both breakdowns of each phase, GiB."""
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
    """One line a strategy."""
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


def gpu_lines() -> Iterator[str]:
    """The hardware table, and below it where its numbers are from."""
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
    """Under CATEGORIES."""
    return [gib(value) for value in breakdown.as_dict().values()]


def gib(num_bytes: int) -> str:
    """One decimal; what is there but small is not shown as nothing."""
    if num_bytes == 0:
        return "-"
    return f"{num_bytes / GIB:,.1f}" if num_bytes >= 0.05 * GIB else "0.0"
