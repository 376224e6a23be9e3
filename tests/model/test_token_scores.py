from __future__ import annotations

import pytest
import torch

from llmscale.model.loss import score_tokens


@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
def test_scores_are_those_of_whole_logits_without_the_padding(chunk_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*size, generator=generator) for size in ((2, 6, 8), (16, 8)))
    weight[11:] *= 100
    targets = torch.randint(11, (2, 6), generator=generator)
    logits = (x @ weight.t())[..., :11]
    targets[0, :3] = logits[0, :3].argmax(-1)
    scores = score_tokens(x.requires_grad_(), weight, targets, 11, chunk_tokens)
    assert not scores.requires_grad
    expected = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    assert torch.allclose(scores[..., 0], expected, atol=1e-6)
    assert torch.equal(scores[..., 1].bool(), logits.argmax(-1) == targets)


def test_products_are_in_autocasts_type_and_scores_in_fp32() -> None:
    x, weight, targets = torch.randn(1, 4, 8), torch.randn(16, 8), torch.zeros(1, 4, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        scores = score_tokens(x, weight, targets, 16, 4)
    rounded = (x.bfloat16()[0] @ weight.bfloat16().t()).float().log_softmax(-1)[:, 0]
    assert scores.dtype == torch.float32
    assert torch.allclose(scores[0, :, 0], rounded, atol=1e-6)
