"""The memory of ladder.py's rungs on a GPU, counted on tensors without storage."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from ladder_gpt import NaiveGPT, Ways
from torch._subclasses.fake_tensor import FakeTensorMode

from llmscale.config.resolve import ResolvedRun
from llmscale.dry_run.cuda_kernels import cuda_kernels, kernel_workspace
from llmscale.dry_run.engine import dry_run
from llmscale.dry_run.fake_gpu import GPU, fake_gpu
from llmscale.dry_run.fake_world import fake_tensors_move
from llmscale.dry_run.tracker import Category, MemoryTracker


def count_plain(resolved: ResolvedRun, ways: Ways) -> int:
    """Peak bytes of tensors on a GPU of Ampere's or newer, over two steps."""
    batch, shape = resolved.plan.micro_batch_size, resolved.shape
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_gpu())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(fake_tensors_move())
        stack.enter_context(cuda_kernels())
        # Tensors without storage have no values, and AdamW divides by a function of its count of steps.
        stack.enter_context(mock.patch("torch.optim.adam._get_value", lambda _: 1.0))
        tracker = stack.enter_context(MemoryTracker(device=GPU, workspace=kernel_workspace))
        with tracker.phase("all", Category.TEMPORARIES):
            model = NaiveGPT(shape, ways).to(GPU)
            optimizer = model.build_optimizer(1e-4, is_gpu=True)
            for _ in range(2):
                tokens = torch.zeros((batch, shape.seq_len + 1), dtype=torch.long, device=GPU)
                model.train_step(tokens, optimizer)
        return tracker.peaks["all"].breakdown.total_bytes


def count_product(resolved: ResolvedRun) -> int:
    """Peak bytes of tensors per GPU, as the dry run of the real engine has it, eager blocks."""
    result = dry_run(resolved)
    return max(moment.total_bytes for moment in (result.forward, result.backward, result.step))
