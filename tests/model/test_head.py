from __future__ import annotations

import torch
import torch.nn.functional as F

from llmscale.model.head import TiedHead
from llmscale.model.layers import Embedding


def random_head() -> tuple[Embedding, TiedHead]:
    """Ten rows, of which seven are of the vocabulary."""
    embedding = Embedding(10, 4, torch.Generator().manual_seed(0))
    head = TiedHead(embedding, vocab_size=7)
    with torch.no_grad():
        embedding.weight.copy_(torch.randn(10, 4))
    return embedding, head


def test_head_follows_the_embedding_without_its_padding_and_is_not_saved() -> None:
    embedding, head = random_head()
    x = torch.randn(2, 3, 4)
    assert torch.allclose(head(x), x @ embedding.weight[:7].t())
    assert head.state_dict() == {}


def test_with_targets_it_is_the_mean_cross_entropy_in_fp32() -> None:
    _, head = random_head()
    head.bfloat16()
    x, targets = torch.randn(2, 3, 4, dtype=torch.bfloat16), torch.randint(7, (2, 3))
    loss = head(x, targets)
    assert loss.dtype == torch.float32
    expected = F.cross_entropy(head(x).float().reshape(6, 7), targets.reshape(6))
    assert torch.equal(loss, expected)
