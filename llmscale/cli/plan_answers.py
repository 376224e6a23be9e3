"""`llmscale plan`: from flags to a request, and from a plan to text, JSON or a picture. No torch."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from llmscale.architecture.shape import GPTShape
from llmscale.cli.answers import align
from llmscale.cli.flags import (
    ESTIMATED_GPUS,
    PLANNED_GPUS,
    PRICE,
    describe_data,
    describe_flags,
    given_keys,
    one_for_each,
    read_gpus,
    resolve_model,
    train_command,
)
from llmscale.config.batch_plan import ParallelLayout
from llmscale.config.bundled_files import is_in_checkout
from llmscale.config.describe_defaults import SIZES, describe_parameters, describe_preset, shape_changes
from llmscale.config.hardware import GPU, Cluster, get_interconnect
from llmscale.config.hf_model import default_preset
from llmscale.config.presets import PRESETS
from llmscale.config.run_config import RunConfig, build_run_config
from llmscale.config.run_flags import keys_asked_by, model_keys
from llmscale.errors import ConfigError
from llmscale.memory.breakdown import format_size
from llmscale.planning.disk_usage import SAVE_EVERY
from llmscale.planning.run_plan import Goal, Lifetime, Plan, PlanRequest, RunPlan
from llmscale.planning.scaling import (
    BESIROGLU,
    FITTED_EXPANSION,
    HOFFMANN,
    KAPLAN,
    PF_DAY_FLOPS,
    Interval,
    Point,
    central,
    dense_equivalent,
    expansion_of,
    inference_flops,
    law_with_experts,
    suggest_shape,
)
from llmscale.planning.scaling_ladder import load_law
from llmscale.planning.search import MARGIN, PROCESS_BYTES
from llmscale.planning.serving import BANDWIDTH_SHARE, MAX_SEQUENCES, MEMORY_SHARE, PROMPT_MFU, break_even_share
from llmscale.planning.step_time import RATE_ERROR, unproven_rates
from llmscale.terminal.human_numbers import format_days, format_quantity
from llmscale.terminal.table import output_width

_TIB = 2**40
#: GPUs of the largest of the rows that speed was fitted to, and the run beyond them whose settings are nearest
#: (tests/planning/published_runs.csv).
_FITTED_GPUS = 512
_MEASURED_BEYOND = (
    "OPT-175B reached 147 TFLOP/s per GPU with its recomputation, 35 % MFU without, on 992 A100-80GB (FSDP and tensor "
    "parallelism, Zhang et al. 2022), and took about 33 days of training and two months with its restarts; for its "
    "settings this estimate is 1.43 times as fast"
)
#: Longest line of text.
_MOST_WIDTH = 112
_LAWS = {"besiroglu": BESIROGLU, "hoffmann": HOFFMANN}
_MODELS = ("--model", "--params")
_OTHERS = ("--budget-usd", "--gpu-hours", "--flops", "--pf-days", "--tokens", "--loss")
#: Keys of the model that do not need --model.
_OF_ANY_MODEL = ("vocab_size", "seq_len")
_DEFAULT_SEQ_LEN = 2048
#: Preset whose vocabulary a planned model has by default.
_SIZED_LIKE = "gpt3-125m"


def plan_lines(request: PlanRequest, plan: Plan) -> Iterator[str]:
    """Yield the complete answer, first whether the run cannot be."""
    if (run := plan.run) is not None and run.row is None:
        yield f"Nothing fits: {run.why}"
    elif run is not None and run.hours is not None and not run.is_in_time:
        taken = f"{run.cluster.in_words()} take {_duration(run.hours)}"
        yield f"Not in {format_days(run.within_days)}: {taken}{_way_out(run)}."
    yield f"Optimal for {plan.flops:.3g} FLOPs = {plan.pf_days:,.4g} PF-days (C = 6 N D) of training:"
    yield from _law_lines(request, plan)
    for text in _law_notes(request, plan):
        yield from textwrap.wrap(text, _width())
    yield ""
    for name, text in _parts(request, plan):
        yield from textwrap.wrap(text, _width(), initial_indent=f"{name:11}", subsequent_indent=" " * 11)
    yield ""
    yield from _command_lines(request, plan)


def _width() -> int:
    return min(_MOST_WIDTH, output_width() or _MOST_WIDTH)


def _parts(request: PlanRequest, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the name of every part of the plan, empty for a further line of the one before, and its text."""
    yield from _model_parts(request, plan)
    if plan.run is not None:
        yield from _placement_parts(request, plan, plan.run)
        yield from _price_parts(request, plan.run)
    else:
        yield "GPUs", "--gpu NAME adds hours, energy, the ZeRO row, and with --price-per-gpu-hour the cost"
    if request.requests is not None:
        yield from _serving_parts(request, plan, *request.requests)
    if plan.lifetime is not None:
        yield from _lifetime_parts(request, plan, plan.lifetime)


