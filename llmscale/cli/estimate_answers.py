"""The answers of `llmscale estimate`: rows, GPUs, networks, model states, the largest model and sequence. No torch."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from llmscale.architecture.layers import ParameterTensors
from llmscale.cli.answers import align, gib, show, table
from llmscale.cli.estimate_details import detail_lines, dry_run_rows
from llmscale.cli.estimate_rows import (
    EXIT_NOTHING_FITS,
    STRATEGY_HEADS,
    EstimateRequest,
    RowsAnswer,
    find_rows,
    host_words,
    margin_line,
    question_values,
    read_cluster,
    read_request,
    row_heads,
    row_lines,
)
from llmscale.cli.flags import PRICE, describe_data, one_for_each, train_command
from llmscale.config.batch_plan import sequence_parallel_sizes
from llmscale.config.bundled_files import DS_CONFIGS
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.describe_defaults import describe_parameters, describe_preset
from llmscale.config.hardware import GPU, GPU_TABLE_HEAD, gpu_table_rows
from llmscale.config.hf_model import is_published
from llmscale.config.optimizers import ADAMW
from llmscale.config.presets import PRESETS
from llmscale.config.user_paths import check_output_file, write_output_file
from llmscale.errors import ConfigError
from llmscale.memory.breakdown import GIB, format_size
from llmscale.planning.recommend import (
    Misfit,
    RankedConfig,
    fastest_by_link,
    fastest_by_split,
    find_misfit,
)
from llmscale.planning.scaling import GPT3, scaling_family
from llmscale.planning.search import (
    Candidate,
    LargestModel,
    LongestSequences,
    find_largest_models,
    find_longest,
    strategy_ds_config,
    with_inputs_on_host,
)
from llmscale.planning.step_time import unproven_rates
from llmscale.report.save_figure import check_plot
from llmscale.terminal.colour import paint
from llmscale.terminal.table import output_width, print_fitting, wrap_line


def answer_rows(args: argparse.Namespace, gpu: GPU) -> int:
    """Print the row to take and those to choose between; return 0 if something fits, else 1."""
    if args.emit is not None:
        check_output_file("--emit", args.emit, overwrite=args.force)
    if args.plot is not None:
        check_plot(args.plot)
    answer = find_rows(read_request(args, gpu), usd_per_gpu_hour=one_for_each(args, PRICE, 1)[0])
    if args.dry_run:
        dry_runs = dry_run_rows(answer)
    else:
        dry_runs = []
    if args.emit is not None and answer.ranking.recommended is not None:
        _emit(args.emit, answer.ranking.recommended.fit, answer.request.nvme_path)
    if args.json:
        show(answer.values() | {"dry_runs": dry_runs}, (), is_json=True)
    else:
        print_fitting(_question_lines(answer))
        print_fitting(_recommendation_lines(answer, args.emit))
        for line in row_lines(answer, is_complete=args.all or args.wide, wide=args.wide):
            print(line)
        print_fitting(detail_lines(answer, args, dry_runs))
    if args.plot is not None:
        _plot(args.plot, answer, answer.choices(is_complete=args.all or args.wide))
    return 0 if answer.ranking.recommendation else EXIT_NOTHING_FITS


def _question_lines(answer: RowsAnswer) -> Iterator[str]:
    request = answer.request
    ranking = answer.ranking
    step = request.step
    model = str(request.keys.get("model", "model"))
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
    request = answer.request
    ranking = answer.ranking
    row = ranking.recommended
    if ranking.recommendation is None or row is None:
        yield from _misfit_lines(find_misfit(ranking.fits, is_restricted=request.is_restricted))
        yield ""
        return
    fit = row.fit
    if row.ds_config:
        name = f"{row.ds_config}: {fit.strategy.describe()}"
    else:
        name = fit.strategy.describe()
    rate = f"; {row.tokens_per_second:,.0f} tokens/s" if row.tokens_per_second else ""
    mfu = f", {row.mfu:.0%} MFU" if row.mfu else ""
    if row.usd_per_billion_tokens:
        price = f", ${row.usd_per_billion_tokens:,.0f} per billion tokens"
    else:
        price = ""
    memory = f"{gib(fit.estimate.total_bytes)} of {fit.cluster.gpu_bytes / GIB:.1f} GiB"
    choice = f"* {name}, micro-batch {row.batch}: {memory}, {fit.verdict.strip()}{rate}{mfu}{price}"
    yield from (paint(line, "green", sys.stdout) for line in wrap_line(choice, output_width()))
    yield f"  {ranking.recommendation.why[0].upper()}{ranking.recommendation.why[1:]}"
    ds, note = _ds_path(fit, request, emitted)
    yield f"  {train_command(ds, fit, request.keys)}"
    yield f"  ({note}{describe_data(fit.step.shape, request.model_keys)})"
    if row.tokens_per_second:
        yield from (f"  {line}" for line in unproven_rates([fit.cluster.gpu]))
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
    nearest = misfit.nearest
    change = misfit.change
    more = misfit.more_nodes
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


def _emit(path: Path, fit: Candidate, nvme_path: str) -> None:
    """Write the row's ds_config atomically. Raises ConfigError."""
    config = strategy_ds_config(fit.strategy, fit.step.precision, nvme_path)
    parse_ds_config(config, str(path))
    write_output_file("--emit", path, json.dumps(config, indent=2) + "\n")


def _plot(path: Path, answer: RowsAnswer, rows: Sequence[RankedConfig]) -> None:
    from llmscale.report.planning_plots import MemoryBar, plot_memory

    bars = [
        MemoryBar(_label(row), row.fit.estimate, row.fit.fits, is_recommended=row is answer.ranking.recommended)
        for row in rows
    ]
    request = answer.request
    seq_len = request.step.shape.seq_len
    model = request.keys.get("model", "")
    title = f"{model} on {request.machines_in_words}, sequences of {seq_len:,}"
    plot_memory(path, bars, request.cluster.gpu_bytes, title)


