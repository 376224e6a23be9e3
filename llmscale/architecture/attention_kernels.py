"""The CUDA kernel that PyTorch chooses for `F.scaled_dot_product_attention`. No torch.

The model, the memory estimate and the dry run depend on it.
"""

from __future__ import annotations

from typing import Literal

#: FlashAttention-2, without or with copies of heads padded to a multiple of 8; PyTorch's memory-efficient kernel;
#: separate matrix products.
AttentionKernel = Literal["flash", "flash_padded", "efficient", "math"]
#: Result of torch.cuda.get_device_capability: (8, 0) is an A100.
ComputeCapability = tuple[int, int]

AMPERE: ComputeCapability = (8, 0)
#: Widest head that FlashAttention-2 accepts.
_WIDEST_FLASH_HEAD = 256


def has_flash_attention(
    head_dim: int, *, is_16bit: bool, drops_out: bool, capability: ComputeCapability | None
) -> bool:
    """Return whether FlashAttention runs causal attention without a mask. `capability` None: assume Ampere or newer."""
    if not is_16bit or head_dim > _WIDEST_FLASH_HEAD:
        return False
    if capability is None:
        return True
    # GPUs with less shared memory cannot train heads of 193 to 224, nor wider ones with dropout
    # (check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120).
    is_small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    is_too_wide = head_dim > 192 and (head_dim <= 224 or drops_out)
    return capability >= AMPERE and not (is_small and is_too_wide)


def attention_kernel(
    head_dim: int,
    *,
    is_16bit: bool,
    masked: bool = False,
    drops_out: bool = False,
    capability: ComputeCapability | None = None,
) -> AttentionKernel:
    """Return the kernel of causal or masked attention (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""
    if not masked and has_flash_attention(head_dim, is_16bit=is_16bit, drops_out=drops_out, capability=capability):
        return "flash_padded" if head_dim % 8 else "flash"
    # minimum_gemm_alignment: elements that tensor cores read at once; they accept fp32 from Ampere on.
    is_old = capability is not None and capability < AMPERE
    multiple = 8 if is_16bit else 1 if is_old else 4
    return "math" if head_dim % multiple else "efficient"
