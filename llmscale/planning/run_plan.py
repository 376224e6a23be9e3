"""The whole plan: from one goal to a model, its steps, its hours, its price and its disk. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmscale.architecture.shape import GPTShape
from llmscale.config.presets import PRESETS
from llmscale.errors import ConfigError
from llmscale.planning.compute_optimal import optimal_point
from llmscale.planning.disk_usage import DiskSpace, estimate_disk
from llmscale.planning.flops import affordable_tokens, inference_flops, training_flops
from llmscale.planning.placement import GPUs, Placement, place, usual_mfu
from llmscale.planning.scaling_laws import Interval, ParametricLaw, Point
from llmscale.planning.shape_for_size import nearest_preset, suggest_shape

#: How many FLOPs GPU-hours buy depends on the model, and the model on the FLOPs: rounds in which the two agree to a
#: thousandth, and where they start.
_ROUNDS = 4
_FIRST_MFU = 0.4


@dataclass(frozen=True)
class Goal:
    """What is given; the rest follows."""

    kind: Literal["flops", "gpu_hours", "parameters", "tokens", "loss"]
    value: float


@dataclass(frozen=True)
class Question:
    """All that a plan depends on."""

    goal: Goal
    shape: GPTShape | None
    """The model, when the user chose it."""
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
    placement: Placement | None
    gpu_hours: float | None
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


def make_plan(question: Question) -> Plan:
    """Raises ConfigError when the goal cannot be reached or is less than one step."""
    optimum, shape = _find_model(question, None)
    preset, batch = _choose_batch(question, shape)
    placement = _place(question, shape, batch)
    if placement is not None and placement.mfu is not None and _depends_on_speed(question):
        # Now that the layout's speed is known, the model changes a little, and the speed with it hardly.
        optimum, changed = _find_model(question, placement.mfu)
        if changed != shape:
            shape = changed
            preset, batch = _choose_batch(question, shape)
            placement = _place(question, shape, batch)
    batch = placement.global_batch_size if placement else batch
    wanted = _tokens(question, shape, optimum, placement)
    steps = int(wanted // (batch * shape.seq_len))
    if steps < 1:
        raise ConfigError(
            f"{wanted:,.0f} tokens are less than one step of {batch:,} sequences of {shape.seq_len:,}. Plan for more, "
            "or give a smaller --global-batch-size."
        )
    tokens = steps * batch * shape.seq_len
    return Plan(
        shape=shape,
        preset=preset,
        optimum=optimum,
        global_batch_size=batch,
        steps=steps,
        loss=_loss(question.law, shape, tokens),
        disk=estimate_disk(shape, steps, tokens, keep_last=question.keep_last, keep_every=question.keep_every),
        placement=placement,
        gpu_hours=_gpu_hours(question, shape, placement, tokens),
        lifetime=_lifetime(question, shape, tokens, placement),
    )


def _find_model(question: Question, mfu: float | None) -> tuple[Point, GPTShape]:
    """The law's best model, and what can be built of it."""
    optimum = _find_optimum(question, mfu)
    shape = question.shape or suggest_shape(optimum.num_parameters, question.vocab_size, question.seq_len)
    return optimum, shape


