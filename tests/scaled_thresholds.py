"""ds_configs whose thresholds are to a tiny model what DeepSpeed's defaults are to one of 8B.

A tiny model is smaller than every default: it is gathered at once, prefetched at once, never released and reduced in
one bucket. Here a block is larger than a bucket and the model larger than the live set, so that weights are gathered
within one block and by another one's prefetch, and released and reduced in parts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conftest import words

#: A model of five blocks.
MODEL = words("--model tiny-1m --n-layer 5 --n-head 4 --n-embd 32")
#: Matrix elements of one of its blocks.
BLOCK = 12 * 32 * 32

#: What `offload` means.
_OFFLOADED = {"none": (), "optimizer": ("offload_optimizer",), "both": ("offload_optimizer", "offload_param")}


def scale_thresholds(stage: int, block: int = BLOCK) -> dict[str, int]:
    """Return keys of zero_optimization for a model whose blocks have `block` elements."""
    bucket = block // 3 // 2 * 2
    if stage == 3:
        return {
            # Norms and biases stay, matrices do not.
            "stage3_param_persistence_threshold": block // 100,
            "stage3_prefetch_bucket_size": block // 4,
            "stage3_max_live_parameters": 2 * block,
            "stage3_max_reuse_distance": block,
            "sub_group_size": block,
            "reduce_bucket_size": bucket,
        }
    return {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket} if stage else {}


def write_scaled_ds(path: Path, stage: int, offload: str = "none", **zero: Any) -> Path:
    """Write a ds_config with thresholds scaled to MODEL; `zero` are further keys of zero_optimization."""
    devices = {name: {"device": "cpu"} for name in _OFFLOADED[offload]}
    section = {"stage": stage, **scale_thresholds(stage), **devices, **zero}
    path.write_text(json.dumps({"zero_optimization": section}))
    return path
