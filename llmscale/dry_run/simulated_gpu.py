"""A GPU and ranks that look real to DeepSpeed and torch, in one process; all that is patched is restored.

The GPU is the second CPU: fake tensors on `cpu:0` represent host memory and those on `cpu:1` the GPU's, so every
`.to(...)`, `.cpu()` and pinned buffer in DeepSpeed is placed as on a real machine, and an operator over both fails as
it does there. A fake "cuda" device would need a CUDA build of torch as soon as autograd asks for its streams.

Fake tensors take the operators of a CUDA GPU, some of which save other tensors for the backward pass than a CPU's:
attention (another fused kernel), dropout (a mask of one byte per element, not a scaled one in the input's type), layer
norm (statistics in fp32) and RMS norm (fused, not decomposed); log-softmax turns 16 bit into fp32 without a copy.
Autograd sums gradients of fake tensors differently. Some kernels allocate memory while they run, which no tensor shows:
`kernel_workspace`.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType, GetSetDescriptorType, ModuleType
from typing import Any, cast
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.zero import partition_parameters
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from llmscale.architecture.attention_kernels import ComputeCapability, attention_kernel
from llmscale.engine.process_group import leave_out_shared_memory_op
from llmscale.errors import ConfigError

HOST = torch.device("cpu")
GPU = torch.device("cpu", 1)

#: Large enough: at start-up DeepSpeed only asks whether a copy of the parameters fits.
_MEMORY_BYTES = 2**50
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
_HALF = (torch.float16, torch.bfloat16)
#: Rows of one block of FlashAttention-2's backward kernel.
_FLASH_ROWS = 128
#: Files of torch with frames between an operator and its caller.
_TORCH_WRAPPERS = ("_ops.py", "eval_frame.py", "_compile.py", "_python_dispatch.py")


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
        # As torch does: a child may convert its own tensors in another way.
        if recurse:
            for child in self.children():
                child._apply(function)
        for parameter in self._parameters.values():
            if parameter is not None:
                with torch.no_grad():
                    converted = function(parameter)
                if converted is not parameter:
                    parameter.data = converted
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = function(buffer)
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
        if device is None:
            return made
        return torch.empty(made.shape, dtype=made.dtype, device=device)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "tensor", tensor))
        # zero.Init replaces torch.tensor temporarily and restores the one from DeepSpeed's import.
        stack.enter_context(mock.patch.object(partition_parameters, "_orig_torch_tensor", tensor))
        fake_data = property(lambda self: data.__get__(self), set_data)
        stack.enter_context(mock.patch.object(FakeTensor, "data", fake_data, create=True))
        stack.enter_context(mock.patch.object(FakeTensor, "record_stream", lambda *_: None, create=True))
        stack.enter_context(mock.patch.object(nn.Module, "_apply", apply))
        yield


_aten = torch.ops.aten


@contextlib.contextmanager
def cuda_kernels(capability: ComputeCapability | None = None) -> Iterator[None]:
    """Replace operators by those of a GPU. Enter inside of `FakeTensorMode` and before the `MemoryTracker`.

    `capability`: compute capability of the GPU; None for Ampere or newer.
    """

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        # torch.compile does not accept a partial as a function.
        return _attention(capability, *args, **kwargs)

    with (
        mock.patch.object(F, "scaled_dot_product_attention", attention),
        mock.patch.object(F, "dropout", _dropout),
        mock.patch.object(F, "rms_norm", _rms_norm),
        mock.patch.object(torch, "log_softmax", _log_softmax),
        _RealTensors(),
    ):
        yield


def _attention(
    capability: ComputeCapability | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run `F.scaled_dot_product_attention` of [batch, n_head, t, head_dim] by the kernel that a GPU would run.

    llmscale.architecture.attention_kernels chooses it. FlashAttention accepts shared key-value heads without a copy. A
    mask must be in q's type with row strides a multiple of 8. cuDNN's kernel, which recent releases prefer on Hopper,
    saves the same tensors as FlashAttention.
    """
    if torch.is_autocast_enabled("cpu"):  # autocast runs attention in 16 bit
        low = torch.get_autocast_dtype("cpu")
        query, key, value = (tensor.to(low) for tensor in (query, key, value))
    head_dim = query.shape[-1]
    kernel = attention_kernel(
        head_dim,
        is_16bit=query.dtype in _HALF,
        masked=attn_mask is not None,
        drops_out=dropout_p > 0,
        capability=capability,
    )
    if kernel in ("flash", "flash_padded"):
        if scale is None:
            scale = 1 / math.sqrt(head_dim)
        padding = -head_dim % 8
        if padding:
            query, key, value = (F.pad(tensor, (0, padding)) for tensor in (query, key, value))
        y = flash_attention(query, key, value, dropout_p, is_causal=is_causal, scale=scale)
        return y[..., :head_dim] if padding else y
    if enable_gqa:
        # No other fused kernel shares key-value heads: torch repeats them for its plain one.
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
        kernel = "math"
    if kernel == "efficient":
        for_backward = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        if attn_mask is not None:
            attn_mask = _as_bias(attn_mask, query).expand(*query.shape[:3], key.shape[2])
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, for_backward, dropout_p, is_causal, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, *, is_causal: bool, scale: float | None = None
) -> Tensor:
    """Run FlashAttention of [batch, n_head, t, head_dim], whose heads must be a multiple of 8 wide."""
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    y: Tensor = _aten._scaled_dot_product_flash_attention(query, key, value, dropout, is_causal, False, scale=scale)[0]
    return y


