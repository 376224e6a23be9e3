"""Clean many parts of an input in three stages of tasks: annotate each part, find the duplicates, write each part.

All machines share the work folder. Each folder in it appears by one rename, so a folder that exists is complete:

    annotated/00003/  texts of part 3, their annotations, the keys that they are compared by
    duplicates/       duplicates among the documents of each part, counts of n-grams
    written/00003/    documents of part 3 that were kept and removed, and a report

A document that shares neither its text's hash nor a band with another has no duplicate. So the second
stage, a single task, compares only the others in input order, and decides what a local run decides.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import secrets
import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from llmscale.data.clean.annotate import Annotations, Annotator, CleanOptions
from llmscale.data.clean.decontaminate import EvaluationNgrams
from llmscale.data.clean.duplicates import Comparison
from llmscale.data.clean.filters import ExactKey, Overlaps, Removed, SketchRow, Why
from llmscale.data.clean.job import CleanResult
from llmscale.data.clean.pipeline import DocumentCounts, FileFacts, Pipeline, StepReport, check_number
from llmscale.data.prepare.output_folder import RejectedRecords, sync_tree
from llmscale.data.prepare.sources.clean_folder import REMOVED_FOLDER, shard_name
from llmscale.data.prepare.sources.source import PassedOver, Source
from llmscale.data.prepare.tokenise import ReadPosition, gather

_TEXTS_NAME, _ANNOTATIONS_NAME, _FACTS_NAME = "texts.zst", "annotations.zst", "facts.json"
_EXACT_KEYS_NAME, _BAND_KEYS_NAME, _COUNTS_NAME = "exact_keys.npy", "band_keys.npy", "ngram_counts.npy"
_REJECTED_NAME = "rejected.jsonl"
_COUNTED = ("num_empty", "num_rejected", "num_cut", "num_skipped")
#: JSON of a written part: how many of its files hold no evaluation text, and its result.
_WRITTEN = TypeAdapter(tuple[int, CleanResult])


@dataclass(frozen=True)
class PartedWork:
    """Work that tasks share: the input in parts, the settings, and the folder for results. It is pickled to workers."""

    folder: Path
    """Absolute path that all machines can reach."""
    parts: Sequence[Source]
    """Consecutive parts of the input."""
    options: CleanOptions
    ngrams: EvaluationNgrams | None
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
class Stage:
    """Tasks that do not depend on each other, and that start when the previous stage is complete."""

    name: str
    num_tasks: int
    run: Callable[[PartedWork, int], None]
    result: Callable[[PartedWork, int], Path]
    """Folder that a task leaves; it exists if and only if the task is complete."""


def plan_stages(num_parts: int) -> list[Stage]:
    """Return the stages in order."""
    return [
        Stage("1-annotate", num_parts, annotate_part, PartedWork.annotated),
        Stage("2-duplicates", 1, find_duplicates, lambda work, task: work.duplicates),
        Stage("3-write", num_parts, write_part, PartedWork.written),
    ]


def annotate_part(work: PartedWork, part: int) -> None:
    """First stage: annotate a part's documents as a local run's workers do. Raises DataError, OSError."""
    annotate = Annotator(work.options, work.ngrams.hashes if work.ngrams else None)
    source, mark, num_documents = work.parts[part], ReadPosition(), 0
    exact_keys, band_keys = array("Q"), list[NDArray[np.uint32]]()
    with (
        _new_folder(work.annotated(part)) as folder,
        _pickle_file(folder / _TEXTS_NAME) as save_texts,
        _pickle_file(folder / _ANNOTATIONS_NAME) as save_annotations,
    ):
        rejected = RejectedRecords(folder / _REJECTED_NAME, work.max_rejected)
        for batch in gather(source, None, mark):
            texts = [document for document in batch.documents if isinstance(document, str)]
            annotations = annotate(texts)
            save_texts(texts)
            save_annotations(annotations)
            exact_keys.extend(annotations.exact_keys)
            band_keys.append(annotations.sketches.band_keys)
            num_documents += len(texts)
            rejected.add(batch.rejected)
            mark = batch.mark
        np.save(folder / _EXACT_KEYS_NAME, np.array(exact_keys, np.uint64))
        # [bands, documents]: the next stage reads one band at a time.
        np.save(folder / _BAND_KEYS_NAME, np.ascontiguousarray(np.concatenate(band_keys).T))
        facts = {"mark": asdict(replace(mark, place=())), "passed_over": sorted(source.passed_over)}
        (folder / _FACTS_NAME).write_text(json.dumps(facts))


def find_duplicates(work: PartedWork, _task: int = 0) -> None:
    """Second stage (a single task): decide in input order which documents are duplicates, and count n-grams.

    Raises DataError, OSError.
    """
    parts = [work.annotated(part) for part in range(len(work.parts))]
    exact, near = _find_shared_keys(parts, work.options.near.bands)
    counts = np.zeros(len(work.ngrams.hashes) if work.ngrams else 0, np.uint32)
    comparison = Comparison(work.options.near)
    number = 0
    with _new_folder(work.duplicates) as folder:
        for part, annotated in enumerate(parts):
            first_number, removed = number, dict[int, Why]()
            for annotations in _read_annotations(annotated):
                comparison.begin_batch(annotations.exact_keys, annotations.sketches)
                for document in annotations.documents:
                    for finding in document.findings.values():
                        if isinstance(finding, (ExactKey, SketchRow)):
                            is_shared = next(exact if isinstance(finding, ExactKey) else near)
                            if is_shared and number not in removed:
                                decision = comparison.decide(number, finding)
                                removed |= {number: decision.why} if decision else {}
                        elif isinstance(finding, Overlaps) and number not in removed:
                            counts[finding.ngrams] += 1
                    number += 1
            facts = {"first_number": first_number, "removed": list(removed.items())}
            (folder / f"{part:05}.json").write_text(json.dumps(facts))
        check_number(number - 1)
        np.save(folder / _COUNTS_NAME, counts)


def _find_shared_keys(parts: Sequence[Path], num_bands: int) -> tuple[Iterator[bool], Iterator[bool]]:
    """Return for each exact key, and for each sketch, whether another document has it or shares a band with it."""
    exact = find_repeated(np.concatenate([np.load(part / _EXACT_KEYS_NAME) for part in parts]))
    bands = [_map_array(part / _BAND_KEYS_NAME) for part in parts]
    near = np.zeros(sum(keys.shape[1] for keys in bands), np.bool_)
    for band in range(num_bands):
        near |= find_repeated(np.concatenate([keys[band] for keys in bands]))
    return map(bool, exact), map(bool, near)


def find_repeated(keys: NDArray[np.unsignedinteger]) -> NDArray[np.bool_]:
    """Return which of the keys occur more than once, [keys]."""
    order = np.argsort(keys, kind="stable")
    same = keys[order[1:]] == keys[order[:-1]]
    repeated = np.zeros(len(keys), np.bool_)
    repeated[order[1:][same]] = True
    repeated[order[:-1][same]] = True
    return repeated


def _map_array(path: Path) -> NDArray[np.uint32]:
    """Map an array into memory; an empty one cannot be mapped."""
    with suppress(ValueError):
        return np.load(path, mmap_mode="r")
    return np.load(path)


def write_part(work: PartedWork, part: int) -> None:
    """Third stage: write a part's documents that are kept, and those that were removed. Raises DataError, OSError."""
    facts = json.loads((work.duplicates / f"{part:05}.json").read_bytes())
    duplicates: dict[int, Why] = dict(facts["removed"])

    def decide(number: int, finding: ExactKey | SketchRow) -> Removed | None:
        why = duplicates.get(number)
        step = "near_duplicate" if isinstance(finding, SketchRow) else "exact_duplicate"
        return Removed(why) if why is not None and why["rule"] == step else None

    first_number, counts = facts["first_number"], np.load(work.duplicates / _COUNTS_NAME)
    with (
        _new_folder(work.written(part)) as folder,
        closing(
            Pipeline(
                folder,
                work.options,
                work.shard_bytes,
                decide,
                work.ngrams,
                first_number=first_number,
                ngram_counts=counts,
            )
        ) as pipeline,
    ):
        texts = _read_pickles(work.annotated(part) / _TEXTS_NAME)
        for contents, annotations in zip(texts, _read_annotations(work.annotated(part)), strict=True):
            pipeline.add(contents, annotations.documents)  # type: ignore[arg-type]  # a list of texts
        documents, removed = pipeline.finish()
        mark, passed_over = read_position(work, part)
        counted = (pipeline.taken_in, pipeline.kept, pipeline.reports)
        result = CleanResult(*counted, mark, documents, removed, passed_over=passed_over)
        (folder / _FACTS_NAME).write_bytes(_WRITTEN.dump_json((pipeline.num_undelayed_files, result)))


