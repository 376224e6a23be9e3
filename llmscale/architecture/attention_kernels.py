"""The CUDA kernel of attention: what PyTorch chooses for `F.scaled_dot_product_attention`, or FlexAttention. No torch.

The model, the memory estimate and the dry run depend on it.
"""

from __future__ import annotations

from typing import Literal

from llmscale.architecture.shape import GPTShape

#: FlashAttention-2, without or with copies of heads padded to a multiple of 8; PyTorch's memory-efficient kernel;
#: separate matrix products; FlexAttention, which skips blocks of positions that a mask hides.
AttentionKernel = Literal["flash", "flash_padded", "efficient", "math", "flex"]
#: Result of torch.cuda.get_device_capability: (8, 0) is an A100.
ComputeCapability = tuple[int, int]

AMPERE: ComputeCapability = (8, 0)
#: Heads that FlexAttention takes without padding.
_FLEX_HEADS = (16, 32, 64, 128, 256)
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
    may_skip: bool = False,
    capability: ComputeCapability | None = None,
) -> AttentionKernel:
    """Return the kernel of causal or masked attention (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).

    `may_skip`: masked attention may take FlexAttention, which has no dropout.
    """
    is_ampere = capability is None or capability >= AMPERE
    if masked and may_skip and is_16bit and is_ampere and not drops_out and head_dim in _FLEX_HEADS:
        return "flex"
    if not masked and has_flash_attention(head_dim, is_16bit=is_16bit, drops_out=drops_out, capability=capability):
        return "flash_padded" if head_dim % 8 else "flash"
    # minimum_gemm_alignment: elements that tensor cores read at once; they accept fp32 from Ampere on.
    if is_16bit:
        multiple = 8
    elif is_ampere:
        multiple = 4
    else:
        multiple = 1
    return "math" if head_dim % multiple else "efficient"


def training_kernel(
    shape: GPTShape, *, is_16bit: bool, checkpointing: str, capability: ComputeCapability | None
) -> AttentionKernel:
    """Return the kernel with which a model trains on a GPU."""
    return attention_kernel(
        shape.head_dim,
        is_16bit=is_16bit,
        masked=shape.has_mask,
        drops_out=shape.dropout > 0,
        may_skip=may_skip_blocks(shape, checkpointing),
        capability=capability,
    )


def may_skip_blocks(shape: GPTShape, checkpointing: str) -> bool:
    """Return whether a run leaves FlexAttention to the GPU.

    Selective checkpointing keeps results of torch's operators, to which FlexAttention does not belong.
    """
    return shape.attention_kernel == "auto" and checkpointing != "selective"
