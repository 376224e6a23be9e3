"""Generate text for a batch of prompts: check its memory, sample a token of each at a time, decode the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from llmscale.architecture.shape import GPTShape
from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.engine.device_memory import free_memory_bytes
from llmscale.engine.device_settings import attention_of_any_shape
from llmscale.errors import ConfigError, TrainingError
from llmscale.memory.breakdown import format_size
from llmscale.model.attention_context import KVCache, kv_cache_bytes
from llmscale.model.gpt import GPT

#: One token per prompt, by the prompt's number.
TokenByPrompt = dict[int, int]
#: Last tokens of a prompt to decode the first new token with.
_PREFIX_TOKENS = 8
_FP32_BYTES = 4


@dataclass(frozen=True)
class SamplingSettings:
    """Number of tokens, and how each is chosen. Raises ConfigError for illegal values."""

    max_new_tokens: int
    temperature: float
    """0 takes the likeliest token; otherwise tokens are drawn from softmax(logits / temperature)."""
    top_k: int | None
    """Number of likeliest tokens to draw from; None for all."""
    top_p: float | None
    """Probability that the likeliest of those tokens reach together (Holtzman et al. 2020); None for all."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens must be at least 0, not {self.max_new_tokens}.")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature must be 0 (the likeliest token) or a positive number, not {self.temperature}."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k must be at least 1 (or absent: no limit), not {self.top_k}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be in (0, 1] (or absent: no limit), not {self.top_p}.")


def sample(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    settings: SamplingSettings,
    *,
    seeds: Sequence[int],
    eot_token: int | None,
    vocab_size: int | None = None,
    use_cache: bool = True,
    agree: Callable[[TokenByPrompt], TokenByPrompt] | None = None,
) -> Iterator[TokenByPrompt]:
    """Yield the next token of every prompt that has not ended, up to `max_new_tokens` times.

    Prompts have 1 to seq_len tokens. Each has a random generator with its seed of `seeds`, so its tokens do not depend
    on the rest of the batch; it ends before `eot_token`. Tokens are chosen among the first `vocab_size`, which the
    tokenizer has; a published model's table may have more. The model sees the last seq_len tokens, from position 0.

    With `use_cache`, only new tokens are computed while a text fits seq_len; then positions shift at every step, and
    all are recomputed. Both ways give the same logits apart from rounding. In fp32 they give the same tokens, unless a
    draw is within rounding of the border between two.

    The model runs in eval mode and returns to its mode; the global random state is unchanged. Where ranks share a
    model, `agree` makes them continue with the same tokens. Raises ConfigError at once for illegal values.
    """
    for prompt in prompts:
        check_prompt(model.shape, prompt)

    def tokens() -> Iterator[TokenByPrompt]:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        contexts = {number: list(prompt) for number, prompt in enumerate(prompts)}
        longest = max(map(len, prompts), default=0) + settings.max_new_tokens
        reader = _Reader(model, KVCache(model.shape, len(prompts), longest) if use_cache else None)
        for _ in range(settings.max_new_tokens):
            if not contexts:
                return
            logits = reader.next_logits(contexts)
            chosen = {
                number: _choose(of_one[:vocab_size], settings, generators[number])
                for number, of_one in zip(contexts, logits, strict=True)
            }
            if agree:
                chosen = agree(chosen)
            chosen = {number: token for number, token in chosen.items() if token != eot_token}
            contexts = {number: contexts[number] for number in chosen}
            for number, token in chosen.items():
                contexts[number].append(token)
            yield chosen

    # An inner generator, so that illegal values raise when this function is called.
    return tokens()