def _as_bias(mask: Tensor, query: Tensor) -> Tensor:
    """Return a mask as the memory-efficient kernel reads it: in the queries' type, its rows a multiple of 8 long.

    A copy where it is not so already (convert_boolean_attn_mask and pad_bias in attention.cpp). Raises
    NotImplementedError for another type, as torch does.
    """
    if mask.dtype not in (torch.bool, query.dtype):
        raise NotImplementedError(f"attn_mask is {mask.dtype}, and queries are {query.dtype}")
    if mask.dtype == query.dtype and not any(stride % 8 for stride in mask.stride()[:-1]):
        return mask
    columns = mask.shape[-1]
    return query.new_zeros((*mask.shape[:-1], _round_up(columns, 8)))[..., :columns]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Run `F.dropout` like CUDA's fused kernel, which is always out of place."""
    if p == 0.0 or not training:
        return input
    return torch.native_dropout(input, p, True)[0]


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Run `F.rms_norm` like CUDA's fused kernel (ATen/native/cuda/layer_norm_kernel.cu); under autocast in fp32."""
    if torch.is_autocast_enabled("cpu"):
        input = input.float()
        if weight is None:
            weight = None
        else:
            weight = weight.float()
    if weight is None:
        weight = input.new_empty(0)
    return cast(Tensor, _FusedRMSNorm.apply(input, weight))


_real_log_softmax = torch.log_softmax


def _log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    """Run `torch.log_softmax` like its CUDA kernel, which reads 16 bit and writes fp32 (ATen/native/SoftMax.cpp)."""
    if input.dtype in _HALF and dtype == torch.float32:
        if torch.is_grad_enabled() and input.requires_grad:
            # With a copy that the kernel has not, and that is gone when it ends.
            return _real_log_softmax(input.float(), dim)
        if out is None:
            return torch.empty_like(input, dtype=dtype)
        return out
    return _real_log_softmax(input, dim, dtype=dtype, out=out)


