"""Fake tensors on the CPU take the operators that a CUDA GPU takes, so that autograd saves the same tensors.

Some operators keep other things for the backward pass on a GPU than on a CPU: attention (another fused kernel), dropout
(a mask of one byte an element, not a scaled one in the input's type), layer norm (statistics in fp32) and RMS norm
(fused, not taken apart); log-softmax makes fp32 of 16 bit without a copy. Autograd treats fake tensors differently
where it sums gradients. And some kernels allocate memory while they run, which no tensor shows: `kernel_workspace`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from llmscale.architecture.attention_kernels import ComputeCapability, attention_kernel
from llmscale.config.hardware import has_bf16
from llmscale.engine import optimizers
from llmscale.model import gpt

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
#: Rows of one block of FlashAttention-2's backward kernel.
_FLASH_ROWS = 128
#: Files of torch whose frames lie between an operator and its caller.
_TORCH_WRAPPERS = ("_ops.py", "eval_frame.py", "_compile.py", "_python_dispatch.py")


@contextmanager
def cuda_kernels(capability: ComputeCapability | None = None) -> Iterator[None]:
    """Enter it inside of `FakeTensorMode` and before the `MemoryTracker`; everything is restored at the end.

    `capability` is that of the GPU; None: of an Ampere or newer one.
    """

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        # Not a partial, which torch.compile does not take for a function.
        return _attention(capability, *args, **kwargs)

    with (
        mock.patch.object(F, "scaled_dot_product_attention", attention),
        mock.patch.object(F, "dropout", _dropout),
        mock.patch.object(F, "rms_norm", _rms_norm),
        mock.patch.object(torch, "log_softmax", _log_softmax),
        mock.patch.object(gpt, "device_capability", lambda _: capability),
        mock.patch.object(optimizers, "has_bf16", lambda: has_bf16(capability)),
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
    """`F.scaled_dot_product_attention` of [batch, n_head, t, head_dim] by the kernel that a GPU of that capability runs
    (llmscale.architecture.attention_kernels): FlashAttention takes key-value heads that query heads share as they are;
    a mask must be in q's type with rows a multiple of 8 apart. cuDNN's kernel, which recent releases prefer on Hopper,
    saves what FlashAttention saves.
    """
    if torch.is_autocast_enabled("cpu"):  # on the list of what autocast runs in 16 bit
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
        scale = 1 / math.sqrt(head_dim) if scale is None else scale
        padding = -head_dim % 8
        if padding:
            query, key, value = (F.pad(tensor, (0, padding)) for tensor in (query, key, value))
        y = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return y[..., :head_dim] if padding else y
    if enable_gqa:
        raise NotImplementedError("key-value heads are shared by FlashAttention alone, in 16 bit and without a mask")
    if kernel == "efficient":
        for_backward = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        if attn_mask is not None:
            _refuse_other_masks(attn_mask, query)
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, for_backward, dropout_p, is_causal, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]


def _refuse_other_masks(mask: Tensor, query: Tensor) -> None:
    """Of masks of another type, or whose rows are not aligned, the kernel makes copies (attention.cpp,
    convert_boolean_attn_mask and pad_bias)."""
    if mask.dtype != query.dtype or any(stride % 8 for stride in mask.stride()[:-1]):
        raise NotImplementedError("only masks in the queries' type whose rows lie a multiple of 8 apart are routed")


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`F.dropout` as CUDA's fused kernel runs it; out of place, whatever `inplace` says, as that kernel is."""
    if p == 0.0 or not training:
        return input
    return torch.native_dropout(input, p, True)[0]


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """`F.rms_norm` as CUDA's fused kernel runs it (aten/src/ATen/native/cuda/layer_norm_kernel.cu); under autocast in
    fp32, as layer norm."""
    if weight is None:
        raise NotImplementedError("only RMS norm with a weight is routed")
    if torch.is_autocast_enabled("cpu"):
        input, weight = input.float(), weight.float()
    return cast(Tensor, _FusedRMSNorm.apply(input, weight))


