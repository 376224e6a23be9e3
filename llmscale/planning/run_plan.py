"""`llmscale plan`: from one goal to a model, its layout on GPUs, its steps, hours, price and disk. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import ParallelLayout, build_batch_plan
from llmscale.config.deepspeed.schema import Precision
from llmscale.config.hardware import GPU, Cluster, usable_precision
from llmscale.config.resolve import ResolvedStep, default_batch_size, resolve_loss, resolve_optimizer, resolve_step
from llmscale.config.run_config import RunConfig
from llmscale.errors import ConfigError
from llmscale.planning.disk_usage import SAVE_EVERY, DiskSpace, estimate_disk
from llmscale.planning.recommend import RankedConfig, nearest_fit, rank_trials
from llmscale.planning.scaling import (
    PF_DAY_FLOPS,
    Interval,
    LawRow,
    ParametricLaw,
    Point,
    affordable_tokens,
    dense_equivalent,
    expansion_of,
    inference_flops,
    law_rows,
    law_with_experts,
    nearest_preset,
    optimal_point,
    suggest_shape,
    training_flops,
)
from llmscale.planning.search import Candidate, Strategy, Trial, build_strategy, evaluate, try_strategies
from llmscale.planning.serving import Serving, estimate_serving, owning_usd_per_gpu_hour
from llmscale.planning.step_time import estimate_compute_s, peak_flops

_GIB = 2**30
_SMALLEST = Strategy(3, "none", "none", "full")
"""Strategy with the least memory on the GPU without offload."""
_MOST_NODES = 4096
#: Tokens of the micro-batch whose speed is assumed before memory is estimated.
_USUAL_MICRO_BATCH_TOKENS = 8192
#: The FLOPs that GPU-hours buy depend on the model, and the model on the FLOPs: rounds until they agree to a
#: thousandth, and the MFU of the first round.
_ROUNDS = 4
_FIRST_MFU = 0.4
_BISECTIONS = 50
#: FLOPs of a step with all blocks recomputed over those without: 8 N D over 6 N D.
RECOMPUTED = 8 / 6
#: Longest duration of a run that is an answer without --days: longer than OPT-175B's two months with all restarts.
LONGEST_DAYS = 90.0
#: Least growth of the nodes from one try to the next, where more of them hardly help.
_LEAST_GROWTH = 1.25
#: Power of a data centre per watt of its computers, an assumption: good ones have 1.1, the average is near 1.6.
DEFAULT_PUE = 1.2
#: Tokens between which those of a model with experts are searched.
_FEWEST_TOKENS = 1e5
_MOST_TOKENS = 1e18


@dataclass(frozen=True)
class Placement:
    """Layout of a model on a cluster."""

    cluster: Cluster = field(repr=False)
    global_batch_size: int = field(repr=False)
    """Sequences per step."""
    row: RankedConfig | None = field(repr=False)
    """Row of `llmscale estimate` to run; None if nothing fits."""
    why: str
    """Reason for this row; or how much the nearest row misses, and how many nodes are enough."""
    peak_flops: float | None = field(repr=False)
    """Peak FLOP/s of a GPU in the run's precision; None if it is unknown."""
    mfu: float | None
    """MFU of that peak; None if nothing fits and none was given, or the peak is unknown."""

    def hours_of(self, shape: GPTShape, tokens: float) -> float | None:
        """Return the hours of training."""
        speed = self.rate_of(shape)
        return None if speed is None else tokens / speed / 3600

    def rate_of(self, shape: GPTShape) -> float | None:
        """Return the rate of all GPUs together."""
        if self.mfu is None or self.peak_flops is None:
            return None
        return self.mfu * self.peak_flops * self.cluster.world_size / shape.flops_per_token


