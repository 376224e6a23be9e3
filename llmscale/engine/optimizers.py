"""The optimizers that DeepSpeed wraps, built from `llmscale.config.optimizers`; Muon on ZeRO's shards.

Muon (Jordan et al. 2024) updates the blocks' matrices, AdamW the rest. DeepSpeed's own Muon orthogonalises inside
ZeRO, before the norm and the clipping, so stages 1 to 3 clip the orthogonalised update and stage 0 the gradient. This
one is an ordinary torch optimizer: ZeRO steps it with reduced, unscaled and clipped gradients, as it steps AdamW. Its
momentum is sharded like the master weights, so checkpoints cut both alike. A matrix must be orthogonalised whole: one
rank gathers each matrix that ZeRO has cut, and sends every rank its part back (`llmscale.config.optimizers` plans who).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmscale.architecture.layers import ParameterKind, ParameterTensors
from llmscale.config.muon_plan import NEWTON_SCHULZ_STEPS, Matrix, matrices_of, plan_rounds
from llmscale.config.optimizers import OptimizerSpec, undivided_name
from llmscale.engine.device_memory import has_bf16
from llmscale.engine.process_group import is_gpu
from llmscale.engine.zero_layout import (
    group_name,
    held_range,
    parameter_shards,
    parts_of_all_ranks,
    shard_group,
)

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

MOMENTUM = 0.95
#: Root mean square of an update, about AdamW's, so that one learning rate and one weight decay serve both
#: (Liu et al. 2025, equation 4).
_UPDATE_RMS = 0.2
#: Coefficients of the quintic of Jordan et al. 2024, chosen for its slope at 0.
_A = 3.4445
_B = -4.7750
_C = 2.0315


class ParameterGroup(TypedDict, total=False):
    """One torch parameter group; a checkpoint finds its hyperparameters by `zero_layout.group_name`."""

    name: str
    undivided: str
    """Name of the group that patterns have divided into this and others. Their scalar states are equal."""
    params: list[nn.Parameter]
    weight_decay: float
    moe: bool
    divided_from: str


def build_parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]],
    kinds: Mapping[str, ParameterKind],
    spec: OptimizerSpec,
    weight_decay: float,
) -> list[ParameterGroup]:
    """Build the optimizer's groups; `kinds` gives each parameter's kind, since ZeRO-3 has flattened its shape.

    Groups without parameters are left out: DeepSpeed would drop them and shift the numbers of the others. Divided
    experts have groups of their own, which DeepSpeed knows by `moe` and the `group_name` of their parameters.
    """
    groups: dict[str, ParameterGroup] = {
        group.name: {
            "name": group.name,
            "undivided": undivided_name(group.name),
            "params": [],
            "weight_decay": group.weight_decay(weight_decay),
        }
        for group in spec.groups
    }
    experts: dict[str, ParameterGroup] = {
        name: {**group, "params": [], "moe": True, "divided_from": name} for name, group in groups.items()
    }
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        group = spec.group_of(kinds[name], name).name
        if ranks := getattr(parameter, "group_name", None):
            experts[group]["name"] = ranks
        (experts if ranks else groups)[group]["params"].append(parameter)
    return [group for group in (*groups.values(), *experts.values()) if group["params"]]


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
    """Build a torch optimizer over the model's parameters. For Muon, call `plan` once the engine is built.

    AdamW is torch's fused kernel on every device. On a CPU, where offloaded states are, it needs no compiled
    extension, unlike DeepSpeed's CPUAdam.
    """
    groups = [dict(group) for group in build_parameter_groups(model.named_parameters(), kinds, spec, weight_decay)]
    if spec.name == "adafactor":
        # torch multiplies the decay by the learning rate, which is larger here for updates as large as AdamW's.
        for group in groups:
            group["weight_decay"] = cast("float", group["weight_decay"]) / spec.default_rate_factor
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
    assert spec.name == "adamw", f"no class is written for {spec.name}"
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)


def newton_schulz_dtype() -> torch.dtype:
    """Return bf16 on GPUs that have it, as Muon was published; a CPU has nothing faster than fp32."""
    return torch.bfloat16 if is_gpu() and has_bf16() else torch.float32


def newton_schulz(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Approximate the orthogonal matrix closest to `matrix` [rows, columns]; singular values end near 0.7 to 1.2.

    Computed and returned in `dtype`. Overwrites a `matrix` of that type.
    """
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
    if is_tall:
        return x.t()
    return x


def orthogonalise(matrix: Tensor, dtype: torch.dtype) -> None:
    """Orthogonalise [rows, columns] in place, and scale it to AdamW's root mean square."""
    matrix.copy_(newton_schulz(matrix, dtype))
    matrix.mul_(_UPDATE_RMS * math.sqrt(max(matrix.shape)))


@dataclass(frozen=True)
class ExchangeRound:
    """Cut matrices that are gathered at the same time, at most one per rank."""

    slices: tuple[tuple[int, int], ...]
    """(first element in the flat tensor, elements) that this rank sends, in the order of the receivers."""
    send_sizes: tuple[int, ...]
    """Elements sent to each rank."""
    shape: tuple[int, int]
    """Shape of the matrix that this rank gathers; (0, 0) when it gathers none."""
    receive_sizes: tuple[int, ...]
    """Elements received from each rank, in rank order."""


