"""The answers of `llmscale estimate`: rows, largest models, networks, other families' states. No torch."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.architecture.hf_config import HFModel
from llmscale.architecture.layers import ParameterTensors
from llmscale.cli.estimate_tables import (
    CATEGORIES,
    align,
    breakdown_cells,
    comparison_as_dict,
    comparison_lines,
    estimate_as_dict,
    fastest_lines,
    gib,
    host_words,
    largest_model_lines,
    largest_models_as_list,
    legend_lines,
    load_lines,
    longest_as_list,
    longest_lines,
    margin_line,
    moment_lines,
    ranking_as_dict,
    row_lines,
    search_as_dict,
    strategy_as_dict,
)
from llmscale.cli.flags import (
    DEFAULT_INTERCONNECT,
    ESTIMATED_GPUS,
    LIST,
    PLANNED_GPUS,
    describe_data,
    given_keys,
    resolve_model,
    train_command,
)
from llmscale.config.batch_plan import sequence_parallel_sizes
from llmscale.config.deepspeed.resolve import DsConfig, parse_ds_config, read_ds_config
from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.config.describe_defaults import describe_parameters, describe_preset
from llmscale.config.hardware import GPU, Interconnect, custom_gpu, get_gpu, get_interconnect, usable_precision
from llmscale.config.hf_model import is_published
from llmscale.config.optimizers import ADAMW
from llmscale.config.presets import PRESETS
from llmscale.config.resolve import resolve_batch, resolve_optimizer
from llmscale.config.run_config import RunConfig, build_run_config
from llmscale.config.run_flags import model_keys
from llmscale.config.user_paths import check_output_file, write_output_file
from llmscale.errors import ConfigError
from llmscale.memory.breakdown import format_size
from llmscale.planning.recommend import (
    Misfit,
    Ranking,
    fastest_by_link,
    fastest_by_split,
    find_misfit,
    nearest_fit,
    rank_configs,
)
from llmscale.planning.scaling import GPT3, scaling_family
from llmscale.planning.search import (
    CHECKPOINTING,
    Candidate,
    HFConfig,
    Job,
    Machines,
    Search,
    find_hf_configs,
    find_largest_models,
    find_longest,
    most_room,
    strategy_ds_config,
)
from llmscale.report.save_figure import check_plot
from llmscale.terminal.colour import paint
from llmscale.terminal.table import output_width, print_fitting, wrap_line, wrap_lines

GIB = 2**30
#: Preset for --max-model and --hf, whose values are replaced or not used.
_ANY_MODEL = "gpt3-125m"
#: Context and batch of `--max-model` without a model: GPT-3's context, and 2^20 tokens.
_MAX_MODEL_SEQ_LEN, _MAX_MODEL_BATCH = 2048, 512


@dataclass(frozen=True)
class EstimateRequest:
    """The user's question."""

    given: Mapping[str, object]
    """Keys of a run that the user gave, with their values."""
    search: Search
    assumes_gpus: bool = False
    """True if the user did not say how many GPUs a node has."""

    @property
    def model_keys(self) -> dict[str, object]:
        """Keys in `given` that describe the model."""
        return {key: self.given[key] for key in model_keys() if key in self.given}

    @property
    def machines_in_words(self) -> str:
        gpu = self.search.gpu
        return self.search.job.machines.in_words(f"{gpu.name} ({gpu.memory_gib:g} GiB)")

    def assumption_lines(self) -> Iterator[str]:
        """Yield the number of GPUs, if it is assumed."""
        if self.assumes_gpus:
            yield f"  {ESTIMATED_GPUS} GPU is assumed, where `plan` assumes {PLANNED_GPUS}: --num-gpus says how many"