def _label(row: RankedConfig) -> str:
    strategy = row.strategy
    offload = row.strategy.offload.replace("-", "")
    if strategy.activation_checkpointing == "none":
        mode = ""
    else:
        mode = f"{strategy.activation_checkpointing} ckpt"
    if row.ds_config:
        where = [row.ds_config]
    else:
        where = [f"ZeRO {strategy.stage_words}", offload]
    return ", ".join(part for part in (*where, mode, f"batch {row.fit.plan.micro_batch_size}") if part)


def answer_gpus(args: argparse.Namespace, gpus: Sequence[GPU], prices: Sequence[float | None]) -> int:
    """Print the row to take on each kind of GPU; return 0 if one fits, else 1."""
    rows = []
    for gpu, price in dict.fromkeys(zip(gpus, prices, strict=True)):
        answer = find_rows(read_request(args, gpu), gpu.name, price)
        rows.append(answer.ranking.nearest)
    request = answer.request
    step = answer.request.step
    has_prices = None not in prices
    costs = [row.usd_per_billion_tokens or math.inf for row in rows]
    rates = [row.tokens_per_second or 0 for row in rows]
    if has_prices:
        best = costs.index(min(costs))
    else:
        best = rates.index(max(rates))
    lines = [
        f"{request.keys.get('model')}: {describe_parameters(step.shape)}, sequences of {step.shape.seq_len:,}, on "
        f"{request.cluster.in_words('each GPU')}, global batch {step.plan.global_batch_size:,}: the row to take, or "
        f"the one that misses least; * {'least expensive' if has_prices else 'fastest'}",
        *request.assumption_lines(),
        "",
        *table(row_heads(wide=False), rows, is_marked=lambda row: row.fit.fits and row is rows[best]),
        "",
        "GiB per GPU at the peak; tok/s are estimated. One --gpu has its command, and the rows to choose between.",
        *unproven_rates(gpus),
    ]
    values = question_values(request)
    show(
        {key: values[key] for key in ("shape", "global_batch_size", "assumed")} | {"gpus": rows},
        lines,
        is_json=args.json,
    )
    return 0 if any(row.fit.fits for row in rows) else EXIT_NOTHING_FITS


def answer_networks(args: argparse.Namespace, gpu: GPU) -> int:
    """Print each ZeRO stage's rate for every network; return 0 if something fits, else 1.

    Raises ConfigError for one node, and for a GPU of unknown rate.
    """
    request = read_request(args, gpu)
    step = request.step
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


def answer_largest(args: argparse.Namespace, gpu: GPU) -> int:
    """Print the largest model for each strategy; return 0 if something fits, else 1."""
    request = read_request(args, gpu)
    if args.model is None:
        model = None
    else:
        model = str(args.model)
    family = scaling_family(model)
    models = find_largest_models(request.trials, request.cluster, family)
    values = question_values(request) | {"largest_models": models}
    del values["shape"]
    show(values, _largest_lines(request, model, family, models), is_json=args.json)
    return 0 if any(model.fit for model in models) else EXIT_NOTHING_FITS


def _largest_lines(
    request: EstimateRequest, model: str | None, family: str, models: Sequence[LargestModel]
) -> Iterator[str]:
    step = request.step
    is_fixed = request.trials[0].is_fixed
    what = "The largest GPT" if model is None else f"The largest model like {model}"
    yield (
        f"{what} that fits {request.machines_in_words}, {step.precision}: sequences of {step.shape.seq_len:,}, "
        f"vocabulary {step.shape.vocab_size:,}, micro-batch {step.plan.micro_batch_size if is_fixed else 1}"
    )
    yield from request.assumption_lines()
    yield ""
    best = max((row.num_parameters or 0 for row in models), default=0)
    heads = STRATEGY_HEADS | {
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
    yield f"total: GiB of one GPU; host and NVMe: GiB of one node, {host_words(request.cluster)}."
    yield f"{margin_line()} A model that barely fits leaves no room for a larger micro-batch."
    yield "preset: the largest that is not larger."


def _shapes_line(model: str | None, family: str) -> str:
    """Return the source of the sizes."""
    if family != GPT3:
        return (
            f"Shapes: the {family} presets, and between them depth, heads and MLP as functions of the width; beyond "
            "the widest in proportion to it."
        )
    if model is None or model.startswith("gpt3-"):
        whose = ""
    else:
        whose = f"; blocks are {model}'s"
    return f"Shapes: GPT-3's table, and between its points depth as a function of the width{whose}."


def answer_longest(args: argparse.Namespace, gpu: GPU) -> int:
    """Print the longest sequence of each strategy by GPUs that divide it; return 0 if one fits, else 1."""
    # The batch does not matter: each group of GPUs has the micro-batch alone.
    args.global_batch_size = read_cluster(args, gpu).world_size * (args.micro_batch_size or 1)
    request = read_request(args, gpu)
    cluster = request.cluster
    step = request.step
    is_fixed = request.trials[0].is_fixed
    every_size = sequence_parallel_sizes(cluster.world_size, step.shape.n_head)
    if args.sequence_parallel_size:
        sizes = [step.plan.ranks.sequence_parallel_size]
    else:
        sizes = every_size
    if request.names:
        trials = request.trials
    else:
        trials = [*with_inputs_on_host(request.trials, request.nvme_path)]
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
        f"Host memory is {host_words(cluster)}.",
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
