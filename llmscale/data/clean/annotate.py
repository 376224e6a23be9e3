"""Annotate documents: apply each step that judges a document alone, and find what the others compare it by.

Documents are annotated in worker processes, in any order; stages.py then decides in input order.
"""

from __future__ import annotations

import functools
import multiprocessing
import operator
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np

from llmscale.data.clean.decontaminate import MAX_NGRAM_DOCUMENTS, find_overlaps
from llmscale.data.clean.duplicates import NearSettings, Sketches, find_exact_key, sketch
from llmscale.data.clean.filters import (
    C4Filter,
    Changed,
    ExactKey,
    Finding,
    Hashes,
    LanguageFilter,
    Removed,
    SketchRow,
    Text,
    filter_fineweb,
    filter_quality,
    filter_repetition,
)
from llmscale.data.prepare.encoder import Encoder, choose_encoder
from llmscale.data.tokenizers.load_tokenizer import load_tokenizer
from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.errors import DataError, MachineError
from llmscale.suggestions import did_you_mean


class Counts(NamedTuple):
    """Number of documents, and their total size."""

    documents: int = 0
    words: int = 0
    """Words between whitespace."""
    bytes: int = 0
    """Bytes of UTF-8."""
    tokens: int = 0
    """Tokens as `data prepare` packs them, special tokens included; 0 without a tokenizer."""

    def plus(self, other: Counts) -> Counts:
        return Counts(*map(operator.add, self, other))

    def minus(self, other: Counts) -> Counts:
        return Counts(*map(operator.sub, self, other))


@dataclass(frozen=True)
class TokenizerName:
    """A tokenizer to count tokens of, as `load_tokenizer` takes it."""

    spec: str
    eot_token: str = ""

    def load(self) -> Tokenizer:
        """Load it. Raises DataError."""
        return load_tokenizer(self.spec, eot_token=self.eot_token)


class Measure:
    """Measure texts, in tokens by the encoder that `data prepare` chooses."""

    def __init__(self, tokenizer: TokenizerName | None) -> None:
        """Raises DataError for a tokenizer that cannot be loaded."""
        self._tokenizer = tokenizer.load() if tokenizer else None
        self._encoder: Encoder | None = None

    def __call__(self, texts: Sequence[str]) -> list[Counts]:
        """Return the size of each text. Raises DataError for text that the tokenizer cannot encode."""
        sizes = [Counts(1, len(text.split()), len(text.encode())) for text in texts]
        if self._tokenizer is None or not texts:
            return sizes
        if self._encoder is None:
            self._encoder, _ = choose_encoder(self._tokenizer, "auto", texts)
        around = len(self._tokenizer.bos_tokens) + 1
        arrays = self._encoder.encode(texts)
        return [size._replace(tokens=len(array) + around) for size, array in zip(sizes, arrays, strict=True)]


StepName = Literal["exact", "language", "gopher-repetition", "gopher-quality", "c4", "fineweb", "near", "decontaminate"]
#: All steps in the order of FineWeb's recipe: cheap ones that remove much first, those that compare documents last.
STEP_NAMES: tuple[StepName, ...] = get_args(StepName)


@dataclass(frozen=True)
class CleanOptions:
    """Steps and their settings. Raises DataError for a combination that cannot work."""

    steps: tuple[StepName, ...] = ("exact", "gopher-repetition", "gopher-quality", "c4", "fineweb", "near")
    languages: tuple[str, ...] = ()
    """ISO 639 codes of the languages to keep."""
    min_confidence: float = 0.5
    """Lowest probability of the language found at which a document is kept."""
    terminal_punctuation: bool = False
    """Let c4 remove lines without a mark that ends a sentence."""
    near: NearSettings = field(default_factory=NearSettings)
    decontaminate: tuple[Path, ...] = ()
    """Files of evaluation text."""
    max_ngram_documents: int = MAX_NGRAM_DOCUMENTS
    """Number of documents above which an n-gram is ignored."""
    tokenizer: TokenizerName | None = None
    """Tokenizer to count tokens of."""

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
                "The step decontaminate must be the last of --steps: it counts how many of the documents that are left "
                "contain an n-gram."
            )

    def settings_of(self, step: StepName) -> dict[str, str | int | float | bool]:
        """Return the settings of a step, by flag."""
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
    """Return the steps of these names. Raises DataError for an unknown name."""
    known: dict[str, StepName] = {name: name for name in STEP_NAMES}
    for name in names:
        if name not in known:
            raise DataError(
                f"--steps: unknown step '{name}'.{did_you_mean(name, STEP_NAMES)} Legal: {', '.join(STEP_NAMES)}."
            )
    return tuple(known[name] for name in names)


