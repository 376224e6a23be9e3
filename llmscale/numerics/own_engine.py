"""Proof of an engine around any module: every link of a step that needs no second model, judged by itself.

Bounds and judge are those of `llmscale doctor --numerics` (links.py); the optimizer is judged beside its copy
(own_update.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from llmscale.engine.collectives import gather
from llmscale.engine.zero_layout import inner_optimizer, name_groups, named_parameters, parameter_shards
from llmscale.errors import ConfigError
from llmscale.numerics.links import (
    DTYPES,
    EngineFacts,
    Finding,
    LinkJudge,
    MeanGradients,
    PlainMean,
    Watched,
    first_wrong,
)
from llmscale.numerics.own_update import OwnUpdate
from llmscale.numerics.probe import Probe, choose_strides
from llmscale.numerics.report import as_row, describe_wrong

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

#: Copies of a parameter beside the gradients of its micro-batches.
_COPIES = 6
#: Steps that fp16 may skip until its loss scale fits.
_SKIPS = 40


@dataclass(frozen=True)
class Checked:
    """Outcome of `check_numerics`, equal on every rank."""

    findings: tuple[Finding, ...]
    """All comparisons: step, link (weights, reduce, norm, update), parameter, error and bound."""
    unwatched: tuple[str, ...]
    """Parameters that could not be compared: no module used them, or the optimizer did not step them."""
    not_judged: str | None
    """Why the optimizer's update is not judged; None if it is."""
    wrong: Finding | None
    """The first wrong link of the first wrong step; None if all are within what rounding explains."""

    def __str__(self) -> str:
        """Return the outcome in a sentence or two."""
        if self.wrong is not None:
            return f"WRONG in step {self.wrong.step + 1}: {describe_wrong(as_row(self.wrong))}"
        most = max((finding.share for finding in self.findings), default=0.0)
        right = f"RIGHT: {len(self.findings)} comparisons are within what rounding explains, at most {most:.2f} of it."
        return f"{right} But {self.not_judged}" if self.not_judged else right


def check_numerics(engine: DeepSpeedEngine, take_step: Callable[[], object], *, steps: int = 2) -> Checked:
    """Take steps, and compare what each uses and computes with a plain computation in fp64. Collective.

    `take_step` runs the micro-batches of one optimizer step. Training continues as if nothing had been watched. Raises
    ConfigError if no call of it steps the optimizer.
    """
    name_groups(engine)
    stepped = {shard.name for shard in parameter_shards(engine)}
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in named_parameters(engine) if name in stepped}
    copies = engine.gradient_accumulation_steps() + _COPIES
    strides = choose_strides({name: math.prod(shape) for name, shape in shapes.items()}, copies)
    update = OwnUpdate(inner_optimizer(engine), strides)
    findings: list[Finding] = []
    unwatched: set[str] = set()
    with _gloo_group() as group, _probe(engine, strides) as probe:
        for step in range(steps):
            _take(take_step, probe, group)
            present = _compared(probe, engine, group)
            unwatched |= shapes.keys() - present
            shapes_now = {name: shape for name, shape in shapes.items() if name in present}
            watched = Watched(_facts(engine), group, strides, shapes_now)
            findings += _judge(step, watched, probe, engine)
            if update.refusal is None:
                findings += update.judge(step, watched, probe)
    return Checked(tuple(findings), tuple(sorted(unwatched)), update.refusal, first_wrong(findings))


@contextmanager
def _gloo_group() -> Iterator[dist.ProcessGroup]:
    group = dist.new_group(backend="gloo")
    assert group is not None
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


@contextmanager
def _probe(engine: DeepSpeedEngine, strides: dict[str, int]) -> Iterator[Probe]:
    probe = Probe(engine, strides)
    try:
        yield probe
    finally:
        probe.close()


def _take(take_step: Callable[[], object], probe: Probe, group: dist.ProcessGroup) -> None:
    """Take a step, again while fp16 skips it. Collective. Raises ConfigError."""
    for _ in range(_SKIPS):
        probe.reset()
        take_step()
        if any(gather(group, bool(probe.pieces))):
            return
    raise ConfigError(
        "no step of the optimizer was taken: take_step must run all micro-batches of a step, each with engine.backward "
        "and engine.step."
    )


def _compared(probe: Probe, engine: DeepSpeedEngine, group: dist.ProcessGroup) -> set[str]:
    """Return the parameters that every rank used, and whose masters are known. Collective."""
    known = {*probe.used}
    if engine.zero_optimization_stage() == 0:
        # Parameters without a gradient are not stepped there.
        known &= probe.pieces.keys()
    return set.intersection(*(set(names) for names in gather(group, [*known])))


def _judge(step: int, watched: Watched, probe: Probe, engine: DeepSpeedEngine) -> list[Finding]:
    means = MeanGradients(watched, probe)

    @cache
    def mean_of(name: str) -> PlainMean:
        return means.of(name)

    norm = engine.get_global_grad_norm()
    if norm is None:
        reported = None
    else:
        reported = float(norm)
    if reported is None and engine.gradient_clipping():
        # Stage 0 in fp32 clips and tells no norm.
        squares = [watched.strides[name] * float(mean_of(name).mean.square().sum()) for name in watched.shapes]
        reported = math.sqrt(sum(squares))
    return LinkJudge(watched, probe).judge_gradients(step, reported, mean_of)


def _facts(engine: DeepSpeedEngine) -> EngineFacts:
    given: dict[str, Any] = engine._config._param_dict
    precision = "fp32"
    if engine.bfloat16_enabled():
        precision = "bf16"
    elif engine.fp16_enabled():
        precision = "fp16"
    model = DTYPES[precision]
    sums = (given.get("data_types") or {}).get("grad_accum_dtype")
    # DeepSpeed's own default of the type in which gradients are exchanged is the model's.
    sent = given.get("communication_data_type")
    return EngineFacts(
        zero_stage=engine.zero_optimization_stage(),
        clipping=float(engine.gradient_clipping()),
        model=model,
        sums=DTYPES[sums] if sums else model,
        sent=DTYPES[sent] if sent else model,
        master=next(iter(parameter_shards(engine))).flat.dtype,
    )
