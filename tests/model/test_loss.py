from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from llmscale.model.loss import next_token_loss


def test_mean_cross_entropy_in_fp32_of_the_normalised_stream() -> None:
    torch.manual_seed(0)
    norm, head = nn.LayerNorm(4).bfloat16(), nn.Linear(4, 7, bias=False).bfloat16()
    x, targets = torch.randn(2, 3, 4, dtype=torch.bfloat16), torch.randint(7, (2, 3))
    loss = next_token_loss(norm, head, x, targets)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, F.cross_entropy(head(norm(x)).float().reshape(6, 7), targets.reshape(6)))
