"""Generate text with a model and its tokenizer, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.evaluate.sampling import SamplingSettings, TokenByPrompt, sample
from llmscale.model.gpt import GPT

#: Last tokens of a prompt to decode the first new token with.
_PREFIX_TOKENS = 8


@dataclass(frozen=True)
class Piece:
    """A further piece of one text."""

    number: int
    """Number of the prompt, in the order given."""
    text: str
    ended_by: Literal["end_of_text", "max_new_tokens"] | None = None
    """Reason for the end, in a text's last piece."""


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
) -> Iterator[Piece]:
    """Yield pieces of the texts that continue `prompts`, token ids each, as soon as they are known; see `sample`.

    A token may end in the middle of a character, so a piece is held back until its characters are complete.
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

    def pieces() -> Iterator[Piece]:
        decoders = {number: _Decoder(tokenizer, prompt) for number, prompt in enumerate(prompts)}
        for tokens in steps:
            for number in sorted(decoders.keys() - tokens.keys()):
                yield Piece(number, decoders.pop(number).rest(), "end_of_text")
            for number, token in tokens.items():
                if text := decoders[number].add(token):
                    yield Piece(number, text)
        for number, decoder in decoders.items():
            yield Piece(number, decoder.rest(), "max_new_tokens")

    return pieces()


class _Decoder:
    """Decode tokens that arrive one by one. Each is decoded after others: some tokenizers drop a leading space."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._before, self._pending = list(prompt[-_PREFIX_TOKENS:]), list[int]()

    def add(self, token: int) -> str:
        """Return the text that is complete now; empty in the middle of a character."""
        self._pending.append(token)
        text = self.rest()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._before, self._pending = self._pending, []
        return text

    def rest(self) -> str:
        """Return the text that no piece contains yet."""
        whole = self._tokenizer.decode([*self._before, *self._pending])
        return whole[len(self._tokenizer.decode(self._before)) :]
