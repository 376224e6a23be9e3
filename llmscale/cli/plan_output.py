"""`llmscale plan`: from flags to a request, and from a plan to text, JSON or a picture. No torch."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from llmscale.architecture.shape import GPTShape
from llmscale.cli.estimate_answers import read_gpu
from llmscale.cli.estimate_tables import align, shape_as_dict, strategy_as_dict
from llmscale.cli.flags import (
    ESTIMATED_GPUS,
    PLANNED_GPUS,
    describe_data,
    describe_flags,
    given_keys,
    resolve_model,
    train_command,
)
from llmscale.config.batch_plan import ParallelLayout
from llmscale.config.bundled_files import is_in_checkout
from llmscale.config.describe_defaults import SIZES, describe_parameters, describe_preset, shape_changes
from llmscale.config.hardware import GPUS, get_interconnect
from llmscale.config.hf_model import default_preset
from llmscale.config.optimizers import get_optimizer
from llmscale.config.presets import PRESETS
from llmscale.config.run_config import RunConfig, build_run_config
from llmscale.config.run_flags import keys_asked_by, model_keys
from llmscale.errors import ConfigError
from llmscale.memory.breakdown import format_size
from llmscale.planning.disk_usage import SAVE_EVERY
from llmscale.planning.run_plan import DEFAULT_PUE, ChosenModel, Goal, GPUPlacement, GPUs, Lifetime, Plan, PlanRequest
from llmscale.planning.scaling import (
    BESIROGLU,
    FITTED_EXPANSION,
    HOFFMANN,
    KAPLAN,
    PF_DAY_FLOPS,
    Interval,
    LawRow,
    Point,
    central,
    dense_equivalent,
    expansion_of,
    inference_flops,
    law_rows,
    law_with_experts,
    suggest_shape,
)
from llmscale.planning.scaling_ladder import load_law
from llmscale.planning.search import MARGIN, PROCESS_BYTES
from llmscale.planning.serving import (
    BANDWIDTH_SHARE,
    MAX_SEQUENCES,
    MEMORY_SHARE,
    PROMPT_MFU,
    Serving,
    break_even_share,
)
from llmscale.terminal.human_numbers import format_quantity
from llmscale.terminal.table import output_width

_TIB = 2**40
#: Longest line of text.
_MOST_WIDTH = 112


def plan_lines(request: PlanRequest, plan: Plan, assumed: Collection[str]) -> Iterator[str]:
    """Yield the complete answer. `assumed`: flags that were not given and whose defaults it names."""
    yield from _law_lines(request, plan)
    yield ""
    yield from _run_lines(request, plan)
    if plan.placement is not None:
        yield from _placement_lines(request, plan, plan.placement, assumed)
    elif request.gpus is None:
        yield _line("GPUs", "--gpu NAME adds hours, energy, the ZeRO row, and with --price-per-gpu-hour the cost")
    if request.requests is not None:
        yield from _serving_lines(request, *request.requests, plan.serving)
    if plan.lifetime is not None:
        yield from _lifetime_lines(request, plan, plan.lifetime)
    yield from _hint_lines(request, plan)


def _line(name: str, text: str) -> str:
    """Return a name and a text, wrapped."""
    return textwrap.fill(text, _width(), initial_indent=f"{name:11}", subsequent_indent=" " * 11)


def _law_lines(request: PlanRequest, plan: Plan) -> Iterator[str]:
    yield _note(
        f"Optimal for {plan.flops:.3g} FLOPs = {plan.flops / PF_DAY_FLOPS:,.4g} PF-days (C = 6 N D) of training:"
    )
    expansion = expansion_of(plan.shape)
    rows = law_rows(plan.flops, request.law, expansion)
    cells = [
        [
            "*" if row.name == request.law.name else "",
            row.name,
            _with_range(row.num_parameters),
            _with_range(row.tokens),
            f"{central(row.tokens) / central(row.num_parameters):.2g}",
            "-" if row.loss is None else f"{central(row.loss):.3f}",
        ]
        for row in rows
    ]
    yield from align(["", "by", "parameters N", "tokens D", "D/N", "loss"], cells)
    yield _note(
        "In brackets: 80 % by the errors of the fit alone. Hoffmann et al. print none for these numbers; all their "
        "approaches together put the optimum of 5.76e23 FLOPs between 40B and 70B."
    )
    if error := request.law.loss_error:
        yield _note(f"Losses by {request.law.name} also contain the error of a single run in its ladder, {error:.1%}.")
    yield _note(f"{KAPLAN.name} differs because {KAPLAN.why_it_differs}.")
    if expansion > 1:
        yield from _expert_law_lines(plan, expansion)
        return
    fitted = request.law.fitted_parameters
    if not fitted[0] <= plan.shape.num_parameters <= fitted[1]:
        low, high = map(format_quantity, fitted)
        yield _note(f"The fits rest on models of {low} to {high} parameters; this is an extrapolation.")


def _expert_law_lines(plan: Plan, expansion: float) -> Iterator[str]:
    """Yield how a model with experts is compared with dense ones, and what lies beyond the runs of that law."""
    joint, equal = law_with_experts(expansion), dense_equivalent(plan.shape, plan.tokens)
    as_good = "no dense model" if math.isinf(equal) else f"a dense model of {format_quantity(equal)} parameters"
    yield _note(
        f"Experts: N counts the {format_quantity(plan.shape.active_parameters)} active parameters, those that a token "
        f"uses; there are {expansion:.3g} times as many experts as a token takes. By {joint.name.partition(',')[0]} "
        f"{as_good} has the same loss after as many tokens. The other laws are of dense models, and that law's losses "
        "are of its own text."
    )
    low, high = joint.fitted_parameters
    if not low <= plan.shape.active_parameters <= high or expansion > FITTED_EXPANSION or plan.tokens > 80e9:
        yield _note(
            f"It rests on {format_quantity(low)} to {format_quantity(high)} active parameters, up to "
            f"{FITTED_EXPANSION} times as many experts as a token takes, and 80B tokens; this is an extrapolation."
        )


def _note(text: str) -> str:
    return textwrap.fill(text, _width())


def _width() -> int:
    return min(_MOST_WIDTH, output_width() or _MOST_WIDTH)


def _with_range(value: Interval | float) -> str:
    if isinstance(value, Interval):
        return f"{format_quantity(value.value)} ({format_quantity(value.low)}-{format_quantity(value.high)})"
    return format_quantity(value)


def _preset_line(name: str, changes: Mapping[str, object]) -> str:
    """Describe a model that has its preset's size."""
    if not changes:
        return f"that is the preset {name}"
    return f"the preset {name} with {', '.join(f'{key} {value}' for key, value in changes.items())}"


