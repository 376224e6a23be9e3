"""Text from a model, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmscale.errors import ConfigError
from llmscale.model.gpt import GPT


def sample(
    model: GPT,
    prompt_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    eot_token: int | None,
) -> Iterator[int]:
    """Yield up to `max_new_tokens` tokens that continue `prompt_ids`, [t] with t >= 1.

    Temperature 0 takes the likeliest token. Otherwise a token is drawn from softmax(logits / temperature)
    after all but the `top_k` likeliest are struck out, and then all beyond the likeliest that together
    reach `top_p` (Holtzman et al. 2020); None strikes out nothing. Ends before `eot_token`. The model
    sees the last seq_len tokens, numbered from position 0, and is called in eval mode and left in the
    mode it was in. The same seed gives the same tokens on one machine; the global random state is not
    touched, and with one generator all ranks of a ZeRO-3 model draw alike. Raises ConfigError at once for
    illegal values.
    """
    _check(model, prompt_ids, max_new_tokens, temperature, top_k, top_p)

    def tokens() -> Iterator[int]:
        generator = torch.Generator().manual_seed(seed)
        context = prompt_ids.to(next(model.parameters()).device)[None]
        for _ in range(max_new_tokens):
            logits = _next_logits(model, context[:, -model.shape.seq_len :])
            token = _choose(logits, temperature, top_k, top_p, generator)
            if token == eot_token:
                return
            yield token
            context = torch.cat([context, context.new_tensor([[token]])], dim=1)

    # An inner generator, so that illegal values raise here and not at the first token.
    return tokens()


def _next_logits(model: GPT, tokens: Tensor) -> Tensor:
    """Logits [vocab_size] of the token after `tokens` [1, t], in fp32 on the CPU."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return model(tokens)[0, -1].float().cpu()
    finally:
        model.train(was_training)


def _choose(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> int:
    """One token id from `logits` [vocab_size]."""
    if temperature == 0:
        return int(logits.argmax())
    likeliest, ids = (logits / temperature).sort(descending=True, stable=True)
    probabilities = likeliest[:top_k].softmax(0)
    if top_p is not None:
        # A token stays while those before it do not yet reach top_p: the first one always does.
        probabilities = probabilities.where(probabilities.cumsum(0) - probabilities < top_p, 0.0)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])


def _check(
    model: GPT,
    prompt_ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    vocab_size = model.shape.vocab_size
    if prompt_ids.dim() != 1 or not len(prompt_ids):
        raise ConfigError("the prompt has no tokens; give at least one, such as the end-of-text token.")
    lowest, highest = int(prompt_ids.min()), int(prompt_ids.max())
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise ConfigError(
            f"the prompt has token {wrong}, and the model's vocabulary is 0 to {vocab_size - 1}: "
            "it was made with another tokenizer."
        )
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens must be at least 0, not {max_new_tokens}.")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature must be 0 (the likeliest token) or a positive number, not {temperature}.")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k must be at least 1 (or absent: no limit), not {top_k}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"top_p must be in (0, 1] (or absent: no limit), not {top_p}.")
