"""The answers of `llmscale estimate` about limits: the largest model, the longest sequence. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

from llmscale.cli.answers import align, show, table
from llmscale.cli.estimate_rows import (
    EXIT_NOTHING_FITS,
    STRATEGY_HEADS,
    EstimateRequest,
    host_words,
    margin_line,
    question_values,
    read_cluster,
    read_request,
)
from llmscale.config.batch_plan import sequence_parallel_sizes
from llmscale.config.hardware import GPU
from llmscale.planning.recommend import (
    RankedConfig,
    fastest_by_split,
)
from llmscale.planning.scaling import GPT3, scaling_family
from llmscale.planning.search import (
    LargestModel,
    LongestSequences,
    find_largest_models,
    find_longest,
    with_inputs_on_host,
)


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
    step, is_fixed = request.step, request.trials[0].is_fixed
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
    whose = "" if model is None or model.startswith("gpt3-") else f"; blocks are {model}'s"
    return f"Shapes: GPT-3's table, and between its points depth as a function of the width{whose}."


def answer_longest(args: argparse.Namespace, gpu: GPU) -> int:
    """Print the longest sequence of each strategy by GPUs that divide it; return 0 if one fits, else 1."""
    # The batch does not matter: each group of GPUs has the micro-batch alone.
    args.global_batch_size = read_cluster(args, gpu).world_size * (args.micro_batch_size or 1)
    request = read_request(args, gpu)
    cluster, step, is_fixed = request.cluster, request.step, request.trials[0].is_fixed
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
