"""Describe every optimizer of a run: parameter groups, states, bytes and FLOPs of a step, legal ZeRO stages. No torch.

Patterns over parameter names (`--param-group`, `--freeze`) divide the groups and leave parameters out.
`llmscale.engine.optimizers` builds the optimizers; memory, disk space and speed derive from these descriptions.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from llmscale import limits
from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.architecture.layers import (
    INIT_STD,
    Architecture,
    Parameter,
    ParameterKind,
    ParameterTensor,
    ParameterTensors,
)
from llmscale.config.hardware import has_bf16
from llmscale.config.muon_plan import matrices_of
from llmscale.errors import ConfigError

OptimizerName = Literal["adamw", "muon", "adafactor"]

_FP32_BYTES = 4
_BF16_BYTES = 2
#: Between the name of a group and the pattern that divides it.
_DIVIDED = "/"


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters that share hyperparameters and states."""

    name: str
    """Key of the group's hyperparameters in a checkpoint."""
    kinds: frozenset[ParameterKind]
    decays: bool
    """True if the run's weight decay applies."""
    states: tuple[str, ...]
    """Names in torch of the states with an element per weight, without the master weight."""
    scalars: tuple[str, ...]
    """Names in torch of the states with one element per parameter."""
    learning_rate_factor: float = 1.0
    is_orthogonalised: bool = False
    """True if updates are orthogonalised matrices (llmscale.config.muon_plan)."""
    products_dtype: Literal["bf16", "fp32"] = "bf16"
    """Type of the orthogonalisation's matrix products: bf16, as Muon was published, where the GPU has it."""
    pattern: str = "*"
    """Pattern of the names of the parameters that belong to the group."""
    own_decay: float | None = None
    """Weight decay in place of the run's."""
    is_factored: bool = False
    """True if each matrix has fp32 sums over its rows and over its columns in place of states."""
    master_bytes: int = _FP32_BYTES
    """Bytes of a master weight, and of each of its states."""

    @property
    def state_bytes(self) -> int:
        """Bytes of one weight: its master and its states."""
        return self.master_bytes * (1 + len(self.states))

    def sums_bytes(self, parameter: Parameter) -> int:
        """Return the bytes of a parameter's sums over rows and columns."""
        if not self.is_factored:
            return 0
        return _FP32_BYTES * (parameter.elements // parameter.columns + parameter.elements // parameter.shape[-2])

    def weight_decay(self, of_run: float) -> float:
        """Return the group's weight decay."""
        if self.own_decay is not None:
            return self.own_decay
        if self.decays:
            return of_run
        return 0.0

    def holds(self, name: str, kind: ParameterKind) -> bool:
        """Return whether a parameter may belong to the group; the first such group has it."""
        return kind in self.kinds and (self.pattern == "*" or fnmatchcase(name, self.pattern))


def undivided_name(name: str) -> str:
    """Return the name of the group that patterns have divided into this and others. Their scalars are equal."""
    return name.partition(_DIVIDED)[0]


@dataclass(frozen=True)
class ParameterRule:
    """Learning rate and weight decay of the parameters whose names match a pattern."""

    pattern: str
    learning_rate_factor: float = 1.0
    own_decay: float | None = None
    """Weight decay in place of the run's; None keeps that."""


@dataclass(frozen=True)
class OptimizerSpec:
    """Properties of an optimizer that are known without running it."""

    name: OptimizerName
    groups: tuple[OptimizerGroup, ...]
    """Parameter groups, in torch's order."""
    steps_shards: bool = True
    """True if it can step a flat shard of a tensor, as ZeRO stages 1 to 3 pass it."""
    default_rate_factor: float = 1.0
    """Ratio of its default learning rate to AdamW's, which presets hold."""
    rate_note: str = ""
    """Reason of that rate, in words that follow the preset's name."""
    frozen: tuple[str, ...] = ()
    """Patterns of the names of parameters without gradients and states."""

    def group_of(self, kind: ParameterKind, name: str = "") -> OptimizerGroup:
        """Return the group of a parameter; without its name, a group of the same states."""
        return next(group for group in self.groups if group.holds(name, kind))

    def group_tensors(
        self, tensors: Iterable[ParameterTensor]
    ) -> tuple[tuple[OptimizerGroup, tuple[ParameterTensor, ...]], ...]:
        """Return each group with its parameters, in order. Empty groups are left out, as in torch and DeepSpeed."""
        members: dict[str, list[ParameterTensor]] = {group.name: [] for group in self.groups}
        by_name = any(group.pattern != "*" for group in self.groups)
        if by_name:
            of_kind = {}
        else:
            of_kind = {kind: self.group_of(kind) for group in self.groups for kind in group.kinds}
        for tensor in tensors:
            members[(of_kind.get(tensor.kind) or self.group_of(tensor.kind, tensor.name)).name].append(tensor)
        return tuple((group, tuple(members[group.name])) for group in self.groups if members[group.name])

    def state_bytes(self, model: Architecture) -> int:
        """Return the bytes of master weights and states of all parameters that are trained."""
        tensors = ParameterTensors(model, self.frozen)
        weights = sum(self.group_of(kind).state_bytes * count for kind, count in tensors.trainable_by_kind.items())
        if any(group.is_factored for group in self.groups):
            factored = tensors.trainable
        else:
            factored = ()
        return weights + sum(self.group_of(one.kind).sums_bytes(one.parameter) for one in factored)

    def checkpoint_bytes(self, model: Architecture) -> int:
        """Return the bytes of a checkpoint: master weights and states, and frozen parameters, at most in fp32.

        Beside adapters the frozen ones stay where the run found them.
        """
        frozen = () if model.has_adapters else ParameterTensors(model, self.frozen).frozen_tensors
        return self.state_bytes(model) + _FP32_BYTES * sum(tensor.elements for tensor in frozen)

    def state_bytes_per_weight(self, model: Architecture) -> float:
        """Return the average `state_bytes` of one weight that is trained."""
        return self.state_bytes(model) / ParameterTensors(model, self.frozen).num_trainable

    def step_bytes_per_weight(self, model: Architecture) -> float:
        """Return the memory traffic of a step per weight: states are read and written, the gradient is read."""
        return 2 * self.state_bytes_per_weight(model) + self.groups[0].master_bytes

    def with_matrix_factor(self, factor: float) -> OptimizerSpec:
        """Return the optimizer with `factor` times the learning rate for orthogonalised matrices."""
        changed = (
            replace(group, learning_rate_factor=factor) if group.is_orthogonalised else group for group in self.groups
        )
        return replace(self, groups=tuple(changed))

    def with_rules(
        self, rules: Sequence[ParameterRule], frozen: Sequence[str], tensors: Sequence[ParameterTensor]
    ) -> OptimizerSpec:
        """Return the optimizer with groups divided by `rules`, the first that matches first, and parameters frozen.

        Raises ConfigError for a pattern without a parameter of its own among `tensors`, and if all are frozen.
        """
        left = [tensor.name for tensor in tensors]
        for flag, patterns in (("--freeze", frozen), ("--param-group", [rule.pattern for rule in rules])):
            for pattern in patterns:
                left = _take_matching(flag, pattern, left, [tensor.name for tensor in tensors])
            if flag == "--freeze" and not left:
                raise ConfigError(f"--freeze {' '.join(frozen)} leaves no parameter to train. Give fewer patterns.")
        divided = (
            replace(
                group,
                name=f"{group.name}{_DIVIDED}{rule.pattern}",
                learning_rate_factor=group.learning_rate_factor * rule.learning_rate_factor,
                pattern=rule.pattern,
                own_decay=rule.own_decay,
            )
            for rule in rules
            for group in self.groups
        )
        return replace(self, groups=(*divided, *self.groups), frozen=tuple(frozen))

    def in_bf16(self) -> OptimizerSpec:
        """Return the optimizer with master weights and states in bf16."""
        return replace(self, groups=tuple(replace(group, master_bytes=_BF16_BYTES) for group in self.groups))

    def on_gpu(self, capability: ComputeCapability | None) -> OptimizerSpec:
        """Return the optimizer on a GPU of that compute capability; None means Ampere or newer."""
        if has_bf16(capability):
            return self
        return replace(self, groups=tuple(replace(group, products_dtype="fp32") for group in self.groups))

    def step_flops(self, model: Architecture) -> int:
        """Return the FLOPs of a step's matrix products, summed over ranks; elementwise operations are not counted."""
        kinds = {kind for group in self.groups if group.is_orthogonalised for kind in group.kinds}
        if kinds:
            tensors = ParameterTensors(model, self.frozen).trainable
        else:
            tensors = ()
        return sum(
            matrix.newton_schulz_flops
            for tensor in tensors
            if tensor.kind in kinds
            for _, matrix in matrices_of(tensor.parameter.matrix_rows, tensor.parameter.columns, ())
        )

    def check_stage(self, zero_stage: int) -> None:
        """Raise ConfigError if ZeRO would pass flat shards to an optimizer that cannot step them."""
        if zero_stage and not self.steps_shards:
            raise ConfigError(
                f"optimizer '{self.name}' cannot run at ZeRO stage {zero_stage}: ZeRO passes it flat shards, which "
                "have no rows and columns to factor. Use --optimizer adamw (ZeRO already divides its states among the "
                "ranks), or --ds zero0."
            )


#: Matrices and embeddings decay; biases and norms do not (GPT-2/GPT-3 practice).
ADAMW = OptimizerSpec(
    "adamw",
    (
        OptimizerGroup("decay", frozenset({"embedding", "matrix"}), True, ("exp_avg", "exp_avg_sq"), ("step",)),
        OptimizerGroup("no_decay", frozenset({"vector"}), False, ("exp_avg", "exp_avg_sq"), ("step",)),
    ),
)
#: Jordan et al. 2024: momentum, orthogonalised, for the blocks' matrices; AdamW for embeddings, the output head, biases
#: and norms.
MUON = OptimizerSpec(
    "muon",
    (
        OptimizerGroup("muon", frozenset({"matrix"}), True, ("momentum_buffer",), (), is_orthogonalised=True),
        replace(ADAMW.groups[0], kinds=frozenset({"embedding"})),
        ADAMW.groups[1],
    ),
    rate_note="for AdamW, whose size of updates it has",
)
#: Shazeer & Stern 2018: second moments of matrices from sums over rows and columns, of vectors complete. The learning
#: rate is relative to a weight's root mean square (section 8), which begins at 0.02.
ADAFACTOR = OptimizerSpec(
    "adafactor",
    (
        replace(ADAMW.groups[0], states=(), is_factored=True),
        replace(ADAMW.groups[1], states=("variance",)),
    ),
    steps_shards=False,
    default_rate_factor=1 / INIT_STD,
    rate_note=f"for AdamW, divided by the weights' first root mean square of {INIT_STD}, as it is relative to theirs",
)
_ALL = (ADAMW, MUON, ADAFACTOR)


def get_optimizer(name: OptimizerName) -> OptimizerSpec:
    """Return the optimizer that a run's `optimizer` key names."""
    return {spec.name: spec for spec in _ALL}[name]


def parse_rule(text: str) -> ParameterRule:
    """Parse PATTERN:lr=0.1x:decay=0 of --param-group, with either setting or both. Raises ConfigError."""
    pattern, *settings = text.split(":")
    values: dict[str, float] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        try:
            number = float(value.removesuffix("x") if key == "lr" and value.endswith("x") else value)
        except ValueError:
            number = math.nan
        most = {"lr": limits.MAX_FACTOR, "decay": limits.MAX_WEIGHT_DECAY}.get(key, -1.0)
        is_legal = 0 <= number <= most and (key == "decay" or value.endswith("x"))
        if not is_legal or key in values:
            raise ConfigError(_ill_formed(text))
        values[key] = number
    if not pattern or not values:
        raise ConfigError(_ill_formed(text))
    return ParameterRule(pattern, values.get("lr", 1.0), values.get("decay"))


def _ill_formed(text: str) -> str:
    return (
        f"--param-group '{text}' must be PATTERN:lr=FACTORx:decay=NUMBER, such as 'wte*:lr=0.1x:decay=0': the "
        f"learning rate as a multiple of the run's, up to {limits.MAX_FACTOR:g}x, the weight decay in "
        f"place of the run's, up to {limits.MAX_WEIGHT_DECAY:g}, or one of them."
    )


def _take_matching(flag: str, pattern: str, left: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names in `left` that do not match. Raises ConfigError if all do not."""
    others = [name for name in left if not fnmatchcase(name, pattern)]
    if len(others) < len(left):
        return others
    if any(fnmatchcase(name, pattern) for name in names):
        raise ConfigError(f"{flag} '{pattern}' matches only parameters that an earlier pattern or --freeze has taken.")
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
    raise ConfigError(
        f"{flag} '{pattern}' matches no parameter. Names near it: {', '.join(near)}. In a pattern * matches "
        "any text: 'wte*', 'blocks.0.*', '*.bias'."
    )
