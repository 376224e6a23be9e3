"""Every optimizer that a run can have: its groups, states, the bytes of a step, and where it works. No torch.

`llmscale.engine.optimizers` builds them; memory, disk space and speed derive from what is said here.
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
    """Parameters that are stepped alike."""

    name: str
    """How a checkpoint finds its hyperparameters again."""
    kinds: frozenset[ParameterKind]
    decays: bool
    """Whether the run's weight decay is for them."""
    states: tuple[str, ...]
    """Tensors in fp32 with an element per weight, by torch's names; the fp32 master weight is not among them."""
    scalars: tuple[str, ...]
    """One-element tensors, of every tensor that is stepped."""
    learning_rate_factor: float = 1.0
    is_orthogonalised: bool = False
    """Whether its updates are matrices that are orthogonalised as a whole (llmscale.config.muon)."""
    products_dtype: Literal["bf16", "fp32"] = "bf16"
    """What they are multiplied in for it: bf16, as Muon was published, where the GPU has it."""

    @property
    def state_bytes(self) -> int:
        """Of one weight: its fp32 master and its states."""
        return _FP32_BYTES * (1 + len(self.states))


@dataclass(frozen=True)
class OptimizerSpec:
    """What must be known of an optimizer without running it."""

    name: OptimizerName
    groups: tuple[OptimizerGroup, ...]
    """In torch's order."""
    steps_shards: bool = True
    """Whether it can step a flat piece of a tensor, as ZeRO hands it."""

    def group_of(self, kind: ParameterKind) -> OptimizerGroup:
        """The group of a parameter."""
        return next(group for group in self.groups if kind in group.kinds)

    def group_tensors(
        self, tensors: Iterable[ParameterTensor]
    ) -> tuple[tuple[OptimizerGroup, tuple[ParameterTensor, ...]], ...]:
        """Each group with its parameters, in their order; none that is empty, as torch and DeepSpeed have it."""
        found: dict[str, list[ParameterTensor]] = {group.name: [] for group in self.groups}
        members = {kind: found[group.name] for group in reversed(self.groups) for kind in group.kinds}
        for tensor in tensors:
            members[tensor.kind].append(tensor)
        return tuple((group, tuple(found[group.name])) for group in self.groups if found[group.name])

    def state_bytes(self, model: Architecture) -> int:
        """fp32 master weights and states of all parameters, once over all ranks: what a checkpoint holds."""
        return sum(self.group_of(kind).state_bytes * count for kind, count in model.elements_by_kind.items())

    def state_bytes_per_weight(self, model: Architecture) -> float:
        """The same of one weight, on average."""
        return self.state_bytes(model) / model.num_parameters

    def step_bytes_per_weight(self, model: Architecture) -> float:
        """What a step moves through the memory that holds the states: they are read and written, the fp32 gradient is
        read."""
        return 2 * self.state_bytes_per_weight(model) + _FP32_BYTES

    def with_matrix_factor(self, factor: float) -> OptimizerSpec:
        """The same with `factor` times the learning rate for what is orthogonalised."""
        changed = (
            replace(group, learning_rate_factor=factor) if group.is_orthogonalised else group for group in self.groups
        )
        return replace(self, groups=tuple(changed))

    def on_gpu(self, capability: ComputeCapability | None) -> OptimizerSpec:
        """The same on a GPU of that compute capability; None: of an Ampere or newer one."""
        if has_bf16(capability):
            return self
        return replace(self, groups=tuple(replace(group, products_dtype="fp32") for group in self.groups))

    def step_flops(self, model: Architecture) -> int:
        """Of matrix products in one step, once over all ranks; what is done element by element is not counted."""
        kinds = {kind for group in self.groups if group.is_orthogonalised for kind in group.kinds}
        layers = (layer for _, layer in model.all_layers())
        parameters = (p for layer in layers for p in layer.parameters if p.kind in kinds)
        return sum(
            matrix.newton_schulz_flops
            for parameter in parameters
            for _, matrix in matrices_of(parameter.matrix_rows, parameter.shape[1], ())
        )

    def check_stage(self, zero_stage: int) -> None:
        """Raise ConfigError where ZeRO would give it flat one-dimensional shards that it cannot step."""
        if zero_stage and not self.steps_shards:
            raise ConfigError(
                f"optimizer '{self.name}' cannot run at ZeRO stage {zero_stage}: ZeRO hands it flat shards, which have "
                "no rows and columns to factor. Use --optimizer adamw (ZeRO already divides its states among the "
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
#: With AdamW's states as a bound: its sums over rows and columns are smaller, and not modelled.
ADAFACTOR = OptimizerSpec("adafactor", ADAMW.groups, steps_shards=False)
_ALL = (ADAMW, MUON, ADAFACTOR)
#: Those of which `estimate` and `plan` know the memory.
MODELLED_NAMES = tuple(spec.name for spec in _ALL if spec.steps_shards)


def get_optimizer(name: OptimizerName) -> OptimizerSpec:
    """What a run's `optimizer` key names."""
    return {spec.name: spec for spec in _ALL}[name]