def _law_lines(request: PlanRequest, plan: Plan) -> Iterator[str]:
    cells = [
        [
            "*" if row.name == request.law.name else "",
            row.name,
            _with_range(row.num_parameters),
            _with_range(row.tokens),
            f"{central(row.tokens) / central(row.num_parameters):.2g}",
            f"{central(row.loss):.3f}",
        ]
        for row in plan.laws
    ]
    yield from align(["", "by", "parameters N", "tokens D", "D/N", "loss"], cells)


def _law_notes(request: PlanRequest, plan: Plan) -> Iterator[str]:
    yield (
        "In brackets: 80 % by the errors of the fit alone. Hoffmann et al. print none for these numbers; all their "
        "approaches together put the optimum of 5.76e23 FLOPs between 40B and 70B."
    )
    if error := request.law.loss_error:
        yield f"Losses by {request.law.name} also contain the error of a single run in its ladder, {error:.1%}."
    yield f"{KAPLAN.name} differs because {KAPLAN.why_it_differs}. Its loss is that of WebText2, another text."
    expansion = expansion_of(plan.shape)
    if expansion > 1:
        yield from _expert_notes(plan, expansion)
        return
    low, high = request.law.fitted_parameters
    if not low <= plan.shape.num_parameters <= high:
        sizes = f"{format_quantity(low)} to {format_quantity(high)}"
        yield f"The fits rest on models of {sizes} parameters; this is an extrapolation."


def _expert_notes(plan: Plan, expansion: float) -> Iterator[str]:
    """Yield how a model with experts is compared with dense ones, and what lies beyond the runs of that law."""
    joint = law_with_experts(expansion)
    equal = dense_equivalent(plan.shape, plan.tokens)
    if math.isinf(equal):
        as_good = "no dense model"
    else:
        as_good = f"a dense model of {format_quantity(equal)} parameters"
    yield (
        f"Experts: N counts the {format_quantity(plan.shape.active_parameters)} active parameters, those that a token "
        f"uses; there are {expansion:.3g} times as many experts as a token takes. By {joint.name.partition(',')[0]} "
        f"{as_good} has the same loss after as many tokens. The other laws are of dense models, and that law's losses "
        "are of its own text."
    )
    low, high = joint.fitted_parameters
    if not low <= plan.shape.active_parameters <= high or expansion > FITTED_EXPANSION or plan.tokens > 80e9:
        yield (
            f"It rests on {format_quantity(low)} to {format_quantity(high)} active parameters, up to "
            f"{FITTED_EXPANSION} times as many experts as a token takes, and 80B tokens; this is an extrapolation."
        )


def _with_range(value: Interval | float) -> str:
    if isinstance(value, Interval):
        return f"{format_quantity(value.value)} ({format_quantity(value.low)}-{format_quantity(value.high)})"
    return format_quantity(value)


