"""Run the steps of `data clean`: annotate documents in worker processes, compare them in input order, report each."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from llmscale.data.clean.cleaned_set import REMOVED_FOLDER
from llmscale.data.clean.compare import Decide
from llmscale.data.clean.decontaminate import (
    MAX_NGRAM_DOCUMENTS,
    Decontaminated,
    Decontaminator,
    EvaluationNgrams,
    find_overlaps,
)
from llmscale.data.clean.exact import find_exact_key
from llmscale.data.clean.filters.c4 import C4Filter
from llmscale.data.clean.filters.fineweb import filter_fineweb
from llmscale.data.clean.filters.gopher import filter_quality, filter_repetition
from llmscale.data.clean.findings import Changed, ExactKey, Finding, Overlaps, Removed, SketchRow, Why
from llmscale.data.clean.jsonl_files import DocumentShards, FileFacts, JsonlFile
from llmscale.data.clean.language import LanguageFilter
from llmscale.data.clean.sketches import NearSettings, Sketches, sketch
from llmscale.data.clean.text import Hashes, Text
from llmscale.data.prepare.encoder import Encoder, choose_encoder
from llmscale.data.tokenizers.load_tokenizer import load_tokenizer
from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.errors import DataError, MachineError
from llmscale.suggestions import did_you_mean
from llmscale.untrusted.terminal import make_visible_line


class Size(NamedTuple):
    """Of a text."""

    words: int
    """Between whitespace."""
    bytes: int
    """Of UTF-8."""
    tokens: int = 0
    """As `data prepare` packs them, with what stands before and behind a document; 0 where nobody counts them."""

    def less(self, other: Size) -> Size:
        """What is left without the other."""
        return Size(self.words - other.words, self.bytes - other.bytes, self.tokens - other.tokens)


@dataclass
class Amount:
    """Of documents, all their sizes together."""

    documents: int = 0
    words: int = 0
    bytes: int = 0
    tokens: int = 0

    def add(self, documents: int, size: Size) -> None:
        """So many more documents, which together have this size."""
        self.documents += documents
        self.words += size.words
        self.bytes += size.bytes
        self.tokens += size.tokens

    def add_all(self, other: Amount) -> None:
        """Those of another."""
        self.add(other.documents, Size(other.words, other.bytes, other.tokens))


@dataclass(frozen=True)
class TokenizerName:
    """Whose tokens are counted, as `load_tokenizer` takes it."""

    spec: str
    eot_token: str = ""

    def load(self) -> Tokenizer:
        """Raises DataError."""
        return load_tokenizer(self.spec, eot_token=self.eot_token)


class Measure:
    """Sizes of texts. Tokens are those of the encoder that `data prepare` chooses."""

    def __init__(self, tokenizer: TokenizerName | None) -> None:
        """Raises DataError for a tokenizer that cannot be loaded."""
        self._tokenizer = tokenizer.load() if tokenizer else None
        self._encoder: Encoder | None = None

    def __call__(self, texts: Sequence[str]) -> list[Size]:
        """Of each text. Raises DataError for what the tokenizer cannot encode."""
        sizes = [Size(len(text.split()), len(text.encode())) for text in texts]
        if self._tokenizer is None or not texts:
            return sizes
        if self._encoder is None:
            self._encoder, _ = choose_encoder(self._tokenizer, "auto", texts)
        around = len(self._tokenizer.bos_tokens) + 1
        arrays = self._encoder.encode(texts)
        return [size._replace(tokens=len(array) + around) for size, array in zip(sizes, arrays, strict=True)]


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


Look = Callable[[Sequence[str]], LookedBatch]


@contextmanager
def start_workers(options: CleanOptions, hashes_path: Path | None, num_workers: int) -> Iterator[Look]:
    """A function that several threads may call, each call by another process; one worker is this process itself.

    It raises MachineError when a process died.
    """
    if num_workers == 1:
        yield Looker(options, hashes_path)
        return
    # Not fork: this process has threads.
    context = multiprocessing.get_context("spawn")
    try:
        pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_begin)
    except OSError as error:  # semaphores are files in /dev/shm
        raise _cannot_work(error) from error

    def look(contents: Sequence[str]) -> LookedBatch:
        try:
            return pool.submit(functools.partial(look_at, options, hashes_path), contents).result()
        except BrokenProcessPool:
            raise MachineError(
                "A worker process died, most likely of too little memory. Give fewer --workers, or more memory."
            ) from None
        except OSError as error:
            raise _cannot_work(error) from error

    try:
        yield look
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _cannot_work(error: OSError) -> MachineError:
    return MachineError(
        f"Worker processes cannot work: {error}. They need room in /dev/shm and open files (`ulimit -n`); --workers 1 "
        "needs none."
    )


def _begin() -> None:
    """In a worker: Ctrl-C is the parent's, threads are, and a parent that was killed takes the worker along."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["RAYON_NUM_THREADS"] = "1"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