class _FusedRMSNorm(torch.autograd.Function):
    """RMS norm that saves the input [..., n], the weight [n] and 1/rms [..., 1] in fp32.

    The kernels read contiguous copies of tensors that are not contiguous, and free them.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        copy = x.contiguous()
        y = torch.empty_like(copy)
        rrms = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rrms)
        return y

    @staticmethod
    def backward(ctx: torch.autograd.function.BackwardCFunction, gradient: Tensor) -> tuple[Tensor, Tensor]:
        saved: Sequence[Tensor] = ctx.saved_tensors
        copies = gradient.contiguous(), saved[0].contiguous()
        return torch.empty_like(copies[1]), torch.empty_like(saved[1])


class _RealTensors(TorchDispatchMode):
    """Give fake tensors on a CPU two properties of real tensors on a GPU.

    - Layer norm's mean and 1/std, [..., 1] each, are in fp32 and not in the input's type.
    - For a tensor with two uses, like the residual stream and the tied table, autograd adds the second gradient to the
      first in place if it has no other reference (torch/csrc/autograd/input_buffer.cpp). For fake tensors it always
      allocates a third.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: see a graph when it runs, not while it is compiled."""
        return True

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is _aten.add.Tensor and not kwargs and _is_called_by_autograd() and _is_as_free_as(*args):
            return _aten.add_.Tensor(*args)
        result = func(*args, **(kwargs or {}))
        if func is not _aten.native_layer_norm.default:
            return result
        output, mean, rstd = result
        return output, mean.float(), rstd.float()


def _is_called_by_autograd() -> bool:
    """Return whether autograd's engine called the operator, with only torch's dispatch between them."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (
        frame.f_code.co_name == "__torch_dispatch__" or frame.f_code.co_filename.endswith(_TORCH_WRAPPERS)
    ):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _is_as_free_as(waiting: object, arriving: object) -> bool:
    """Return whether the waiting gradient has no more references than the new one, which has the least possible here.

    The tied table's gradient has more: it is a transposed view, which refers to its base.
    """

    def references(tensor: object) -> tuple[int, int]:
        assert isinstance(tensor, Tensor)
        storage = tensor.untyped_storage()
        return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]

    return references(waiting) == references(arriving)


def kernel_workspace(func: torch._ops.OpOverload, args: tuple[object, ...]) -> Sequence[int]:
    """Return sizes in bytes that a CUDA kernel allocates beside its results and frees when it returns.

    - FlashAttention-2's backward kernel sums dQ in fp32, with t and head_dim rounded up to blocks, and one fp32 number
      per row; if query heads share key-value heads, also dK and dV of every query head (mha_bwd in
      flash_attn/flash_api.cpp);
    - the memory-efficient backward kernel in fp32 is preceded by rowsum(dO x O), whose product is a tensor
      (attention_backward.cu, where the kernel does not compute delta); in 16 bit it sums dQ in fp32, which is as much
      except for its rounding to blocks (kernel_backward.h, workspace_elements_gq);
    - isinf is |x| == infinity with a tensor |x| (Tensor isinf in TensorCompare.cpp);
    - log-softmax copies an input that is not contiguous, such as logits without padding columns (host_softmax in
      SoftMax.cu).

    Not counted: cuBLAS's workspace, which is allocated once, and a few KiB of partial sums.
    """
    if func is _aten._scaled_dot_product_flash_attention_backward.default:
        query = args[1]
        assert isinstance(query, Tensor)
        batch, heads, t, head_dim = query.shape
        rows = batch * heads * _round_up(t, _FLASH_ROWS)
        dq = rows * _round_up(head_dim, 32 if head_dim <= 128 else 64) * 4, rows * 4
        shares_keys = _shape_of(args[2])[1] < heads
        return (*dq, *(2 * [query.numel() * query.element_size()] if shares_keys else []))
    if func is _aten._scaled_dot_product_efficient_attention_backward.default:
        batch, heads, t, head_dim = _shape_of(args[1])
        rows = batch * heads * t
        return rows * head_dim * 4, rows * 4, rows * 4
    if func is _aten.isinf.default:
        tested = args[0]
        assert isinstance(tested, Tensor)
        return (tested.numel() * tested.element_size(),)
    if func is _aten._log_softmax.default:
        logits = args[0]
        assert isinstance(logits, Tensor)
        if logits.is_contiguous():
            return ()
        return (logits.numel() * logits.element_size(),)
    return ()


def _shape_of(argument: object) -> torch.Size:
    assert isinstance(argument, Tensor)
    return argument.shape


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
