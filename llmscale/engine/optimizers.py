"""Muon (Jordan et al. 2024) for the blocks' matrices and AdamW for the rest, on whatever ZeRO hands the optimizer.

DeepSpeed's own Muon orthogonalises inside of ZeRO, before the norm and the clipping, so stages 1 to 3 clip the
orthogonalised update and stage 0 the gradient. This one is an ordinary torch optimizer: ZeRO steps it with gradients
that are reduced, unscaled and clipped, as it steps AdamW, and its momentum lies where the master weights lie, so that
checkpoints cut both alike. What is left is that a matrix is orthogonalised as a whole: those that ZeRO has cut are
brought together on one rank each, and every rank gets its own part back (`llmscale.config.muon` says by whom).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmscale.architecture.layers import ParameterKind, ParameterTensors
from llmscale.config.muon import NEWTON_SCHULZ_STEPS, Matrix, matrices_of, plan_rounds
from llmscale.config.optimizers import OptimizerSpec
from llmscale.engine.device_memory import has_bf16
from llmscale.engine.process_group import is_gpu
from llmscale.engine.zero_layout import ParameterShard, parameter_shards, parts_of_all_ranks, shard_group

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

MOMENTUM = 0.95

#: Of the root mean square of an update: AdamW's is about this, so that one learning rate and one weight decay serve
#: both (Liu et al. 2025, equation 4).
_UPDATE_RMS = 0.2

#: Of the quintic of Jordan et al. 2024, chosen for its slope at 0.
_A, _B, _C = 3.4445, -4.7750, 2.0315


def newton_schulz(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Near the orthogonal matrix that is closest to `matrix` [rows, columns]: its singular values end between about
    0.7 and 1.2. Computed and returned in `dtype`; a `matrix` of that type is overwritten."""
    x = matrix.to(dtype)
    x = x.div_(x.norm().clamp(min=1e-7))
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:
        x = x.t()
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.t()
        polynomial = torch.addmm(gram, gram, gram, beta=_B, alpha=_C)
        del gram
        x = torch.addmm(x, polynomial, x, beta=_A)
        del polynomial
    return x.t() if is_tall else x


def orthogonalise(matrix: Tensor, dtype: torch.dtype) -> None:
    """In place; [rows, columns], the root mean square of the result is about AdamW's."""
    matrix.copy_(newton_schulz(matrix, dtype))
    matrix.mul_(_UPDATE_RMS * math.sqrt(max(matrix.shape)))


@dataclass(frozen=True)
class _Here:
    """A matrix that this rank has all of."""

    offset: int
    """First element in the flat tensor."""
    rows: int
    columns: int


@dataclass(frozen=True)
class _Round:
    """Matrices that are brought together at a time, one per rank at most."""

    slices: tuple[tuple[int, int], ...]
    """(first element in the flat tensor, elements) of what this rank sends, in the order of the receivers."""
    send_sizes: tuple[int, ...]
    """Elements for each rank."""
    shape: tuple[int, int]
    """Of the matrix that this rank brings together; (0, 0): none."""
    receive_sizes: tuple[int, ...]
    """Elements from each rank, which has them in the order of the ranks."""


@dataclass(frozen=True)
class _Work:
    """What is done for one flat tensor."""

    here: tuple[_Here, ...]
    rounds: tuple[_Round, ...]


