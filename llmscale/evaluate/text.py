"""Text from a model and its tokenizer, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.evaluate.sampling import sample
from llmscale.model.gpt import GPT


def generate_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
) -> Iterator[str]:
    """Pieces of text that continue `prompt`, as soon as they are known; see `sample` for the settings.

    A token may end in the middle of a character, so a piece is held back until what it decodes to is whole. An empty
    prompt begins a new document.
    """
    prompt_ids = torch.tensor([*tokenizer.bos_tokens, *tokenizer.encode(prompt)] or [tokenizer.eot_token])
    pending: list[int] = []
    tokens = sample(
        model,
        prompt_ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        eot_token=tokenizer.eot_token,
    )
    for token in tokens:
        pending.append(token)
        piece = tokenizer.decode(pending)
        if not piece.endswith("\N{REPLACEMENT CHARACTER}"):
            yield piece
            pending.clear()
    if pending:
        yield tokenizer.decode(pending)