def _model_parts(request: PlanRequest, plan: Plan) -> Iterator[tuple[str, str]]:
    shape = plan.shape
    preset = PRESETS[plan.nearest_preset]
    yield (
        "model",
        f"{describe_parameters(shape)}: {shape.n_layer} layers, {shape.n_head} heads of {shape.head_dim}, width "
        f"{shape.n_embd} (vocabulary {shape.vocab_size:,})",
    )
    changes = shape_changes(plan.nearest_preset, shape)
    if changes.keys() & {*SIZES}:
        yield "", f"nearest preset: {plan.nearest_preset}, {preset.n_layer} layers, width {preset.n_embd}"
    else:
        same = f"that is the preset {plan.nearest_preset}"
        if changes:
            same = f"the preset {plan.nearest_preset} with {', '.join(f'{key} {changes[key]}' for key in changes)}"
        yield "", describe_preset(plan.nearest_preset, shape, "a") or same
    yield (
        "training",
        f"{format_quantity(plan.tokens)} tokens = {plan.steps:,} steps of {plan.tokens_per_step:,} tokens "
        f"({plan.global_batch_size:,} sequences of {shape.seq_len:,})",
    )
    loss = f"{central(plan.loss):.3f}"
    if isinstance(plan.loss, Interval):
        loss += f" ({plan.loss.low:.3f}-{plan.loss.high:.3f})"
    yield "loss", f"{loss} nats per token by {plan.law}, on text and a tokenizer like theirs"
    disk = plan.disk
    hourly = ""
    if disk.hourly:
        if disk.is_hourly_weights:
            kind = "exports (`llmscale export`, then delete the checkpoint)"
        else:
            kind = "checkpoints"
        hourly = f"{disk.hourly:,} {kind} kept permanently, one every {request.keep_hours:g} hours, "
        hourly += f"{_size(disk.hourly_bytes)}; "
    yield (
        "disk",
        f"{_size(disk.total_bytes)}: checkpoints of {_size(disk.checkpoint_bytes)}, {disk.kept_checkpoints} kept and "
        f"one being written; {hourly}data {_size(disk.data_bytes)}; 16-bit weights {_size(disk.weights_bytes)}",
    )


def _placement_parts(request: PlanRequest, plan: Plan, run: RunPlan) -> Iterator[tuple[str, str]]:
    fewest = ""
    if request.num_nodes is None and (run.cluster.num_nodes > 1 or request.days):
        if run.is_in_time and run.hours:
            in_time = f" and finish in {format_days(run.within_days)}"
        else:
            in_time = ""
        fewest = f" (the fewest nodes that hold it{in_time})"
    yield "GPUs", f"{run.cluster.in_words()}, {run.precision}{fewest}"
    if request.assumes_gpus:
        estimated = f"where `estimate` assumes {ESTIMATED_GPUS}"
        yield "", f"{run.cluster.gpus_per_node} GPUs a node are assumed, {estimated}: --num-gpus says how many"
    if run.row is None:
        yield "ZeRO", f"nothing fits these GPUs: {run.why}"
    else:
        batch = run.row.fit.plan
        dtype = run.row.fit.step.engine_config.grad_accum_dtype
        if batch.gradient_accumulation_steps > 1:
            summed = f" (gradients summed in {dtype})"
        else:
            summed = ""
        if batch.filler_share:
            fillers = f", fillers {batch.filler_share:.1%} more work"
        else:
            fillers = ""
        layout = f"{run.row.strategy.describe()}, micro-batch {run.row.batch} accumulation"
        yield "ZeRO", f"{layout}{summed}{fillers}: {run.why}"
        yield "", f"chosen with a margin of {MARGIN:.0%} of each GPU, because no GPU has calibrated the estimate"
        yield "host", _host_memory(run)
    yield (
        "store",
        f"with --run s3://BUCKET/NAME {run.store_requests_per_save:,} requests a save, and "
        f"{_size(run.store_bytes_per_step)} a step at --save-every {SAVE_EVERY}",
    )


def _host_memory(run: RunPlan) -> str:
    """Return the parts of a node's memory."""
    gpus = run.cluster.gpus_per_node
    total = run.host_bytes_per_node + run.save_bytes_per_node + gpus * PROCESS_BYTES
    if run.host_bytes_per_node:
        offloaded = f"{_size(run.host_bytes_per_node)} of offloaded states, "
    else:
        offloaded = ""
    return (
        f"{_size(total)} of memory per node, not checked here: {offloaded}{_size(run.save_bytes_per_node)} of a "
        f"checkpoint's copy while it is written, and {gpus} x {_size(PROCESS_BYTES)} for processes with their data "
        "workers, assumed"
    )


