"""Process of test_loss.py, under Triton's interpreter: how far Liger's kernel is from torch's operations.

Prints one JSON object: of each case the errors of the loss, the gradients and z^2 against double precision, Liger's and
torch's.
"""

from __future__ import annotations

import json
import os

import torch
from torch import Tensor

from llmscale.config.loss_settings import LossKernel, LossSettings
from llmscale.model.loss import check_fused_loss, chunked_cross_entropy

TOKENS, WIDTH, VOCABULARY, ROWS = 24, 32, 301, 320


def run(kernel: LossKernel, dtype: torch.dtype, z_loss: float, chunk: int, *, train: bool = True) -> list[Tensor]:
    """Loss, gradients of x and the weights, mean z^2."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(TOKENS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)
    targets = torch.randint(VOCABULARY, (1, TOKENS), generator=generator)
    x, weight = (tensor.bfloat16().to(dtype).requires_grad_(train) for tensor in (x[None], weight))
    settings = LossSettings(chunk, z_loss, kernel)
    losses = chunked_cross_entropy(x, weight, targets, VOCABULARY, settings, each_sequence=True)
    actual = [losses.mean.detach()]
    assert losses.of_sequences is not None
    assert torch.allclose(losses.of_sequences, actual[0], atol=1e-6)
    if train:
        losses.mean.backward()
        assert x.grad is not None
        assert weight.grad is not None
        actual += [x.grad, weight.grad]
    return actual if losses.mean_z_squared is None else [*actual, losses.mean_z_squared]


def error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    check_fused_loss("cpu")
    results = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for z_loss in (0.0, 0.1):
            for chunk, train in ((7, True), (TOKENS, True), (TOKENS, False)):
                exact, plain, fused = (
                    run(kernel, of, z_loss, chunk, train=train)
                    for kernel, of in (("torch", torch.float64), ("torch", dtype), ("liger", dtype))
                )
                errors = [
                    [error(ours, true), error(theirs, true)]
                    for ours, theirs, true in zip(fused, plain, exact, strict=True)
                ]
                results[f"{dtype} z-loss {z_loss} chunks of {chunk} train {train}"] = errors
    print(json.dumps(results))


if __name__ == "__main__":
    main()
