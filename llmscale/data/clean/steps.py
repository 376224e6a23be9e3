"""The steps: their names, their order, and what they are set to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from llmscale.data.clean.decontaminate import MAX_NGRAM_DOCUMENTS
from llmscale.data.clean.measure import TokenizerName
from llmscale.data.clean.sketches import NearSettings
from llmscale.errors import DataError, did_you_mean

StepName = Literal["exact", "language", "gopher-repetition", "gopher-quality", "c4", "fineweb", "near", "decontaminate"]
#: All of them, in the order of FineWeb's recipe: what is cheap and takes much first, what compares documents last.
STEP_NAMES: tuple[StepName, ...] = get_args(StepName)


@dataclass(frozen=True)
class CleanOptions:
    """What to do. Raises DataError for what cannot work."""

    steps: tuple[StepName, ...] = ("exact", "gopher-repetition", "gopher-quality", "c4", "fineweb", "near")
    languages: tuple[str, ...] = ()
    """ISO 639 codes of the languages that stay."""
    min_confidence: float = 0.5
    """Of the language that a document is taken to be in."""
    terminal_punctuation: bool = False
    """Whether c4 takes lines that end in no mark that ends a sentence."""
    near: NearSettings = field(default_factory=NearSettings)
    decontaminate: tuple[Path, ...] = ()
    """Files of evaluation text."""
    max_ngram_documents: int = MAX_NGRAM_DOCUMENTS
    """N-grams in more documents than these are ignored."""
    tokenizer: TokenizerName | None = None
    """Whose tokens are counted."""

    def __post_init__(self) -> None:
        if not self.steps:
            raise DataError(f"--steps names no step. Legal: {', '.join(STEP_NAMES)}.")
        if len(set(self.steps)) < len(self.steps):
            raise DataError(f"--steps {','.join(self.steps)} names a step twice.")
        for step, flag, values in (
            ("language", "--languages", self.languages),
            ("decontaminate", "--decontaminate", self.decontaminate),
        ):
            if step in self.steps and not values:
                raise DataError(f"The step {step} needs {flag}. Give it, or leave the step out of --steps.")
            if values and step not in self.steps:
                raise DataError(f"{flag} is given, and --steps leaves out {step}. Add it, or drop {flag}.")
        if "decontaminate" in self.steps and self.steps[-1] != "decontaminate":
            raise DataError(
                "The step decontaminate must be the last of --steps: it counts in how many of the documents left an "
                "n-gram stands."
            )

    def settings_of(self, step: StepName) -> dict[str, str | int | float | bool]:
        """What decides about the step's result, by flag."""
        near = self.near
        settings: dict[StepName, dict[str, str | int | float | bool]] = {
            "language": {"--languages": ",".join(self.languages), "--min-confidence": self.min_confidence},
            "c4": {"--terminal-punctuation": self.terminal_punctuation},
            "near": {
                "--permutations": near.permutations,
                "--bands": near.bands,
                "--similarity": near.threshold,
                "--shingle-words": near.shingle_words,
                "--seed": near.seed,
            },
            "decontaminate": {"--max-ngram-documents": self.max_ngram_documents},
        }
        return settings.get(step, {})


def parse_steps(names: Sequence[str]) -> tuple[StepName, ...]:
    """Raises DataError for a name that is no step's."""
    known: dict[str, StepName] = {name: name for name in STEP_NAMES}
    for name in names:
        if name not in known:
            raise DataError(
                f"--steps: there is no step '{name}'.{did_you_mean(name, STEP_NAMES)} Legal: {', '.join(STEP_NAMES)}."
            )
    return tuple(known[name] for name in names)


def default_steps(*, has_languages: bool, has_evaluation_text: bool) -> tuple[StepName, ...]:
    """All steps, without those for which nothing is given."""
    left_out = {"language"} if not has_languages else set()
    left_out |= {"decontaminate"} if not has_evaluation_text else set()
    return tuple(name for name in STEP_NAMES if name not in left_out)
