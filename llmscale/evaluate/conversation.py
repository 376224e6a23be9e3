"""A conversation with a model, in the chat template of the data that it was fine-tuned on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from llmscale.data.prepare.chat import ChatEncoder, ChatSettings, find_template
from llmscale.data.prepare.chat_template import ChatTemplate
from llmscale.data.tokenizers.hugging_face import HuggingFaceTokenizer
from llmscale.data.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llmscale.evaluate.generate import TextChunk


def open_template(tokenizer: Tokenizer, source: str | None) -> tuple[Tokenizer, ChatTemplate]:
    """Return the tokenizer that reads the template's special tokens, and the template: `source`, or the tokenizer's.

    Raises DataError.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer = tokenizer.parsing_special()
    return tokenizer, find_template(tokenizer, source)


class Conversation:
    """Turns so far, and the tokens that the model continues."""

    def __init__(self, tokenizer: Tokenizer, template: str | None, max_tokens: int) -> None:
        """`template` is that of the model's data, or None for the tokenizer's own. Raises DataError.

        The oldest turns are forgotten beyond `max_tokens`.
        """
        tokenizer, of_data = open_template(tokenizer, template)
        settings = ChatSettings(of_data)
        self._encoder = ChatEncoder(tokenizer, settings, max_tokens)
        self._max_tokens = max_tokens
        self._end = settings.template.end_of_turn
        self._turns: list[dict[str, str]] = []

    def ask(self, line: str) -> list[int]:
        """Return the token ids that the model's answer to a line of the user continues."""
        # Without a line whose answer was refused or interrupted: two of the user's in a row are not in the data.
        self._turns[len(self._turns) // 2 * 2 :] = [{"role": "user", "content": line}]
        tokens = self._encoder.prompt_tokens(self._turns)
        while len(tokens) > self._max_tokens and len(self._turns) > 2:
            del self._turns[:2]
            tokens = self._encoder.prompt_tokens(self._turns)
        return tokens

    def answer(self, chunks: Iterable[TextChunk]) -> Iterator[str]:
        """Yield the generated text up to the end of the turn, which is remembered then."""
        text = ""
        done = 0
        for chunk in chunks:
            text += chunk.text
            if self._end:
                place = text.find(self._end)
            else:
                place = -1
            # The end may arrive in several chunks.
            if place >= 0:
                safe = place
            else:
                safe = max(done, len(text) - len(self._end) + 1)
            yield text[done:safe]
            done = safe
            if place >= 0:
                break
        else:
            yield text[done:]
            done = len(text)
        self._turns.append({"role": "assistant", "content": text[:done].strip() or " "})

    def forget(self) -> None:
        """Begin another conversation."""
        self._turns.clear()