def _price_parts(request: PlanRequest, run: RunPlan) -> Iterator[tuple[str, str]]:
    """Yield speed, time, energy and money."""
    if run.mfu is None or run.hours is None or run.gpu_hours is None:
        what = "more nodes, or --mfu for an assumption"
        if run.peak_flops is None:
            what = f"the peak rate of {run.gpu} in {run.precision} is not in the table"
        yield "speed", f"not known: {what}"
        return
    yield from _speed_parts(request, run, run.mfu)
    if run.is_in_time:
        too_long = ""
    else:
        too_long = f". That is too long{_way_out(run)}"
    yield "time", f"{_duration(run.hours)}; {run.gpu_hours:,.0f} GPU-hours{too_long}"
    if run.hours_with_recomputation is not None:
        yield (
            "",
            f"{_duration(run.hours_with_recomputation)}, if the FLOP/s of --mfu count recomputation (8 N D in place of "
            "6 N D), as OPT-175B's 147 TFLOP/s do",
        )
    if run.energy_kwh is not None and run.watts is not None:
        is_assumed = " (assumed)" if request.pue is None else ""
        if request.watts is None:
            is_limit = f", their limit ({run.cluster.gpu.source})"
        else:
            is_limit = ""
        if run.energy_kwh < 1000:
            energy = f"{run.energy_kwh:.3g} kWh"
        else:
            energy = f"{run.energy_kwh / 1000:,.4g} MWh"
        boards = f"boards at {run.watts:g} W{is_limit}"
        yield "energy", f"{energy}: {boards}, PUE {run.pue:g}{is_assumed}; hosts and network not counted"
    electricity = run.electricity_usd_per_gpu_hour
    if electricity is not None:
        yield "", f"${run.gpu_hours * electricity:,.2f} at ${request.usd_per_kwh:g} per kWh"
    if run.cost_usd is not None:
        yield "cost", f"${run.cost_usd:,.0f} at ${request.usd_per_gpu_hour:g} per GPU-hour"
    owning = run.owning_usd_per_gpu_hour
    bought = request.usd_per_bought_gpu
    if bought is not None and (owning is None or electricity is None):
        yield "buying", "not known: the GPU's power limit is not published"
    elif bought is not None and owning is not None and electricity is not None:
        yield (
            "buying",
            f"${run.cluster.world_size * bought:,.0f} for all GPUs; over {request.years:g} years without a "
            f"pause ${owning:.2f} per GPU-hour with electricity, staff not counted; this run "
            f"${run.gpu_hours * owning:,.0f}{_beside_renting(owning, electricity, request.usd_per_gpu_hour)}",
        )


def _speed_parts(request: PlanRequest, run: RunPlan, mfu: float) -> Iterator[tuple[str, str]]:
    basis = "given by --mfu" if request.mfu is not None else f"estimated, {RATE_ERROR}"
    gpu = run.cluster.gpu
    peak = run.peak_flops or 0
    of_peak = f"{mfu:.0%} MFU, {mfu * peak / 1e12:.3g} of {peak / 1e12:g} TFLOP/s per GPU"
    yield "speed", f"{run.tokens_per_second:,.0f} tokens/s at {of_peak} ({basis})"
    if run.precision == "fp32" and gpu.tf32_flops:
        yield "", f"runs in fp32 do not use TF32, whose peak is {gpu.tf32_flops / 1e12:g} TFLOP/s"
    if request.mfu is None:
        yield from (("", line) for line in unproven_rates([gpu]))
    if run.cluster.world_size > _FITTED_GPUS and request.mfu is None:
        yield "", f"on more GPUs than those rows: {_MEASURED_BEYOND}"


def _way_out(run: RunPlan) -> str:
    """Return the words after a time that is too long, with the nodes that are enough."""
    days = format_days(run.within_days)
    if run.enough_nodes is not None:
        return f": {run.enough_nodes:,} nodes finish in {days}"
    return (
        f", and more nodes do not finish in {days} either: every GPU needs one of the {run.global_batch_size:,} "
        "sequences of a step. A larger --global-batch-size allows more GPUs"
    )


