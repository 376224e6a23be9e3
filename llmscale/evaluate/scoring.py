"""Compute log-likelihoods of rows of tokens, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llmscale.evaluate.scoring_requests import Row, batches_by_length
from llmscale.model.gpt import GPT

#: Map tokens and targets, ids [batch, t], to the targets' scores [batch, t, 2] (model/loss.py).
TokenScorer = Callable[[Tensor, Tensor], Tensor]


class RowScore(NamedTuple):
    """Score of a row's scored tokens."""

    log_likelihood: float
    """Sum of their log-probabilities, nats."""
    is_greedy: bool
    """True if each of them is the likeliest token at its position."""


def score_batch(scorer: TokenScorer, rows: Sequence[Row], device: torch.device) -> list[RowScore]:
    """Score rows in one forward pass; padding at the end of shorter rows does not change their scores."""
    longest = max(map(len, rows))
    filled = torch.tensor([[*row.tokens, *(0,) * (longest - len(row))] for row in rows], device=device)
    scores = scorer(filled[:, :-1], filled[:, 1:]).double().cpu()
    of_rows = (of_row[len(row) - row.num_scored : len(row)] for of_row, row in zip(scores, rows, strict=True))
    return [RowScore(float(kept[:, 0].sum()), bool(kept[:, 1].all())) for kept in of_rows]


def score_rows(
    model: GPT,
    rows: Sequence[Row],
    *,
    batch_size: int,
    progress: Callable[[int], object] = lambda num_rows: None,
) -> list[RowScore]:
    """Score rows with a model on one device, in their order. `progress` gets the number of rows done per batch."""
    device = next(model.parameters()).device

    def scorer(tokens: Tensor, targets: Tensor) -> Tensor:
        return model(tokens, targets, each_token=True)

    scores: dict[int, RowScore] = {}
    with torch.inference_mode():
        for batch in batches_by_length(rows, batch_size, batch_size * model.shape.seq_len):
            scores.update(zip(batch, score_batch(scorer, [rows[index] for index in batch], device), strict=True))
            progress(len(batch))
    return in_order(scores.items())


def in_order(scores: Iterable[tuple[int, RowScore]]) -> list[RowScore]:
    """Sort scores by the numbers of their rows."""
    return [score for _, score in sorted(scores, key=lambda pair: pair[0])]
