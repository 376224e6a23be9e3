"""Dropout's randomness as a pure function of (seed, step, rank): no random state has to be saved or restored."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed every global generator (Python, NumPy, torch on all devices) for one optimizer step on one rank.

    A resumed run draws what the uninterrupted one would have drawn, bit for bit at the same world size; at another,
    ranks draw other numbers, as independent as before.
    """
    digest = hashlib.blake2b(f"llmscale {seed} {step} {rank}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number % 2**63)