def _run_lines(request: PlanRequest, plan: Plan) -> Iterator[str]:
    shape, preset = plan.shape, PRESETS[plan.preset]
    yield _line(
        "model",
        f"{describe_parameters(shape)}: {shape.n_layer} layers, {shape.n_head} heads of {shape.head_dim}, width "
        f"{shape.n_embd} (vocabulary {shape.vocab_size:,})",
    )
    changes = shape_changes(plan.preset, shape)
    if changes.keys() & {*SIZES}:
        yield _line("", f"nearest preset: {plan.preset}, {preset.n_layer} layers, width {preset.n_embd}")
    else:
        yield _line("", describe_preset(plan.preset, shape, "a") or _preset_line(plan.preset, changes))
    yield _line(
        "training",
        f"{format_quantity(plan.tokens)} tokens = {plan.steps:,} steps of {plan.tokens_per_step:,} tokens "
        f"({plan.global_batch_size:,} sequences of {shape.seq_len:,})",
    )
    loss = f"{central(plan.loss):.3f}"
    if isinstance(plan.loss, Interval):
        loss += f" ({plan.loss.low:.3f}-{plan.loss.high:.3f})"
    yield _line("loss", f"{loss} nats per token by {request.law.name}, on text and a tokenizer like theirs")
    disk = plan.disk
    yield _line(
        "disk",
        f"{_size(disk.total_bytes)}: checkpoints of {_size(disk.checkpoint_bytes)}, {disk.kept_checkpoints} kept and "
        f"one being written; data {_size(disk.data_bytes)}; 16-bit weights {_size(disk.weights_bytes)}",
    )