def read_position(work: PartedWork, part: int) -> tuple[ReadPosition, set[PassedOver]]:
    """Return the end of an annotated part, with counts of its malformed records, and skipped files. Raises OSError."""
    facts = json.loads((work.annotated(part) / _FACTS_NAME).read_bytes())
    return ReadPosition(**{**facts["mark"], "place": ()}), {PassedOver(*one) for one in facts["passed_over"]}


def join_parts(work: PartedWork, folder: Path) -> CleanResult:
    """Move the files of all parts into `folder` and add up their results. It can be repeated after a kill.

    Documents with evaluation text come last, as in a local run. Raises OSError.
    """
    (folder / REMOVED_FOLDER).mkdir(parents=True, exist_ok=True)
    taken_in, kept, mark = DocumentCounts(), DocumentCounts(), ReadPosition(is_end=True)
    reports = [StepReport(step) for step in work.options.steps]
    passed_over = set[PassedOver]()
    files, delayed, removed = list[tuple[Path, FileFacts]](), list[tuple[Path, FileFacts]](), list[FileFacts]()
    for part in range(len(work.parts)):
        source = work.written(part)
        num_undelayed, result = _WRITTEN.validate_json((source / _FACTS_NAME).read_bytes())
        taken_in.add_all(result.taken_in)
        kept.add_all(result.kept)
        mark = replace(mark, **{name: getattr(mark, name) + getattr(result.mark, name) for name in _COUNTED})
        passed_over |= result.passed_over
        for report, of_part in zip(reports, result.reports, strict=True):
            report.add_all(of_part)
        documents = [(source / file.name, file) for file in result.documents]
        files += documents[:num_undelayed]
        delayed += documents[num_undelayed:]
        for file in result.removed:
            if file.records:
                removed.append(replace(file, name=file.name.replace(".", f"-{part:05}.", 1)))
                _move(source / REMOVED_FOLDER / file.name, folder / REMOVED_FOLDER / removed[-1].name)
    kept_files = [replace(file, name=shard_name(number)) for number, (_, file) in enumerate(files + delayed)]
    for (path, _), file in zip(files + delayed, kept_files, strict=True):
        _move(path, folder / file.name)
    removed.sort(key=lambda file: file.name)
    num_ignored = int((np.load(work.duplicates / _COUNTS_NAME) > work.options.max_ngram_documents).sum())
    num_short = work.ngrams.num_short if work.ngrams else 0
    return CleanResult(taken_in, kept, reports, mark, kept_files, removed, num_ignored, num_short, passed_over)


def _move(source: Path, target: Path) -> None:
    """Rename a file, unless an earlier run that was killed did."""
    if source.exists() or not target.exists():
        os.replace(source, target)


def join_rejected(work: PartedWork, path: Path) -> None:
    """Write the malformed records of all parts to `path`. Raises OSError."""
    path.unlink(missing_ok=True)
    for part in range(len(work.parts)):
        rejected = work.annotated(part) / _REJECTED_NAME
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
    import zstandard

    with path.open("xb") as file, zstandard.ZstdCompressor(1).stream_writer(file) as out:
        yield lambda value: pickle.dump(value, out, pickle.HIGHEST_PROTOCOL)


def _read_pickles(path: Path) -> Iterator[object]:
    """Yield what was written to a `_pickle_file`. Raises OSError."""
    import zstandard

    with path.open("rb") as file:
        contents = io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file))
        while contents.peek(1):
            # Tasks run code that Ray pickles: whoever can write to this folder can run code here anyway.
            yield pickle.load(contents)


def _read_annotations(folder: Path) -> Iterator[Annotations]:
    yield from _read_pickles(folder / _ANNOTATIONS_NAME)  # type: ignore[misc]  # as the first stage wrote them
