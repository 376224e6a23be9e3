"""Clean an input in three stages: annotate each part, find the duplicates, write each part.

A local run has one part, and on Ray all machines share the job's folder. Each folder in it appears by one rename, so a
folder that exists is complete:

    annotated/00003/  texts of part 3, their annotations, the keys that they are compared by
    duplicates/       duplicates among the documents of each part, counts of n-grams
    written/00003/    documents of part 3 that were kept and removed, and a report

A document that shares neither its text's hash nor a band with another has no duplicate. So the second stage, a single
task, compares only the others, in input order.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import pickle
import secrets
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from llmscale.data.clean.annotate import (
    Annotate,
    Annotations,
    Annotator,
    CleanOptions,
    Counts,
    DocumentAnnotations,
    Measure,
    StepName,
)
from llmscale.data.clean.decontaminate import Decontaminator, EvaluationNgrams
from llmscale.data.clean.duplicates import ExactIndex, NearIndex
from llmscale.data.clean.filters import Changed, ExactKey, Overlaps, Removed, SketchRow, Why
from llmscale.data.prepare.output_folder import RejectedRecords, sync_tree
from llmscale.data.prepare.sources.clean_folder import REMOVED_FOLDER, shard_name
from llmscale.data.prepare.sources.source import PassedOver, Source
from llmscale.data.prepare.tokenise import Batch, ReadPosition, gather
from llmscale.errors import DataError
from llmscale.untrusted.terminal import make_visible_line

_TEXTS_NAME = "texts.zst"
_ANNOTATIONS_NAME = "annotations.zst"
_RESULT_NAME = "result.pickle"
_EXACT_KEYS_NAME = "exact_keys.npy"
_BAND_KEYS_NAME = "band_keys.npy"
_COUNTS_NAME = "ngram_counts.npy"
_REJECTED_NAME = "rejected.jsonl"
_COUNTED = ("num_empty", "num_rejected", "num_cut", "num_skipped")
#: Indexes hold numbers of documents in 32 bits.
MAX_DOCUMENTS = 1 << 32
#: Level of zstd for text that was kept or removed.
_LEVEL = 3
#: Removed texts of which a report shows the beginning.
_MOST_EXAMPLES = 3
_EXAMPLE_CHARACTERS = 100


@dataclass(frozen=True)
class CleanJob:
    """Input in parts, settings, and the folder for results. It is pickled to the workers of a cluster."""

    folder: Path
    """Absolute path that all machines can reach."""
    parts: Sequence[Source]
    """Consecutive parts of the input."""
    options: CleanOptions
    ngrams: EvaluationNgrams | None
    """N-grams of evaluation text, for the step decontaminate."""
    max_rejected: int
    shard_bytes: int

    def annotated(self, part: int) -> Path:
        return self.folder / "annotated" / f"{part:05}"

    @property
    def duplicates(self) -> Path:
        return self.folder / "duplicates"

    def written(self, part: int) -> Path:
        return self.folder / "written" / f"{part:05}"


@dataclass(frozen=True)
class CleanResult:
    """Counts, reports and files of a finished job, or of a part."""

    taken_in: Counts
    kept: Counts
    reports: list[StepReport]
    mark: ReadPosition
    """Reader position after the last record, with the counts of empty and rejected records."""
    documents: Sequence[FileFacts] = ()
    """Files of the documents that were kept."""
    removed: Sequence[FileFacts] = ()
    """Files of the text that was removed."""
    num_ignored_ngrams: int = 0
    """N-grams of evaluation text that occur in too many documents."""
    num_short_items: int = 0
    """Items of evaluation text with too few words to look for."""
    passed_over: set[PassedOver] = field(default_factory=set)
    """Files that other machines skipped."""
    reused: bool = False
    """True where the folder existed already and nothing was done."""

    def check_anything_left(self, name: str) -> None:
        """Raise DataError when no document of the source `name` was kept."""
        if self.kept.documents:
            return
        if not self.taken_in.documents:
            raise DataError(f"{name} has no text.")
        worst = max(self.reports, key=lambda report: report.removed.documents)
        rules = ", ".join(f"{rule} {count:,}" for rule, count in worst.rules.most_common(3))
        raise DataError(
            f"{name}: nothing is left of {self.taken_in.documents:,} documents. The step {worst.step} took "
            f"{worst.removed.documents:,} of them ({rules}). Leave it out of --steps, or change its settings."
        )


AnnotatedBatch = tuple[Batch, list[str], Annotations]
#: Annotates batches, and yields each with its texts and their annotations, in order.
AnnotateBatches = Callable[[Iterable[Batch]], Iterator[AnnotatedBatch]]


@dataclass(frozen=True)
class Stage:
    """Tasks that do not depend on each other, and that start when the previous stage is complete."""

    name: str
    num_tasks: int
    run: Callable[[CleanJob, int], None]
    result: Callable[[CleanJob, int], Path]
    """Folder that a task leaves; it exists if and only if the task is complete."""


def plan_stages(num_parts: int, annotate_batches: AnnotateBatches | None = None) -> list[Stage]:
    """Return the stages in order. Without `annotate_batches` a task annotates in its own process."""
    if annotate_batches is None:
        annotate = annotate_part
    else:
        annotate = functools.partial(annotate_part, using=annotate_batches)
    return [
        Stage("1-annotate", num_parts, annotate, CleanJob.annotated),
        Stage("2-duplicates", 1, find_duplicates, lambda job, task: job.duplicates),
        Stage("3-write", num_parts, write_part, CleanJob.written),
    ]


def annotate_batch(batch: Batch, annotate: Annotate) -> AnnotatedBatch:
    """Annotate a batch."""
    texts = [document for document in batch.documents if isinstance(document, str)]
    return batch, texts, annotate(texts)


def annotate_part(job: CleanJob, part: int, using: AnnotateBatches | None = None) -> None:
    """First stage: annotate a part's documents. Raises DataError, OSError, MachineError."""
    if using is None:
        annotator = Annotator(job.options, job.ngrams.hashes if job.ngrams else None)
        using = functools.partial(map, lambda batch: annotate_batch(batch, annotator))
    source = job.parts[part]
    mark = ReadPosition()
    num_documents = 0
    exact_keys = array("Q")
    band_keys = list[NDArray[np.uint32]]()
    with (
        _new_folder(job.annotated(part)) as folder,
        _pickle_file(folder / _TEXTS_NAME) as save_texts,
        _pickle_file(folder / _ANNOTATIONS_NAME) as save_annotations,
    ):
        rejected = RejectedRecords(folder / _REJECTED_NAME, job.max_rejected)
        for batch, texts, annotations in using(gather(source, None, mark)):
            save_texts(texts)
            save_annotations((annotations.documents, annotations.sketches.minima))
            exact_keys.extend(annotations.exact_keys)
            band_keys.append(annotations.sketches.band_keys)
            num_documents += len(texts)
            rejected.add(batch.rejected)
            mark = batch.mark
        np.save(folder / _EXACT_KEYS_NAME, np.array(exact_keys, np.uint64))
        # [bands, documents]: the next stage reads one band at a time.
        np.save(folder / _BAND_KEYS_NAME, np.ascontiguousarray(np.concatenate(band_keys).T))
        result = num_documents, replace(mark, place=()), source.passed_over
        (folder / _RESULT_NAME).write_bytes(pickle.dumps(result))


