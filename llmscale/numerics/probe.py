"""Hooks of an engine that copy what one step uses and computes: no gather, no barrier, nothing is changed.

DeepSpeed's own accessors are not used: between backward pass and step they hang, or return zeros, sums that are not
reduced, or values that are not unscaled, depending on stage and precision. The hooks here are the same at every stage:
autograd's gradients of the parameters, and the step of the optimizer that DeepSpeed wraps, which gets gradients
reduced, unscaled and clipped.

Of large models every n-th element is copied. Memory is bounded then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from llmscale.engine.loss_scale import loss_scale
from llmscale.engine.zero_layout import (
    ParameterShard,
    held_range,
    inner_optimizer,
    named_parameters,
    parameter_shards,
)

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

#: Elements of a parameter that are always copied, and memory of a rank for all copies.
_LEAST = 4096
_BUDGET_BYTES = 2**30


def choose_strides(elements: Mapping[str, int], copies: int, budget_bytes: int = _BUDGET_BYTES) -> dict[str, int]:
    """Return of each parameter the n whose multiples are copied, so that `copies` in fp32 take at most `budget_bytes`.

    They are odd, so that they fall on all columns of a matrix.
    """
    total = 4 * copies * sum(elements.values())
    stride = -(-total // budget_bytes)
    return {name: max(1, min(stride, count // _LEAST)) | 1 for name, count in elements.items()}


def select(part: Tensor, start: int, stride: int) -> tuple[Tensor, int]:
    """Return the selected elements of a flat part that begins at element `start`, and the number of those before it."""
    offset = -start % stride
    return part.detach().reshape(-1)[offset::stride], (start + offset) // stride


@dataclass
class Piece:
    """Selected elements of a parameter that this rank steps, before and after the step."""

    name: str
    first: int
    """Number of the parameter's selected elements before these."""
    given: Tensor
    """Gradient that the optimizer gets."""
    before: Tensor
    states: dict[str, Tensor]
    """The optimizer's states before the step: with an element per weight, or complete."""
    after: Tensor
    states_after: dict[str, Tensor]
    count: int
    """Steps that the optimizer has counted before this one."""
    flat: Tensor
    """The tensor that the optimizer steps, of which these elements are a part."""
    settings: dict[str, object]
    """Settings of its group at this step."""


def shards_to_step(
    inner: torch.optim.Optimizer, shards: Sequence[ParameterShard]
) -> Iterator[tuple[ParameterShard, Tensor]]:
    """Yield the shards that the next step of DeepSpeed's optimizer changes, each with its flat's gradient."""
    stepped = {id(p) for group in inner.param_groups for p in group["params"] if p.grad is not None}
    for shard in shards:
        if id(shard.flat) in stepped:
            assert shard.flat.grad is not None
            yield shard, shard.flat.grad


