from __future__ import annotations

import torch
import torch.nn.functional as F

from llmscale.config.loss_settings import DEFAULT_LOSS, LossSettings
from llmscale.model.gpt import Embedding, TiedHead


def random_head(loss: LossSettings = DEFAULT_LOSS) -> tuple[Embedding, TiedHead]:
    """Ten rows, of which seven are of the vocabulary."""
    embedding = Embedding(10, 4, torch.Generator().manual_seed(0))
    head = TiedHead(embedding, 7, loss)
    with torch.no_grad():
        embedding.weight.copy_(torch.randn(10, 4))
    return embedding, head


def test_head_follows_the_embedding_without_its_padding_and_is_not_saved() -> None:
    embedding, head = random_head()
    x = torch.randn(2, 3, 4)
    assert torch.allclose(head(x), x @ embedding.weight[:7].t(), atol=1e-6)
    assert head.state_dict() == {}


def test_with_targets_it_is_the_loss_and_a_z_loss_is_in_the_gradients_alone() -> None:
    x, targets = torch.randn(2, 3, 4), torch.randint(7, (2, 3))
    embedding, head = random_head(LossSettings(chunk_tokens=4, z_loss=0.5))
    logits = head(x)
    loss = head(x, targets)
    assert torch.allclose(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten()), atol=1e-6)
    z_squared = logits.logsumexp(-1).square().mean()
    assert torch.allclose(head.mean_z_squared, z_squared, atol=1e-6)
    wanted = torch.autograd.grad(
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.5 * z_squared, embedding.weight
    )[0]
    loss.backward()
    assert torch.allclose(embedding.weight.grad, wanted, atol=1e-6)


def test_a_validation_has_no_z_loss() -> None:
    _, head = random_head(LossSettings(z_loss=0.5))
    head.eval()
    head(torch.randn(2, 3, 4), torch.randint(7, (2, 3)))
    assert head.mean_z_squared is None
