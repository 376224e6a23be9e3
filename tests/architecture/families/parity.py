"""A model of ours beside transformers', with the same weights: how far logits and gradients are apart."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmscale.architecture.families.family import Family
from llmscale.architecture.shape import GPTShape
from llmscale.model.gpt import GPT

#: Largest difference of a logit, and of a gradient over the largest gradient.
TOLERANCE = 1e-5


def randomise(model: nn.Module) -> None:
    """Every weight random, biases and norms too, and large enough that attention is not uniform."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, values in model.state_dict().items():
            noise = torch.randn(values.shape, generator=generator)
            # Routers' biases are small beside the scores.
            about = 0.0 if "router.bias" in name or "correction_bias" in name else 1.0
            values.copy_(about + 0.2 * noise if values.dim() == 1 else 0.1 * noise)


def to_ours(shape: GPTShape, theirs: dict[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Their tensors as our state dict, or their gradients under our names; padding rows are zeros."""
    ours = {name: torch.zeros_like(value) for name, value in GPT(shape, seed=0).state_dict().items()}
    for tensor in family.tensors(shape):
        if tensor.parameter:
            value = theirs[tensor.name]
            assert tuple(value.shape) == tensor.shape, tensor.name
            value = value.t() if tensor.transposed else value[tensor.skipped_rows :]
            rows = ours[tensor.parameter].view(-1, *value.shape[1:])
            rows[tensor.first_row : tensor.first_row + len(value)] = value
    return ours


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def differences(ours: GPT, theirs: nn.Module, family: Family) -> tuple[float, float]:
    """Largest difference of logits; largest difference of gradients over the largest gradient."""
    ours.eval()
    theirs.eval()
    tokens = torch.randint(ours.shape.vocab_size, (2, ours.shape.seq_len), generator=torch.Generator().manual_seed(1))
    logits_of = []
    for model in (ours, theirs):
        model.zero_grad()
        logits = model(tokens) if model is ours else model(tokens).logits
        loss_of(logits, tokens).backward()
        logits_of.append(logits.detach())
    gradients = {name: torch.zeros_like(value) for name, value in theirs.state_dict().items()}
    gradients |= {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    expected = to_ours(ours.shape, gradients, family)
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    apart = [(parameter.grad - expected[name]).abs().max().item() for name, parameter in ours.named_parameters()]
    return (logits_of[0] - logits_of[1]).abs().max().item(), max(apart) / largest
