"""Settings of torch on a GPU that a run's configuration does not contain. Imports torch only inside functions."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from contextlib import AbstractContextManager

from llmscale.config.deepspeed.schema import Precision

#: Variables with the settings of torch's caching allocator. Both are read; torch has the second since 2.9.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
#: torch's variable that allows TF32; setting a precision would override it.
_TF32_VARIABLE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
#: Growing segments leave no gaps between them.
EXPANDABLE_SEGMENTS = "expandable_segments:True"


def allocator_settings(environment: MutableMapping[str, str]) -> str:
    """Return the allocator's settings; empty for torch's defaults."""
    return ",".join(environment[name] for name in ALLOCATOR_VARIABLES if environment.get(name))


def set_allocator_default(environment: MutableMapping[str, str]) -> None:
    """Let segments grow, unless the user has configured the allocator. Call it before importing torch."""
    if not allocator_settings(environment):
        environment[ALLOCATOR_VARIABLES[0]] = EXPANDABLE_SEGMENTS


def allow_tf32(precision: Precision) -> None:
    """Allow TF32 in a run's remaining fp32 products; where its precision is fp32, if the user's variable does."""
    import torch

    is_exact = precision == "fp32" and os.environ.get(_TF32_VARIABLE) != "1"
    torch.set_float32_matmul_precision("highest" if is_exact else "high")


def attention_of_any_shape() -> AbstractContextManager[None]:
    """Leave out cuDNN's attention, which torch prefers on Hopper in 16 bit: it builds a plan for each new shape."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def describe_settings() -> str:
    """Return the line about these settings that a start on a GPU prints."""
    import torch

    tf32 = "TF32" if torch.get_float32_matmul_precision() == "high" else "fp32 (no TF32)"
    return f"kernels: fp32 products in {tf32}; allocator: {allocator_settings(os.environ)}"