def comparison_lines(requests: Sequence[PlanRequest], plans: Sequence[Plan]) -> Iterator[str]:
    """Yield a line for every GPU: the least expensive is marked, without prices the fastest."""
    runs = [plan.run for plan in plans if plan.run]
    what = "fastest"
    amounts = [run.hours for run in runs]
    if requests[0].goal.kind == "gpu_hours":
        what = "lowest loss"
        amounts = [central(plan.loss) for plan in plans]
    elif requests[0].usd_per_gpu_hour is not None:
        what = "least expensive"
        amounts = [run.cost_usd for run in runs]
    usable = [amount for amount, run in zip(amounts, runs, strict=True) if amount and run.row and run.is_in_time]
    if requests[0].num_nodes is None:
        which = "The fewest nodes of each GPU that hold the model and"
    else:
        which = "Nodes that"
    days = format_days(runs[0].within_days)
    if not usable:
        yield f"None of these GPUs can do it in {days}:"
    yield f"{which} finish in {days}; * {what}"
    cells = []
    for amount, plan, run in zip(amounts, plans, runs, strict=True):
        fit = run.row.strategy if run.row else None
        cells.append(
            [
                "*" if usable and amount == min(usable) else "",
                run.gpu,
                f"{run.cluster.num_nodes} x {run.cluster.gpus_per_node}",
                format_quantity(plan.shape.num_parameters),
                format_quantity(plan.tokens),
                f"{central(plan.loss):.3f}",
                fit.stage_words if fit else "nothing fits",
                fit.offload if fit else "-",
                fit.activation_checkpointing if fit else "-",
                "-" if run.mfu is None else f"{run.mfu:.0%}",
                "-" if run.hours is None else f"{run.hours / 24:,.1f}{'' if run.is_in_time else ' (too long)'}",
                "-" if run.energy_kwh is None else f"{run.energy_kwh:,.0f}",
                "-" if run.cost_usd is None else f"{run.cost_usd:,.0f}",
            ]
        )
    heads = ("", "GPU", "nodes", "N", "tokens D", "loss", "stage", "offload", "checkpt", "MFU", "days", "kWh", "$")
    yield from align(heads, cells)
    yield f"MFU is estimated, {RATE_ERROR}. One --gpu has its command, disk and serving."
    yield from unproven_rates([request.cluster.gpu for request in requests if request.cluster])


def _beside_renting(owning: float, electricity: float, rent: float | None) -> str:
    if rent is None:
        return ""
    share = break_even_share(owning, electricity, rent)
    if share is None:
        what = "never cheaper"
    else:
        what = f"cheaper, if they work more than {share:.0%} of that time,"
    return f"; {what} than renting at ${rent:g}"


def _serving_parts(request: PlanRequest, plan: Plan, prompt: int, output: int) -> Iterator[tuple[str, str]]:
    assert request.cluster is not None
    gpu = request.cluster.gpu.name
    serving = plan.serving
    asked = f"requests of {prompt:,} + {output:,} tokens"
    if serving is None:
        node = f"{request.cluster.gpus_per_node} x {gpu}"
        yield "serving", f"{asked}: no replica fits {node}, or the bandwidth of their memory is unknown"
        return
    yield (
        "serving",
        f"{asked} on {serving.num_gpus} x {gpu}, {serving.num_sequences} at a time: "
        f"{serving.requests_per_s * 86400:,.0f} a day; alone, prompts {serving.prompt_tokens_per_s:,.0f} tokens/s and "
        f"output {serving.output_tokens_per_s:,.0f}, bound by {'memory' if serving.is_memory_bound else 'arithmetic'}",
    )
    if serving.usd_per_day is not None:
        yield (
            "",
            f"${serving.usd_per_day:,.0f} a day; a million tokens: prompts "
            f"${serving.usd_per_million_prompt_tokens:,.3f}, output ${serving.usd_per_million_output_tokens:,.3f}",
        )
    yield (
        "",
        f"assumed: 16-bit weights, full load, {BANDWIDTH_SHARE:.0%} of the bandwidth and {PROMPT_MFU:.0%} of the peak "
        f"rate reached, {MEMORY_SHARE:.0%} of the memory, at most {MAX_SEQUENCES} sequences",
    )


def _lifetime_parts(request: PlanRequest, plan: Plan, lifetime: Lifetime) -> Iterator[tuple[str, str]]:
    other = lifetime.training_optimal
    mfu = plan.run.mfu if plan.run else None
    served = format_quantity(request.inference_tokens)
    yield "inference", f"{served} tokens: {lifetime.inference_flops:.3g} FLOPs (2 N D, attention not counted)"
    unit = "FLOPs"
    if request.inference_mfu is not None and mfu is not None:
        unit = f"FLOPs of training (serving at {request.inference_mfu:.0%} MFU, training at {mfu:.0%})"
    total = f"{lifetime.total_flops:.3g} {unit}"
    if plan.usd_per_flop is not None:
        total += f" = ${lifetime.total_flops * plan.usd_per_flop:,.0f}"
    yield "lifetime", f"{total} for training and inference together"
    saved = 1 - lifetime.total_flops / lifetime.training_optimal_total_flops
    more = f"{saved:.0%} less" if saved >= 0 else f"{-saved:.0%} more"
    cheapest = f"{format_quantity(other.num_parameters)} on {format_quantity(other.tokens)} tokens"
    yield (
        "",
        f"{more} than the model of the same loss that is cheapest to train, {cheapest}: {other.flops:.3g} + "
        f"{inference_flops(other.num_parameters, request.inference_tokens):.3g} FLOPs",
    )
    if request.inference_mfu is None:
        yield "", "served at the MFU of training; producing one token at a time is slower by far: --inference-mfu"