#: Documents of which a report shows the beginning.
_MOST_EXAMPLES = 3
_EXAMPLE_CHARACTERS = 100


@dataclass
class StepReport:
    """One step's, in the order in which documents came to it."""

    step: StepName
    taken_in: Amount = field(default_factory=Amount)
    removed: Amount = field(default_factory=Amount)
    """Whole documents, and the parts of those that were changed."""
    num_changed: int = 0
    """Documents that stay with less text."""
    rules: Counter[str] = field(default_factory=Counter)
    """How often each rule took something."""
    examples: list[tuple[int, str, Why]] = field(default_factory=list)
    """Id, beginning of the text, and why."""

    def note(self, number: int, text: str, why: Why) -> None:
        """One more document or part of one that was taken."""
        self.rules[str(why["rule"])] += 1
        if len(self.examples) < _MOST_EXAMPLES:
            self.examples.append((number, text[: 4 * _EXAMPLE_CHARACTERS], why))

    def add_all(self, later: StepReport) -> None:
        """What the same step took of documents behind these."""
        self.taken_in.add_all(later.taken_in)
        self.removed.add_all(later.removed)
        self.num_changed += later.num_changed
        self.rules.update(later.rules)
        self.examples = (self.examples + later.examples)[:_MOST_EXAMPLES]

    def to_record(self) -> dict[str, object]:
        """For JSON."""
        return {**vars(self), "taken_in": asdict(self.taken_in), "removed": asdict(self.removed)}

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> StepReport:
        """What `to_record` gave."""
        amounts = {"taken_in": Amount(**record["taken_in"]), "removed": Amount(**record["removed"])}
        return cls(**{**record, **amounts, "rules": Counter(record["rules"])})

    def describe_examples(self) -> list[str]:
        """A line each, safe for a terminal."""
        return [
            f"#{number} {describe_why(why)}: {make_visible_line(' '.join(text.split()))[:_EXAMPLE_CHARACTERS]}"
            for number, text, why in self.examples
        ]


def describe_why(why: Why) -> str:
    """In a few words, safe for a terminal."""
    rest = ", ".join(f"{key} {value}" for key, value in why.items() if key != "rule")
    return make_visible_line(f"{why['rule']}{f' ({rest})' if rest else ''}")[:_EXAMPLE_CHARACTERS]


class RemovedFile:
    """The file of what a step took, and its report."""

    def __init__(self, folder: Path, place: int, step: StepName) -> None:
        """Raises OSError."""
        self.report = StepReport(step)
        self._file = JsonlFile(folder / f"{place:02}-{step}.jsonl.zst")

    def remove(self, number: int, text: str, why: Why, size: Size) -> None:
        """A whole document goes. Raises OSError."""
        self.report.removed.add(1, size)
        self._write(number, text, why, "document")

    def change(self, number: int, parts: list[tuple[str, Why]], size: Size) -> None:
        """A document stays without these parts, which together have this size. Raises OSError."""
        self.report.removed.add(0, size)
        self.report.num_changed += 1
        for text, why in parts:
            self._write(number, text, why, "part")

    def _write(self, number: int, text: str, why: Why, what: str) -> None:
        self._file.write({"id": number, "removed": what, **why, "text": text})
        self.report.note(number, text, why)

    def finish(self) -> FileFacts:
        """Raises OSError."""
        return self._file.finish()

    def close(self) -> None:
        """Let go of it, whole or not."""
        self._file.close()


#: Numbers of documents are kept in 32 bits.
MAX_DOCUMENTS = 1 << 32
_SCRATCH_HELD = "held.jsonl"


