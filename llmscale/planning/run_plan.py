"""The whole plan: from one goal to a model, its steps, its hours, its price and its disk. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from llmscale.architecture.shape import GPTShape
from llmscale.config.loss_settings import CHUNK_TOKENS
from llmscale.config.optimizers import ADAMW, OptimizerSpec
from llmscale.config.presets import PRESETS
from llmscale.errors import ConfigError
from llmscale.planning.compute_optimal import optimal_point
from llmscale.planning.disk_usage import DiskSpace, estimate_disk
from llmscale.planning.flops import affordable_tokens, inference_flops, training_flops
from llmscale.planning.placement import GPUPlacement, GPUs, place, usual_mfu
from llmscale.planning.scaling_laws import Interval, ParametricLaw, Point
from llmscale.planning.shape_for_size import nearest_preset, suggest_shape

#: How many FLOPs GPU-hours buy depends on the model, and the model on the FLOPs: rounds in which the two agree to a
#: thousandth, and where they start.
_ROUNDS = 4
_FIRST_MFU = 0.4
#: Power that a data centre draws per watt of its computers. An assumption: good ones are at 1.1, the average near 1.6.
DEFAULT_PUE = 1.2


@dataclass(frozen=True)
class Goal:
    """What is given; the rest follows."""

    kind: Literal["flops", "gpu_hours", "parameters", "tokens", "loss"]
    value: float


@dataclass(frozen=True)
class ChosenModel:
    """The model that the user named."""

    shape: GPTShape
    preset: str
    """Whose batch it has, unless another is given."""


@dataclass(frozen=True)
class PlanRequest:
    """All that a plan depends on."""

    goal: Goal
    shape: GPTShape | None
    """The model, when the user chose it or its size."""
    law: ParametricLaw
    vocab_size: int
    seq_len: int
    global_batch_size: int | None
    """Sequences; None: that of the preset nearest in size."""
    gpus: GPUs | None
    inference_tokens: float = 0.0
    inference_mfu: float | None = None
    """None: that of training."""
    keep_last: int = 2
    keep_every: int = 0
    usd_per_gpu_hour: float | None = None
    pue: float = DEFAULT_PUE
    optimizer: OptimizerSpec = ADAMW
    loss_chunk_tokens: int = CHUNK_TOKENS
    chosen: ChosenModel | None = None
    """Where the user named the model."""
    given: Mapping[str, object] = field(default_factory=dict)
    """What was said of the model, in the keys of train.py."""
    given_of_run: Mapping[str, object] = field(default_factory=dict)
    """What was said of the optimizer and of the loss, in the keys of train.py."""


@dataclass(frozen=True)
class Plan:
    """The answer."""

    shape: GPTShape
    preset: str
    """The nearest preset by number of parameters."""
    optimum: Point
    """What the law finds best for the goal; the shape is what can be built of it."""
    global_batch_size: int
    steps: int
    loss: Interval | float
    """Of shape and tokens under the law."""
    disk: DiskSpace
    placement: GPUPlacement | None
    gpu_hours: float | None
    energy_kwh: float | None
    """At the boards' power limit, with the data centre's overhead; hosts and network are not counted. None: the time
    or the GPU's power is not known."""
    cost_usd: float | None
    """Of training; None: the time or the price is not known."""
    lifetime: Lifetime | None

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.shape.seq_len

    @property
    def tokens(self) -> int:
        """Of whole steps."""
        return self.steps * self.tokens_per_step

    @property
    def flops(self) -> float:
        """6 N D."""
        return training_flops(self.shape.num_parameters, self.tokens)

    @property
    def usd_per_flop(self) -> float | None:
        """Of 6 N D, at this plan's speed."""
        return None if self.cost_usd is None else self.cost_usd / self.flops

    @property
    def hours(self) -> float | None:
        """Of the wall clock."""
        if self.gpu_hours is None or self.placement is None:
            return None
        return self.gpu_hours / self.placement.machines.world_size


@dataclass(frozen=True)
class Lifetime:
    """Training and inference together, beside the compute-optimal model of the same loss."""

    inference_flops: float
    total_flops: float
    """FLOPs of inference weighed as they cost, training MFU over inference MFU."""
    training_optimal: Point
    training_optimal_total_flops: float


def make_plan(request: PlanRequest) -> Plan:
    """Raises ConfigError when the goal cannot be reached or is less than one step."""
    optimum, shape = _find_model(request, None)
    preset, batch = _choose_batch(request, shape)
    placement = _place(request, shape, batch)
    if placement is not None and placement.mfu is not None and _depends_on_speed(request):
        # Now that the layout's speed is known, the model changes a little, and the speed with it hardly.
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
    return Plan(
        shape=shape,
        preset=preset,
        optimum=optimum,
        global_batch_size=batch,
        steps=steps,
        loss=_loss(request.law, shape, tokens),
        disk=estimate_disk(
            shape,
            steps,
            tokens,
            optimizer=request.optimizer,
            keep_last=request.keep_last,
            keep_every=request.keep_every,
        ),
        placement=placement,
        gpu_hours=hours,
        energy_kwh=None if hours is None or power_w is None else hours * power_w * request.pue / 1000,
        cost_usd=None if hours is None or price is None else hours * price,
        lifetime=_lifetime(request, shape, tokens, placement),
    )