class _Reader:
    """Compute the logits after each context: with a cache, of contexts that fit seq_len, only from their new tokens."""

    def __init__(self, model: GPT, cache: KVCache | None) -> None:
        self._model = model
        self._cache = cache
        self._rows = list(range(len(cache.lengths) if cache else 0))
        """Numbers of the contexts, in the order of the cache."""

    def next_logits(self, contexts: Mapping[int, list[int]]) -> Tensor:
        """Return logits, [contexts, vocab_size], in fp32 on the CPU, in the order of `contexts`."""
        seq_len = self._model.shape.seq_len
        cache = self._cache
        logits: dict[int, Tensor] = {}
        growing = [number for number, context in contexts.items() if cache and len(context) <= seq_len]
        if cache:
            cache.keep([self._rows.index(number) for number in growing])
            self._rows = growing
            if growing:
                new = [contexts[number][length:] for number, length in zip(growing, cache.lengths, strict=True)]
                logits |= zip(growing, self._read(new, cache), strict=True)
        if sliding := [number for number in contexts if number not in logits]:
            logits |= zip(sliding, self._read([contexts[number][-seq_len:] for number in sliding], None), strict=True)
        return torch.stack([logits[number] for number in contexts])

    def _read(self, rows: Sequence[Sequence[int]], cache: KVCache | None) -> Tensor:
        """Return the logits after each row's last token; rows continue the cached contexts."""
        device = next(self._model.parameters()).device
        longest = max(map(len, rows))
        # Padded at the end; causal attention keeps padding from the tokens before it.
        tokens = torch.tensor([[*row, *(0,) * (longest - len(row))] for row in rows], device=device)
        ends = torch.tensor([len(row) - 1 for row in rows], device=device)
        if cache:
            lengths = [cached + len(row) for cached, row in zip(cache.lengths, rows, strict=True)]
        else:
            lengths = []
        was_training = self._model.training
        self._model.eval()
        with torch.no_grad(), attention_of_any_shape():
            logits: Tensor = self._model(tokens, cache=cache, at=ends)[:, 0]
        self._model.train(was_training)
        if cache:
            cache.lengths = lengths
        return logits.float().cpu()


def _choose(logits: Tensor, settings: SamplingSettings, generator: torch.Generator) -> int:
    """Choose a token id from `logits`, [vocab_size]. Raises TrainingError for NaN.

    One random number is looked up in the cumulative probabilities in the order of ids. So rounding that swaps the ranks
    of two nearly equal tokens changes nothing.
    """
    if logits.isnan().any():
        raise TrainingError("the model's logits are NaN: its training diverged.")
    if settings.temperature == 0:
        return int(logits.argmax())
    # Subtracts the largest logit, so that no temperature divides to infinity.
    probabilities = ((logits.double() - logits.max()) / settings.temperature).softmax(0)
    if settings.top_k is not None and settings.top_k < len(logits):
        likeliest = probabilities.topk(settings.top_k).indices
        probabilities = torch.zeros_like(probabilities).index_copy_(0, likeliest, probabilities[likeliest])
        probabilities /= probabilities.sum()
    if settings.top_p is not None:
        sorted_, ids = probabilities.sort(descending=True, stable=True)
        # A token is kept while those before it do not reach top_p, so the first one always is.
        probabilities[ids[sorted_.cumsum(0) - sorted_ >= settings.top_p]] = 0.0
    reached = probabilities.cumsum(0)
    drawn = torch.rand(1, dtype=torch.float64, generator=generator) * reached[-1]
    # The draw is in [0, sum); `right=True` never selects a token of probability 0.
    return min(int(torch.searchsorted(reached, drawn, right=True)), int(probabilities.nonzero()[-1]))


def check_prompt(shape: GPTShape, prompt: Sequence[int], where: str = "the prompt") -> None:
    """Refuse tokens that the model cannot continue; `where` names the prompt. Raises ConfigError."""
    vocab_size = shape.vocab_size
    seq_len = shape.seq_len
    if not prompt:
        raise ConfigError(f"{where} has no tokens; give at least one, such as the end-of-text token.")
    if len(prompt) > seq_len:
        raise ConfigError(
            f"{where} has {len(prompt):,} tokens, and the model sees {seq_len:,} (its seq_len). "
            f"Give the last {seq_len:,} or fewer."
        )
    lowest = min(prompt)
    highest = max(prompt)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise ConfigError(
            f"{where} has token {wrong}, and the model's vocabulary is 0 to {vocab_size - 1}: "
            "it was made with another tokenizer."
        )


