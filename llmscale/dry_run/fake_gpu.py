"""A GPU that DeepSpeed believes in: the second CPU, whose tensors hold nothing.

Fake tensors on `cpu:0` stand for host memory and those on `cpu:1` for the GPU's, so that every `.to(...)`, `.cpu()` and
pinned buffer in DeepSpeed lands where it would on a real machine, and an operator over both is an error as it is there.
A fake "cuda" device would need a CUDA build of torch as soon as autograd asks for its streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor

HOST = torch.device("cpu")
GPU = torch.device("cpu", 1)

#: Plenty: DeepSpeed only asks whether a copy of the parameters fits while it starts.
_MEMORY_BYTES = 2**50


class _Stream:
    """A stream or event on which everything has already happened."""

    def __init__(self, *_: object, **__: object) -> None:
        """Nothing to set up."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record(self, *_: object) -> None:
        """Nothing to record."""

    def record_event(self, *_: object) -> _Stream:
        return _Stream()

    def wait_stream(self, _: object) -> None:
        """Nothing to wait for."""

    def wait_event(self, _: object) -> None:
        """Nothing to wait for."""


class FakeGPU(CPU_Accelerator):
    """Answers as DeepSpeed's CUDA accelerator does, so that DeepSpeed takes its GPU branches."""

    _torch_pins_host_memory = False

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | str | None = None) -> str:
        return str(GPU)

    def current_device_name(self) -> str:
        return str(GPU)

    def device(self, device_index: int | None = None) -> torch.device:
        return GPU

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device == GPU

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        return tensor.new_empty(tensor.shape if match_shape else (tensor.numel(),), device=HOST)

    def _torch_empty_pinned(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        return tensor.new_empty(shape, device=HOST)

    def total_memory(self, device_index: int | None = None) -> int:
        return _MEMORY_BYTES

    def available_memory(self, device_index: int | None = None) -> int:
        return _MEMORY_BYTES

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.half, torch.bfloat16]

    @property
    def Stream(self) -> type[_Stream]:
        return _Stream

    @property
    def Event(self) -> type[_Stream]:
        return _Stream

    def current_stream(self, device_index: int | None = None) -> _Stream:
        return _Stream()

    def default_stream(self, device_index: int | None = None) -> _Stream:
        return _Stream()

    @property
    def FloatTensor(self) -> Callable[[object], Tensor]:
        return partial(torch.tensor, dtype=torch.float32, device=GPU)

    @property
    def ByteTensor(self) -> Callable[[object], Tensor]:
        return partial(torch.tensor, dtype=torch.uint8, device=GPU)


@contextlib.contextmanager
def fake_gpu() -> Iterator[None]:
    """For the time being DeepSpeed's accelerator is a FakeGPU."""
    from deepspeed.accelerator import real_accelerator

    before = real_accelerator.ds_accelerator
    real_accelerator.ds_accelerator = FakeGPU()
    try:
        yield
    finally:
        real_accelerator.ds_accelerator = before