def _command_lines(request: PlanRequest, plan: Plan) -> Iterator[str]:
    """Yield the commands that come next, from the keys that were set."""
    shape = plan.shape
    preset = PRESETS[plan.nearest_preset]
    keys = {**request.keys, **_keys_of_saves(request, plan)}
    if request.preset is None:
        keys = {"model": plan.nearest_preset, **keys}
        keys |= {name: getattr(shape, name) for name in SIZES if getattr(shape, name) != getattr(preset, name)}
    asked = {key: value for key, value in keys.items() if key in (*model_keys(), *keys_asked_by("estimate"))}
    asked |= {"seq_len": shape.seq_len, "vocab_size": shape.vocab_size, "global_batch_size": plan.global_batch_size}
    if plan.run is None:
        yield f"llmscale estimate {describe_flags(asked)} --gpu NAME --emit ds.json"
        trained = keys | {"global_batch_size": plan.global_batch_size, "steps": plan.steps}
        start = "deepspeed llmscale/train.py" if is_in_checkout() else "llmscale train"
        yield f"{start} --ds ds.json {describe_flags(trained)}"
        return
    cluster = plan.run.cluster
    if cluster.gpu.source.startswith("given"):
        asked["gpu_memory_gib"] = f"{cluster.gpu.memory_gib:g}"
        asked["bf16_tflops"] = f"{cluster.gpu.dense_16bit_flops / 1e12:g}"
    else:
        asked["gpu"] = cluster.gpu.name
    asked |= {"num_gpus": cluster.gpus_per_node, "num_nodes": cluster.num_nodes}
    if cluster.num_nodes > 1:
        asked["interconnect"] = cluster.interconnect.name
    yield f"llmscale estimate {describe_flags(asked)} --emit ds.json"
    if plan.run.row is not None:
        yield train_command("ds.json", plan.run.row.fit, keys | {"steps": plan.steps})
        yield f"({describe_data(shape, keys)})"


def _keys_of_saves(request: PlanRequest, plan: Plan) -> dict[str, object]:
    """Return the keys of a run that keeps checkpoints by the hour: about the usual steps between saves."""
    if not plan.disk.hourly or plan.run is None or not plan.run.hours or not request.keep_hours:
        return {}
    steps = plan.steps * request.keep_hours / plan.run.hours
    saves = math.ceil(steps / SAVE_EVERY)
    return {"save_every": max(1, round(steps / saves)), "keep_every": saves * max(1, round(steps / saves))}


def _size(num_bytes: float) -> str:
    if num_bytes < _TIB:
        return format_size(num_bytes)
    return f"{num_bytes / _TIB:,.2f} TiB"


def _duration(hours: float) -> str:
    if hours < 1:
        return f"{hours * 60:.3g} minutes"
    return f"{hours:.3g} hours" if hours < 48 else f"{hours / 24:,.1f} days"


def draw(path: Path, request: PlanRequest, plan: Plan) -> None:
    """Draw iso-FLOP curves with the chosen point. Raises ConfigError without matplotlib."""
    from llmscale.report.planning_plots import plot_isoflops

    chosen = Point(plan.shape.active_parameters, plan.tokens, central(plan.loss))
    law = request.law
    interval = law.interval(lambda moved: moved.optimal_parameters(plan.flops))
    plot_isoflops(
        path, law, chosen, interval or law.optimal_parameters(plan.flops), f"{law.name}: loss at equal training FLOPs"
    )


def read_requests(args: argparse.Namespace) -> list[PlanRequest]:
    """Check all flags, and return a request for every GPU, equal ones once. Raises ConfigError."""
    _check_goals(args)
    has_gpu = bool(_given(args, ("--gpu", "--gpu-memory-gib", "--bf16-tflops")))
    gpus = read_gpus(args) if has_gpu else [None]
    prices, watts = (one_for_each(args, flag, len(gpus)) for flag in (PRICE, "--watts"))
    return [_read_request(args, *given) for given in dict.fromkeys(zip(gpus, prices, watts, strict=True))]