def _placement_lines(
    request: PlanRequest, plan: Plan, placement: GPUPlacement, assumed: Collection[str]
) -> Iterator[str]:
    if request.gpus is None:
        return
    gpu, machines = request.gpus.gpu, placement.machines
    found = " (the fewest nodes that hold it)" if request.gpus.num_nodes is None and machines.num_nodes > 1 else ""
    yield _line("GPUs", f"{machines.in_words(gpu.name)}, {request.gpus.precision}{found}")
    if "num_gpus" in assumed:
        estimated = f"where `estimate` assumes {ESTIMATED_GPUS}"
        yield _line("", f"{machines.gpus_per_node} GPUs a node are assumed, {estimated}: --num-gpus says how many")
    if placement.row is None:
        yield _line("ZeRO", f"nothing fits these GPUs: {placement.why}")
    else:
        fit = placement.row.fit
        is_summed = fit.plan.gradient_accumulation_steps > 1
        summed = f" (gradients summed in {fit.step.engine_config.grad_accum_dtype})" if is_summed else ""
        share = fit.plan.filler_share
        fillers = f", fillers {share:.1%} more work" if share else ""
        yield _line(
            "ZeRO",
            f"{fit.strategy.describe()}, micro-batch {fit.plan.micro_batch_size} x "
            f"{fit.plan.gradient_accumulation_steps} accumulation{summed}{fillers}: {placement.why}",
        )
        if fit.host_bytes_per_node:
            processes = f"{machines.gpus_per_node} x {_size(PROCESS_BYTES)} for processes"
            host = f"{_size(fit.host_bytes_per_node)} of host memory per node, and {processes}, assumed"
            yield _line("", f"needs {host}; not checked here")
        yield _line("", f"chosen with a margin of {MARGIN:.0%} of each GPU, because no GPU has calibrated the estimate")
    speed = placement.tokens_per_second(plan.shape, gpu)
    requests, step_bytes = plan.disk.store_requests(machines.world_size), plan.disk.checkpoint_bytes / SAVE_EVERY
    yield _line(
        "store",
        f"with --run s3://BUCKET/NAME {requests:,} requests a save, and {_size(step_bytes)} a step at --save-every "
        f"{SAVE_EVERY}",
    )
    if speed is None or placement.mfu is None or plan.gpu_hours is None or plan.hours is None:
        yield _line("speed", "not known: more nodes, or --mfu for an assumption")
        return
    yield _line("speed", f"{speed:,.0f} tokens/s at {placement.mfu:.0%} MFU ({placement.calibration})")
    yield _line("time", f"{_duration(plan.hours)}; {plan.gpu_hours:,.0f} GPU-hours")
    if plan.energy_kwh is not None:
        is_assumed = " (assumed)" if "pue" in assumed else ""
        yield _line(
            "energy",
            f"{_energy(plan.energy_kwh)}: boards at their limit of "
            f"{gpu.power_w:g} W, PUE {request.pue:g}{is_assumed}; hosts and network not counted",
        )
    if plan.electricity_usd_per_gpu_hour is not None:
        electricity_usd = plan.gpu_hours * plan.electricity_usd_per_gpu_hour
        yield _line("", f"${electricity_usd:,.2f} at ${request.usd_per_kwh:g} per kWh")
    if plan.cost_usd is not None:
        yield _line("cost", f"${plan.cost_usd:,.0f} at ${request.usd_per_gpu_hour:g} per GPU-hour")
    if request.usd_per_bought_gpu is not None:
        yield _buying_line(request, plan, machines.world_size * request.usd_per_bought_gpu)


def _buying_line(request: PlanRequest, plan: Plan, price: float) -> str:
    owning, electricity = plan.owning_usd_per_gpu_hour, plan.electricity_usd_per_gpu_hour
    if owning is None or electricity is None or plan.gpu_hours is None:
        return _line("buying", "not known: the GPU's power limit is not published")
    text = (
        f"${price:,.0f} for all GPUs; over {request.years:g} years without a pause ${owning:.2f} per GPU-hour with "
        f"electricity, staff not counted; this run ${plan.gpu_hours * owning:,.0f}"
    )
    if (rent := request.usd_per_gpu_hour) is not None:
        share = break_even_share(owning, electricity, rent)
        what = "never cheaper" if share is None else f"cheaper, if they work more than {share:.0%} of that time,"
        text += f"; {what} than renting at ${rent:g}"
    return _line("buying", text)


