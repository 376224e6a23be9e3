"""`llmscale plan`: from one goal to a model, its layout on GPUs, its steps, hours, price and disk. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.schema import Precision
from llmscale.config.hardware import GPU, Interconnect, usable_precision
from llmscale.config.loss_settings import CHUNK_TOKENS
from llmscale.config.optimizers import ADAMW, OptimizerSpec
from llmscale.config.resolve import default_batch_size
from llmscale.errors import ConfigError
from llmscale.planning.disk_usage import DiskSpace, estimate_disk
from llmscale.planning.recommend import RankedConfig, nearest_fit, rank_configs
from llmscale.planning.scaling import (
    Interval,
    ParametricLaw,
    Point,
    affordable_tokens,
    dense_equivalent,
    expansion_of,
    inference_flops,
    law_with_experts,
    nearest_preset,
    optimal_point,
    suggest_shape,
    training_flops,
)
from llmscale.planning.search import Candidate, Job, Machines, Search, Strategy, build_strategy, fit_at
from llmscale.planning.serving import Serving, estimate_serving, owning_usd_per_gpu_hour
from llmscale.planning.step_time import estimate_compute_s

_GIB = 2**30
_SMALLEST = Strategy(3, "none", "none", "full")
"""Strategy with the least memory on the GPU without offload."""
_MOST_NODES = 4096
#: Tokens of the micro-batch whose speed is assumed before memory is estimated.
_USUAL_MICRO_BATCH_TOKENS = 8192


@dataclass(frozen=True)
class GPUs:
    """GPUs to plan for."""

    gpu: GPU
    gpus_per_node: int
    num_nodes: int | None
    """Number of nodes; None for the fewest that fit without offload."""
    interconnect: Interconnect
    mfu: float | None
    """MFU given by the user; None to estimate it."""

    @property
    def precision(self) -> Precision:
        return usable_precision(None, self.gpu)

    def machines(self, num_nodes: int) -> Machines:
        return Machines(num_nodes, self.gpus_per_node, int(self.gpu.memory_gib * _GIB), capability=self.gpu.capability)


@dataclass(frozen=True)
class GPUPlacement:
    """Layout of a model on a number of nodes."""

    machines: Machines
    global_batch_size: int
    """Sequences per step."""
    row: RankedConfig | None
    """Row of `llmscale estimate` to run; None if nothing fits."""
    why: str
    """Reason for this row; or how much the nearest row misses, and how many nodes are enough."""
    mfu: float | None
    """MFU; None if nothing fits and none was given."""
    calibration: str
    """Basis of the MFU."""

    def tokens_per_second(self, shape: GPTShape, gpu: GPU) -> float | None:
        """Return the rate of all GPUs together."""
        if self.mfu is None:
            return None
        return self.mfu * gpu.dense_16bit_flops * self.machines.world_size / shape.flops_per_token


def place(
    shape: GPTShape,
    batch: int,
    *,
    is_batch_given: bool,
    gpus: GPUs,
    optimizer: OptimizerSpec = ADAMW,
    loss_chunk_tokens: int = CHUNK_TOKENS,
    expert_parallel_size: int = 1,
) -> GPUPlacement:
    """Find the row to run. A batch that was not given is rounded up to a multiple of the GPUs, which needs no fillers.

    Raises ConfigError if a given batch has fewer sequences than there are GPUs.
    """

    def job_on(num_nodes: int) -> Job:
        machines = gpus.machines(num_nodes)
        rounded = batch if is_batch_given else -(-batch // machines.world_size) * machines.world_size
        return Job(
            shape,
            rounded,
            machines,
            optimizer=optimizer,
            loss_chunk_tokens=loss_chunk_tokens,
            expert_parallel_size=expert_parallel_size,
        )

    job = job_on(gpus.num_nodes or _fewest_nodes(job_on, gpus.precision, 1) or 1)
    ranking = rank_configs(Search(job, gpus.gpu, gpus.interconnect, gpus.precision))
    row = ranking.recommended
    if row is not None and ranking.recommendation is not None:
        why = ranking.recommendation.why
    else:
        enough = _fewest_nodes(job_on, gpus.precision, job.machines.num_nodes + 1)
        why = _what_is_missing(nearest_fit(ranking.fits), enough)
    mfu, calibration = gpus.mfu, "given by --mfu"
    if mfu is None:
        throughput = row.throughput if row else None
        mfu = throughput.mfu if throughput else None
        calibration = throughput.calibration if throughput else "nothing fits"
    return GPUPlacement(job.machines, job.global_batch_size, row, why, mfu, calibration)


def usual_mfu(shape: GPTShape, gpus: GPUs) -> float:
    """Return the MFU of the arithmetic alone, which is assumed before memory is estimated."""
    if gpus.mfu is not None:
        return gpus.mfu
    micro_batch_size = max(1, _USUAL_MICRO_BATCH_TOKENS // shape.seq_len)
    seconds = estimate_compute_s(shape, micro_batch_size, gpus.precision, "none", gpus.gpu)
    if seconds is None:
        raise ValueError("16-bit rates are known for every GPU")
    return shape.flops_per_token * micro_batch_size * shape.seq_len / seconds / gpus.gpu.dense_16bit_flops


def _fewest_nodes(job_on: Callable[[int], Job], precision: Precision, least: int) -> int | None:
    """Return the fewest nodes, doubling, on which the smallest layout fits; None if no number helps."""
    ds = build_strategy(_SMALLEST, precision)
    if ds is None:
        return None
    num_nodes = 1
    while num_nodes <= _MOST_NODES:
        job = job_on(num_nodes)
        if job.global_batch_size < job.machines.world_size:
            return None
        if num_nodes >= least and fit_at(ds, job, _SMALLEST.checkpointing, 1).has_margin:
            return num_nodes
        num_nodes *= 2
    return None


def _what_is_missing(nearest: Candidate, enough: int | None) -> str:
    missing = f"the row that misses least needs {-nearest.spare_bytes / _GIB:,.1f} GiB more per GPU"
    if enough is None:
        return f"{missing}. More GPUs alone do not help; a shorter --seq-len or a smaller model does."
    return f"{missing}; --num-nodes {enough} is enough."


#: The FLOPs that GPU-hours buy depend on the model, and the model on the FLOPs: rounds until they agree to a
#: thousandth, and the MFU of the first round.
_ROUNDS = 4
_FIRST_MFU = 0.4
_BISECTIONS = 50
#: Power of a data centre per watt of its computers, an assumption: good ones have 1.1, the average is near 1.6.
DEFAULT_PUE = 1.2


@dataclass(frozen=True)
class Goal:
    """Quantity that is given."""

    kind: Literal["flops", "gpu_hours", "parameters", "tokens", "loss"]
    value: float


@dataclass(frozen=True)
class ChosenModel:
    """Model that the user named."""

    shape: GPTShape
    preset: str
    """Preset of its batch, unless another is given."""


@dataclass(frozen=True)
class PlanRequest:
    """Inputs of a plan."""

    goal: Goal
    shape: GPTShape | None
    """Model, if the user chose it or its size."""
    law: ParametricLaw
    vocab_size: int
    seq_len: int
    global_batch_size: int | None
    """Sequences per step; None for those of the preset nearest in size."""
    gpus: GPUs | None
    inference_tokens: float = 0.0
    inference_mfu: float | None = None
    """MFU of inference; None for that of training."""
    keep_last: int = 2
    keep_every: int = 0
    usd_per_gpu_hour: float | None = None
    pue: float = DEFAULT_PUE
    requests: tuple[int, int] | None = None
    """Tokens of prompt and output of a request to serve."""
    usd_per_kwh: float | None = None
    usd_per_bought_gpu: float | None = None
    years: float = 4.0
    """Years until a bought GPU is worth nothing, an assumption."""
    optimizer: OptimizerSpec = ADAMW
    loss_chunk_tokens: int = CHUNK_TOKENS
    expert_parallel_size: int = 1
    """GPUs that divide the experts of a block."""
    chosen: ChosenModel | None = None
    """Model that the user named."""
    given: Mapping[str, object] = field(default_factory=dict)
    """Keys of train.py given for the model."""
    given_of_run: Mapping[str, object] = field(default_factory=dict)
    """Keys of train.py given for the optimizer and the loss."""


@dataclass(frozen=True)
class Plan:
    """A plan for a run."""

    shape: GPTShape
    preset: str
    """Nearest preset by number of parameters."""
    optimum: Point
    """Optimum of the law for the goal, which the shape approximates."""
    global_batch_size: int
    steps: int
    loss: Interval | float
    """Loss of shape and tokens by the law."""
    disk: DiskSpace
    placement: GPUPlacement | None
    gpu_hours: float | None
    energy_kwh: float | None
    """Energy at the boards' power limit with the data centre's overhead, without hosts and network; None if unknown."""
    cost_usd: float | None
    """Cost of training; None if the time or the price is unknown."""
    lifetime: Lifetime | None
    serving: Serving | None = None
    electricity_usd_per_gpu_hour: float | None = None
    """Price of a GPU's power at its limit, with the data centre's overhead."""
    owning_usd_per_gpu_hour: float | None = None
    """Price of an hour of a bought GPU that never idles, with electricity; None without its price, or its power."""

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
    def usd_per_flop(self) -> float | None:
        """Return the price of a FLOP of 6 N D at this plan's speed."""
        return None if self.cost_usd is None else self.cost_usd / self.flops

    @property
    def hours(self) -> float | None:
        """Return hours by the wall clock."""
        if self.gpu_hours is None or self.placement is None:
            return None
        return self.gpu_hours / self.placement.machines.world_size


