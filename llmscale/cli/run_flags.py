"""Flags that `estimate` and `plan` share with train.py, beside those of the model and of the batch. No torch."""

from __future__ import annotations

import argparse

from llmscale.config import flag_type, limits
from llmscale.config.loss_settings import CHUNK_TOKENS
from llmscale.config.optimizers import ADAMW, MODELLED_NAMES


def add_run_flags(group: argparse._ArgumentGroup) -> None:
    """What decides memory and is no matter of the ds_config."""
    group.add_argument("--optimizer", choices=MODELLED_NAMES, help=f"default: {ADAMW.name}")
    group.add_argument(
        "--loss-chunk-tokens",
        type=flag_type.whole(1, limits.MAX_BATCH_TOKENS),
        metavar="N",
        help=f"tokens whose logits exist at a time (default {CHUNK_TOKENS:,}, as train.py's)",
    )
