"""One optimizer step: micro-batches, DeepSpeed's step; its timing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from llmscale.model.experts import Router
from llmscale.model.gpt import GPT

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

Phase = Literal["data_wait", "forward_backward", "optimizer_step", "other"]
PHASES: tuple[Phase, ...] = ("data_wait", "forward_backward", "optimizer_step", "other")


class CountedTargets(NamedTuple):
    """The tokens of a step that are targets."""

    masks: Sequence[Tensor | None]
    """True for targets, bool like the micro-batch; None if all are."""
    scale: float
    """Targets of the global batch if all its tokens were, over those that it has: the mean over all positions, times
    this, is the mean over targets, whatever their number in a micro-batch."""

    def of(self, micro_step: int, device: torch.device, seq_len: int | None) -> dict[str, Tensor | float | None]:
        """Return the model's arguments for a micro-batch."""
        mask = self.masks[micro_step]
        if mask is None:
            return {"scale": self.scale}
        mask = mask.to(device, non_blocking=True)
        if seq_len is not None:
            mask = mask.unfold(1, seq_len + 1, seq_len).flatten(0, 1)
        return {"is_target": mask[:, 1:], "scale": self.scale}


def train_step(
    engine: DeepSpeedEngine,
    micro_batches: Sequence[Tensor],
    device: torch.device,
    timer: PhaseTimer,
    seq_len: int | None = None,
    weights: Sequence[float] | None = None,
    targets: CountedTargets | None = None,
) -> Tensor:
    """Train on one rank's share of a global batch.

    micro_batches: gradient_accumulation_steps tensors of token ids [micro_batch_size, T + 1], which are cut into
    sequences of `seq_len` tokens, T by default. `weights` of their losses are 1 by default, and 0 for a filler, which
    only takes part in exchanges. `targets` tells which tokens count, all by default. Returns this rank's mean of the
    weighted losses in nats, a scalar on the device; reading it would make the host wait. The mean over the ranks is the
    loss.
    """
    total = torch.zeros((), device=device)
    model = engine.module
    model.routing = model.head.z_squared = None
    for micro_step, tokens in enumerate(micro_batches):
        timer.mark("forward_backward")
        tokens = tokens.to(device, non_blocking=True)
        if seq_len is not None:
            # Neighbours share a token, so that each is a target once.
            tokens = tokens.unfold(1, seq_len + 1, seq_len).flatten(0, 1)
        weight = 1.0 if weights is None else weights[micro_step]
        if targets is None:
            counted = {}
        else:
            counted = targets.of(micro_step, device, seq_len)
        with nullcontext() if weight else _unrecorded(model):
            loss = engine(tokens[:, :-1], tokens[:, 1:], **counted)
        if weight != 1:
            loss = loss * weight
        # DeepSpeed divides by the accumulation steps itself.
        engine.backward(loss)
        total += loss.detach()
        if micro_step == len(micro_batches) - 1:
            timer.mark("optimizer_step")
        engine.step()
    if model.routing is not None and model.shape.router_bias and engine.was_step_applied():
        _balance_routers(model)
    timer.mark("other")
    return total / len(micro_batches)


@contextmanager
def _unrecorded(model: GPT) -> Iterator[None]:
    """Leave a filler out of the model's sums over micro-batches: the experts' loads, and z^2."""
    head = model.head
    routing = model.routing
    z_squared = model.head.z_squared
    yield
    if model.routing is not None:
        if routing is None:
            model.routing = torch.zeros_like(model.routing)
        else:
            model.routing = routing
    if head.z_squared is not None:
        if z_squared is None:
            head.z_squared = torch.zeros_like(head.z_squared)
        else:
            head.z_squared = z_squared


def _balance_routers(model: GPT) -> None:
    """Change the routers' biases by the load of the global batch. Collective.

    A step that fp16 skips leaves them as it leaves the weights. So does freezing of a router.
    """
    assert model.routing is not None
    loads = model.routing[:, : model.shape.num_experts].clone()
    dist.all_reduce(loads)
    routers = (module for module in model.modules() if isinstance(module, Router))
    for router, load in zip(routers, loads, strict=True):
        if router.weight.requires_grad:
            router.balance(load, model.loss.router_bias_speed)


def set_micro_steps(engine: DeepSpeedEngine, micro_steps: int) -> None:
    """Set the number of micro-batches of the next optimizer step, which a batch ramp changes. Call it between steps."""
    if engine.gradient_accumulation_steps() == micro_steps:
        return
    engine.set_train_batch_size(micro_steps * engine.train_micro_batch_size_per_gpu() * engine.dp_world_size)
    # DeepSpeed ends a step where its count of all micro-batches is a multiple of the new number.
    engine.micro_steps = 0
    # Stages 1 and 2 have a copy of the number, by which offloading finds the sums.
    if hasattr(engine.optimizer, "gradient_accumulation_steps"):
        engine.optimizer.gradient_accumulation_steps = micro_steps


class PhaseTimer:
    """Sums seconds per phase between two reads.

    On a GPU each mark records an event in the stream, so a phase is device time: `data_wait` is the time the device
    was idle for want of data, not the time the host waited ahead of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Phase, float | torch.cuda.Event]] = []
        self.listener: Callable[[Phase], None] | None = None
        """Function called at every mark."""

    def mark(self, phase: Phase) -> None:
        """End the current phase and begin `phase`."""
        if self.listener is not None:
            self.listener(phase)
        if not self._on_gpu:
            self._marks.append((phase, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, event))

    def read(self) -> dict[Phase, float]:
        """Return seconds per phase since the last read; the current phase continues. Synchronises with the device."""
        if not self._marks:
            return dict.fromkeys(PHASES, 0.0)
        self.mark(self._marks[-1][0])
        seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        for (phase, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            seconds[phase] += _elapsed_s(begin, end)
        self._marks = self._marks[-1:]
        return seconds


def _elapsed_s(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]  # a timer's marks are all of one kind
    end.synchronize()
    return begin.elapsed_time(end) / 1000