def find_duplicates(job: CleanJob, _task: int = 0) -> None:
    """Second stage (a single task): decide in input order which documents are duplicates, and count n-grams.

    Raises DataError, OSError.
    """
    parts = [job.annotated(part) for part in range(len(job.parts))]
    exact_index = ExactIndex(np.concatenate([np.load(part / _EXACT_KEYS_NAME) for part in parts]))
    band_keys = [np.load(part / _BAND_KEYS_NAME, mmap_mode="r") for part in parts]
    bands = (np.concatenate([keys[band] for keys in band_keys]) for band in range(job.options.near.bands))
    near_index = NearIndex(job.options.near, bands)
    num_sketches = 0
    counts = np.zeros(len(job.ngrams.hashes) if job.ngrams else 0, np.uint32)
    number = 0
    with _new_folder(job.duplicates) as folder:
        for part, annotated in enumerate(parts):
            with _pickle_file(folder / f"{part:05}.zst") as save:
                for documents, minima in _read_pickles(annotated / _ANNOTATIONS_NAME):
                    removed = dict[tuple[int, StepName], Removed]()
                    for document in documents:
                        is_kept = True
                        for step, finding in document.findings.items():
                            decision = None
                            if isinstance(finding, SketchRow):
                                if is_kept:
                                    decision = near_index.decide(number, num_sketches, minima[finding.row])
                                num_sketches += 1
                            elif isinstance(finding, ExactKey) and is_kept:
                                decision = exact_index.decide(number, finding.key)
                            elif isinstance(finding, Overlaps) and is_kept:
                                counts[finding.ngrams] += 1
                            if decision is not None:
                                removed[number, step] = decision
                                is_kept = False
                        number += 1
                    save(removed)
        if number > MAX_DOCUMENTS:
            raise DataError(f"The input has more than {MAX_DOCUMENTS:,} documents. Clean it in parts.")
        np.save(folder / _COUNTS_NAME, counts)


