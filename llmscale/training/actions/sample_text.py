"""Text from the model every --sample-every steps."""

from __future__ import annotations

from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer
from llmscale.engine.collectives import on_main_rank, together
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
        self._tokenizer = together(live.world.control, lambda: load_set_tokenizer(location.folder, location.manifest))

    def due(self, step: int) -> bool:
        return step % self._live.run.config.sample_every == 0

    def act(self, done: DoneStep) -> None:
        live, config = self._live, self._live.run.config
        # What is longer than the model's context it would not see anyway.
        prompt = encode_prompt(self._tokenizer, config.sample_prompt)[-live.run.resolved.shape.seq_len :]
        with live.meter.pause("evaluating"):
            pieces = generate_text(
                live.engine.module,
                self._tokenizer,
                [prompt],
                _SETTINGS,
                seeds=[config.seed],
                agree=lambda tokens: on_main_rank(live.world.control, lambda: tokens),
            )
            text = config.sample_prompt + "".join(piece.text for piece in pieces)
        live.report(f"step {done.step:>6}/{live.run.resolved.total_steps} | sample: {text!r}")
