from __future__ import annotations

import torch

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
    assert torch.allclose(head(x), x @ embedding.weight[:7].t(), atol=1e-6)
    assert head.state_dict() == {}