def _serving_lines(request: PlanRequest, prompt: int, output: int, serving: Serving | None) -> Iterator[str]:
    assert request.gpus is not None
    asked = f"requests of {prompt:,} + {output:,} tokens"
    if serving is None:
        node = f"{request.gpus.gpus_per_node} x {request.gpus.gpu.name}"
        yield _line("serving", f"{asked}: no replica fits {node}, or the bandwidth of their memory is unknown")
        return
    yield _line(
        "serving",
        f"{asked} on {serving.num_gpus} x {request.gpus.gpu.name}, {serving.num_sequences} at a time: "
        f"{serving.requests_per_s * 86400:,.0f} a day; alone, prompts {serving.prompt_tokens_per_s:,.0f} tokens/s and "
        f"output {serving.output_tokens_per_s:,.0f}, bound by {'memory' if serving.is_memory_bound else 'arithmetic'}",
    )
    if request.usd_per_gpu_hour is not None:
        day, of_prompt, of_output = serving.prices(request.usd_per_gpu_hour).values()
        yield _line("", f"${day:,.0f} a day; a million tokens: prompts ${of_prompt:,.3f}, output ${of_output:,.3f}")
    yield _line(
        "",
        f"assumed: 16-bit weights, full load, {BANDWIDTH_SHARE:.0%} of the bandwidth and {PROMPT_MFU:.0%} of the peak "
        f"rate reached, {MEMORY_SHARE:.0%} of the memory, at most {MAX_SEQUENCES} sequences",
    )


def _lifetime_lines(request: PlanRequest, plan: Plan, lifetime: Lifetime) -> Iterator[str]:
    other = lifetime.training_optimal
    served = format_quantity(request.inference_tokens)
    yield _line("inference", f"{served} tokens: {lifetime.inference_flops:.3g} FLOPs (2 N D, attention not counted)")
    unit = "FLOPs"
    if request.inference_mfu is not None and plan.placement is not None and plan.placement.mfu is not None:
        unit = f"FLOPs of training (serving at {request.inference_mfu:.0%} MFU, training at {plan.placement.mfu:.0%})"
    total = f"{lifetime.total_flops:.3g} {unit}"
    if plan.usd_per_flop is not None:
        total += f" = ${lifetime.total_flops * plan.usd_per_flop:,.0f}"
    yield _line("lifetime", f"{total} for training and inference together")
    saved = 1 - lifetime.total_flops / lifetime.training_optimal_total_flops
    more = f"{saved:.0%} less" if saved >= 0 else f"{-saved:.0%} more"
    yield _line(
        "",
        f"{more} than the model of the same loss that is cheapest to train, {_describe(other)}: "
        f"{other.flops:.3g} + {inference_flops(other.num_parameters, request.inference_tokens):.3g} FLOPs",
    )
    if request.inference_mfu is None:
        yield _line(
            "",
            "served at the MFU of training; producing one token at a time is slower by far: --inference-mfu",
        )


def _hint_lines(request: PlanRequest, plan: Plan) -> Iterator[str]:
    """Yield the commands that come next."""
    shape, preset = plan.shape, PRESETS[plan.preset]
    keys = {**request.given, **request.given_of_run}
    if request.chosen is None:
        keys = {"model": plan.preset, **keys}
        keys |= {name: getattr(shape, name) for name in SIZES if getattr(shape, name) != getattr(preset, name)}
    asked = {key: value for key, value in keys.items() if key in (*model_keys(), *keys_asked_by("estimate"))}
    asked |= {"seq_len": shape.seq_len, "vocab_size": shape.vocab_size}
    asked |= {"global_batch_size": plan.global_batch_size}
    yield ""
    if plan.placement is None or request.gpus is None:
        trained = keys | {"global_batch_size": plan.global_batch_size, "steps": plan.steps}
        yield f"llmscale estimate {describe_flags(asked)} --gpu NAME --emit ds.json"
        start = "deepspeed llmscale/train.py" if is_in_checkout() else "llmscale train"
        yield f"{start} --ds ds.json {describe_flags(trained)}"
        return
    machines, gpu = plan.placement.machines, request.gpus.gpu
    if gpu in GPUS:
        asked["gpu"] = gpu.name
    else:
        asked |= {"gpu_memory_gib": f"{gpu.memory_gib:g}", "bf16_tflops": f"{gpu.dense_16bit_flops / 1e12:g}"}
    asked |= {"num_gpus": machines.gpus_per_node, "num_nodes": machines.num_nodes}
    if request.expert_parallel_size > 1:
        asked["expert_parallel_size"] = request.expert_parallel_size
    if machines.num_nodes > 1:
        asked["interconnect"] = request.gpus.interconnect.name
    yield f"llmscale estimate {describe_flags(asked)} --emit ds.json"
    if plan.placement.row is not None:
        yield train_command("ds.json", plan.placement.row.fit, keys | {"steps": plan.steps})
        yield describe_data(shape, keys)


def _energy(kwh: float) -> str:
    return f"{kwh:.3g} kWh" if kwh < 1000 else f"{kwh / 1000:,.4g} MWh"