@dataclass(frozen=True)
class TextChunk:
    """A further chunk of one text."""

    number: int
    """Number of the prompt, in the order given."""
    text: str
    ended_by: Literal["end_of_text", "max_new_tokens"] | None = None
    """Reason for the end, in a text's last chunk."""


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return a prompt's tokens after those that begin a document; an empty prompt begins a new document."""
    return [*tokenizer.bos_tokens, *tokenizer.encode(prompt)] or [tokenizer.eot_token]


def generate_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    settings: SamplingSettings,
    *,
    seeds: Sequence[int],
    use_cache: bool = True,
    agree: Callable[[TokenByPrompt], TokenByPrompt] | None = None,
) -> Iterator[TextChunk]:
    """Yield chunks of the texts that continue `prompts`, token ids each, as soon as they are known; see `sample`.

    A token may end in the middle of a character, so a chunk is held back until its characters are complete.
    """
    steps = sample(
        model,
        prompts,
        settings,
        seeds=seeds,
        eot_token=tokenizer.eot_token,
        vocab_size=tokenizer.vocab_size,
        use_cache=use_cache,
        agree=agree,
    )

    def chunks() -> Iterator[TextChunk]:
        decoders = {number: _Decoder(tokenizer, prompt) for number, prompt in enumerate(prompts)}
        for tokens in steps:
            for number in sorted(decoders.keys() - tokens.keys()):
                yield TextChunk(number, decoders.pop(number).rest(), "end_of_text")
            for number, token in tokens.items():
                if text := decoders[number].add(token):
                    yield TextChunk(number, text)
        for number, decoder in decoders.items():
            yield TextChunk(number, decoder.rest(), "max_new_tokens")

    return chunks()


class _Decoder:
    """Decode tokens that arrive one by one. Each is decoded after others: some tokenizers drop a leading space."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._before = list(prompt[-_PREFIX_TOKENS:])
        self._pending = list[int]()

    def add(self, token: int) -> str:
        """Return the text that is complete now; empty in the middle of a character."""
        self._pending.append(token)
        text = self.rest()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._before = self._pending
        self._pending = []
        return text

    def rest(self) -> str:
        """Return the text that no chunk contains yet."""
        text = self._tokenizer.decode([*self._before, *self._pending])
        return text[len(self._tokenizer.decode(self._before)) :]


def check_memory(shape: GPTShape, batch: int, prompt_len: int, max_new_tokens: int, *, use_cache: bool) -> None:
    """Refuse a batch that does not fit the free memory of this machine's GPU, or of its host. Raises ConfigError."""
    needed = batch_bytes(shape, batch, prompt_len, max_new_tokens, use_cache=use_cache)
    free = free_memory_bytes()
    if needed > free:
        without = ", or keep no keys and values (--no-cache)" if use_cache else ""
        raise ConfigError(
            f"{batch:,} texts at once of up to {prompt_len + max_new_tokens:,} tokens need {format_size(needed)} of "
            f"memory, and {format_size(free)} are free. Give fewer at once (--batch-size) or shorter ones "
            f"(--max-new-tokens){without}."
        )


def batch_bytes(shape: GPTShape, batch: int, prompt_len: int, max_new_tokens: int, *, use_cache: bool) -> int:
    """Return a lower bound in bytes: the cache, and one block's activations of the tokens computed together.

    These are the prompts' tokens, or all that the model sees if a text exceeds seq_len or nothing is cached.
    """
    longest = min(prompt_len + max_new_tokens, shape.seq_len)
    outgrows = prompt_len + max_new_tokens > shape.seq_len
    together = batch * (prompt_len if use_cache and not outgrows else longest)
    in_experts = shape.experts_per_token * shape.expert_width
    width = max(in_experts if shape.is_sparse(block) else shape.mlp_width for block in range(shape.n_layer))
    hidden = width * (3 if shape.gated_mlp else 2)
    widest = 2 * shape.n_embd + max(hidden, 2 * shape.qkv_heads * shape.head_dim)
    if use_cache:
        cache_bytes = kv_cache_bytes(shape, batch, longest, _FP32_BYTES)
    else:
        cache_bytes = 0
    return cache_bytes + together * widest * _FP32_BYTES
