"""A checkpoint as named flat tensors, of whoever wrote it: any part of any tensor is read without an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from llmscale.checkpoint.engine_state import EngineState, GroupState
from llmscale.engine.zero_layout import plain_name

_T = TypeVar("_T")

#: Loss scaler's values that training continues with.
SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
#: Kinds of tensors that make up a module.
WEIGHT_KINDS = ("master", "frozen", "buffer")
#: Types of an optimizer's settings.
_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as flat pieces, which are mapped files: only the part that is read takes memory."""

    total: int
    pieces: tuple[tuple[int, Tensor], ...]
    """Each piece's first element, and its elements."""

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0][1].dtype

    def fill(self, target: Tensor, start: int) -> None:
        """Fill `target` [n] with the elements from `start` on, converted to its type."""
        end = start + target.numel()
        for begin, piece in self.pieces:
            first = max(start, begin)
            last = min(end, begin + piece.numel())
            if first < last:
                target[first - start : last - start].copy_(piece[first - begin : last - begin])

    def read(self, shape: list[int]) -> Tensor:
        """Return the whole tensor."""
        target = torch.empty(self.total, dtype=self.dtype)
        self.fill(target, 0)
        return target.view(shape)

    def is_complete(self) -> bool:
        """Return whether the pieces follow each other and make up the tensor."""
        end = 0
        for begin, piece in self.pieces:
            if begin != end:
                return False
            end += piece.numel()
        return end == self.total and bool(self.pieces)


@dataclass(frozen=True)
class StoredGroup:
    """An optimizer group."""

    names: tuple[str, ...]
    """Parameters, in the optimizer's order."""
    settings: Mapping[str, Any]
    """Learning rate, betas and the like: plain values."""
    scalars: Mapping[str, Any]
    """States without elements, such as Adam's step, as they were stored: numbers, or tensors of one."""

    @property
    def numbers(self) -> dict[str, int | float]:
        """The scalars as Python's numbers."""
        return {key: value.item() if isinstance(value, Tensor) else value for key, value in self.scalars.items()}


@dataclass(frozen=True)
class PortableCheckpoint:
    """Everything that continuing needs, whatever ranks and ZeRO stage wrote it."""

    path: Path
    zero_stage: int
    ranks: int
    precision: str
    step: int
    tensors: Mapping[str, StoredTensor]
    """'<state>/<parameter>', 'frozen/<parameter>' and 'buffer/<buffer>', as the fragments of an engine."""
    groups: tuple[StoredGroup, ...]
    shapes: Mapping[str, list[int]]
    """Shape of each stored parameter and buffer."""
    tied: Mapping[str, str]
    """Further names of tied tensors, each with the name that is stored."""
    scheduler: dict[str, Any] | None
    loss_scaler: Mapping[str, Any]
    """Fields of DeepSpeed's loss scaler; empty without one."""
    skipped_steps: int
    global_samples: int
    client_state: Mapping[str, Any] = field(default_factory=dict)
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    has_frozen: bool = True
    """False where parameters that the optimizer does not change were left out (exclude_frozen_parameters)."""
    lost: tuple[str, ...] = ()
    """Trainable parameters that the optimizer has not, and that DeepSpeed did not save at stage 3."""
    module_order: tuple[str, ...] = ()
    """Names of the module's state dict, in its order; empty where it is not known."""

    @property
    def scaler_state(self) -> dict[str, float] | None:
        """Loss scaler's values, as engines take them."""
        values = {key: self.loss_scaler[key] for key in SCALER_KEYS if key in self.loss_scaler}
        return values or None

    @property
    def samples_per_step(self) -> int | None:
        """Global batch size, where all steps had the same."""
        if self.step <= 0 or self.global_samples % self.step:
            return None
        return self.global_samples // self.step or None

    @property
    def engine_state(self) -> EngineState:
        """Everything beside tensors, as llmscale's own checkpoints hold it. Groups are named by their numbers."""
        names = [str(group.settings.get("name", f"group-{number}")) for number, group in enumerate(self.groups)]
        return EngineState(
            step=self.step,
            precision=self.precision,
            optimizer_scalars={
                name: group.numbers for name, group in zip(names, self.groups, strict=True) if group.scalars
            },
            groups=tuple(
                GroupState(name, group.names, dict(group.settings))
                for name, group in zip(names, self.groups, strict=True)
            ),
            shapes={name: tuple(shape) for name, shape in self.shapes.items()},
            tied=dict(self.tied),
            scheduler=self.scheduler,
            loss_scaler=self.scaler_state,
            skipped_steps=self.skipped_steps,
            global_steps=self.step,
            global_samples=self.global_samples,
            train_batch_size=self.samples_per_step or 0,
            has_frozen=self.has_frozen,
            extra=dict(self.client_state),
        )

    def with_plain_names(self) -> PortableCheckpoint:
        """Return the same with the names that a module has without torch.compile, as engines here use them."""

        def renamed(values: Mapping[str, _T]) -> dict[str, _T]:
            return {plain_name(name): value for name, value in values.items()}

        groups = [replace(group, names=tuple(map(plain_name, group.names))) for group in self.groups]
        return replace(
            self,
            tensors=renamed(self.tensors),
            groups=tuple(groups),
            shapes=renamed(self.shapes),
            tied={alias: plain_name(name) for alias, name in renamed(self.tied).items()},
            lost=tuple(map(plain_name, self.lost)),
            module_order=tuple(map(plain_name, self.module_order)),
        )

    def parts(self, *kinds: str) -> Iterator[tuple[str, str, StoredTensor]]:
        """Yield (kind, name, tensor) of the tensors of these kinds; of all without any."""
        for key, tensor in self.tensors.items():
            kind, _, name = key.partition("/")
            if not kinds or kind in kinds:
                yield kind, name, tensor


class ReadableWeights:
    """The weights of a portable checkpoint, as files of safetensors are written from."""

    def __init__(self, source: PortableCheckpoint) -> None:
        self._tensors = {name: tensor for _, name, tensor in source.parts(*WEIGHT_KINDS)}

    @property
    def sizes(self) -> dict[str, int]:
        """Number of elements by name."""
        return {name: tensor.total for name, tensor in self._tensors.items()}

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the type in which a tensor is stored."""
        return self._tensors[name].dtype

    def read(self, name: str, start: int, elements: int, *, own_type: bool = False) -> Tensor:
        """Read elements of a tensor, flat, in fp32 or, `own_type`, as stored."""
        target = torch.empty(elements, dtype=self.dtype_of(name) if own_type else torch.float32)
        self._tensors[name].fill(target, start)
        return target


def plain_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an optimizer group that are plain values: others are the script's."""
    settings = {}
    for key, value in group.items():
        values = value if isinstance(value, tuple | list) else [value]
        if key != "params" and all(isinstance(one, _PLAIN) for one in values):
            settings[key] = value
        elif isinstance(value, Tensor) and value.numel() == 1:
            settings[key] = value.item()
    return settings
