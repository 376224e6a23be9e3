"""What torch is set to on a GPU, beyond what a run's configuration says. Imports torch only where it is needed."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from llmscale.config.deepspeed.schema import Precision

#: Of torch's caching allocator. Either is read; the second is torch's name for it since 2.9.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
#: Segments that grow leave no gaps between them.
EXPANDABLE_SEGMENTS = "expandable_segments:True"


def allocator_settings(environment: MutableMapping[str, str]) -> str:
    """What the user or the run has set; empty for torch's defaults."""
    return ",".join(environment[name] for name in ALLOCATOR_VARIABLES if environment.get(name))


def set_allocator_default(environment: MutableMapping[str, str]) -> None:
    """Let segments grow, unless the user has set anything of the allocator. To be called before torch is imported."""
    if not allocator_settings(environment):
        environment[ALLOCATOR_VARIABLES[0]] = EXPANDABLE_SEGMENTS


def allow_tf32(precision: Precision) -> None:
    """Let tensor cores round the inputs of fp32 products to TF32 where a run is in 16 bits or autocast anyway, for what
    is left in fp32. Where fp32 was asked for, a product is one of fp32."""
    import torch

    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")


def describe_settings() -> str:
    """The line that a start on a GPU prints."""
    import torch

    tf32 = "TF32" if torch.get_float32_matmul_precision() == "high" else "fp32 (no TF32)"
    return f"kernels: fp32 products in {tf32}; allocator: {allocator_settings(os.environ)}"