class Pipeline:
    """Writes what is left and what was removed into a folder."""

    def __init__(
        self,
        folder: Path,
        options: CleanOptions,
        shard_bytes: int,
        decide: Decide,
        ngrams: EvaluationNgrams | None,
        *,
        first_number: int = 0,
        ngram_counts: NDArray[np.uint32] | None = None,
    ) -> None:
        """`decide` is what the steps say that compare documents. `first_number` is the first document's in the whole
        input, and `ngram_counts` how many documents of it have each of `ngrams`, where that is known. Raises OSError,
        DataError for a tokenizer that cannot be loaded."""
        self.taken_in, self.kept = Amount(), Amount()
        self._first_number = first_number
        self._decide_comparing = decide
        self._shards = DocumentShards(folder, shard_bytes)
        (folder / REMOVED_FOLDER).mkdir()
        self._files: dict[StepName, RemovedFile] = {
            step: RemovedFile(folder / REMOVED_FOLDER, place, step) for place, step in enumerate(options.steps, start=1)
        }
        self._decontaminator: Decontaminator | None = None
        if ngrams is not None:
            held = folder / _SCRATCH_HELD
            self._decontaminator = Decontaminator(ngrams, held, options.max_ngram_documents, ngram_counts)
            self._measure = Measure(options.tokenizer)

    @property
    def reports(self) -> list[StepReport]:
        return [file.report for file in self._files.values()]

    @property
    def num_ignored_ngrams(self) -> int:
        return self._decontaminator.num_ignored if self._decontaminator else 0

    def add(self, contents: Sequence[str], looked: Sequence[LookedDocument]) -> None:
        """Neighbouring documents, with what was found of each. Raises OSError."""
        for content, document in zip(contents, looked, strict=True):
            check_number(self._first_number + self.taken_in.documents)
            self._pass_through(content, document)

    def _pass_through(self, content: str, document: LookedDocument) -> None:
        number, sizes = self._first_number + self.taken_in.documents, iter(document.sizes)
        size = next(sizes)
        self.taken_in.add(1, size)
        for step, file in self._files.items():
            file.report.taken_in.add(1, size)
            finding = self._decide(number, document.findings.get(step))
            if isinstance(finding, Removed):
                file.remove(number, content, finding.why, size)
                return
            if isinstance(finding, Changed):
                left = next(sizes)
                file.change(number, finding.parts, size.less(left))
                content, size = finding.text, left
            elif isinstance(finding, Overlaps):
                assert self._decontaminator is not None
                self._decontaminator.hold(number, content, finding)
                return
        self._keep({"id": number, "text": content}, size)

    def _decide(self, number: int, finding: Finding | None) -> Finding | None:
        return self._decide_comparing(number, finding) if isinstance(finding, (ExactKey, SketchRow)) else finding

    def _keep(self, record: dict[str, str | int], size: Size) -> None:
        self._shards.write(record)
        self.kept.add(1, size)

    def finish(self) -> tuple[list[FileFacts], list[FileFacts]]:
        """The files of what is left, and of what was removed. Raises OSError."""
        if self._decontaminator is not None:
            for document in self._decontaminator.finish():
                self._decontaminated(document)
        return self._shards.finish(), [file.finish() for file in self._files.values()]

    def _decontaminated(self, document: Decontaminated) -> None:
        file, number = self._files["decontaminate"], document.number
        whole, *sizes = self._measure([document.text, *document.pieces])
        if not document.pieces:
            [(text, why)] = document.cuts
            file.remove(number, text, why, whole)
        elif document.cuts:
            file.change(number, document.cuts, functools.reduce(Size.less, sizes, whole))
        for place, (piece, size) in enumerate(zip(document.pieces, sizes, strict=True)):
            record: dict[str, str | int] = {"id": number, "text": piece}
            if document.cuts:
                record = {"id": number, "piece": place, "text": piece}
            self._keep(record, size)

    def close(self) -> None:
        """Let go of all files, whole or not."""
        with suppress(OSError):
            for file in self._files.values():
                file.close()
            self._shards.close()
            if self._decontaminator is not None:
                self._decontaminator.close()


def check_number(number: int) -> None:
    """Raises DataError for a document that cannot be counted."""
    if number >= MAX_DOCUMENTS:
        raise DataError(f"The input has more than {MAX_DOCUMENTS:,} documents. Clean it in parts.")