def _read_request(
    args: argparse.Namespace, gpu: GPU | None, usd_per_gpu_hour: float | None, watts: float | None
) -> PlanRequest:
    keys = given_keys(args, "plan")
    config = build_run_config(keys)
    shape, preset = _read_model(args, config, given_keys(args))
    ParallelLayout(config.expert_parallel_size, 1, config.expert_parallel_size).experts_of_rank(
        shape.num_experts if shape else 0
    )
    gpus = (args.num_gpus or PLANNED_GPUS, get_interconnect(args.interconnect))
    if gpu and watts:
        gpu = replace(gpu, power_w=watts)
    return PlanRequest(
        goal=_read_goal(args, shape, usd_per_gpu_hour),
        config=config,
        keys={key: getattr(config, key) for key in keys},
        shape=shape,
        preset=preset,
        law=_LAWS.get(args.law) or load_law(args.law),
        vocab_size=_vocab_size(config),
        seq_len=shape.seq_len if shape else config.seq_len or _DEFAULT_SEQ_LEN,
        cluster=Cluster(gpu, *gpus) if gpu else None,
        assumes_gpus=args.num_gpus is None,
        num_nodes=args.num_nodes,
        days=args.days,
        mfu=args.mfu,
        inference_tokens=args.inference_tokens or 0.0,
        inference_mfu=args.inference_mfu,
        usd_per_gpu_hour=usd_per_gpu_hour,
        pue=args.pue,
        requests=args.serve,
        usd_per_kwh=args.usd_per_kwh,
        usd_per_bought_gpu=args.buy_usd_per_gpu,
        years=args.years,
        keep_hours=args.keep_hours,
        keeps_weights=args.keep_weights,
        watts=watts,
    )


def _given(args: argparse.Namespace, flags: tuple[str, ...]) -> list[str]:
    return [flag for flag in flags if getattr(args, flag.removeprefix("--").replace("-", "_")) is not None]


def _check_goals(args: argparse.Namespace) -> None:
    models = _given(args, _MODELS)
    others = _given(args, _OTHERS)
    for flags in (models, others):
        if len(flags) > 1:
            raise ConfigError(f"{' and '.join(flags)} are two goals that contradict each other. Give one of them.")
    if not models and not others:
        raise ConfigError(
            f"plan for what? Give one of {', '.join((*_OTHERS, *_MODELS))}, or a model and one of the others."
        )


def _read_model(
    args: argparse.Namespace, config: RunConfig, keys: Mapping[str, object]
) -> tuple[GPTShape | None, str | None]:
    """Return the shape of the user's model or size, and the preset of the model that --model names."""
    if args.model is not None:
        config, shape = resolve_model(config, config.seq_len)
        return shape, default_preset(config)
    others = [key for key in keys if key not in _OF_ANY_MODEL]
    if others:
        raise ConfigError(f"--{others[0].replace('_', '-')} changes a model: it needs --model PRESET.")
    if args.params is None:
        return None, None
    return suggest_shape(args.params, _vocab_size(config), config.seq_len or _DEFAULT_SEQ_LEN), None


def _vocab_size(config: RunConfig) -> int:
    """Return the vocabulary size of a model that the plan chooses."""
    return config.vocab_size or PRESETS[_SIZED_LIKE].vocab_size


def _read_goal(args: argparse.Namespace, shape: GPTShape | None, usd_per_gpu_hour: float | None) -> Goal:
    if args.budget_usd is not None and usd_per_gpu_hour:
        return Goal("gpu_hours", args.budget_usd / usd_per_gpu_hour)
    if args.gpu_hours is not None:
        return Goal("gpu_hours", args.gpu_hours)
    if args.pf_days is not None:
        return Goal("flops", args.pf_days * PF_DAY_FLOPS)
    if args.flops is not None:
        return Goal("flops", args.flops)
    if args.tokens is not None:
        return Goal("tokens", args.tokens)
    if args.loss is not None:
        return Goal("loss", args.loss)
    if shape is None:
        raise ConfigError("plan for what? Give a goal.")
    return Goal("parameters", float(shape.active_parameters))
