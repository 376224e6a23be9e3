"""Turn texts into rows of tokens, and compute their log-likelihoods, a batch at a time.

Texts are split into tokens as in lm-eval (lm_eval/api/model.py, TemplateLM._encode_pair; utils.py,
get_rolling_token_windows), so that scores are equal. Only scoring imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.engine.device_settings import attention_of_any_shape
from llmscale.errors import DataError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from llmscale.model.gpt import GPT

    #: Map tokens and targets, ids [batch, t], to the targets' scores [batch, t, 2] (model/loss.py).
    TokenScorer = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """Tokens of which the last `num_scored` are scored, each given the tokens before it."""

    tokens: tuple[int, ...]
    """Token ids: one more than the model's input, 2 to seq_len + 1."""
    num_scored: int

    def __len__(self) -> int:
        """Return the number of input positions."""
        return len(self.tokens) - 1


def prefix_token(tokenizer: Tokenizer) -> int:
    """Return the token that precedes a text without context."""
    return tokenizer.bos_tokens[0] if tokenizer.bos_tokens else tokenizer.eot_token


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return a text's tokens after those that begin a document."""
    return [*tokenizer.bos_tokens, *tokenizer.encode(text)]


def pair_row(tokenizer: Tokenizer, seq_len: int, context: str, continuation: str, where: str) -> Row:
    """Return a row that scores the continuation's tokens, with the context truncated on the left to seq_len.

    Spaces at the context's end belong to the continuation, as a tokenizer joins them to the next word. Raises
    DataError, which names `where`, for a continuation without tokens or with more than the model has positions.
    """
    if context:
        moved = len(context) - len(context.rstrip())
        together = encode_text(tokenizer, context + continuation)
        before = encode_text(tokenizer, context[: len(context) - moved])
        scored = together[len(before) :]
    else:
        before = [prefix_token(tokenizer)]
        scored = tokenizer.encode(continuation)
        if scored[:1] == before:
            scored = scored[1:]
    if not scored or not before:
        which = "continuation" if before else "context"
        raise DataError(f"{where}: the {which} has no tokens. Give it some text.")
    if len(scored) > seq_len:
        raise DataError(
            f"{where}: the continuation has {len(scored):,} tokens, and the model sees {seq_len:,} (its seq_len). "
            "Leave the item out, or score the text in windows (text=FILE.jsonl)."
        )
    # Truncated as the complete text is; `before` need not be its exact beginning.
    return Row(tuple([*before, *scored][-(seq_len + 1) :]), len(scored))


def rolling_rows(tokenizer: Tokenizer, seq_len: int, text: str) -> list[Row]:
    """Return rows that score every token of a text once.

    The first row scores `seq_len` tokens after the beginning of a document; later rows fill up with preceding tokens.
    """
    tokens = encode_text(tokenizer, text)
    first = tokens[:seq_len]
    if tokens:
        rows = [Row((prefix_token(tokenizer), *first), len(first))]
    else:
        rows = []
    for start in range(seq_len, len(tokens), seq_len):
        end = min(start + seq_len, len(tokens))
        rows.append(Row(tuple(tokens[end - seq_len - 1 : end]), end - start))
    return rows


def batches_by_length(rows: Sequence[Row], max_rows: int, max_tokens: int) -> list[list[int]]:
    """Group rows of similar length, the longest first; return their indices.

    A batch has at most `max_rows` rows, and at most `max_tokens` positions with padding unless a single row has more.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(rows)), key=lambda index: (-len(rows[index]), rows[index].tokens)):
        if batches:
            longest = len(rows[batches[-1][0]])
        else:
            longest = 0
        if batches and len(batches[-1]) < max_rows and (len(batches[-1]) + 1) * longest <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


class RowScore(NamedTuple):
    """Score of a row's scored tokens."""

    log_likelihood: float
    """Sum of their log-probabilities, nats."""
    is_greedy: bool
    """True if each of them is the likeliest token at its position."""


def score_batch(scorer: TokenScorer, rows: Sequence[Row], device: torch.device) -> list[RowScore]:
    """Score rows in one forward pass; padding at the end of shorter rows does not change their scores."""
    import torch

    longest = max(map(len, rows))
    filled = torch.tensor([[*row.tokens, *(0,) * (longest - len(row))] for row in rows], device=device)
    with attention_of_any_shape():
        scores = scorer(filled[:, :-1], filled[:, 1:]).double().cpu()
    of_rows = (of_row[len(row) - row.num_scored : len(row)] for of_row, row in zip(scores, rows, strict=True))
    return [RowScore(float(scored[:, 0].sum()), bool(scored[:, 1].all())) for scored in of_rows]


def score_rows(
    model: GPT,
    rows: Sequence[Row],
    *,
    batch_size: int,
    progress: Callable[[int], object] = lambda num_rows: None,
) -> list[RowScore]:
    """Score rows with a model on one device, in their order. `progress` gets the number of rows done per batch."""
    import torch

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
