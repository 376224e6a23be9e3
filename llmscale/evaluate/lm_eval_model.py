"""Adapt a model to lm-eval: likelihoods of continuations and texts, and generated text.

Tokens, windows and stops are those of lm-eval's own Hugging Face backend (lm_eval/models/huggingface.py, 0.4.13), so
that an exported model has the same scores there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from llmscale.data.prepare.chat_template import ChatTemplate
from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.errors import ConfigError
from llmscale.evaluate.generate import SamplingSettings, sample
from llmscale.evaluate.scoring import Row, RowScore, encode_text, pair_row, rolling_rows, score_rows
from llmscale.model.gpt import GPT

#: Default of tokens to generate, as in lm-eval's own backend.
_MAX_NEW_TOKENS = 256


class LlmscaleLM(LM):
    """Model in this process. Raises ConfigError or DataError, with the task's name, for requests it cannot compute."""

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        progress: Callable[[int], object] = lambda num_rows: None,
        template: ChatTemplate | None = None,
    ) -> None:
        """`template`: tasks are put as conversations, and the end of a turn ends generated text."""
        super().__init__()
        self.template = template
        self._model, self._tokenizer = model, tokenizer
        self._batch_size, self._progress = batch_size, progress

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation of a context, and whether greedy decoding gives it."""
        seq_len = self._model.shape.seq_len
        rows = [
            pair_row(self._tokenizer, seq_len, request.args[0], request.args[1], _where(request))
            for request in requests
        ]
        return [(score.log_likelihood, score.is_greedy) for score in self._score(rows)]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Return the log-likelihood of each text; every token is scored once."""
        rows: list[Row] = []
        counts = []
        for request in requests:
            of_text = rolling_rows(self._tokenizer, self._model.shape.seq_len, request.args[0])
            rows += of_text
            counts.append(len(of_text))
        scores = iter(self._score(rows))
        return [math.fsum(next(scores).log_likelihood for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Return the continuation of each context up to a stop string, the end of text or the most tokens."""
        texts: dict[int, str] = {}
        by_settings: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_settings.setdefault(repr(request.args[1]), []).append(index)
        for indices in by_settings.values():
            how = self._generation(requests[indices[0]])
            # Contexts of similar length exceed the model's positions together.
            indices.sort(key=lambda index: -len(requests[index].args[0]))
            for start in range(0, len(indices), self._batch_size):
                batch = indices[start : start + self._batch_size]
                contexts = [encode_text(self._tokenizer, requests[index].args[0]) for index in batch]
                texts.update(zip(batch, self._generate(contexts, how), strict=True))
                self._progress(len(batch))
        return [texts[index] for index in range(len(requests))]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text that the assistant's next turn continues, or else its last turn, which is begun."""
        if self.template is None:
            raise ConfigError("the model was evaluated without --chat, and a task asks for its chat template.")
        if add_generation_prompt:
            return self.template.render(chat_history, prompts=True)
        text = self.template.render(chat_history)
        begun = chat_history[-1]["content"]
        return text[: text.rindex(begun) + len(begun)]

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the template's source, which lm-eval records."""
        return "" if self.template is None else self.template.source

    @property
    def tokenizer_name(self) -> str:
        """Name by which lm-eval stores requests; it stores none here."""
        return ""

    def _score(self, rows: Sequence[Row]) -> list[RowScore]:
        return score_rows(self._model, rows, batch_size=self._batch_size, progress=self._progress)

    def _generation(self, request: Instance) -> _Generation:
        options: Mapping[str, object] = normalize_gen_kwargs(dict(request.args[1]), _MAX_NEW_TOKENS)
        most, seq_len = int(str(options["max_gen_toks"])), self._model.shape.seq_len
        if most >= seq_len:
            raise ConfigError(
                f"{_where(request)}: {most:,} tokens are to be generated (max_gen_toks), and the model sees "
                f"{seq_len:,} (its seq_len). Give fewer in the task's generation_kwargs."
            )
        draws = bool(options.get("do_sample"))
        settings = SamplingSettings(
            most,
            temperature=float(str(options.get("temperature", 1.0))) if draws else 0.0,
            top_k=int(str(options["top_k"])) if draws and options.get("top_k") else None,
            top_p=float(str(options["top_p"])) if draws and options.get("top_p") else None,
        )
        end = self._tokenizer.decode([self._tokenizer.eot_token])
        stops = handle_stop_sequences(options["until"], eos=end)
        if self.template is not None:
            stops = [*stops, self.template.end_of_turn]
        return _Generation(settings, tuple(stops), seq_len - most)

    def _generate(self, contexts: Sequence[list[int]], how: _Generation) -> list[str]:
        tokens: list[list[int]] = [[] for _ in contexts]
        steps = sample(
            self._model,
            [context[-how.max_context :] for context in contexts],
            how.settings,
            seeds=range(len(contexts)),
            eot_token=self._tokenizer.eot_token,
            vocab_size=self._tokenizer.vocab_size,
        )
        for chosen in steps:
            for number, token in chosen.items():
                tokens[number].append(token)
            # Text after a stop string is not needed.
            if all(how.is_stopped(self._tokenizer.decode(tokens[number])) for number in chosen):
                break
        return [postprocess_generated_text(self._tokenizer.decode(text), list(how.stops), None) for text in tokens]


@dataclass(frozen=True)
class _Generation:
    settings: SamplingSettings
    stops: tuple[str, ...]
    max_context: int
    """Most tokens of the context; its last ones are used."""

    def is_stopped(self, text: str) -> bool:
        return any(stop and stop in text for stop in self.stops)


def _where(request: Instance) -> str:
    return f"task {request.task_name}, document {request.doc_id}"