def place(request: PlanRequest, cluster: Cluster, shape: GPTShape, batch: int) -> Placement:
    """Find the row to run. A batch that was not given is rounded up to a multiple of the GPUs, which needs no fillers.

    Raises ConfigError if a given batch has fewer sequences than there are GPUs.
    """

    def step_on(num_nodes: int) -> ResolvedStep:
        return _smallest_step(request, replace(cluster, num_nodes=num_nodes), shape, batch)

    unit = _fewest_for_experts(request, cluster)
    most_ranks = request.config.global_batch_size or math.inf
    num_nodes = request.num_nodes or _fewest_nodes(step_on, cluster, unit, most_ranks) or unit
    cluster = replace(cluster, num_nodes=num_nodes)
    step = step_on(num_nodes)
    hpz_ranks = cluster.gpus_per_node if num_nodes > 1 else 1
    ranking = rank_trials(try_strategies(Trial(step), hpz_ranks=hpz_ranks), cluster)
    row = ranking.recommended
    if row is not None and ranking.recommendation is not None:
        why = ranking.recommendation.why
    else:
        enough = _fewest_nodes(step_on, cluster, unit, most_ranks, num_nodes + 1)
        why = _what_is_missing(nearest_fit(ranking.fits), enough)
    peak = peak_flops(cluster.gpu, step.precision)
    mfu = request.mfu
    if mfu is None and peak and row and row.throughput:
        mfu = row.throughput.tokens_per_second * shape.flops_per_token / (cluster.world_size * peak)
    return Placement(cluster, step.plan.global_batch_size, row, why, peak, mfu)


