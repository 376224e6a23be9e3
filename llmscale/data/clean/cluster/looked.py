"""First stage: every task looks at its documents, as a worker of a local run does, and keeps what it found."""

from __future__ import annotations

import io
import json
import os
import pickle
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmscale.data.clean.cluster.work_files import WorkFiles, load_array, whole_folder
from llmscale.data.clean.findings import ExactKey, Overlaps, SketchRow
from llmscale.data.clean.pipeline import CleanOptions, LookedBatch, LookedDocument, Looker
from llmscale.data.clean.sketches import Sketches
from llmscale.data.prepare.output_folder import RejectedRecords
from llmscale.data.prepare.sources.source import Source
from llmscale.data.prepare.tokenise import ReadPosition, gather

_BATCHES_NAME, _FACTS_NAME, REJECTED_NAME = "batches.zst", "facts.json", "rejected.jsonl"


@dataclass(frozen=True)
class LookStage:
    """Tasks by their number; each has a part of the input."""

    files: WorkFiles
    options: CleanOptions
    sources: Sequence[Source]
    max_rejected: int

    def __call__(self, task: int) -> int:
        """How many documents there were. Raises DataError, OSError."""
        # As of the processes of a local run: a task has one core.
        os.environ["RAYON_NUM_THREADS"] = "1"
        has_ngrams = "decontaminate" in self.options.steps
        look = Looker(self.options, self.files.ngram_hashes if has_ngrams else None)
        with whole_folder(self.files.looked(task)) as folder, _BatchFile(folder / _BATCHES_NAME) as batches:
            quarantine = RejectedRecords(folder / REJECTED_NAME, self.max_rejected)
            compared = _Compared(self.options)
            mark = ReadPosition()
            for batch in gather(self.sources[task], None, mark):
                texts = [document for document in batch.documents if isinstance(document, str)]
                looked = look(texts)
                batches.write(texts, looked.documents)
                compared.add(looked)
                quarantine.add(batch.rejected)
                mark = batch.mark
            compared.save(folder)
            facts = {
                "documents": compared.num_documents,
                "mark": asdict(replace(mark, place=())),
                "passed_over": self.sources[task].passed_over,
            }
            (folder / _FACTS_NAME).write_text(json.dumps(facts))
        return compared.num_documents


class _Compared:
    """By what documents are compared, in memory until the task is over."""

    def __init__(self, options: CleanOptions) -> None:
        self._options = options
        self.num_documents = 0
        self._exact_documents, self._exact_keys = array("I"), array("Q")
        self._near_documents = array("I")
        self._band_keys: list[NDArray[np.uint32]] = []
        self._minima: list[NDArray[np.uint8]] = []
        self._overlaps = array("I")

    def add(self, looked: LookedBatch) -> None:
        for document, found in enumerate(looked.documents, start=self.num_documents):
            for finding in found.findings.values():
                if isinstance(finding, ExactKey):
                    self._exact_documents.append(document)
                    self._exact_keys.append(finding.key)
                elif isinstance(finding, SketchRow):
                    self._near_documents.append(document)
                elif isinstance(finding, Overlaps):
                    for ngram in finding.ngrams:
                        self._overlaps.extend((document, ngram))
        self._band_keys.append(looked.sketches.band_keys)
        self._minima.append(looked.sketches.minima)
        self.num_documents += len(looked.documents)

    def save(self, folder: Path) -> None:
        """Raises OSError."""
        near = self._options.near
        bands = np.concatenate([np.zeros((0, near.bands), np.uint32), *self._band_keys])
        arrays: dict[str, NDArray[np.generic]] = {
            "exact_documents": np.array(self._exact_documents, np.uint32),
            "exact_keys": np.array(self._exact_keys, np.uint64),
            "near_documents": np.array(self._near_documents, np.uint32),
            # A band lies in one piece: a task of the next stage reads some of them.
            "band_keys": np.ascontiguousarray(bands.T),
            "minima": np.concatenate([np.zeros((0, near.permutations), np.uint8), *self._minima]),
            "overlaps": np.array(self._overlaps, np.uint32).reshape(-1, 2),
        }
        for name, values in arrays.items():
            np.save(folder / f"{name}.npy", values)


class ComparedKeys:
    """What a task left for comparing."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        self.exact_documents: NDArray[np.uint32] = load_array(folder / "exact_documents.npy")
        """Of the task's documents, which came as far as the step exact."""
        self.exact_keys: NDArray[np.uint64] = load_array(folder / "exact_keys.npy")
        self.near_documents: NDArray[np.uint32] = load_array(folder / "near_documents.npy")
        """Of the task's documents, which came as far as the step near."""
        self.band_keys: NDArray[np.uint32] = load_array(folder / "band_keys.npy")
        """[bands, documents]"""
        self.minima: NDArray[np.uint8] = load_array(folder / "minima.npy")
        """[documents, permutations]"""
        self.overlaps: NDArray[np.uint32] = load_array(folder / "overlaps.npy")
        """[overlaps, 2]: a document, and an n-gram that it has."""

    def sketches(self, rows: NDArray[np.intp]) -> Sketches:
        """Of some of the documents."""
        return Sketches(np.ascontiguousarray(self.band_keys[:, rows].T), self.minima[rows])


class _BatchFile:
    """Texts, and what was found of each."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        import zstandard

        self._file = path.open("xb")
        self._out = zstandard.ZstdCompressor(1).stream_writer(self._file)

    def write(self, texts: Sequence[str], documents: Sequence[LookedDocument]) -> None:
        """Raises OSError."""
        pickle.dump((texts, documents), self._out, pickle.HIGHEST_PROTOCOL)

    def __enter__(self) -> _BatchFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.close()
        self._file.close()


def read_batches(folder: Path) -> Iterator[tuple[list[str], list[LookedDocument]]]:
    """In order. A pickle, as datatrove's executor beside it is: whoever can write here decides what runs anyway. Raises
    OSError."""
    import zstandard

    with (folder / _BATCHES_NAME).open("rb") as file:
        contents = io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file))
        while contents.peek(1):
            yield pickle.load(contents)


def count_documents(folder: Path) -> int:
    """Of a task. Raises OSError."""
    return int(json.loads((folder / _FACTS_NAME).read_bytes())["documents"])


def read_facts(folder: Path) -> tuple[ReadPosition, Counter[str]]:
    """What else a task met: records that are no documents, and files that it passed over. Raises OSError."""
    facts = json.loads((folder / _FACTS_NAME).read_bytes())
    return ReadPosition(**{**facts["mark"], "place": ()}), Counter(facts["passed_over"])