def _find_model(request: PlanRequest, mfu: float | None) -> tuple[Point, GPTShape]:
    """The law's best model, and what can be built of it."""
    optimum = _find_optimum(request, mfu)
    shape = request.shape or suggest_shape(optimum.num_parameters, request.vocab_size, request.seq_len)
    return optimum, shape


def _choose_batch(request: PlanRequest, shape: GPTShape) -> tuple[str, int]:
    """The nearest preset, and sequences per step: the user's, or the preset's tokens."""
    preset = request.chosen.preset if request.chosen else nearest_preset(shape.num_parameters, request.vocab_size)
    return preset, request.global_batch_size or max(1, PRESETS[preset].global_batch_tokens // shape.seq_len)


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
    )


def _depends_on_speed(request: PlanRequest) -> bool:
    """Whether the best model is another on faster GPUs."""
    return request.goal.kind == "gpu_hours" or request.inference_mfu is not None


def _find_optimum(request: PlanRequest, mfu: float | None) -> Point:
    """`mfu` None: not yet known, and taken to be that of the arithmetic alone."""
    if request.gpus is None or not _depends_on_speed(request):
        return _optimum_at(request, 1.0, 1.0)
    point = _optimum_at(request, mfu or _FIRST_MFU, 1.0)
    for _ in range(_ROUNDS):
        shape = request.shape or suggest_shape(point.num_parameters, request.vocab_size, request.seq_len)
        # MFU counts attention and leaves out positions; 6 N D does neither.
        share = 6 * shape.num_parameters / shape.flops_per_token
        point = _optimum_at(request, mfu or usual_mfu(shape, request.gpus), share)
    return point


def _optimum_at(request: PlanRequest, mfu: float, share: float) -> Point:
    """`share`: of the FLOPs that MFU counts, those of 6 N D."""
    goal, served = request.goal, request.inference_tokens
    weight = _inference_weight(request, mfu)
    if goal.kind != "gpu_hours":
        return optimal_point(request.law, goal.kind, goal.value, served, weight)
    if request.gpus is None:
        raise ConfigError("GPU-hours of which GPU? Give --gpu NAME.")
    flops = goal.value * 3600 * request.gpus.gpu.dense_16bit_flops * mfu * share
    return optimal_point(request.law, "flops", flops, served, weight)


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
        return affordable_tokens(goal.value, shape.num_parameters)
    if goal.kind == "tokens":
        return goal.value
    if goal.kind == "loss":
        tokens = request.law.tokens_for_loss(shape.num_parameters, goal.value)
        if tokens is None:
            raise ConfigError(
                f"a model of {shape.num_parameters:,} parameters does not reach a loss of {goal.value:g} on any number "
                f"of tokens ({request.law.name}). Leave the model out, or choose a higher loss."
            )
        return tokens
    return optimum.tokens


def _loss(law: ParametricLaw, shape: GPTShape, tokens: float) -> Interval | float:
    return law.interval(lambda moved: moved.loss(shape.num_parameters, tokens)) or law.loss(
        shape.num_parameters, tokens
    )


def _gpu_hours(request: PlanRequest, shape: GPTShape, placement: GPUPlacement | None, tokens: float) -> float | None:
    if placement is None or request.gpus is None:
        return None
    speed = placement.tokens_per_second(shape, request.gpus.gpu)
    return None if speed is None else tokens / speed / 3600 * placement.machines.world_size


def _inference_weight(request: PlanRequest, mfu: float | None) -> float:
    """What a FLOP of inference costs in FLOPs of training."""
    return 1.0 if request.inference_mfu is None or mfu is None else mfu / request.inference_mfu


def _lifetime(request: PlanRequest, shape: GPTShape, tokens: float, placement: GPUPlacement | None) -> Lifetime | None:
    """Beside the compute-optimal model that is as good as shape and tokens."""
    if not request.inference_tokens:
        return None
    weight = _inference_weight(request, placement.mfu if placement else None)
    law, served = request.law, request.inference_tokens
    used = inference_flops(shape.num_parameters, served)
    other = optimal_point(law, "loss", law.loss(shape.num_parameters, tokens))
    return Lifetime(
        inference_flops=used,
        total_flops=training_flops(shape.num_parameters, tokens) + weight * used,
        training_optimal=other,
        training_optimal_total_flops=other.flops + weight * inference_flops(other.num_parameters, served),
    )