def default_steps(*, has_languages: bool, has_evaluation_text: bool) -> tuple[StepName, ...]:
    """Return all steps except those whose input is not given."""
    if not has_languages:
        left_out = {"language"}
    else:
        left_out = set()
    left_out |= {"decontaminate"} if not has_evaluation_text else set()
    return tuple(name for name in STEP_NAMES if name not in left_out)


@dataclass(frozen=True, slots=True)
class DocumentAnnotations:
    """Findings about one document, up to the first step that removes it without comparing it with others."""

    sizes: list[Counts]
    """Size of the original text, then of each text that a step changed it to."""
    findings: dict[StepName, Finding]
    """Findings in the order of the steps; a step that found nothing is absent."""


@dataclass(frozen=True, slots=True)
class Annotations:
    """Annotations of consecutive documents."""

    documents: list[DocumentAnnotations]
    sketches: Sketches
    """Sketches of the documents that reached the step near."""

    @property
    def exact_keys(self) -> list[int]:
        """Keys of the documents that reached the step exact."""
        findings = (finding for document in self.documents for finding in document.findings.values())
        return [finding.key for finding in findings if isinstance(finding, ExactKey)]


class Annotator:
    """Annotate documents. Steps that compare documents get a key or a sketch instead of a decision."""

    def __init__(self, options: CleanOptions, ngram_hashes: Hashes | None) -> None:
        """Take hashes of evaluation text's n-grams, sorted. Raises DataError."""
        self._options = options
        self._measure = Measure(options.tokenizer)
        if ngram_hashes is None:
            hashes = np.zeros(0, np.uint64)
        else:
            hashes = ngram_hashes
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

    def __call__(self, contents: Sequence[str]) -> Annotations:
        documents: list[dict[StepName, Finding]] = []
        versions: list[list[str]] = []
        to_sketch: list[Hashes] = []
        for content in contents:
            text = Text(content)
            findings: dict[StepName, Finding] = {}
            documents.append(findings)
            versions.append([content])
            for step, judge in self._steps:
                if judge is not None:
                    finding = judge(text)
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
        # All at once: encoders are fastest on many texts.
        sizes = iter(self._measure([text for texts in versions for text in texts]))
        annotated = [
            DocumentAnnotations([next(sizes) for _ in texts], findings)
            for texts, findings in zip(versions, documents, strict=True)
        ]
        return Annotations(annotated, sketch(to_sketch, self._options.near))


@functools.cache
def _load_annotator(options: CleanOptions, hashes_path: Path | None) -> Annotator:
    return Annotator(options, np.load(hashes_path, mmap_mode="r") if hashes_path else None)


def _annotate_in_worker(options: CleanOptions, hashes_path: Path | None, contents: Sequence[str]) -> Annotations:
    return _load_annotator(options, hashes_path)(contents)


Annotate = Callable[[Sequence[str]], Annotations]


@contextmanager
def start_workers(options: CleanOptions, hashes_path: Path | None, num_workers: int) -> Iterator[Annotate]:
    """Yield a function that annotates documents in a worker process, and that several threads may call at once.

    With one worker it runs in this process. `hashes_path` holds the hashes of evaluation text's n-grams. The function
    raises MachineError when a process dies.
    """
    if num_workers == 1:
        yield _load_annotator.__wrapped__(options, hashes_path)
        return
    # Not fork: this process has threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_begin_worker) as pool:

        def annotate(contents: Sequence[str]) -> Annotations:
            try:
                return pool.submit(_annotate_in_worker, options, hashes_path, contents).result()
            except BrokenProcessPool:
                raise MachineError(
                    "A worker process died, probably out of memory. Give fewer --workers, or more memory."
                ) from None

        try:
            yield annotate
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin_worker() -> None:
    """Leave Ctrl-C and threads to the parent, and exit when the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["RAYON_NUM_THREADS"] = "1"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