def read_request(args: argparse.Namespace) -> EstimateRequest:
    """Check all flags and read the files. Raises ConfigError."""
    gpu = read_gpu(args)
    machines = read_machines(args, gpu)
    given = given_keys(args, "estimate")
    if args.freeze is not None:
        given["freeze"] = [pattern for text in args.freeze for pattern in text.split(",")]
    config = build_run_config({"model": _ANY_MODEL, **given})
    mode = config.activation_checkpointing
    search = Search(
        _read_job(args, config, machines),
        gpu,
        get_interconnect(DEFAULT_INTERCONNECT if args.interconnect == LIST else args.interconnect),
        usable_precision(config.precision, gpu),
        (mode,) if mode else CHECKPOINTING,
        args.nvme_path,
        [_read_ds_file(path, config, gpu) for path in args.ds or ()],
    )
    return EstimateRequest({key: getattr(config, key) for key in given}, search, args.num_gpus is None)


def _read_job(args: argparse.Namespace, config: RunConfig, machines: Machines) -> Job:
    """Return shape and global batch, resolved as for a training run."""
    seq_len = config.seq_len if args.model else config.seq_len or _MAX_MODEL_SEQ_LEN
    config, shape = resolve_model(config, seq_len)
    plan = resolve_batch(config, shape.seq_len, machines.world_size, None)
    is_default = config.global_batch_size is None
    if is_default:
        # As in `plan`: without fillers.
        least = _MAX_MODEL_BATCH if args.model is None else plan.global_batch_size
        unit = math.lcm(plan.ranks.data_parallel_size, config.micro_batch_size or 1)
        plan = replace(plan, global_batch_size=-(-least // unit) * unit)
    plan.ranks.heads_of_rank(shape.n_head, shape.n_kv_head)
    plan.ranks.experts_of_rank(shape.num_experts)
    return Job(
        shape,
        plan.global_batch_size,
        machines,
        config.micro_batch_size,
        resolve_optimizer(config, shape),
        config.loss_chunk_tokens,
        config.sequence_parallel_size,
        config.expert_parallel_size,
        is_default_batch=is_default,
    )


def _read_ds_file(path: Path, config: RunConfig, gpu: GPU) -> tuple[DsConfig, CheckpointingMode]:
    """Return a ds_config and its checkpointing mode; flags override both. Raises ConfigError."""
    ds = read_ds_config(path).with_flags(config.precision, config.gradient_clipping)
    usable_precision(ds.precision, gpu, f"{path}: ")
    return ds, config.activation_checkpointing or ds.checkpointing


def read_gpu(args: argparse.Namespace) -> GPU:
    """Return the GPU, from the table or as the flags describe it. Raises ConfigError."""
    described = [args.gpu_memory_gib, args.bf16_tflops]
    if args.gpu is not None:
        if any(value is not None for value in described):
            raise ConfigError(
                "--gpu names a GPU of the table, --gpu-memory-gib and --bf16-tflops one that is not in it."
            )
        return get_gpu(args.gpu)
    if None in described:
        raise ConfigError(
            "which GPU? Give --gpu NAME (--gpu list shows the table), or --gpu-memory-gib and --bf16-tflops for a GPU "
            "that is not in it."
        )
    return custom_gpu(args.gpu_memory_gib, args.bf16_tflops)


def read_machines(args: argparse.Namespace, gpu: GPU) -> Machines:
    """Return the machines that the flags describe."""
    host_gib = args.host_memory_gib
    host_bytes = None if host_gib is None else int(host_gib * GIB)
    return Machines(
        args.num_nodes, args.num_gpus or ESTIMATED_GPUS, int(gpu.memory_gib * GIB), host_bytes, gpu.capability
    )


if TYPE_CHECKING:  # a plain estimate does not wait for what only --dry-run and --emit need
    from llmscale.dry_run.comparison import Comparison

EXIT_NOTHING_FITS = 1


def answer_rows(args: argparse.Namespace) -> int:
    """Print the rows of every strategy, or of --ds; return 0 if something fits, else 1."""
    if args.emit is not None:
        check_output_file("--emit", args.emit, overwrite=args.force)
    if args.plot is not None:
        check_plot(args.plot)
    request = read_request(args)
    ranking = rank_configs(request.search)
    names = _names([ds.source for ds, _ in request.search.files])
    dry_runs = _dry_runs(request.search, ranking) if args.dry_run else []
    if args.json:
        values = search_as_dict(request.search) | ranking_as_dict(ranking, names)
        print(json.dumps(values | {"dry_runs": [comparison_as_dict(dry_run) for dry_run in dry_runs]}, indent=1))
    else:
        for line in wrap_lines(
            _answer_lines(request, ranking, names, dry_runs, wide=args.wide), None if args.wide else output_width()
        ):
            print(line)
    if args.plot is not None:
        _plot(args.plot, request, ranking, names)
    if args.emit is not None and ranking.recommended is not None:
        _emit(args.emit, ranking.recommended.fit, request.search.nvme_path)
    if not args.json:
        for line in _last_lines(request, ranking, args.emit):
            print(line)
    return 0 if ranking.recommendation else EXIT_NOTHING_FITS


def _names(paths: list[str]) -> list[str] | None:
    """Return the files' names, with folders where names are equal; None without files."""
    names = [Path(path).name for path in paths]
    return [name if names.count(name) == 1 else path for name, path in zip(names, paths, strict=True)] or None


def _dry_runs(search: Search, ranking: Ranking) -> list[Comparison]:
    """Dry-run every file; without files, the recommended row, or the one that misses least."""
    from llmscale.dry_run.comparison import compare_with_dry_run

    fits = ranking.fits
    if not search.files:
        fits = [ranking.recommended.fit if ranking.recommended else nearest_fit(fits)]
    return [compare_with_dry_run(fit, search.job.shape) for fit in fits]


def _emit(path: Path, fit: Candidate, nvme_path: str) -> None:
    """Write the row's ds_config atomically. Raises ConfigError."""
    config = strategy_ds_config(fit.strategy, fit.step.precision, nvme_path)
    parse_ds_config(config, str(path))
    write_output_file("--emit", path, json.dumps(config, indent=2) + "\n")


def _answer_lines(
    request: EstimateRequest, ranking: Ranking, names: list[str] | None, dry_runs: list[Comparison], *, wide: bool
) -> Iterator[str]:
    job = request.search.job
    shape, model = job.shape, str(request.given.get("model", "model"))
    yield (
        f"{model}: {describe_parameters(shape)} ({shape.n_layer} layers, {shape.n_head} heads, width "
        f"{shape.n_embd}, vocabulary {shape.vocab_size:,}), sequences of {shape.seq_len:,}"
    )
    reshaped = describe_preset(model, shape, "a") if model in PRESETS else None
    if reshaped:
        yield f"  {reshaped}"
    if is_published(model) and shape.vocab_size != shape.padded_vocab_size:
        yield f"  its table of {shape.vocab_size:,} rows is padded to {shape.padded_vocab_size:,} here"
    precisions = " and ".join(sorted({fit.step.precision for fit in ranking.fits}))
    tensors = ParameterTensors(shape.architecture, job.optimizer.frozen)
    if tensors.frozen:
        frozen = shape.num_parameters - tensors.num_trainable
        yield f"  {frozen:,} of them frozen; activations are counted as if all were trained, which is an upper bound"
    # ds_configs may set their own.
    sizes = sorted({fit.plan.global_batch_size for fit in ranking.fits})
    batches, tokens = (" or ".join(f"{size * each:,}" for size in sizes) for each in (1, shape.seq_len))
    optimizer = "" if job.optimizer.name == ADAMW.name else f"{job.optimizer.name}, "
    yield (
        f"on {request.machines_in_words}, {precisions}, {optimizer}global batch {batches} sequences = {tokens} tokens"
    )
    yield from request.assumption_lines()
    if job.sequence_parallel_size > 1:
        yield job.ranks.describe_split(shape.seq_len, shape.n_head, shape.n_kv_head)
    yield ""
    chosen = ranking.recommendation.index if ranking.recommendation else None
    yield from row_lines(ranking.configs, chosen, names, wide=wide)
    yield ""
    yield from legend_lines(ranking.configs, wide=wide)
    if shape.num_experts:
        fit = ranking.fits[0 if chosen is None else chosen]
        yield from load_lines(fit)
    if names is not None:
        for fit, name in zip(ranking.fits, names, strict=True):
            yield from _explain(fit, name)
    for dry_run in dry_runs:
        yield ""
        yield from comparison_lines(dry_run)
    yield ""


def _explain(fit: Candidate, name: str) -> Iterator[str]:
    """Yield one ds_config, moment by moment."""
    yield ""
    yield (
        f"{name}: {fit.strategy.describe()}, {fit.step.precision}, "
        f"gradients summed in {fit.step.engine_config.grad_accum_dtype}; {fit.plan.describe()}"
    )
    for warning in (*fit.ds.warnings, *fit.ds.batch_notices(fit.plan)):
        yield f"  warning: {warning}"
    yield from moment_lines(fit.estimate.moments, fit.estimate.peak_moment)


def _last_lines(request: EstimateRequest, ranking: Ranking, emitted: Path | None) -> Iterator[str]:
    """Yield the recommendation, or the bytes that are missing."""
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
        yield f"  {train_command(str(ds_path), fit, request.model_keys | dict(request.given))}"
        yield f"  {describe_data(search.job.shape, request.model_keys)}"
    else:
        yield from wrap_line("  --emit FILE writes its ds_config and prints the train.py command.", output_width())


def _shortfall_lines(shortfall: Misfit) -> Iterator[str]:
    """Yield the missing bytes and the cheapest change."""
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
        yield (
            "More GPUs do not help: a shorter --seq-len does, GPUs that divide sequences (--max-seq-len compares) or a "
            "smaller model (--max-model finds the largest)."
        )
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


def answer_largest(args: argparse.Namespace) -> int:
    """Print the largest model for each strategy; return 0 if something fits, else 1."""
    request = read_request(args)
    search, job = request.search, request.search.job
    model = None if args.model is None else str(args.model)
    family = scaling_family(model)
    models = find_largest_models(search, family)
    if args.json:
        values = search_as_dict(search) | {"largest_models": largest_models_as_list(models)}
        del values["shape"]
        print(json.dumps(values, indent=1))
    else:
        said = [
            f"{_largest_of(model)} that fits {request.machines_in_words}, {search.precision}: sequences of "
            f"{job.shape.seq_len:,}, vocabulary {job.shape.vocab_size:,}, micro-batch {job.micro_batch_size or 1}",
            *(*request.assumption_lines(), "", *largest_model_lines(models), ""),
        ]
        fit = next((model.fit for model in models if model.fit), None)
        if fit is not None and fit.plan.gradient_accumulation_steps > 1:
            said.append(
                f"global batch {job.global_batch_size:,}: {fit.plan.gradient_accumulation_steps} micro-steps, whose "
                f"gradients are summed in {fit.step.engine_config.grad_accum_dtype}."
            )
        said += [
            _shapes_line(model, family),
            f"total: GiB of one GPU; host and NVMe: GiB of one node, {host_words(job.machines)}.",
            f"{margin_line()} A model that barely fits leaves no room for a larger micro-batch.",
            "preset: the largest that is not larger.",
        ]
        print_fitting(said)
    return 0 if any(model.shape for model in models) else EXIT_NOTHING_FITS


def _largest_of(model: str | None) -> str:
    return "The largest GPT" if model is None else f"The largest model like {model}"


def _shapes_line(model: str | None, family: str) -> str:
    """Return the source of the sizes."""
    if family != GPT3:
        return (
            f"Shapes: the {family} presets, and between them depth, heads and MLP as functions of the width; beyond "
            "the widest in proportion to it."
        )
    whose = "" if model is None or model.startswith("gpt3-") else f"; blocks are {model}'s"
    return f"Shapes: GPT-3's table, and between its points depth as a function of the width{whose}."


def answer_longest(args: argparse.Namespace) -> int:
    """Print the longest sequence of each strategy by GPUs that divide it; return 0 if one fits, else 1."""
    # The batch does not matter: each group of GPUs has the micro-batch alone.
    args.global_batch_size = read_machines(args, read_gpu(args)).world_size * (args.micro_batch_size or 1)
    request = read_request(args)
    search, job = request.search, request.search.job
    every_size = sequence_parallel_sizes(job.machines.world_size, job.shape.n_head)
    sizes = [job.sequence_parallel_size] if args.sequence_parallel_size else every_size
    rows = find_longest(search, sizes)
    fastest = fastest_by_split(search, sizes)
    if args.json:
        values = search_as_dict(search) | {"longest": longest_as_list(rows)}
        rates = {size: row.throughput.tokens_per_second for size, row in fastest.items() if row and row.throughput}
        print(json.dumps(values | {"tokens_per_second": rates}, indent=1))
    else:
        head = (
            f"The longest sequence that fits {request.machines_in_words}, {search.precision}, in tokens: micro-batch "
            f"{job.micro_batch_size or 1}, no accumulation; by the number of GPUs that divide a sequence"
        )
        speed = fastest_lines(fastest, job.shape.seq_len, search.interconnect.name)
        notes = [margin_line(), f"Host memory is {host_words(job.machines)}."]
        if any(row.ds.cpu_checkpointing for row in rows):
            notes.append('full, host: the ds_config has "activation_checkpointing": {"cpu_checkpointing": true}.')
        print_fitting([head, *request.assumption_lines(), "", *longest_lines(rows, sizes), "", *notes, "", *speed])
    return 0 if any(fit for row in rows for fit in row.fits.values()) else EXIT_NOTHING_FITS


def answer_networks(args: argparse.Namespace) -> int:
    """Print each ZeRO stage's rate for every network; return 0 if something fits, else 1.

    Raises ConfigError for one node, and for a GPU of unknown rate.
    """
    request = read_request(args)
    search = request.search
    if search.job.machines.num_nodes == 1:
        raise ConfigError("--interconnect list compares networks between nodes; this is one node. Give --num-nodes.")
    rates = fastest_by_link(search)
    if rates is None:
        raise ConfigError(
            f"--interconnect list compares tokens/s; the rate of {search.gpu.name} in {search.precision} is not known."
        )
    if args.json:
        values = search_as_dict(search) | {
            "tokens_per_second": {interconnect.name: best for interconnect, best in rates},
        }
        del values["interconnect"]
        print(json.dumps(values, indent=1))
    else:
        shape = search.job.shape
        head = (
            f"{describe_parameters(shape)} on {request.machines_in_words}, {search.precision}, global batch "
            f"{search.job.global_batch_size:,} x {shape.seq_len:,} tokens"
        )
        what = "Estimated tokens/s of each ZeRO stage's fastest row that fits; * the fastest of a line."
        print_fitting([head, *request.assumption_lines(), what, "", *_network_lines(rates)])
    if any(best for _, best in rates):
        return 0
    print("Nothing fits: without --interconnect list the table says by how much.", file=sys.stderr)
    return EXIT_NOTHING_FITS


def _network_lines(rates: Sequence[tuple[Interconnect, dict[str, float]]]) -> Iterator[str]:
    stages = sorted({stage for _, best in rates for stage in best})
    rows = []
    for interconnect, best in rates:
        marks = {stage: "*" * (rate == max(best.values())) for stage, rate in best.items()}
        cells = (f"{marks[stage]}{best[stage]:,.0f}" if stage in best else "-" for stage in stages)
        rows.append([interconnect.name, *cells, interconnect.description])
    return align(["network", *(f"ZeRO {stage}" for stage in stages), "source"], rows)


def answer_states(args: argparse.Namespace, model: HFModel) -> int:
    """Print the model states of a family that llmscale does not train; return 0 if they fit, else 1."""
    gpu = read_gpu(args)
    config = build_run_config(given_keys(args, "estimate"))
    machines, precision = read_machines(args, gpu), usable_precision(config.precision, gpu)
    rows = find_hf_configs(model, machines, precision, config.global_batch_size)
    if args.json:
        print(json.dumps(_states_as_dict(model, machines, rows), indent=1))
    else:
        print(f"{model.name}: {model.num_parameters:,} parameters ({model.family}), model states only")
        print(f"on {machines.in_words(f'{gpu.name} ({gpu.memory_gib:g} GiB)')}, {precision}")
        print()
        for line in _states_lines(rows, machines):
            print(line)
        print()
        print("GiB per GPU at the peak of parameters, gradients, optimizer states, buffers and temporaries.")
        print(_accumulation(config.global_batch_size, rows[0]))
        print("room: bytes left for activations, logits and loss when the backward pass begins, after the allocator's")
        print(f"reserve and the context, both assumed. {model.unknown[0].upper()}{model.unknown[1:]}.")
        print()
        print(_states_summary(rows))
    return 0 if any(row.fits for row in rows) else EXIT_NOTHING_FITS


def _accumulation(global_batch_size: int | None, row: HFConfig) -> str:
    """Return a note on gradient accumulation, which is assumed without --global-batch-size."""
    if row.ds_config.gradient_accumulation_steps == 1:
        return "one micro-step per step, as --global-batch-size has one sequence per GPU: no gradients are summed."
    why = "" if global_batch_size else " (assumed: --global-batch-size says how many)"
    return f"gradients of several micro-steps{why} are summed in {row.ds_config.grad_accum_dtype}."


def _states_lines(rows: list[HFConfig], machines: Machines) -> Iterator[str]:
    head = ["", "ZeRO", "offload", *CATEGORIES, "allocated", "peak in", "  room", "host", "NVMe"]
    kept = [index for index, name in enumerate(head) if name not in ("activ", "logits")]
    table: list[list[str]] = []
    for row in rows:
        estimate = row.states.estimate
        cells = ["", str(row.strategy.zero_stage), row.strategy.offload, *breakdown_cells(estimate.peak)]
        room = gib(row.room_bytes) if row.fits else f"no, {gib(-row.room_bytes)} over"
        cells += [gib(estimate.allocated_bytes), estimate.peak_moment, f"  {room}"]
        cells += [gib(size * machines.gpus_per_node) for size in (estimate.host_bytes, estimate.nvme_bytes)]
        table.append([cells[index] for index in kept])
    yield from align([head[index] for index in kept], table)


def _states_summary(rows: list[HFConfig]) -> str:
    best, num_fitting = most_room(rows), sum(row.fits for row in rows)
    stage, room = f"ZeRO stage {best.strategy.zero_stage}", format_size(abs(best.room_bytes))
    if not best.fits:
        return (
            f"Nothing fits, not even without activations: {stage} misses least, by {room} per GPU. More GPUs, or "
            "another GPU."
        )
    offload = "without offload" if best.strategy.offload == "-" else f"with offload ({best.strategy.offload})"
    return f"{num_fitting} of {len(rows)} rows fit; {stage} {offload} leaves most room for activations: {room}."


def _states_as_dict(model: HFModel, machines: Machines, rows: list[HFConfig]) -> dict[str, object]:
    return {
        "model": {"name": model.name, "family": model.family, "num_parameters": model.num_parameters},
        "unknown": model.unknown,
        "gpu_bytes": machines.gpu_bytes,
        "rows": [
            {
                "strategy": strategy_as_dict(row.strategy),
                "estimate": estimate_as_dict(row.states.estimate),
                "room_for_activations_bytes": row.room_bytes,
                "fits": row.fits,
            }
            for row in rows
        ],
    }
