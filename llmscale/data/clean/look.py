"""What can be said of a document by itself: the part of the work that many processes share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmscale.data.clean.decontaminate import find_overlaps
from llmscale.data.clean.exact import find_exact_key
from llmscale.data.clean.filters.c4 import C4Filter
from llmscale.data.clean.filters.fineweb import filter_fineweb
from llmscale.data.clean.filters.gopher import filter_quality, filter_repetition
from llmscale.data.clean.findings import Changed, ExactKey, Finding, Removed, SketchRow
from llmscale.data.clean.language import LanguageFilter
from llmscale.data.clean.measure import Measure, Size
from llmscale.data.clean.sketches import Sketches, sketch
from llmscale.data.clean.steps import CleanOptions, StepName
from llmscale.data.clean.text import Hashes, Text


@dataclass(frozen=True, slots=True)
class LookedDocument:
    """One document's findings, in the order of the steps: up to the first step that removes it whatever others hold."""

    sizes: list[Size]
    """Of its text as it came, then of each that a step made of it."""
    findings: dict[StepName, Finding]


@dataclass(frozen=True, slots=True)
class LookedBatch:
    """Neighbouring documents."""

    documents: list[LookedDocument]
    sketches: Sketches
    """Of those that came as far as the step near."""

    @property
    def exact_keys(self) -> list[int]:
        """Of those that came as far as the step exact."""
        found = (finding for document in self.documents for finding in document.findings.values())
        return [finding.key for finding in found if isinstance(finding, ExactKey)]


class Looker:
    """Looks at documents one by one. Steps that compare documents get what they compare by."""

    def __init__(self, options: CleanOptions, hashes_path: Path | None) -> None:
        """`hashes_path` holds the evaluation text's n-grams. Raises DataError."""
        self._options = options
        self._measure = Measure(options.tokenizer)
        hashes: Hashes = np.load(hashes_path, mmap_mode="r") if hashes_path else np.zeros(0, np.uint64)
        make: dict[StepName, Callable[[], Callable[[Text], Finding | None]]] = {
            "exact": lambda: find_exact_key,
            "language": lambda: LanguageFilter(options.languages, options.min_confidence),
            "gopher-repetition": lambda: filter_repetition,
            "gopher-quality": lambda: filter_quality,
            "c4": lambda: C4Filter(terminal_punctuation=options.terminal_punctuation),
            "fineweb": lambda: filter_fineweb,
            "decontaminate": lambda: lambda text: find_overlaps(text, hashes),
        }
        self._steps = [(step, make[step]() if step in make else None) for step in options.steps]

    def __call__(self, contents: Sequence[str]) -> LookedBatch:
        documents: list[dict[StepName, Finding]] = []
        versions: list[list[str]] = []
        to_sketch: list[Hashes] = []
        for content in contents:
            text = Text(content)
            findings: dict[StepName, Finding] = {}
            documents.append(findings)
            versions.append([content])
            for step, look in self._steps:
                if look is not None:
                    finding = look(text)
                elif len(text.word_hashes):
                    finding = SketchRow(len(to_sketch))
                    to_sketch.append(text.word_hashes)
                else:
                    finding = None  # nothing to compare by
                if finding is not None:
                    findings[step] = finding
                if isinstance(finding, Removed):
                    break
                if isinstance(finding, Changed):
                    text = Text(finding.text)
                    versions[-1].append(finding.text)
        # At once: encoders are fastest on many texts.
        sizes = iter(self._measure([text for texts in versions for text in texts]))
        looked = [
            LookedDocument([next(sizes) for _ in texts], findings)
            for texts, findings in zip(versions, documents, strict=True)
        ]
        return LookedBatch(looked, sketch(to_sketch, self._options.near))


@functools.cache
def _looker(options: CleanOptions, hashes_path: Path | None) -> Looker:
    return Looker(options, hashes_path)


def look_at(options: CleanOptions, hashes_path: Path | None, contents: Sequence[str]) -> LookedBatch:
    """What a worker process does; it loads once what it needs."""
    return _looker(options, hashes_path)(contents)