def _choose_batch(question: Question, shape: GPTShape) -> tuple[str, int]:
    """The nearest preset, and sequences per step: the user's, or the preset's tokens."""
    preset = nearest_preset(shape.num_parameters, question.vocab_size)
    return preset, question.global_batch_size or max(1, PRESETS[preset].global_batch_tokens // shape.seq_len)


def _place(question: Question, shape: GPTShape, batch: int) -> Placement | None:
    if question.gpus is None:
        return None
    return place(shape, batch, is_batch_given=question.global_batch_size is not None, gpus=question.gpus)


def _depends_on_speed(question: Question) -> bool:
    """Whether the best model is another on faster GPUs."""
    return question.goal.kind == "gpu_hours" or question.inference_mfu is not None


def _find_optimum(question: Question, mfu: float | None) -> Point:
    """`mfu` None: not yet known, and taken to be that of the arithmetic alone."""
    if question.gpus is None or not _depends_on_speed(question):
        return _optimum_at(question, 1.0, 1.0)
    point = _optimum_at(question, mfu or _FIRST_MFU, 1.0)
    for _ in range(_ROUNDS):
        shape = question.shape or suggest_shape(point.num_parameters, question.vocab_size, question.seq_len)
        # MFU counts attention and leaves out positions; 6 N D does neither.
        share = 6 * shape.num_parameters / shape.flops_per_token
        point = _optimum_at(question, mfu or usual_mfu(shape, question.gpus), share)
    return point


def _optimum_at(question: Question, mfu: float, share: float) -> Point:
    """`share`: of the FLOPs that MFU counts, those of 6 N D."""
    goal, served = question.goal, question.inference_tokens
    weight = _inference_weight(question, mfu)
    if goal.kind != "gpu_hours":
        return optimal_point(question.law, goal.kind, goal.value, served, weight)
    if question.gpus is None:
        raise ConfigError("GPU-hours of which GPU? Give --gpu NAME.")
    flops = goal.value * 3600 * question.gpus.gpu.dense_16bit_flops * mfu * share
    return optimal_point(question.law, "flops", flops, served, weight)


def _tokens(question: Question, shape: GPTShape, optimum: Point, placement: Placement | None) -> float:
    goal = question.goal
    if goal.kind == "gpu_hours" and placement is not None and question.gpus is not None:
        speed = placement.tokens_per_second(shape, question.gpus.gpu)
        if speed is None:
            raise ConfigError(
                f"the {shape.num_parameters:,} parameters that this budget trains best do not fit "
                f"{placement.machines.world_size} x {question.gpus.gpu.name}, so their speed is not known: "
                f"{placement.why} --mfu plans with an assumption."
            )
        return goal.value * 3600 / placement.machines.world_size * speed
    if goal.kind == "flops":
        return affordable_tokens(goal.value, shape.num_parameters)
    if goal.kind == "tokens":
        return goal.value
    if goal.kind == "loss":
        tokens = question.law.tokens_for_loss(shape.num_parameters, goal.value)
        if tokens is None:
            raise ConfigError(
                f"a model of {shape.num_parameters:,} parameters does not reach a loss of {goal.value:g} on any number "
                f"of tokens ({question.law.name}). Leave the model out, or choose a higher loss."
            )
        return tokens
    return optimum.tokens


def _loss(law: ParametricLaw, shape: GPTShape, tokens: float) -> Interval | float:
    return law.interval(lambda moved: moved.loss(shape.num_parameters, tokens)) or law.loss(
        shape.num_parameters, tokens
    )


def _gpu_hours(question: Question, shape: GPTShape, placement: Placement | None, tokens: float) -> float | None:
    if placement is None or question.gpus is None:
        return None
    speed = placement.tokens_per_second(shape, question.gpus.gpu)
    return None if speed is None else tokens / speed / 3600 * placement.machines.world_size


def _inference_weight(question: Question, mfu: float | None) -> float:
    """What a FLOP of inference costs in FLOPs of training."""
    return 1.0 if question.inference_mfu is None or mfu is None else mfu / question.inference_mfu


def _lifetime(question: Question, shape: GPTShape, tokens: float, placement: Placement | None) -> Lifetime | None:
    """Beside the compute-optimal model that is as good as shape and tokens."""
    if not question.inference_tokens:
        return None
    weight = _inference_weight(question, placement.mfu if placement else None)
    law, served = question.law, question.inference_tokens
    used = inference_flops(shape.num_parameters, served)
    other = optimal_point(law, "loss", law.loss(shape.num_parameters, tokens))
    return Lifetime(
        inference_flops=used,
        total_flops=training_flops(shape.num_parameters, tokens) + weight * used,
        training_optimal=other,
        training_optimal_total_flops=other.flops + weight * inference_flops(other.num_parameters, served),
    )