class Muon(torch.optim.AdamW):
    """AdamW (torch's fused kernel), but for the groups named in `orthogonalised`.

    `plan` must be called before the first step with a learning rate.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, object]],
        *,
        orthogonalised: Collection[str],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        dtype: torch.dtype,
    ) -> None:
        """dtype: of the Newton-Schulz iteration."""
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        self.dtype = dtype
        self._orthogonalised = frozenset(orthogonalised)
        self._work: dict[int, _Work] = {}
        self._group: dist.ProcessGroup | None = None
        self._device = torch.device("cpu")

    def plan(self, engine: DeepSpeedEngine, tensors: ParameterTensors) -> None:
        """Learn which part of which matrix lies where. `tensors`: those of the engine's model."""
        self._group, self._device = shard_group(engine), torch.device(engine.device)
        parameters = {tensor.name: tensor.parameter for tensor in tensors.all}
        parts = parts_of_all_ranks(engine)
        found: dict[int, list[tuple[int, Matrix]]] = {}
        for place in parameter_shards(engine):
            if place.group in self._orthogonalised:
                parameter = parameters[place.name]
                matrices = matrices_of(parameter.matrix_rows, parameter.shape[1], parts.get(place.name, ()))
                found.setdefault(id(place.flat), []).extend(_with_offsets(place, matrices))
        rank = dist.get_rank(self._group)
        world_size = dist.get_world_size(self._group)
        self._work = {flat: _plan(matrices, rank, world_size) for flat, matrices in found.items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch's is untyped
        """As ZeRO calls it: of all groups or of one, each with its flat tensors or with none. Collective where a matrix
        is cut. Gradients of matrices are overwritten."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if group["name"] not in self._orthogonalised]
        try:
            super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            for flat in group["params"] if group["name"] in self._orthogonalised else ():
                if flat.grad is not None:
                    self._step_matrices(flat, group["lr"], group["weight_decay"])

    def _step_matrices(self, flat: Tensor, lr: float, weight_decay: float) -> None:
        momentum, gradient = self._momentum_of(flat), flat.grad
        assert gradient is not None
        momentum.lerp_(gradient, 1 - MOMENTUM)
        if lr == 0:  # also DeepSpeed's own steps at start-up, before `plan`
            return
        # Nesterov's momentum. Nobody reads a gradient after the step, so the update takes its place.
        update = gradient.lerp_(momentum, MOMENTUM)
        self._orthogonalise(update.view(-1), self._work[id(flat)])
        flat.mul_(1 - lr * weight_decay).add_(update, alpha=-lr)

    def _momentum_of(self, flat: Tensor) -> Tensor:
        state = self.state[flat]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(flat)
        return cast(Tensor, state["momentum_buffer"])

    def _orthogonalise(self, update: Tensor, work: _Work) -> None:
        """All matrices of a flat update, in place; under offload on the GPU, one by one."""
        for here in work.here:
            own = update.narrow(0, here.offset, here.rows * here.columns).view(here.rows, here.columns)
            if own.device == self._device:
                orthogonalise(own, self.dtype)
            else:
                there = own.to(self._device)
                orthogonalise(there, self.dtype)
                own.copy_(there)
                del there
        for one in work.rounds:
            self._bring_together(update, one)

    def _bring_together(self, update: Tensor, one: _Round) -> None:
        """Collective. The parts of a matrix arrive in the order of ranks, which is that of its elements."""
        parts = [update.narrow(0, *where) for where in one.slices]
        sent = torch.cat(parts or [update[:0]]).to(self._device)
        received = sent.new_empty(sum(one.receive_sizes))
        receive_sizes, send_sizes = list(one.receive_sizes), list(one.send_sizes)
        dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=self._group)
        if received.numel():
            orthogonalise(received.view(one.shape), self.dtype)
        dist.all_to_all_single(sent, received, send_sizes, receive_sizes, group=self._group)
        for part, result in zip(parts, sent.split([part.numel() for part in parts]), strict=True):
            part.copy_(result)


def _with_offsets(place: ParameterShard, matrices: Iterable[tuple[int, Matrix]]) -> Iterator[tuple[int, Matrix]]:
    """(first element of the matrix in the flat tensor, the matrix): before the tensor's begin where this rank has only
    the end of it."""
    for begin, matrix in matrices:
        yield place.offset - place.start + begin, matrix


def _plan(matrices: list[tuple[int, Matrix]], rank: int, world_size: int) -> _Work:
    here = [
        _Here(offset, matrix.rows, matrix.columns)
        for offset, matrix in matrices
        if not matrix.is_cut and (not matrix.parts or matrix.parts[0].rank == rank)
    ]
    cut = [(offset, matrix) for offset, matrix in matrices if matrix.is_cut]
    rounds = []
    for owned in plan_rounds([matrix for _, matrix in cut]):
        slices, send_sizes, receive_sizes = [], [0] * world_size, [0] * world_size
        for owner in sorted(owned):
            offset, matrix = cut[owned[owner]]
            part = matrix.part_of(rank)
            if part:
                slices.append((offset + part.start, part.length))
                send_sizes[owner] = part.length
        shape = (0, 0)
        if rank in owned:
            mine = cut[owned[rank]][1]
            shape = (mine.rows, mine.columns)
            for part in mine.parts:
                receive_sizes[part.rank] = part.length
        rounds.append(_Round(tuple(slices), tuple(send_sizes), shape, tuple(receive_sizes)))
    return _Work(tuple(here), tuple(rounds))


class ParameterGroup(TypedDict):
    """One torch parameter group; `name` is how a checkpoint finds its hyperparameters again."""

    name: str
    params: list[nn.Parameter]
    weight_decay: float


def build_parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]],
    kinds: Mapping[str, ParameterKind],
    spec: OptimizerSpec,
    weight_decay: float,
) -> list[ParameterGroup]:
    """The optimizer's groups; `kinds` says what each parameter is, which ZeRO-3 has flattened.

    Groups without parameters are left out: DeepSpeed would drop them and shift the numbers of the others.
    """
    groups: dict[str, ParameterGroup] = {
        group.name: {"name": group.name, "params": [], "weight_decay": weight_decay if group.decays else 0.0}
        for group in spec.groups
    }
    for name, parameter in named:
        if parameter.requires_grad:
            groups[spec.group_of(kinds[name]).name]["params"].append(parameter)
    return [group for group in groups.values() if group["params"]]


def build_optimizer(
    model: nn.Module,
    kinds: Mapping[str, ParameterKind],
    spec: OptimizerSpec,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> torch.optim.Optimizer:
    """A torch optimizer over the model's parameters; Muon must be bound to the engine.

    AdamW is torch's own fused kernel on every device: on a CPU, where offloaded states live, it needs no extension to
    be compiled, which DeepSpeed's CPUAdam does.
    """
    groups = [dict(group) for group in build_parameter_groups(model.named_parameters(), kinds, spec, weight_decay)]
    if spec.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=lr, weight_decay=weight_decay)
    if spec.name == "muon":
        orthogonalised = {group.name for group in spec.groups if group.is_orthogonalised}
        return Muon(
            groups,
            orthogonalised=orthogonalised,
            lr=lr,
            weight_decay=weight_decay,
            betas=betas,
            eps=eps,
            dtype=newton_schulz_dtype(),
        )
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)


def newton_schulz_dtype() -> torch.dtype:
    """bf16 on GPUs that have it, as Muon was published; a CPU has nothing faster than fp32."""
    return torch.bfloat16 if is_gpu() and has_bf16() else torch.float32
