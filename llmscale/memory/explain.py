"""The known formula of activations beside ours: what a naive loop would need, and what is left of it. No torch.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), equation
2: a layer saves s b h (34 + 5 a s / h) bytes in 16 bit, for a micro-batch of b sequences of s tokens, width h and a
heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.config.resolve import ResolvedStep
from llmscale.memory.estimate import step_activations
from llmscale.memory.layers import estimate_activations, loss

#: Bytes of a complete logit at the peak of an unchunked loss: logits, copy and softmax in fp32, and their gradients.
_WHOLE_LOGIT_BYTES = 12


@dataclass(frozen=True)
class Term:
    """A part of the activations' bytes, or what takes a part of them away."""

    words: str
    num_bytes: float
    is_sum: bool = False
    """True for the sum of the terms before."""


def explain_activations(step: ResolvedStep, capability: ComputeCapability | None = None) -> Iterator[Term]:
    """Yield the terms of the known formula, of what a run saves of them, and their sums."""
    ours = step_activations(step, capability)
    p, shape = ours.p, step.shape
    unit = shape.n_layer * p.width / 2
    stream = unit * 34 * p.tokens * shape.n_embd
    scores = unit * 5 * shape.n_head * p.tokens * shape.seq_len
    logits = float(_WHOLE_LOGIT_BYTES * p.tokens * shape.padded_vocab_size)
    yield Term("34 s b h for every layer: inputs of matrix products, norms, GELU and dropout masks", stream)
    yield Term("5 a s^2 b for every layer: attention's scores, their softmax and its dropout", scores)
    yield Term("12 s b V: logits of the vocabulary, their softmax and gradients", logits)
    yield Term("a naive loop needs", stream + scores + logits, is_sum=True)
    uncheckpointed = estimate_activations(p, "none").saved[-1]
    chunked = loss(p).forward
    yield Term(f"attention by the {p.kernel.replace('_padded', '')} kernel keeps no scores", -scores)
    yield Term("our layers keep other tensors than the formula counts", uncheckpointed - stream)
    yield Term(f"the loss in chunks of {step.loss.chunk_tokens:,} tokens", chunked - logits)
    if ours.saved[-1] != uncheckpointed:
        yield Term(f"{step.checkpointing} checkpointing recomputes", ours.saved[-1] - uncheckpointed)
    yield Term("what is left", ours.saved[-1] + chunked, is_sum=True)
