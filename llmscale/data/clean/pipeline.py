"""Documents through the steps, in the order of the input: what the comparing steps say, and who gets what."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmscale.data.clean.cleaned_set import REMOVED_FOLDER
from llmscale.data.clean.compare import Decide
from llmscale.data.clean.decontaminate import Decontaminated, Decontaminator
from llmscale.data.clean.evaluation_text import EvaluationNgrams
from llmscale.data.clean.findings import Changed, ExactKey, Finding, Overlaps, Removed, SketchRow
from llmscale.data.clean.jsonl_files import DocumentShards, FileFacts
from llmscale.data.clean.look import LookedDocument
from llmscale.data.clean.measure import Amount, Measure, Size
from llmscale.data.clean.step_report import RemovedFile, StepReport
from llmscale.data.clean.steps import CleanOptions, StepName
from llmscale.errors import DataError

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
