"""Make fake tensors on the CPU take the operators of a CUDA GPU, so that autograd saves the same tensors.

Some operators save other tensors for the backward pass on a GPU: attention (another fused kernel), dropout (a mask of
one byte per element, not a scaled one in the input's type), layer norm (statistics in fp32) and RMS norm (fused, not
decomposed); log-softmax turns 16 bit into fp32 without a copy. Autograd sums gradients of fake tensors differently.
Some kernels allocate memory while they run, which no tensor shows: `kernel_workspace`.
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
from llmscale.model import attention_context, gpt, layers

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
#: Rows of one block of FlashAttention-2's backward kernel.
_FLASH_ROWS = 128
#: Files of torch with frames between an operator and its caller.
_TORCH_WRAPPERS = ("_ops.py", "eval_frame.py", "_compile.py", "_python_dispatch.py")


@contextmanager
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
        mock.patch.object(gpt, "device_capability", lambda _: capability),
        mock.patch.object(gpt, "has_flex_attention", lambda _: True),
        mock.patch.object(attention_context, "attend_in_blocks", _attend_in_blocks),
        mock.patch.object(layers, "sums_in_16_bit", lambda _: False),
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


def _attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, _mask: object) -> Tensor:
    """Run FlexAttention as FlashAttention, which saves the same tensors."""
    scale = 1 / math.sqrt(query.shape[-1])
    y: Tensor = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, False, scale=scale)[0]
    return y


def _refuse_other_masks(mask: Tensor, query: Tensor) -> None:
    """Raise NotImplementedError for a mask that the kernel would copy (pad_bias in attention.cpp)."""
    if mask.dtype != query.dtype or any(stride % 8 for stride in mask.stride()[:-1]):
        raise NotImplementedError("only masks in the queries' type with row strides a multiple of 8 are routed")


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Run `F.dropout` like CUDA's fused kernel, which is always out of place."""
    if p == 0.0 or not training:
        return input
    return torch.native_dropout(input, p, True)[0]


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Run `F.rms_norm` like CUDA's fused kernel (ATen/native/cuda/layer_norm_kernel.cu); under autocast in fp32."""
    if weight is None:
        raise NotImplementedError("only RMS norm with a weight is routed")
    if torch.is_autocast_enabled("cpu"):
        input, weight = input.float(), weight.float()
    return cast(Tensor, _FusedRMSNorm.apply(input, weight))


_real_log_softmax = torch.log_softmax


def _log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    """Run `torch.log_softmax` like its CUDA kernel, which reads 16 bit and writes fp32 (ATen/native/SoftMax.cpp)."""
    if input.dtype in _HALF and dtype == torch.float32:
        if torch.is_grad_enabled() and input.requires_grad:
            raise NotImplementedError("log-softmax of 16 bit in fp32 is routed without gradients alone")
        return torch.empty_like(input, dtype=dtype) if out is None else out
    return _real_log_softmax(input, dim, dtype=dtype, out=out)


class _FusedRMSNorm(torch.autograd.Function):
    """RMS norm that saves the input [..., n], the weight [n] and 1/rms [..., 1] in fp32.

    The kernels read contiguous copies of tensors that are not contiguous, and free them.
    """

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
        return () if logits.is_contiguous() else (logits.numel() * logits.element_size(),)
    return ()


def _shape_of(argument: object) -> torch.Size:
    assert isinstance(argument, Tensor)
    return argument.shape


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
