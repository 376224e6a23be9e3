"""Text from the model every --sample-every steps, and where it is evaluated."""

from __future__ import annotations

from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer
from llmscale.engine.collectives import on_all_ranks, on_main_rank
from llmscale.evaluate.sampling import SamplingSettings
from llmscale.evaluate.text import encode_prompt, generate_text
from llmscale.training.actions.action import DoneStep, StepAction
from llmscale.training.live_run import LiveRun

_SETTINGS = SamplingSettings(max_new_tokens=48, temperature=0.8, top_k=50, top_p=None)


class SampleText(StepAction):
    """Generates on every rank alike, because ZeRO-3 gathers weights in every forward pass; the main rank prints.

    The main rank's choice of each token is everybody's: ranks that rounded differently would end at different tokens,
    and one would wait for ever for weights that the others gather no more.
    """

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        location = live.run.sets.first
        self._tokenizer = on_all_ranks(
            live.world.control, lambda: load_set_tokenizer(location.folder, location.manifest)
        )

    def due(self, step: int) -> bool:
        config, total_steps = self._live.run.config, self._live.run.resolved.total_steps
        if config.eval_every and step == total_steps:
            return True
        return any(every and step % every == 0 for every in (config.sample_every, config.eval_every))

    def act(self, done: DoneStep) -> None:
        live, config, prompts = self._live, self._live.run.config, self._live.run.prompts
        seq_len = live.run.resolved.shape.seq_len
        # What is longer than the model's context it would not see anyway.
        tokens_of = [encode_prompt(self._tokenizer, prompt)[-seq_len:] for prompt in prompts]
        texts = [""] * len(prompts)
        with live.meter.pause("evaluating"):
            pieces = generate_text(
                live.engine.module,
                self._tokenizer,
                tokens_of,
                _SETTINGS,
                seeds=[config.seed] * len(prompts),
                agree=lambda tokens: on_main_rank(live.world.control, lambda: tokens),
            )
            for piece in pieces:
                texts[piece.number] += piece.text
        if live.log:
            for prompt, text in zip(prompts, texts, strict=True):
                live.log.log_sample(done.step, prompt, prompt + text)
