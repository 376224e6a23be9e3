"""Cog's prediction: generate text from weights of cog_train.py."""

from __future__ import annotations

import os
import sys
import tarfile
import tempfile
from pathlib import Path as LocalPath

from cog import BasePredictor, ConcatenateIterator, Input, Path

# Cog copies the repository without installing it.
sys.path.insert(0, str(LocalPath(__file__).resolve().parents[2]))

from llmscale.checkpoint.inventory import find_checkpoint
from llmscale.engine.deepspeed_patches import quiet_libraries
from llmscale.evaluate.generate import SamplingSettings, encode_prompt, generate_text
from llmscale.evaluate.model_source import open_model


class Predictor(BasePredictor):
    """One loaded model."""

    def setup(self, weights: Path | None = None) -> None:
        """Load the model from cog_train.py's archive, which Cog downloads. Raises ValueError without weights."""
        archive = weights or os.environ.get("COG_WEIGHTS")
        if not archive:
            raise ValueError("no weights: run the training first, or name its archive in COG_WEIGHTS.")
        quiet_libraries()
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(str(archive)) as tar:
                # The filter refuses names that lead out of the folder.
                tar.extractall(folder, filter="data")
            source = open_model(find_checkpoint(LocalPath(folder) / "run"))
            self.model, self.tokenizer = source.load_model(), source.tokenizer

    def predict(
        self,
        prompt: str = Input(description="Text to continue", default=""),
        max_new_tokens: int = Input(description="Tokens to generate", default=200, ge=1, le=4096),
        temperature: float = Input(description="0 takes the most likely token", default=0.8, ge=0.0, le=5.0),
        top_k: int = Input(description="Sample from the k most likely tokens", default=50, ge=1),
        top_p: float = Input(
            description="Sample from the most likely tokens up to this total probability", default=1.0, ge=0.01, le=1.0
        ),
        seed: int = Input(description="Seed of the sampling", default=1337),
    ) -> ConcatenateIterator[str]:
        """Yield pieces of the text as they are generated."""
        settings = SamplingSettings(max_new_tokens, temperature, top_k, top_p)
        prompts = [encode_prompt(self.tokenizer, prompt)]
        for chunk in generate_text(self.model, self.tokenizer, prompts, settings, seeds=[seed]):
            yield chunk.text
