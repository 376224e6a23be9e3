"""Where numbers stop being numbers: the first parameters of a forward or backward pass that meet NaN or infinity.

Works at every ZeRO stage, for it looks at what autograd sees: outputs of modules and gradients of whole parameters,
before DeepSpeed reduces and shards them. Nothing is read until the pass is over. Compiled blocks run eagerly while it
looks: torch.compile reuses their graph without asking for hooks of the modules inside (skip_nnmodule_hook_guards).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from llmscale.engine.compilation import BlockCompiler


@dataclass(frozen=True)
class NonfiniteParameters:
    """Of one step on one rank, each in the order of its pass; empty where all was well."""

    forward: tuple[str, ...]
    """Parameters of modules whose output held NaN or infinity."""
    backward: tuple[str, ...]
    """Parameters whose gradient did."""


class NonfiniteSearch:
    """Hooks on a model, from when it is built until `end` or `close`."""

    def __init__(self, engine: DeepSpeedEngine, compiler: BlockCompiler | None) -> None:
        """`compiler` of the engine's blocks; None where they run eagerly."""
        model: nn.Module = engine.module
        self._compiler = compiler
        if compiler is not None:
            compiler.is_paused = True
        self._forward: list[tuple[tuple[str, ...], Tensor]] = []
        self._backward: list[tuple[str, Tensor]] = []
        self._handles = []
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        for module in model.modules():
            names = tuple(self._names[id(own)] for own in module.parameters(recurse=False) if id(own) in self._names)
            if names:
                self._handles.append(module.register_forward_hook(self._note_output(names)))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(self._note_gradient(name)))

    def end(self) -> NonfiniteParameters:
        """What was found; the hooks go. Waits for the device."""
        self.close()
        forward = _of_bad([(name, is_good) for names, is_good in self._forward for name in names])
        found = NonfiniteParameters(forward, _of_bad(self._backward))
        self._forward, self._backward = [], []
        return found

    def close(self) -> None:
        """The hooks go, and nothing is read. Waits for nobody."""
        for handle in self._handles:
            handle.remove()
        if self._compiler is not None:
            self._compiler.is_paused = False

    def _note_output(self, names: tuple[str, ...]):  # type: ignore[no-untyped-def]  # torch's type of hooks is private
        def note(_module: nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                self._forward.append((names, torch.isfinite(output.detach()).all()))

        return note

    def _note_gradient(self, name: str):  # type: ignore[no-untyped-def]  # as above
        def note(gradient: Tensor) -> None:
            self._backward.append((name, torch.isfinite(gradient).all()))

        return note


def _of_bad(noted: list[tuple[str, Tensor]]) -> tuple[str, ...]:
    """Names whose flag is false, once each."""
    if not noted:
        return ()
    flags = torch.stack([is_good for _, is_good in noted]).tolist()
    return tuple(dict.fromkeys(name for (name, _), is_good in zip(noted, flags, strict=True) if not is_good))