@dataclass(frozen=True)
class Lifetime:
    """FLOPs of training and inference, beside the compute-optimal model of the same loss."""

    inference_flops: float
    total_flops: float
    """Total with FLOPs of inference weighted by training MFU over inference MFU."""
    training_optimal: Point
    training_optimal_total_flops: float


def make_plan(request: PlanRequest) -> Plan:
    """Plan a run. Raises ConfigError if the goal cannot be reached or is less than one step."""
    optimum, shape = _find_model(request, None)
    preset, batch = _choose_batch(request, shape)
    placement = _place(request, shape, batch)
    if placement is not None and placement.mfu is not None and _depends_on_speed(request):
        # The layout's speed changes the model a little, which hardly changes the speed.
        optimum, changed = _find_model(request, placement.mfu)
        if changed != shape:
            shape = changed
            preset, batch = _choose_batch(request, shape)
            placement = _place(request, shape, batch)
    batch = placement.global_batch_size if placement else batch
    wanted = _tokens(request, shape, optimum, placement)
    steps = int(wanted // (batch * shape.seq_len))
    if steps < 1:
        raise ConfigError(
            f"{wanted:,.0f} tokens are less than one step of {batch:,} sequences of {shape.seq_len:,}. Plan for more, "
            "or give a smaller --global-batch-size."
        )
    tokens = steps * batch * shape.seq_len
    hours = _gpu_hours(request, shape, placement, tokens)
    price, power_w = request.usd_per_gpu_hour, request.gpus.gpu.power_w if request.gpus else None
    kw = None if power_w is None else power_w * request.pue / 1000
    electricity = None if kw is None or request.usd_per_kwh is None else kw * request.usd_per_kwh
    bought = request.usd_per_bought_gpu
    return Plan(
        shape=shape,
        preset=preset,
        optimum=optimum,
        global_batch_size=batch,
        steps=steps,
        loss=_loss(request.law, shape, tokens),
        disk=estimate_disk(shape, steps, tokens, request.optimizer, request.keep_last, request.keep_every),
        placement=placement,
        gpu_hours=hours,
        energy_kwh=None if hours is None or kw is None else hours * kw,
        cost_usd=None if hours is None or price is None else hours * price,
        lifetime=_lifetime(request, shape, tokens, placement),
        serving=_serving(request, shape),
        electricity_usd_per_gpu_hour=electricity,
        owning_usd_per_gpu_hour=(
            owning_usd_per_gpu_hour(bought, request.years, electricity) if bought and electricity else None
        ),
    )


def _serving(request: PlanRequest, shape: GPTShape) -> Serving | None:
    if request.requests is None or request.gpus is None:
        return None
    return estimate_serving(shape, request.gpus.gpu, request.gpus.gpus_per_node, *request.requests)


def _find_model(request: PlanRequest, mfu: float | None) -> tuple[Point, GPTShape]:
    """Return the law's optimum and the shape to build."""
    optimum = _find_optimum(request, mfu)
    shape = request.shape or suggest_shape(optimum.num_parameters, request.vocab_size, request.seq_len)
    return optimum, shape


def _choose_batch(request: PlanRequest, shape: GPTShape) -> tuple[str, int]:
    """Return the nearest preset, and sequences per step: the user's, or those of the preset's tokens."""
    preset = request.chosen.preset if request.chosen else nearest_preset(shape.num_parameters, request.vocab_size)
    return preset, request.global_batch_size or default_batch_size(preset, shape.seq_len, 1)


def _place(request: PlanRequest, shape: GPTShape, batch: int) -> GPUPlacement | None:
    if request.gpus is None:
        return None
    return place(
        shape,
        batch,
        is_batch_given=request.global_batch_size is not None,
        gpus=request.gpus,
        optimizer=request.optimizer,
        loss_chunk_tokens=request.loss_chunk_tokens,
        expert_parallel_size=request.expert_parallel_size,
    )


def _depends_on_speed(request: PlanRequest) -> bool:
    """Return whether the best model depends on the speed of the GPUs."""
    return request.goal.kind == "gpu_hours" or request.inference_mfu is not None


def _find_optimum(request: PlanRequest, mfu: float | None) -> Point:
    """Return the law's optimum. `mfu` None: assume that of the arithmetic alone."""
    if request.gpus is None or not _depends_on_speed(request):
        return _optimum_at(request, 1.0, 1.0)
    point = _optimum_at(request, mfu or _FIRST_MFU, 1.0)
    for _ in range(_ROUNDS):
        shape = request.shape or suggest_shape(point.num_parameters, request.vocab_size, request.seq_len)
        # MFU counts attention and omits positions; 6 N D does neither.
        share = 6 * shape.active_parameters / shape.flops_per_token
        point = _optimum_at(request, mfu or usual_mfu(shape, request.gpus), share)
    return point


def _optimum_at(request: PlanRequest, mfu: float, share: float) -> Point:
    """Return the optimum at an MFU. `share`: 6 N D over the FLOPs that MFU counts."""
    goal, served, law = request.goal, request.inference_tokens, request.law
    if request.shape is not None and request.shape.num_experts and goal.kind != "loss":
        law = law_with_experts(expansion_of(request.shape))
    weight = _inference_weight(request, mfu)
    if goal.kind != "gpu_hours":
        return optimal_point(law, goal.kind, goal.value, served, weight)
    if request.gpus is None:
        raise ConfigError("GPU-hours of which GPU? Give --gpu NAME.")
    flops = goal.value * 3600 * request.gpus.gpu.dense_16bit_flops * mfu * share
    return optimal_point(law, "flops", flops, served, weight)


def _tokens(request: PlanRequest, shape: GPTShape, optimum: Point, placement: GPUPlacement | None) -> float:
    goal = request.goal
    if goal.kind == "gpu_hours" and placement is not None and request.gpus is not None:
        speed = placement.tokens_per_second(shape, request.gpus.gpu)
        if speed is None:
            raise ConfigError(
                f"the {shape.num_parameters:,} parameters that this budget trains best do not fit "
                f"{placement.machines.world_size} x {request.gpus.gpu.name}, so their speed is not known: "
                f"{placement.why} --mfu plans with an assumption."
            )
        return goal.value * 3600 / placement.machines.world_size * speed
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


def _loss(law: ParametricLaw, shape: GPTShape, tokens: float) -> Interval | float:
    equivalent = dense_equivalent(shape, tokens)
    return law.estimate_loss(lambda moved: moved.loss(equivalent, tokens))


#: Tokens between which those of a model with experts are searched.
_FEWEST_TOKENS, _MOST_TOKENS = 1e5, 1e18


def _tokens_for_loss(law: ParametricLaw, shape: GPTShape, loss: float) -> float | None:
    """Return the tokens after which a model reaches a loss; None if it never does."""
    if not shape.num_experts:
        return law.tokens_for_loss(shape.num_parameters, loss)
    # The dense model that is as good depends on the tokens.
    low, high = math.log(_FEWEST_TOKENS), math.log(_MOST_TOKENS)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        tokens = math.exp(middle)
        reached = law.loss(dense_equivalent(shape, tokens), tokens) <= loss
        low, high = (low, middle) if reached else (middle, high)
    return math.exp(high) if high < math.log(_MOST_TOKENS) else None


def _gpu_hours(request: PlanRequest, shape: GPTShape, placement: GPUPlacement | None, tokens: float) -> float | None:
    if placement is None or request.gpus is None:
        return None
    speed = placement.tokens_per_second(shape, request.gpus.gpu)
    return None if speed is None else tokens / speed / 3600 * placement.machines.world_size


def _inference_weight(request: PlanRequest, mfu: float | None) -> float:
    """Return the cost of a FLOP of inference in FLOPs of training."""
    return 1.0 if request.inference_mfu is None or mfu is None else mfu / request.inference_mfu


def _lifetime(request: PlanRequest, shape: GPTShape, tokens: float, placement: GPUPlacement | None) -> Lifetime | None:
    """Return training and inference beside the compute-optimal model of the same loss."""
    if not request.inference_tokens:
        return None
    weight = _inference_weight(request, placement.mfu if placement else None)
    law, served = request.law, request.inference_tokens
    used = inference_flops(shape.active_parameters, served)
    other = optimal_point(law, "loss", law.loss(dense_equivalent(shape, tokens), tokens))
    return Lifetime(
        inference_flops=used,
        total_flops=training_flops(shape.active_parameters, tokens) + weight * used,
        training_optimal=other,
        training_optimal_total_flops=other.flops + weight * inference_flops(other.num_parameters, served),
    )
