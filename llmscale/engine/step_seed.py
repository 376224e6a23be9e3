"""Dropout's randomness as a pure function of (seed, step, rank): no random state has to be saved or restored."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

from llmscale.engine.process_group import is_gpu


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed every generator (Python's, NumPy's, torch's of the CPU and of this rank's GPU) for one optimizer step.

    A resumed run draws what the uninterrupted one would have drawn, bit for bit at the same world size; at another,
    ranks draw other numbers, as independent as before.
    """
    digest = hashlib.blake2b(f"llmscale {seed} {step} {rank}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    random.seed(number)
    np.random.seed(number % 2**32)
    # Not torch.manual_seed: where CUDA is not in use it keeps each call for later, with a stack trace that takes longer
    # than a small model's forward pass.
    torch.default_generator.manual_seed(number % 2**63)
    if is_gpu():
        from deepspeed.accelerator import get_accelerator

        get_accelerator().manual_seed(number % 2**63)