@dataclass(frozen=True)
class MatrixPlan:
    """Matrices of one flat tensor: held by this rank alone, or exchanged."""

    here: tuple[tuple[int, Matrix], ...]
    """(first element in the flat tensor, matrix) of those that this rank holds completely."""
    rounds: tuple[ExchangeRound, ...]
    group: dist.ProcessGroup | None
    """Ranks that the tensor is cut among; None for all of them."""


class Muon(torch.optim.AdamW):
    """Muon for the groups named in `orthogonalised`, torch's fused AdamW for the others.

    Call `plan` before the first step with a learning rate.
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
        """dtype: type of the Newton-Schulz iteration."""
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        self.dtype = dtype
        self._orthogonalised = frozenset(orthogonalised)
        self._plans: dict[int, MatrixPlan] = {}
        self._device = torch.device("cpu")

    def plan(self, engine: DeepSpeedEngine, tensors: ParameterTensors) -> None:
        """Plan which rank orthogonalises each matrix. `tensors` describe the engine's model."""
        self._device = torch.device(engine.device)
        parameters = {tensor.name: tensor.parameter for tensor in tensors.all}
        parts = parts_of_all_ranks(engine)
        by_flat: dict[int, list[tuple[int, Matrix]]] = {}
        groups: dict[int, dist.ProcessGroup | None] = {}
        for shard in parameter_shards(engine):
            if shard.group in self._orthogonalised:
                parameter = parameters[shard.name]
                held = engine.module.get_parameter(shard.name)
                first, elements, _ = held_range(held)
                matrices = matrices_of(parameter.matrix_rows, parameter.columns, parts.get(shard.name, ()))
                # The first element in the flat tensor is negative where this rank has only the end of the matrix.
                by_flat.setdefault(id(shard.flat), []).extend(
                    (shard.offset - shard.start + begin, matrix)
                    for begin, matrix in matrices
                    if first <= begin < first + elements
                )
                groups[id(shard.flat)] = shard_group(engine, held)
        self._plans = {flat: _plan_matrices(matrices, groups[flat]) for flat, matrices in by_flat.items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch's is untyped
        """Step all groups or one, each with its flat tensors or with none, as ZeRO calls it.

        Collective where a matrix is cut. Overwrites the gradients of matrices.
        """
        groups = self.param_groups
        self.param_groups = [group for group in groups if group_name(group) not in self._orthogonalised]
        super().step(closure)
        self.param_groups = groups
        for group in groups:
            for flat in group["params"] if group_name(group) in self._orthogonalised else ():
                if flat.grad is not None:
                    self._step_matrices(flat, group["lr"], group["weight_decay"])

    def _step_matrices(self, flat: Tensor, lr: float, weight_decay: float) -> None:
        gradient = flat.grad
        state = self.state[flat]
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(flat)
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - MOMENTUM)
        if lr == 0:  # also DeepSpeed's own steps at start-up, before `plan`
            return
        # Nesterov's momentum. Nobody reads a gradient after the step, so the update takes its place.
        update = gradient.lerp_(momentum, MOMENTUM)
        self._orthogonalise(update.view(-1), self._plans[id(flat)])
        flat.mul_(1 - lr * weight_decay).add_(update, alpha=-lr)

    def _orthogonalise(self, update: Tensor, plan: MatrixPlan) -> None:
        """Orthogonalise all matrices of a flat update in place; offloaded ones on the GPU, one at a time."""
        for offset, matrix in plan.here:
            own = update.narrow(0, offset, matrix.elements).view(matrix.rows, matrix.columns)
            if own.device == self._device:
                orthogonalise(own, self.dtype)
            else:
                there = own.to(self._device)
                orthogonalise(there, self.dtype)
                own.copy_(there)
                del there
        for exchange in plan.rounds:
            self._exchange(update, exchange, plan.group)

    def _exchange(self, update: Tensor, exchange: ExchangeRound, group: dist.ProcessGroup | None) -> None:
        """Gather one matrix per rank, orthogonalise it, send every rank its part back. Collective.

        A matrix's parts arrive in rank order, which is the order of its elements.
        """
        parts = [update.narrow(0, *where) for where in exchange.slices]
        sent = torch.cat(parts or [update[:0]]).to(self._device)
        received = sent.new_empty(sum(exchange.receive_sizes))
        receive_sizes = list(exchange.receive_sizes)
        send_sizes = list(exchange.send_sizes)
        dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=group)
        if received.numel():
            orthogonalise(received.view(exchange.shape), self.dtype)
        dist.all_to_all_single(sent, received, send_sizes, receive_sizes, group=group)
        for part, result in zip(parts, sent.split([part.numel() for part in parts]), strict=True):
            part.copy_(result)


def _plan_matrices(matrices: list[tuple[int, Matrix]], group: dist.ProcessGroup | None) -> MatrixPlan:
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    here = [
        (offset, matrix)
        for offset, matrix in matrices
        if not matrix.is_cut and (not matrix.parts or matrix.parts[0].rank == rank)
    ]
    cut = [(offset, matrix) for offset, matrix in matrices if matrix.is_cut]
    rounds = []
    for owned in plan_rounds([matrix for _, matrix in cut]):
        slices = []
        send_sizes = [0] * world_size
        receive_sizes = [0] * world_size
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
        rounds.append(ExchangeRound(tuple(slices), tuple(send_sizes), shape, tuple(receive_sizes)))
    return MatrixPlan(tuple(here), tuple(rounds), group)