def _describe(point: Point) -> str:
    return f"{format_quantity(point.num_parameters)} on {format_quantity(point.tokens)} tokens"


def _size(num_bytes: float) -> str:
    return format_size(num_bytes) if num_bytes < _TIB else f"{num_bytes / _TIB:,.2f} TiB"


def _duration(hours: float) -> str:
    if hours < 1:
        return f"{hours * 60:.3g} minutes"
    return f"{hours:.3g} hours" if hours < 48 else f"{hours / 24:,.1f} days"


def to_json(request: PlanRequest, plan: Plan) -> str:
    """Return all numbers, unrounded."""
    return json.dumps(
        {
            "goal": asdict(request.goal),
            "flops": plan.flops,
            "pf_days": plan.flops / PF_DAY_FLOPS,
            "laws": [_law_as_dict(row) for row in law_rows(plan.flops, request.law, expansion_of(plan.shape))],
            "law": request.law.name,
            "optimum": {**asdict(plan.optimum), "flops": plan.optimum.flops},
            "shape": shape_as_dict(plan.shape),
            "nearest_preset": plan.preset,
            "tokens": plan.tokens,
            "steps": plan.steps,
            "global_batch_size": plan.global_batch_size,
            "tokens_per_step": plan.tokens_per_step,
            "loss": asdict(plan.loss) if isinstance(plan.loss, Interval) else plan.loss,
            "disk": {
                **asdict(plan.disk),
                "checkpoints_bytes": plan.disk.checkpoints_bytes,
                "total_bytes": plan.disk.total_bytes,
            },
            "run": _run_as_dict(request, plan),
            "lifetime": asdict(plan.lifetime) if plan.lifetime else None,
            "serving": _serving_as_dict(request, plan.serving),
        },
        indent=1,
    )


def _serving_as_dict(request: PlanRequest, serving: Serving | None) -> dict[str, object] | None:
    if serving is None:
        return None
    return asdict(serving) | (serving.prices(request.usd_per_gpu_hour) if request.usd_per_gpu_hour else {})


def _law_as_dict(row: LawRow) -> dict[str, object]:
    values = {"num_parameters": row.num_parameters, "tokens": row.tokens, "loss": row.loss}
    plain = {key: asdict(value) if isinstance(value, Interval) else value for key, value in values.items()}
    return {"name": row.name, **plain, "source": row.source}


def _run_as_dict(request: PlanRequest, plan: Plan) -> dict[str, object] | None:
    placement = plan.placement
    if placement is None or request.gpus is None:
        return None
    gpu, fit = request.gpus.gpu, placement.row.fit if placement.row else None
    return {
        "gpu": gpu.name,
        "gpus_per_node": placement.machines.gpus_per_node,
        "num_nodes": placement.machines.num_nodes,
        "precision": request.gpus.precision,
        "strategy": strategy_as_dict(fit.strategy) if fit else None,
        "micro_batch_size": fit.plan.micro_batch_size if fit else None,
        "gradient_accumulation_steps": fit.plan.gradient_accumulation_steps if fit else None,
        "filler_share": fit.plan.filler_share if fit else None,
        "grad_accum_dtype": fit.step.engine_config.grad_accum_dtype if fit else None,
        "why": placement.why,
        "store_requests_per_save": plan.disk.store_requests(placement.machines.world_size),
        "store_bytes_per_step": plan.disk.checkpoint_bytes / SAVE_EVERY,
        "mfu": placement.mfu,
        "calibration": placement.calibration,
        "tokens_per_second": placement.tokens_per_second(plan.shape, gpu),
        "hours": plan.hours,
        "gpu_hours": plan.gpu_hours,
        "energy_kwh": plan.energy_kwh,
        "pue": request.pue,
        "cost_usd": plan.cost_usd,
        "electricity_usd_per_gpu_hour": plan.electricity_usd_per_gpu_hour,
        "owning_usd_per_gpu_hour": plan.owning_usd_per_gpu_hour,
    }


def draw(path: Path, request: PlanRequest, plan: Plan) -> None:
    """Draw iso-FLOP curves with the chosen point. Raises ConfigError without matplotlib."""
    from llmscale.report.isoflop_plot import plot_isoflops

    chosen = Point(plan.shape.active_parameters, plan.tokens, central(plan.loss))
    law = request.law
    interval = law.interval(lambda moved: moved.optimal_parameters(plan.flops))
    plot_isoflops(
        path, law, chosen, interval or law.optimal_parameters(plan.flops), f"{law.name}: loss at equal training FLOPs"
    )