def _smallest_step(request: PlanRequest, cluster: Cluster, shape: GPTShape, batch: int) -> ResolvedStep:
    """Return the run with the smallest layout on a cluster, at a micro-batch of 1. Raises ConfigError."""
    config = request.config
    world_size = cluster.world_size
    plan = build_batch_plan(
        global_batch_size=batch if config.global_batch_size else -(-batch // world_size) * world_size,
        ranks=ParallelLayout(world_size, expert_parallel_size=config.expert_parallel_size),
        seq_len=shape.seq_len,
        micro_batch_size=1,
    )
    ds = build_strategy(_SMALLEST, usable_precision(config.precision, cluster.gpu))
    assert ds is not None
    mode = _SMALLEST.activation_checkpointing
    optimizer = resolve_optimizer(config, shape)
    loss = resolve_loss(config, shape)
    return resolve_step(ds, shape, plan, mode, optimizer, loss)


def usual_mfu(shape: GPTShape, gpu: GPU, precision: Precision | None = None) -> float:
    """Return the MFU of the arithmetic alone, which is assumed before memory is estimated.

    Raises ConfigError if the GPU's rate in this precision is unknown.
    """
    micro_batch_size = max(1, _USUAL_MICRO_BATCH_TOKENS // shape.seq_len)
    precision = usable_precision(precision, gpu)
    peak = _known_peak(gpu, precision)
    seconds = estimate_compute_s(shape, micro_batch_size, precision, "none", gpu)
    assert seconds is not None, "the peak is known"
    return shape.flops_per_token * micro_batch_size * shape.seq_len / seconds / peak


def _known_peak(gpu: GPU, precision: Precision) -> float:
    peak = peak_flops(gpu, precision)
    if peak is None:
        raise ConfigError(f"--gpu {gpu.name}: its rate in {precision} is not known. Plan for --precision bf16.")
    return peak


def _fewest_for_experts(request: PlanRequest, cluster: Cluster) -> int:
    """Return the nodes of which a number of nodes is a multiple: ranks that divide experts divide all ranks."""
    size = request.config.expert_parallel_size
    return size // math.gcd(size, cluster.gpus_per_node)


def _fewest_nodes(
    step_on: Callable[[int], ResolvedStep], cluster: Cluster, unit: int, most_ranks: float, least: int = 1
) -> int | None:
    """Return the fewest nodes, doubling from `unit`, that are at least `least` and on which the smallest layout fits.

    None if no number helps, or the batch has fewer sequences than they have GPUs.
    """
    num_nodes = unit
    while num_nodes <= _MOST_NODES and num_nodes * cluster.gpus_per_node <= most_ranks:
        larger = replace(cluster, num_nodes=num_nodes)
        if num_nodes >= least and evaluate(step_on(num_nodes), larger).has_margin:
            return num_nodes
        num_nodes *= 2
    return None


def _what_is_missing(nearest: Candidate, enough: int | None) -> str:
    missing = f"the row that misses least needs {-nearest.spare_bytes / _GIB:,.1f} GiB more per GPU"
    if enough is None:
        return f"{missing}. More GPUs alone do not help; a shorter --seq-len or a smaller model does."
    return f"{missing}; --num-nodes {enough} is enough."


@dataclass(frozen=True)
class Goal:
    """Quantity that is given."""

    kind: Literal["flops", "gpu_hours", "parameters", "tokens", "loss"]
    value: float


@dataclass(frozen=True)
class PlanRequest:
    """Inputs of a plan."""

    goal: Goal
    config: RunConfig
    """Keys of the run: of its model, its batch, its optimizer and the like."""
    keys: Mapping[str, object]
    """Keys of `config` that the user set."""
    shape: GPTShape | None
    """Model, if the user chose it or its size."""
    law: ParametricLaw
    vocab_size: int
    seq_len: int
    cluster: Cluster | None = None
    """GPUs to plan for, on one node until their number is known."""
    num_nodes: int | None = None
    """Number of nodes; None for the fewest that fit without offload and finish in time."""
    days: float | None = None
    """Days in which the run must finish; None for LONGEST_DAYS, if any number of nodes does."""
    mfu: float | None = None
    """MFU given by the user; None to estimate it."""
    inference_tokens: float = 0.0
    inference_mfu: float | None = None
    """MFU of inference; None for that of training."""
    usd_per_gpu_hour: float | None = None
    pue: float | None = None
    """Power of the data centre per watt of its computers; None for DEFAULT_PUE."""
    requests: tuple[int, int] | None = None
    """Tokens of prompt and output of a request to serve."""
    usd_per_kwh: float | None = None
    usd_per_bought_gpu: float | None = None
    years: float = 4.0
    """Years until a bought GPU is worth nothing, an assumption."""
    assumes_gpus: bool = False
    """True if the user did not say how many GPUs a node has."""
    preset: str | None = None
    """Preset of a model that the user named; None for the one nearest in size."""
    keep_hours: float | None = None
    """Hours between checkpoints that are kept permanently."""
    keeps_weights: bool = False
    """True to keep the 16-bit weights of these alone."""
    watts: float | None = None
    """Power of a GPU given by the user, which the cluster's GPU has; None for its limit."""


@dataclass(frozen=True)
class RunPlan(Placement):
    """A planned run on its GPUs; what follows from the MFU is None without one."""

    DERIVED: ClassVar = (
        "cluster.gpus_per_node",
        "cluster.num_nodes",
        "row.strategy",
        "row.fit.plan.micro_batch_size",
        "row.fit.plan.gradient_accumulation_steps",
        "row.fit.plan.filler_share",
        "row.fit.step.engine_config.grad_accum_dtype",
    )

    gpu: str
    precision: Precision
    host_bytes_per_node: int
    """Host memory of offloaded states."""
    save_bytes_per_node: int
    """Host memory of the copy of a checkpoint that is written in the background; 0 if nothing fits."""
    store_requests_per_save: int
    store_bytes_per_step: float
    tokens_per_second: float | None
    """Rate of all GPUs together."""
    hours: float | None
    """Hours by the wall clock."""
    gpu_hours: float | None
    hours_with_recomputation: float | None
    """Hours if the MFU that the user gave counts the recomputation of full checkpointing: 8 N D in place of 6 N D."""
    within_days: float
    """Days in which the run should finish."""
    enough_nodes: int | None
    """Fewest nodes that finish in these days where this run does not; None if it does, or no number of nodes does."""
    watts: float | None
    """Power of a GPU: the board's limit, unless the user gave it."""
    energy_kwh: float | None
    """Energy of the boards with the data centre's overhead, without hosts and network; None if unknown."""
    pue: float
    cost_usd: float | None
    """Cost of training; None if the time or the price is unknown."""
    electricity_usd_per_gpu_hour: float | None
    """Price of a GPU's power at its limit, with the data centre's overhead."""
    owning_usd_per_gpu_hour: float | None
    """Price of an hour of a bought GPU that never idles, with electricity; None without its price, or its power."""

    @property
    def is_in_time(self) -> bool:
        """Return whether the run finishes in its days; an unknown time counts as enough."""
        return self.hours is None or self.hours <= 24 * self.within_days


@dataclass(frozen=True)
class Plan:
    """A plan for a run."""

    DERIVED: ClassVar = ("flops", "pf_days", "tokens", "tokens_per_step")

    goal: Goal
    laws: list[LawRow]
    """Optimum for the plan's FLOPs by every law."""
    law: str
    """Name of the law that decides."""
    optimum: Point
    """Optimum of that law for the goal, which the shape approximates."""
    shape: GPTShape
    nearest_preset: str
    """Nearest preset by number of parameters."""
    global_batch_size: int
    steps: int
    loss: Interval | float
    """Loss of shape and tokens by the law."""
    disk: DiskSpace
    run: RunPlan | None
    lifetime: Lifetime | None
    serving: Serving | None

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.shape.seq_len

    @property
    def tokens(self) -> int:
        """Return the tokens of all steps."""
        return self.steps * self.tokens_per_step

    @property
    def flops(self) -> float:
        """Return the training FLOPs, 6 N D with the N that a token uses."""
        return training_flops(self.shape.active_parameters, self.tokens)

    @property
    def pf_days(self) -> float:
        return self.flops / PF_DAY_FLOPS

    @property
    def usd_per_flop(self) -> float | None:
        """Return the price of a FLOP of 6 N D at this plan's speed."""
        if self.run is None or self.run.cost_usd is None:
            return None
        return self.run.cost_usd / self.flops


@dataclass(frozen=True)
class Lifetime:
    """FLOPs of training and inference, beside the compute-optimal model of the same loss."""

    inference_flops: float
    total_flops: float
    """Total with FLOPs of inference weighted by training MFU over inference MFU."""
    training_optimal: Point
    training_optimal_total_flops: float


def make_plan(request: PlanRequest) -> Plan:
    """Plan a run, on the fewest nodes that hold it and finish in time if their number is open.

    Raises ConfigError if the goal cannot be reached or is less than one step.
    """
    plan = _plan_on(request, request.num_nodes)
    if plan.run is None or plan.run.is_in_time:
        return plan
    faster = _find_faster(request, plan.run, min(_MOST_NODES, plan.global_batch_size // plan.run.cluster.gpus_per_node))
    if faster is None or request.num_nodes is None:
        return faster or plan
    if faster.run and faster.run.is_in_time:
        enough = faster.run.cluster.num_nodes
    else:
        enough = None
    return replace(plan, run=replace(plan.run, enough_nodes=enough))


def _find_faster(request: PlanRequest, slow: RunPlan, most: int) -> Plan | None:
    """Return the plan on the fewest nodes that finishes in time, or on `most` if no fewer do; None if not faster.

    `most`: with more, not every GPU has a sequence of the batch.
    """
    too_few = slow.cluster.num_nodes
    enough = 0
    run = slow
    plan = None
    unit = _fewest_for_experts(request, slow.cluster)
    while not run.is_in_time:
        if run.hours is None or run.cluster.num_nodes + unit > most:
            return plan
        # Time shrinks at best in proportion.
        too_few = run.cluster.num_nodes
        least = too_few * max(run.hours / (24 * run.within_days), _LEAST_GROWTH)
        enough = min(most // unit, math.ceil(least / unit)) * unit
        plan = _plan_on(request, enough)
        assert plan.run is not None, "it has GPUs"
        run = plan.run
    num_nodes = enough - unit
    while num_nodes > too_few:
        fewer = _plan_on(request, num_nodes)
        if fewer.run and fewer.run.is_in_time:
            plan = fewer
            enough = num_nodes
        else:
            too_few = num_nodes
        num_nodes = (too_few + enough) // 2 // unit * unit
    return plan


def _plan_on(request: PlanRequest, num_nodes: int | None) -> Plan:
    request = replace(request, num_nodes=num_nodes)
    optimum, shape = _find_model(request, None)
    preset, batch = _choose_batch(request, shape)
    if request.cluster:
        placement = place(request, request.cluster, shape, batch)
    else:
        placement = None
    if placement is not None and placement.mfu is not None and _depends_on_speed(request):
        # The layout's speed changes the model a little, which hardly changes the speed.
        optimum, changed = _find_model(request, placement.mfu)
        if changed != shape:
            shape = changed
            preset, batch = _choose_batch(request, shape)
            placement = place(request, placement.cluster, shape, batch)
    batch = placement.global_batch_size if placement else batch
    wanted = _tokens(request, shape, optimum, placement)
    steps = int(wanted // (batch * shape.seq_len))
    if steps < 1:
        raise ConfigError(
            f"{wanted:,.0f} tokens are less than one step of {batch:,} sequences of {shape.seq_len:,}. Plan for more, "
            "or give a smaller --global-batch-size."
        )
    tokens = steps * batch * shape.seq_len
    flops = training_flops(shape.active_parameters, tokens)
    equivalent = dense_equivalent(shape, tokens)
    disk = estimate_disk(shape, steps, tokens, request.config)
    if request.keep_hours and placement and (hours := placement.hours_of(shape, tokens)):
        disk = replace(disk, hourly=int(hours // request.keep_hours), is_hourly_weights=request.keeps_weights)
    return Plan(
        goal=request.goal,
        laws=law_rows(flops, request.law, expansion_of(shape)),
        law=request.law.name,
        optimum=optimum,
        shape=shape,
        nearest_preset=preset,
        global_batch_size=batch,
        steps=steps,
        loss=request.law.estimate_loss(lambda moved: moved.loss(equivalent, tokens)),
        disk=disk,
        run=None if placement is None else _plan_run(request, placement, shape, tokens, disk),
        lifetime=_lifetime(request, shape, tokens, placement),
        serving=_serving(request, shape),
    )


def _plan_run(request: PlanRequest, placement: Placement, shape: GPTShape, tokens: int, disk: DiskSpace) -> RunPlan:
    cluster = placement.cluster
    fit = placement.row.fit if placement.row else None
    pue = DEFAULT_PUE if request.pue is None else request.pue
    hours = placement.hours_of(shape, tokens)
    watts = cluster.gpu.power_w
    recomputes = fit is not None and fit.step.checkpointing == "full" and request.mfu is not None
    gpu_hours = None if hours is None else hours * cluster.world_size
    kw = None if watts is None else watts * pue / 1000
    if kw is None or request.usd_per_kwh is None:
        electricity = None
    else:
        electricity = kw * request.usd_per_kwh
    price = request.usd_per_gpu_hour
    bought = request.usd_per_bought_gpu
    if bought and electricity:
        owning = owning_usd_per_gpu_hour(bought, request.years, electricity)
    else:
        owning = None
    return RunPlan(
        **vars(placement),
        gpu=cluster.gpu.name,
        precision=usable_precision(request.config.precision, cluster.gpu),
        host_bytes_per_node=fit.host_bytes_per_node if fit else 0,
        save_bytes_per_node=fit.save_bytes_per_node if fit else 0,
        store_requests_per_save=disk.store_requests(cluster.world_size),
        store_bytes_per_step=disk.checkpoint_bytes / SAVE_EVERY,
        tokens_per_second=placement.rate_of(shape),
        hours=hours,
        gpu_hours=gpu_hours,
        hours_with_recomputation=hours * RECOMPUTED if hours and recomputes else None,
        within_days=request.days or LONGEST_DAYS,
        enough_nodes=None,
        watts=watts,
        energy_kwh=None if gpu_hours is None or kw is None else gpu_hours * kw,
        pue=pue,
        cost_usd=None if gpu_hours is None or price is None else gpu_hours * price,
        electricity_usd_per_gpu_hour=electricity,
        owning_usd_per_gpu_hour=owning,
    )


def _serving(request: PlanRequest, shape: GPTShape) -> Serving | None:
    cluster = request.cluster
    if request.requests is None or cluster is None:
        return None
    serving = estimate_serving(shape, cluster.gpu, cluster.gpus_per_node, *request.requests)
    if serving:
        return serving.with_prices(request.usd_per_gpu_hour)
    return None


def _find_model(request: PlanRequest, mfu: float | None) -> tuple[Point, GPTShape]:
    """Return the law's optimum and the shape to build."""
    optimum = _find_optimum(request, mfu)
    shape = request.shape or suggest_shape(optimum.num_parameters, request.vocab_size, request.seq_len)
    return optimum, shape


def _choose_batch(request: PlanRequest, shape: GPTShape) -> tuple[str, int]:
    """Return the nearest preset, and sequences per step: the user's, or those of the preset's tokens."""
    preset = request.preset or nearest_preset(shape.num_parameters, request.vocab_size)
    return preset, request.config.global_batch_size or default_batch_size(preset, shape.seq_len, 1)


def _depends_on_speed(request: PlanRequest) -> bool:
    """Return whether the best model depends on the speed of the GPUs."""
    return request.goal.kind == "gpu_hours" or request.inference_mfu is not None


def _find_optimum(request: PlanRequest, mfu: float | None) -> Point:
    """Return the law's optimum. `mfu` None: assume that of the arithmetic alone."""
    if request.cluster is None or not _depends_on_speed(request):
        return _optimum_at(request, 1.0, 1.0)
    point = _optimum_at(request, mfu or _FIRST_MFU, 1.0)
    for _ in range(_ROUNDS):
        shape = request.shape or suggest_shape(point.num_parameters, request.vocab_size, request.seq_len)
        # MFU counts attention and omits positions; 6 N D does neither.
        share = 6 * shape.active_parameters / shape.flops_per_token
        usual = mfu or request.mfu or usual_mfu(shape, request.cluster.gpu, request.config.precision)
        point = _optimum_at(request, usual, share)
    return point


def _optimum_at(request: PlanRequest, mfu: float, share: float) -> Point:
    """Return the optimum at an MFU. `share`: 6 N D over the FLOPs that MFU counts."""
    goal = request.goal
    served = request.inference_tokens
    law = request.law
    if request.shape is not None and request.shape.num_experts and goal.kind != "loss":
        law = law_with_experts(expansion_of(request.shape))
    weight = _inference_weight(request, mfu)
    if goal.kind != "gpu_hours":
        return optimal_point(law, goal.kind, goal.value, served, weight)
    if request.cluster is None:
        raise ConfigError("GPU-hours of which GPU? Give --gpu NAME.")
    gpu = request.cluster.gpu
    flops = goal.value * 3600 * _known_peak(gpu, usable_precision(request.config.precision, gpu)) * mfu * share
    return optimal_point(law, "flops", flops, served, weight)


def _tokens(request: PlanRequest, shape: GPTShape, optimum: Point, placement: Placement | None) -> float:
    goal = request.goal
    if goal.kind == "gpu_hours" and placement is not None:
        speed = placement.rate_of(shape)
        if speed is None:
            raise ConfigError(
                f"the {shape.num_parameters:,} parameters that this budget trains best do not fit "
                f"{placement.cluster.world_size} x {placement.cluster.gpu.name}, so their speed is not known: "
                f"{placement.why} --mfu plans with an assumption."
            )
        return goal.value * 3600 / placement.cluster.world_size * speed
    if goal.kind == "flops":
        return affordable_tokens(goal.value, shape.active_parameters)
    if goal.kind == "tokens":
        return goal.value
    if goal.kind == "loss":
        tokens = _tokens_for_loss(request.law, shape, goal.value)
        if tokens is None:
            raise ConfigError(
                f"a model of {shape.num_parameters:,} parameters does not reach a loss of {goal.value:g} on any number "
                f"of tokens ({request.law.name}). Leave the model out, or choose a higher loss."
            )
        return tokens
    return optimum.tokens


def _tokens_for_loss(law: ParametricLaw, shape: GPTShape, loss: float) -> float | None:
    """Return the tokens after which a model reaches a loss; None if it never does."""
    if not shape.num_experts:
        return law.tokens_for_loss(shape.num_parameters, loss)
    # The dense model that is as good depends on the tokens.
    low = math.log(_FEWEST_TOKENS)
    high = math.log(_MOST_TOKENS)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        tokens = math.exp(middle)
        reached = law.loss(dense_equivalent(shape, tokens), tokens) <= loss
        low, high = (low, middle) if reached else (middle, high)
    if high < math.log(_MOST_TOKENS):
        return math.exp(high)
    return None


def _inference_weight(request: PlanRequest, mfu: float | None) -> float:
    """Return the cost of a FLOP of inference in FLOPs of training."""
    if request.inference_mfu is None or mfu is None:
        return 1.0
    return mfu / request.inference_mfu


def _lifetime(request: PlanRequest, shape: GPTShape, tokens: float, placement: Placement | None) -> Lifetime | None:
    """Return training and inference beside the compute-optimal model of the same loss."""
    if not request.inference_tokens:
        return None
    weight = _inference_weight(request, placement.mfu if placement else None)
    law = request.law
    served = request.inference_tokens
    used = inference_flops(shape.active_parameters, served)
    other = optimal_point(law, "loss", law.loss(dense_equivalent(shape, tokens), tokens))
    return Lifetime(
        inference_flops=used,
        total_flops=training_flops(shape.active_parameters, tokens) + weight * used,
        training_optimal=other,
        training_optimal_total_flops=other.flops + weight * inference_flops(other.num_parameters, served),
    )