def write_part(job: CleanJob, part: int) -> None:
    """Third stage: write a part's documents that are kept, and those that were removed. Raises DataError, OSError."""
    first_number = sum(read_annotated(job, earlier)[0] for earlier in range(part))
    _, mark, passed_over = read_annotated(job, part)
    decontaminator = None
    if job.ngrams is not None:
        counts = np.load(job.duplicates / _COUNTS_NAME)
        decontaminator = Decontaminator(job.ngrams, counts, job.options.max_ngram_documents)
    with _new_folder(job.written(part)) as folder:
        writer = Writer(folder, job.options, job.shard_bytes, first_number, decontaminator)
        texts = _read_pickles(job.annotated(part) / _TEXTS_NAME)
        annotated = _read_pickles(job.annotated(part) / _ANNOTATIONS_NAME)
        duplicates = _read_pickles(job.duplicates / f"{part:05}.zst")
        for contents, (documents, _), copies in zip(texts, annotated, duplicates, strict=True):
            writer.add(contents, documents, copies)
        kept, removed = writer.finish()
        counted = writer.taken_in, writer.kept, list(writer.reports.values())
        result = CleanResult(*counted, mark, kept, removed, passed_over=passed_over)
        (folder / _RESULT_NAME).write_bytes(pickle.dumps(result))


def read_annotated(job: CleanJob, part: int) -> tuple[int, ReadPosition, set[PassedOver]]:
    """Return an annotated part's documents, its end with counts of malformed records, and skipped files.

    Raises OSError.
    """
    result: tuple[int, ReadPosition, set[PassedOver]] = pickle.loads((job.annotated(part) / _RESULT_NAME).read_bytes())
    return result


def join_parts(job: CleanJob, folder: Path) -> CleanResult:
    """Move the files of all parts into `folder` and add up their results. It can be repeated after a kill.

    Raises OSError.
    """
    (folder / REMOVED_FOLDER).mkdir(parents=True, exist_ok=True)
    taken_in = Counts()
    kept = Counts()
    mark = ReadPosition(is_end=True)
    reports = [StepReport(step) for step in job.options.steps]
    passed_over = set[PassedOver]()
    documents = list[FileFacts]()
    removed = list[FileFacts]()
    for part in range(len(job.parts)):
        source = job.written(part)
        result: CleanResult = pickle.loads((source / _RESULT_NAME).read_bytes())
        taken_in = taken_in.plus(result.taken_in)
        kept = kept.plus(result.kept)
        mark = replace(mark, **{name: getattr(mark, name) + getattr(result.mark, name) for name in _COUNTED})
        passed_over |= result.passed_over
        for report, of_part in zip(reports, result.reports, strict=True):
            report.add_all(of_part)
        for file in result.documents:
            documents.append(replace(file, name=shard_name(len(documents))))
            _move(source / file.name, folder / documents[-1].name)
        removed += _move_removed(job, part, result.removed, folder)
    removed.sort(key=lambda file: file.name)
    num_ignored = int((np.load(job.duplicates / _COUNTS_NAME) > job.options.max_ngram_documents).sum())
    return CleanResult(
        taken_in,
        kept,
        reports,
        mark,
        documents,
        removed,
        num_ignored_ngrams=num_ignored,
        num_short_items=job.ngrams.num_short if job.ngrams else 0,
        passed_over=passed_over,
    )