_LAWS = {"besiroglu": BESIROGLU, "hoffmann": HOFFMANN}
_MODELS = ("--model", "--params")
_OTHERS = ("--budget-usd", "--gpu-hours", "--flops", "--pf-days", "--tokens", "--loss")
#: Keys of the model that do not need --model.
_OF_ANY_MODEL = ("vocab_size", "seq_len")
_DEFAULT_SEQ_LEN = 2048
#: Preset whose vocabulary a planned model has by default.
_SIZED_LIKE = "gpt3-125m"


def read_request(args: argparse.Namespace) -> PlanRequest:
    """Check all flags. Raises ConfigError."""
    _check_goals(args)
    config = build_run_config(given_keys(args, "plan"))
    given = {key: getattr(config, key) for key in given_keys(args)}
    chosen = _read_chosen_model(args, config, given)
    shape = chosen.shape if chosen else _read_size(args, config)
    ParallelLayout(config.expert_parallel_size, 1, config.expert_parallel_size).experts_of_rank(
        shape.num_experts if shape else 0
    )
    run_keys = {key: getattr(config, key) for key in given_keys(args, "plan") if key not in given}
    return PlanRequest(
        goal=_read_goal(args, shape),
        shape=shape,
        chosen=chosen,
        given=given,
        given_of_run=run_keys,
        optimizer=get_optimizer(config.optimizer),
        loss_chunk_tokens=config.loss_chunk_tokens,
        expert_parallel_size=config.expert_parallel_size,
        law=_LAWS.get(args.law) or load_law(args.law),
        vocab_size=_vocab_size(config),
        seq_len=shape.seq_len if shape else config.seq_len or _DEFAULT_SEQ_LEN,
        global_batch_size=config.global_batch_size,
        gpus=_read_gpus(args),
        inference_tokens=args.inference_tokens or 0.0,
        inference_mfu=args.inference_mfu,
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        usd_per_gpu_hour=args.price_per_gpu_hour,
        pue=args.pue or DEFAULT_PUE,
        requests=args.serve,
        usd_per_kwh=args.usd_per_kwh,
        usd_per_bought_gpu=args.buy_usd_per_gpu,
        years=args.years,
    )


def _given(args: argparse.Namespace, flags: tuple[str, ...]) -> list[str]:
    return [flag for flag in flags if getattr(args, flag.removeprefix("--").replace("-", "_")) is not None]


def _check_goals(args: argparse.Namespace) -> None:
    models, others = _given(args, _MODELS), _given(args, _OTHERS)
    for flags in (models, others):
        if len(flags) > 1:
            raise ConfigError(f"{' and '.join(flags)} are two goals that contradict each other. Give one of them.")
    if not models and not others:
        raise ConfigError(
            f"plan for what? Give one of {', '.join((*_OTHERS, *_MODELS))}, or a model and one of the others."
        )


def _has_gpu(args: argparse.Namespace) -> bool:
    return bool(_given(args, ("--gpu", "--gpu-memory-gib", "--bf16-tflops")))


def _read_gpus(args: argparse.Namespace) -> GPUs | None:
    if not _has_gpu(args):
        return None
    network = get_interconnect(args.interconnect)
    return GPUs(read_gpu(args), args.num_gpus or PLANNED_GPUS, args.num_nodes, network, args.mfu)


def _read_chosen_model(args: argparse.Namespace, config: RunConfig, given: Mapping[str, object]) -> ChosenModel | None:
    """Return the model that --model names, changed by the flags of the model."""
    if args.model is None:
        others = [key for key in given if key not in _OF_ANY_MODEL]
        if others:
            flag = f"--{others[0].replace('_', '-')}"
            raise ConfigError(f"{flag} changes a model: it needs --model PRESET.")
        return None
    config, shape = resolve_model(config, config.seq_len)
    return ChosenModel(shape, default_preset(config))


def _read_size(args: argparse.Namespace, config: RunConfig) -> GPTShape | None:
    if args.params is not None:
        return suggest_shape(args.params, _vocab_size(config), config.seq_len or _DEFAULT_SEQ_LEN)
    return None


def _vocab_size(config: RunConfig) -> int:
    """Return the vocabulary size of a model that the plan chooses."""
    return config.vocab_size or PRESETS[_SIZED_LIKE].vocab_size


def _read_goal(args: argparse.Namespace, shape: GPTShape | None) -> Goal:
    if args.budget_usd is not None:
        return Goal("gpu_hours", args.budget_usd / args.price_per_gpu_hour)
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