_real_log_softmax = torch.log_softmax


def _log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    """`torch.log_softmax`, whose CUDA kernel makes fp32 of 16 bit by itself (aten/src/ATen/native/SoftMax.cpp)."""
    if input.dtype in _HALF and dtype == torch.float32:
        if torch.is_grad_enabled() and input.requires_grad:
            raise NotImplementedError("log-softmax of 16 bit in fp32 is routed without gradients alone")
        return torch.empty_like(input, dtype=dtype) if out is None else out
    return _real_log_softmax(input, dim, dtype=dtype, out=out)


class _FusedRMSNorm(torch.autograd.Function):
    """Saves the input [..., n], the weight [n] and 1/rms [..., 1] in fp32. The kernels read contiguous copies of what
    is not contiguous, and give them back."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        copy = x.contiguous()
        y, rrms = torch.empty_like(copy), torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rrms)
        return y

    @staticmethod
    def backward(ctx: torch.autograd.function.BackwardCFunction, gradient: Tensor) -> tuple[Tensor, Tensor]:
        saved: Sequence[Tensor] = ctx.saved_tensors
        copies = gradient.contiguous(), saved[0].contiguous()
        return torch.empty_like(copies[1]), torch.empty_like(saved[1])


class _RealTensors(TorchDispatchMode):
    """Two ways in which real tensors on a GPU differ from fake ones on a CPU.

    - Layer norm's mean and 1/std, [..., 1] each, are in fp32 and not in the input's type.
    - Where a tensor has two uses, as the residual stream and the tied table have, autograd adds the second gradient to
      the first in place if nothing else refers to that (torch/csrc/autograd/input_buffer.cpp); of fake tensors it
      always makes a third.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What a graph does when it runs is seen here, how it is compiled is not."""
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
    """Whether nothing but torch's dispatch lies between the operator and autograd's engine."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (
        frame.f_code.co_name == "__torch_dispatch__" or frame.f_code.co_filename.endswith(_TORCH_WRAPPERS)
    ):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _is_as_free_as(waiting: object, arriving: object) -> bool:
    """Whether the gradient that waits has as few references as the one that has just been made, whose are the least
    that a tensor has at this place. The tied table's has more: it is a transposed view, which knows its base."""

    def references(tensor: object) -> tuple[int, int]:
        assert isinstance(tensor, Tensor)
        storage = tensor.untyped_storage()
        return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]

    return references(waiting) == references(arriving)


def kernel_workspace(func: torch._ops.OpOverload, args: tuple[object, ...]) -> Sequence[int]:
    """Sizes in bytes of what a CUDA kernel takes from the allocator beside its results, freed when it returns.

    - FlashAttention-2's backward kernel sums dQ in fp32, with t and head_dim rounded up to whole blocks, and one fp32
      number a row; where query heads share key-value heads, dK and dV of every query head, summed at the end
      (mha_bwd in flash_attn/flash_api.cpp);
    - the memory-efficient backward kernel in fp32 is preceded by rowsum(dO x O), whose product is a tensor
      (attention_backward.cu, where the kernel does not compute delta); in 16 bit it sums dQ in fp32, which is as much
      but for its rounding to blocks (kernel_backward.h, workspace_elements_gq);
    - isinf is |x| == infinity, and |x| a tensor (Tensor isinf in TensorCompare.cpp);
    - log-softmax copies an input that is not contiguous, such as logits without their padding columns
      (host_softmax in SoftMax.cu).

    Not counted: cuBLAS's work space, which is allocated once, and a few KiB of partial sums.
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
        return () if logits.is_contiguous() else (logits.numel() * logits.element_size(),)
    return ()


def _shape_of(argument: object) -> torch.Size:
    assert isinstance(argument, Tensor)
    return argument.shape


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