def _move_removed(job: CleanJob, part: int, files: Sequence[FileFacts], folder: Path) -> Iterator[FileFacts]:
    """Move a part's files of removed text, and yield each with its new name; of several parts without empty ones."""
    for file in files:
        moved = file
        if len(job.parts) > 1:
            if not file.records:
                continue
            moved = replace(file, name=file.name.replace(".", f"-{part:05}.", 1))
        _move(job.written(part) / REMOVED_FOLDER / file.name, folder / REMOVED_FOLDER / moved.name)
        yield moved


def _move(source: Path, target: Path) -> None:
    """Rename a file, unless an earlier run that was killed did."""
    if source.exists() or not target.exists():
        os.replace(source, target)


def join_rejected(job: CleanJob, path: Path) -> None:
    """Write the malformed records of all parts to `path`. Raises OSError."""
    path.unlink(missing_ok=True)
    for part in range(len(job.parts)):
        rejected = job.annotated(part) / _REJECTED_NAME
        if rejected.exists():
            with rejected.open("rb") as source, path.open("ab") as target:
                shutil.copyfileobj(source, target)


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder that becomes `path` when the block ends, unless another try was faster. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        yield partial
        sync_tree(partial)
        try:
            os.rename(partial, path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _pickle_file(path: Path) -> Iterator[Callable[[object], None]]:
    """Yield a function that appends a pickle to a new compressed file. Raises OSError."""
    with path.open("xb") as file, zstandard.ZstdCompressor(1).stream_writer(file) as out:
        yield lambda value: pickle.dump(value, out, pickle.HIGHEST_PROTOCOL)


def _read_pickles(path: Path) -> Iterator[Any]:
    """Yield what was written to a `_pickle_file`. Raises OSError."""
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as compressed:
        contents = io.BufferedReader(compressed)
        while contents.peek(1):
            # Tasks run code that Ray pickles: whoever can write to this folder can run code here anyway.
            yield pickle.load(contents)


@dataclass(frozen=True)
class FileFacts:
    """A file, as the manifest describes it."""

    name: str
    records: int
    bytes: int
    sha256: str


class JsonlFile:
    """JSON lines compressed with zstd. The same records give the same bytes."""

    def __init__(self, path: Path) -> None:
        """Create the file. Raises OSError."""
        self._path = path
        self._file = path.open("xb")
        self._compressor = zstandard.ZstdCompressor(_LEVEL).compressobj()
        self._digest = hashlib.sha256()
        self._num_records = 0
        self.num_text_bytes = 0

    def write(self, record: Mapping[str, object]) -> None:
        """Append a record. Raises OSError."""
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        self._num_records += 1
        self.num_text_bytes += len(line)
        self._put(self._compressor.compress(line))

    def finish(self) -> FileFacts:
        """Complete the file. Raises OSError."""
        self._put(self._compressor.flush())
        num_bytes = self._file.tell()
        self._file.close()
        return FileFacts(self._path.name, self._num_records, num_bytes, self._digest.hexdigest())

    def _put(self, contents: bytes) -> None:
        self._file.write(contents)
        self._digest.update(contents)


@dataclass
class StepReport:
    """Counts and examples of what one step removed."""

    step: StepName
    taken_in: Counts = field(default_factory=Counts)
    removed: Counts = field(default_factory=Counts)
    """Documents removed, and the parts removed from others."""
    num_changed: int = 0
    """Documents kept with less text."""
    rules: Counter[str] = field(default_factory=Counter)
    """Texts that each rule removed."""
    examples: list[tuple[int, str, Why]] = field(default_factory=list)
    """Number, beginning and reason of the first removed texts."""

    def note(self, number: int, text: str, why: Why) -> None:
        """Count a removed document, or a part of one."""
        self.rules[str(why["rule"])] += 1
        if len(self.examples) < _MOST_EXAMPLES:
            self.examples.append((number, text[: 4 * _EXAMPLE_CHARACTERS], why))

    def add_all(self, later: StepReport) -> None:
        """Add the report of the same step for later documents."""
        self.taken_in = self.taken_in.plus(later.taken_in)
        self.removed = self.removed.plus(later.removed)
        self.num_changed += later.num_changed
        self.rules.update(later.rules)
        self.examples = (self.examples + later.examples)[:_MOST_EXAMPLES]

    def describe_examples(self) -> list[str]:
        """Return a line per example, safe for a terminal."""
        return [
            f"#{number} {describe_why(why)}: {make_visible_line(' '.join(text.split()))[:_EXAMPLE_CHARACTERS]}"
            for number, text, why in self.examples
        ]


def describe_why(why: Why) -> str:
    """Describe a reason briefly, safe for a terminal."""
    rest = ", ".join(f"{key} {value}" for key, value in why.items() if key != "rule")
    return make_visible_line(f"{why['rule']}{f' ({rest})' if rest else ''}")[:_EXAMPLE_CHARACTERS]


#: Removed documents that copy another, by number and step.
Duplicates = Mapping[tuple[int, StepName], Removed]


class Writer:
    """Write a part's documents that are kept, and removed text, into a folder."""

    def __init__(
        self,
        folder: Path,
        options: CleanOptions,
        shard_bytes: int,
        first_number: int,
        decontaminator: Decontaminator | None,
    ) -> None:
        """Number documents from `first_number` on. Raises OSError, DataError."""
        self.taken_in = Counts()
        self.kept = Counts()
        self.reports = {step: StepReport(step) for step in options.steps}
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._number = first_number
        self._shards: list[FileFacts] = []
        self._shard: JsonlFile | None = None
        (folder / REMOVED_FOLDER).mkdir()
        self._removed = {
            step: JsonlFile(folder / REMOVED_FOLDER / f"{place:02}-{step}.jsonl.zst")
            for place, step in enumerate(options.steps, start=1)
        }
        self._decontaminator = decontaminator
        if decontaminator is not None:
            self._measure = Measure(options.tokenizer)

    def add(self, contents: Sequence[str], documents: Sequence[DocumentAnnotations], duplicates: Duplicates) -> None:
        """Add consecutive documents with their annotations. Raises DataError, OSError."""
        for content, document in zip(contents, documents, strict=True):
            self._add(content, document, duplicates)
            self._number += 1

    def _add(self, content: str, document: DocumentAnnotations, duplicates: Duplicates) -> None:
        sizes = iter(document.sizes)
        size = next(sizes)
        self.taken_in = self.taken_in.plus(size)
        for step, report in self.reports.items():
            report.taken_in = report.taken_in.plus(size)
            finding = duplicates.get((self._number, step)) or document.findings.get(step)
            if isinstance(finding, Removed):
                self._remove(step, [(content, finding.why)], size)
                return
            if isinstance(finding, Changed):
                left = next(sizes)
                self._remove(step, finding.parts, size.minus(left))
                content = finding.text
                size = left
            elif isinstance(finding, Overlaps):
                self._decontaminate(content, finding)
                return
        self._keep({"id": self._number, "text": content}, size)

    def _remove(self, step: StepName, parts: list[tuple[str, Why]], size: Counts) -> None:
        """Record removed text of the total `size`: one document, or without a document in `size` parts of one."""
        report = self.reports[step]
        what = "document" if size.documents else "part"
        report.removed = report.removed.plus(size)
        report.num_changed += not size.documents
        for text, why in parts:
            self._removed[step].write({"id": self._number, "removed": what, **why, "text": text})
            report.note(self._number, text, why)

    def _decontaminate(self, content: str, overlaps: Overlaps) -> None:
        assert self._decontaminator is not None
        document = self._decontaminator(content, overlaps)
        size, *sizes = self._measure([content, *document.pieces])
        if not document.pieces:
            self._remove("decontaminate", document.cuts, size)
        elif document.cuts:
            for piece_size in sizes:
                size = size.minus(piece_size)
            self._remove("decontaminate", document.cuts, size._replace(documents=0))
        for index, (piece, piece_size) in enumerate(zip(document.pieces, sizes, strict=True)):
            place = {"piece": index} if document.cuts else {}
            self._keep({"id": self._number, **place, "text": piece}, piece_size)

    def _keep(self, record: Mapping[str, object], size: Counts) -> None:
        if self._shard is None:
            self._shard = JsonlFile(self._folder / shard_name(len(self._shards)))
        self._shard.write(record)
        self.kept = self.kept.plus(size)
        if self._shard.num_text_bytes >= self._shard_bytes:
            self._finish_shard()

    def _finish_shard(self) -> None:
        if self._shard is not None:
            self._shards.append(self._shard.finish())
            self._shard = None

    def finish(self) -> tuple[list[FileFacts], list[FileFacts]]:
        """Return the files of documents that were kept, and of removed text. Raises OSError."""
        self._finish_shard()
        return self._shards, [file.finish() for file in self._removed.values()]
