"""A GPU and ranks that DeepSpeed takes for real ones, in one process; everything patched is restored afterwards.

The GPU is the second CPU: fake tensors on `cpu:0` represent host memory and those on `cpu:1` the GPU's, so every
`.to(...)`, `.cpu()` and pinned buffer in DeepSpeed is placed as on a real machine, and an operator over both fails as
it does there. A fake "cuda" device would need a CUDA build of torch as soon as autograd asks for its streams.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from types import GetSetDescriptorType, ModuleType
from typing import cast
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.zero import partition_parameters
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmscale.engine.process_group import leave_out_shared_memory_op
from llmscale.errors import ConfigError

HOST = torch.device("cpu")
GPU = torch.device("cpu", 1)

#: Large enough: at start-up DeepSpeed only asks whether a copy of the parameters fits.
_MEMORY_BYTES = 2**50


class _Stream:
    """Stream or event on which everything has already happened."""

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
    """Answers like DeepSpeed's CUDA accelerator, so that DeepSpeed takes its GPU branches."""

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
    """Replace DeepSpeed's accelerator by a FakeGPU."""
    from deepspeed.accelerator import real_accelerator

    before = real_accelerator.ds_accelerator
    real_accelerator.ds_accelerator = FakeGPU()
    try:
        yield
    finally:
        real_accelerator.ds_accelerator = before


#: Modules with process-wide state of DeepSpeed: the communication backend, process groups, whether checkpointing is
#: configured, how deep zero.Init is nested.
_STATEFUL_MODULES = (
    "deepspeed.comm.comm",
    "deepspeed.utils.groups",
    "deepspeed.runtime.activation_checkpointing.checkpointing",
    "deepspeed.runtime.zero.partition_parameters",
    "deepspeed.runtime.zero.parameter_offload",
    "deepspeed.runtime.zero.linear",
)


@contextlib.contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of `world_size`, with collectives that move nothing.

    Raises ConfigError when the process is already part of a job, as process groups are process-wide.
    """
    if dist.is_initialized():
        raise ConfigError("a dry run needs a process of its own, and this one is a rank of a running job.")
    environment = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        for name in _STATEFUL_MODULES:
            stack.enter_context(_kept_state(importlib.import_module(name)))
        # Stage 3 replaces torch's linear layer for good.
        stack.enter_context(mock.patch.object(torch.nn.functional, "linear", torch.nn.functional.linear))
        stack.enter_context(mock.patch.dict(deepspeed.ops.__compatible_ops__))
        leave_out_shared_memory_op()
        for module, name in _checks_across_ranks():
            stack.enter_context(mock.patch.object(module, name, lambda *_, **__: None))
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        deepspeed.init_distributed("fake", auto_mpi_discovery=False, verbose=False, dist_init_required=False)
        yield


def _checks_across_ranks() -> Iterator[tuple[ModuleType, str]]:
    """Yield the checks of stage 3 that compare numbers with other ranks, which do not exist."""
    for name in ("utils", "partitioned_param_coordinator", "partition_parameters", "stage3"):
        module = importlib.import_module(f"deepspeed.runtime.zero.{name}")
        for check in ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks"):
            if hasattr(module, check):
                yield module, check


@contextlib.contextmanager
def _kept_state(module: ModuleType) -> Iterator[None]:
    """Restore every global of a module, and the contents of its containers."""
    before = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    contents = {name: value.copy() for name, value in before.items() if isinstance(value, list | dict | set)}
    try:
        yield
    finally:
        for name in [name for name in vars(module) if not name.startswith("__") and name not in before]:
            delattr(module, name)
        for name, value in before.items():
            setattr(module, name, value)
            if isinstance(value, list):
                value[:] = contents[name]
            elif isinstance(value, dict | set):
                value.clear()
                value.update(contents[name])


@contextlib.contextmanager
def fake_row_counts(sent: int, received: int) -> Iterator[None]:
    """Let ranks that divide experts read these numbers of rows, whose counts by rank are fake tensors [2, ranks]."""

    def counts(self: FakeTensor) -> list[list[int]]:
        return [[rows, *[0] * (self.shape[1] - 1)] for rows in (sent, received)]

    with mock.patch.object(FakeTensor, "tolist", counts, create=True):
        yield


@contextlib.contextmanager
def fake_tensors_move() -> Iterator[None]:
    """Let assignments to `.data` move a fake tensor to another device, `Module.to` use them, and ignore streams.

    torch keeps a fake tensor's device beside its storage and loses it in an assignment to `.data`, which DeepSpeed uses
    everywhere.
    """
    data = cast(GetSetDescriptorType, Tensor.data)

    def set_data(self: FakeTensor, value: Tensor) -> None:
        data.__set__(self, value)
        if isinstance(value, FakeTensor):
            self.fake_device = value.fake_device

    def apply(self: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for parameter in self.parameters(recurse):
            with torch.no_grad():
                parameter.data = function(parameter)
        for buffer in self.buffers(recurse):
            # A router's bias, which moves but stays in fp32.
            buffer.data = function(buffer).to(buffer.dtype)
        return self

    make_tensor = torch.tensor

    def tensor(
        data: object,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> Tensor:
        made = make_tensor(data, dtype=dtype, requires_grad=requires_grad)
        # torch.tensor ignores the index of a CPU.
        return made if device is None else torch.empty(made.shape, dtype=made.dtype, device=device)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "tensor", tensor))
        # zero.Init replaces torch.tensor temporarily and restores the one from DeepSpeed's import.
        stack.enter_context(mock.patch.object(partition_parameters, "_orig_torch_tensor", tensor))
        fake_data = property(lambda self: data.__get__(self), set_data)
        stack.enter_context(mock.patch.object(FakeTensor, "data", fake_data, create=True))
        stack.enter_context(mock.patch.object(FakeTensor, "record_stream", lambda *_: None, create=True))
        stack.enter_context(mock.patch.object(nn.Module, "_apply", apply))
        yield
