"""Random numbers of a step: a function of seed, step and rank."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

from llmscale.engine.process_group import is_gpu


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed every generator (Python's, NumPy's, torch's on the CPU and on this rank's GPU) for one optimizer step.

    Dropout is thus a pure function of (seed, step, rank), and no random state is saved. A resumed run draws the same
    numbers bit for bit at the same world size; at another, ranks draw other, equally independent numbers.
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
