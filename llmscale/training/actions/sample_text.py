"""Text from the model every --sample-every steps."""

from __future__ import annotations

from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer
from llmscale.engine.collectives import together
from llmscale.evaluate.text import generate_text
from llmscale.training.actions.action import DoneStep, StepAction
from llmscale.training.live_run import LiveRun

#: Tokens per sample.
_SAMPLE_TOKENS = 48


class SampleText(StepAction):
    """Generates on every rank alike, because ZeRO-3 gathers weights in every forward pass; the main rank prints."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        location = live.run.location
        self._tokenizer = together(live.world.control, lambda: load_set_tokenizer(location.folder, location.manifest))

    def due(self, step: int) -> bool:
        return step % self._live.run.config.sample_every == 0

    def act(self, done: DoneStep) -> None:
        config = self._live.run.config
        with self._live.meter.pause():
            pieces = generate_text(
                self._live.engine.module,
                self._tokenizer,
                config.sample_prompt,
                max_new_tokens=_SAMPLE_TOKENS,
                temperature=0.8,
                top_k=50,
                top_p=None,
                seed=config.seed,
            )
            text = config.sample_prompt + "".join(pieces)
        self._live.report(f"step {done.step:>6}/{self._live.run.resolved.total_steps} | sample: {text!r}")
