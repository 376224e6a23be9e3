"""Describe every optimizer of a run: parameter groups, states, bytes and FLOPs of a step, legal ZeRO stages. No torch.

`llmscale.engine.optimizers` builds them; memory, disk space and speed derive from these descriptions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.architecture.layers import Architecture, ParameterKind, ParameterTensor
from llmscale.config.hardware import has_bf16
from llmscale.config.muon import matrices_of
from llmscale.errors import ConfigError

OptimizerName = Literal["adamw", "muon", "adafactor"]

_FP32_BYTES = 4


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters that share hyperparameters and states."""

    name: str
    """Key of the group's hyperparameters in a checkpoint."""
    kinds: frozenset[ParameterKind]
    decays: bool
    """True if the run's weight decay applies."""
    states: tuple[str, ...]
    """Names in torch of the fp32 states with an element per weight, without the master weight."""
    scalars: tuple[str, ...]
    """Names in torch of the states with one element per parameter."""
    learning_rate_factor: float = 1.0
    is_orthogonalised: bool = False
    """True if updates are orthogonalised matrices (llmscale.config.muon)."""
    products_dtype: Literal["bf16", "fp32"] = "bf16"
    """Type of the orthogonalisation's matrix products: bf16, as Muon was published, where the GPU has it."""

    @property
    def state_bytes(self) -> int:
        """Bytes of one weight: its fp32 master and its states."""
        return _FP32_BYTES * (1 + len(self.states))


@dataclass(frozen=True)
class OptimizerSpec:
    """Properties of an optimizer that are known without running it."""

    name: OptimizerName
    groups: tuple[OptimizerGroup, ...]
    """Parameter groups, in torch's order."""
    steps_shards: bool = True
    """True if it can step a flat shard of a tensor, as ZeRO stages 1 to 3 pass it."""

    def group_of(self, kind: ParameterKind) -> OptimizerGroup:
        """Return the group of a parameter."""
        return next(group for group in self.groups if kind in group.kinds)

    def group_tensors(
        self, tensors: Iterable[ParameterTensor]
    ) -> tuple[tuple[OptimizerGroup, tuple[ParameterTensor, ...]], ...]:
        """Return each group with its parameters, in order. Empty groups are left out, as in torch and DeepSpeed."""
        found: dict[str, list[ParameterTensor]] = {group.name: [] for group in self.groups}
        members = {kind: found[group.name] for group in reversed(self.groups) for kind in group.kinds}
        for tensor in tensors:
            members[tensor.kind].append(tensor)
        return tuple((group, tuple(found[group.name])) for group in self.groups if found[group.name])

    def state_bytes(self, model: Architecture) -> int:
        """Return the bytes of fp32 master weights and states of all parameters, as a checkpoint holds them."""
        return sum(self.group_of(kind).state_bytes * count for kind, count in model.elements_by_kind.items())

    def state_bytes_per_weight(self, model: Architecture) -> float:
        """Return the average `state_bytes` of one weight."""
        return self.state_bytes(model) / model.num_parameters

    def step_bytes_per_weight(self, model: Architecture) -> float:
        """Return the memory traffic of a step per weight: states are read and written, the fp32 gradient is read."""
        return 2 * self.state_bytes_per_weight(model) + _FP32_BYTES

    def with_matrix_factor(self, factor: float) -> OptimizerSpec:
        """Return the optimizer with `factor` times the learning rate for orthogonalised matrices."""
        changed = (
            replace(group, learning_rate_factor=factor) if group.is_orthogonalised else group for group in self.groups
        )
        return replace(self, groups=tuple(changed))

    def on_gpu(self, capability: ComputeCapability | None) -> OptimizerSpec:
        """Return the optimizer on a GPU of that compute capability; None means Ampere or newer."""
        if has_bf16(capability):
            return self
        return replace(self, groups=tuple(replace(group, products_dtype="fp32") for group in self.groups))

    def step_flops(self, model: Architecture) -> int:
        """Return the FLOPs of a step's matrix products, summed over ranks; elementwise operations are not counted."""
        kinds = {kind for group in self.groups if group.is_orthogonalised for kind in group.kinds}
        layers = (layer for _, layer in model.all_layers())
        parameters = (p for layer in layers for p in layer.parameters if p.kind in kinds)
        return sum(
            matrix.newton_schulz_flops
            for parameter in parameters
            for _, matrix in matrices_of(parameter.matrix_rows, parameter.shape[1], ())
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
)
#: AdamW's states serve as an upper bound: the sums over rows and columns are smaller, and not modelled.
ADAFACTOR = OptimizerSpec("adafactor", ADAMW.groups, steps_shards=False)
_ALL = (ADAMW, MUON, ADAFACTOR)
#: Optimizers whose memory `estimate` and `plan` know.
MODELLED_NAMES = tuple(spec.name for spec in _ALL if spec.steps_shards)


def get_optimizer(name: OptimizerName) -> OptimizerSpec:
    """Return the optimizer that a run's `optimizer` key names."""
    return {spec.name: spec for spec in _ALL}[name]