class Probe:
    """Watches an engine until `close`; call `reset` before each step."""

    def __init__(
        self, engine: DeepSpeedEngine, strides: Mapping[str, int], *, graphs: type[torch.nn.Module] | None = None
    ) -> None:
        """strides: the parameters to watch; graphs: kind of modules that are compiled, each as a whole."""
        self.engine = engine
        self.strides = strides
        self.parameters = {name: p for name, p in named_parameters(engine) if name in strides}
        self.starts = {name: held_range(p)[0] for name, p in self.parameters.items()}
        self._shards = list(parameter_shards(engine))
        self._handles: list[RemovableHandle] = []
        self._inner = inner_optimizer(engine)
        self._step: Callable[..., object] = self._inner.step
        self._watch(graphs)
        self.reset()

    def reset(self) -> None:
        """Forget the last step."""
        self.gradients: list[dict[str, Tensor]] = []
        """Selected elements of this rank's gradients by micro-batch, times the loss scale."""
        self.used: dict[str, Tensor] = {}
        """Selected elements of the weights that the first forward pass computes with."""
        self.pieces: dict[str, Piece] = {}
        self.given_squares = 0.0
        """Sum of the squares of all gradients that this rank's optimizer gets."""
        self.scale = 1.0
        """Loss scale of the step."""

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._inner.step = self._step  # type: ignore[assignment, method-assign]

    def _watch(self, graphs: type[torch.nn.Module] | None) -> None:
        model = self.engine.module
        names = {id(p): name for name, p in self.parameters.items()}
        self._handles.append(model.register_forward_pre_hook(self._begin_micro_batch))
        self._handles += [p.register_hook(self._gradient_hook(name)) for name, p in self.parameters.items()]
        graph_modules = [module for module in model.modules() if graphs is not None and isinstance(module, graphs)]
        compiled = {inner for graph in graph_modules for inner in graph.modules()}
        for module in model.modules():
            # After DeepSpeed's hooks, which gather the weights. A graph has no room for hooks: its block is watched.
            is_graph = module in graph_modules
            if module in compiled and not is_graph:
                continue
            own = [(names[id(p)], p) for p in module.parameters(recurse=is_graph) if id(p) in names]
            if own:
                self._handles.append(module.register_forward_pre_hook(self._weights_hook(own)))
        self._inner.step = self._watched_step  # type: ignore[assignment, method-assign]

    def _begin_micro_batch(self, *_: object) -> None:
        if self.engine.module.training:
            self.scale = loss_scale(self.engine) or 1.0
            self.gradients.append({})

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        def copy(gradient: Tensor) -> None:
            # The last call counts: autograd.grad within a backward pass (tiles of an MLP) calls hooks for parts, too.
            self.gradients[-1][name] = select(gradient, self.starts[name], self.strides[name])[0].clone()

        return copy

    def _weights_hook(self, own: list[tuple[str, torch.nn.Parameter]]) -> Callable[..., None]:
        def copy(module: torch.nn.Module, _: object) -> None:
            for name, parameter in own:
                if name not in self.used and module.training:
                    self.used[name] = select(parameter, self.starts[name], self.strides[name])[0].clone()

        return copy

    def _watched_step(self, *args: object, **kwargs: object) -> object:
        stepped = list(shards_to_step(self._inner, self._shards))
        for shard, gradient in stepped:
            self._copy_before(shard, gradient)
        result = self._step(*args, **kwargs)
        for shard, _ in stepped:
            piece = self.pieces[shard.name]
            piece.after = self._select(shard, shard.flat)
            piece.states_after = self._states(shard)
        return result

    def _copy_before(self, shard: ParameterShard, gradient: Tensor) -> None:
        local = shard.view(gradient).local
        self.given_squares += float(torch.linalg.vector_norm(local, dtype=torch.float64)) ** 2
        before = self._select(shard, shard.flat)
        states = self._states(shard)
        self.pieces[shard.name] = Piece(
            name=shard.name,
            first=select(local, shard.start, self.strides[shard.name])[1],
            # Muon overwrites its gradients.
            given=self._select(shard, gradient),
            before=before,
            states=states,
            after=before,
            states_after=states,
            count=int(self._inner.state.get(shard.flat, {}).get("step", 0)),
            flat=shard.flat,
            settings=self._settings(shard.flat),
        )

    def _settings(self, flat: Tensor) -> dict[str, object]:
        group = next(group for group in self._inner.param_groups if any(p is flat for p in group["params"]))
        return {key: value for key, value in group.items() if key != "params"}

    def _select(self, shard: ParameterShard, flat: Tensor) -> Tensor:
        return select(shard.view(flat).local, shard.start, self.strides[shard.name])[0].float().clone()

    def _states(self, shard: ParameterShard) -> dict[str, Tensor]:
        states = {}
        for key, value in self._inner.state.get(shard.flat, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.numel() == shard.flat.numel():
                states[key] = self._select(shard, value)
            elif isinstance(value, Tensor | int | float):
                states[key] = torch.as_tensor(value).detach().clone()
        return states
