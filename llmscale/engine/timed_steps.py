"""Time optimizer steps of a real engine before a run's first one, and undo them.

Only a step itself shows how long it takes: communication, offload and the optimizer are part of it. So these
are complete steps, on made-up tokens: neither the data nor a random state moves. Afterwards weights, optimizer states,
buffers and the loss scaler are what they were, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from llmscale.config.resolve import ResolvedRun
from llmscale.engine.collectives import on_main_rank
from llmscale.engine.deepspeed_engine import set_learning_rate
from llmscale.engine.process_group import World
from llmscale.engine.train_step import PhaseTimer, get_scaler_state, set_micro_steps, set_scaler_state, train_step
from llmscale.engine.zero_shards import (
    group_scalars,
    materialise_optimizer_state,
    refresh_low_precision_weights,
    reset_step_counts,
    set_group_scalars,
    state_views,
    write_back,
)

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

#: Most timed steps.
_MOST_STEPS = 50
#: Learning rate, relative to the peak: no warm-up protects these steps, and Muon skips its work at 0.
_LOW_RATE = 1e-3


@dataclass(frozen=True)
class TimedSteps:
    """Seconds of a step of the full batch, equal on every rank."""

    step_s: float
    count: int
    """Timed steps."""


def time_steps(
    engine: DeepSpeedEngine,
    resolved: ResolvedRun,
    world: World,
    limit_s: float,
    *,
    is_new: bool = True,
    progress: Callable[[], object] = lambda: None,
) -> TimedSteps:
    """Time steps for about `limit_s` seconds, at least one, after one that allocates and compiles. Collective.

    That one is repeated while fp16 lowers its scale. `is_new` if the optimizer has taken no step yet. `progress` is
    called after every step. Synchronises with the device.
    """

    def step() -> None:
        train_step(engine, micro_batches, world.device, PhaseTimer(world.device))
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        progress()

    micro_batches = _made_up_tokens(resolved, world)
    with _undone(engine, is_new=is_new):
        set_micro_steps(engine, len(micro_batches))
        set_learning_rate(engine, resolved.optimizer, resolved.schedule.lr * _LOW_RATE)
        for _ in range(_MOST_STEPS):
            step()
            if engine.was_step_applied():  # not skipped by fp16, whose scale was too large
                break
        began, seconds, count = time.perf_counter(), 0.0, 0
        while count == 0 or (seconds < limit_s and count < _MOST_STEPS):
            step()
            count += 1
            seconds = on_main_rank(world.control, lambda: time.perf_counter() - began)
    return TimedSteps(seconds / count, count)


def _made_up_tokens(resolved: ResolvedRun, world: World) -> list[torch.Tensor]:
    """Return a rank's micro-batches of a step, each [micro_batch_size, T + 1], equal for ranks that divide them."""
    plan, generator = resolved.plan, torch.Generator()
    generator.manual_seed(plan.ranks.group_of(world.rank))
    size, steps = (plan.micro_batch_size, plan.seq_len + 1), plan.gradient_accumulation_steps
    return [torch.randint(resolved.shape.vocab_size, size, generator=generator) for _ in range(steps)]


@contextmanager
def _undone(engine: DeepSpeedEngine, *, is_new: bool) -> Iterator[None]:
    """Restore everything that steps inside change. Collective."""
    materialise_optimizer_state(engine)
    if is_new:
        reset_step_counts(engine)
    views = {key: view.local.to("cpu", copy=True) for key, view in state_views(engine).items()}
    scalars, scaler = group_scalars(engine), get_scaler_state(engine)
    counts = engine.global_steps, engine.skipped_steps
    yield
    changed = state_views(engine)
    for key, view in changed.items():
        view.local.copy_(views[key])
    write_back(engine, changed)
    set_group_scalars(engine, scalars)
    refresh_low_precision_weights(engine)
    set_scaler_state(engine, scaler)
    engine.global_steps, engine.skipped_steps = counts
