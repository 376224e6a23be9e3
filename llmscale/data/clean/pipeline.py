"""Documents through the steps, in the order of the input: what the comparing steps say, and who gets what."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from llmscale.data.clean.cleaned_set import REMOVED_FOLDER
from llmscale.data.clean.decontaminate import Decontaminated, Decontaminator
from llmscale.data.clean.evaluation_text import EvaluationNgrams
from llmscale.data.clean.exact import ExactIndex
from llmscale.data.clean.findings import Changed, ExactKey, Finding, Overlaps, Removed, SketchRow
from llmscale.data.clean.jsonl_files import DocumentShards, FileFacts
from llmscale.data.clean.look import LookedBatch, LookedDocument
from llmscale.data.clean.near import NearIndex
from llmscale.data.clean.step_report import Amount, RemovedFile, StepReport, measure
from llmscale.data.clean.steps import CleanOptions, StepName
from llmscale.errors import DataError

#: Numbers of documents are kept in 32 bits.
MAX_DOCUMENTS = 1 << 32


class Pipeline:
    """Writes what is left and what was removed into a folder."""

    def __init__(
        self, folder: Path, options: CleanOptions, shard_bytes: int, ngrams: EvaluationNgrams | None, held_path: Path
    ) -> None:
        """`held_path` is a file for documents that wait for the end. Raises OSError."""
        self.taken_in, self.kept = Amount(), Amount()
        self._shards = DocumentShards(folder, shard_bytes)
        (folder / REMOVED_FOLDER).mkdir()
        self._files: dict[StepName, RemovedFile] = {
            step: RemovedFile(folder / REMOVED_FOLDER, place, step) for place, step in enumerate(options.steps, start=1)
        }
        self._exact = ExactIndex()
        self._near = NearIndex(options.near)
        self._decontaminator = Decontaminator(ngrams, held_path, options.max_ngram_documents) if ngrams else None

    @property
    def reports(self) -> list[StepReport]:
        return [file.report for file in self._files.values()]

    @property
    def num_ignored_ngrams(self) -> int:
        return self._decontaminator.num_ignored if self._decontaminator else 0

    def add(self, contents: Sequence[str], looked: LookedBatch) -> None:
        """Neighbouring documents, with what was found of each. Raises OSError."""
        found = [finding for document in looked.documents for finding in document.findings.values()]
        self._exact.begin_batch([finding.key for finding in found if isinstance(finding, ExactKey)])
        self._near.begin_batch(looked.sketches)
        for content, document in zip(contents, looked.documents, strict=True):
            if self.taken_in.documents == MAX_DOCUMENTS:
                raise DataError(f"The input has more than {MAX_DOCUMENTS:,} documents. Clean it in parts.")
            self._pass_through(content, document)

    def _pass_through(self, content: str, document: LookedDocument) -> None:
        number, num_words, num_bytes = self.taken_in.documents, document.num_words, document.num_bytes
        self.taken_in.add(1, num_words, num_bytes)
        for step, file in self._files.items():
            file.report.taken_in.add(1, num_words, num_bytes)
            finding = self._decide(number, document.findings.get(step))
            if isinstance(finding, Removed):
                file.remove(number, content, finding.why, num_words, num_bytes)
                return
            if isinstance(finding, Changed):
                file.change(number, finding.parts, num_words - finding.num_words, num_bytes - finding.num_bytes)
                content, num_words, num_bytes = finding.text, finding.num_words, finding.num_bytes
            elif isinstance(finding, Overlaps):
                assert self._decontaminator is not None
                self._decontaminator.hold(number, content, finding)
                return
        self._keep({"id": number, "text": content}, num_words, num_bytes)

    def _decide(self, number: int, finding: Finding | None) -> Finding | None:
        if isinstance(finding, ExactKey):
            return self._exact.decide(number, finding.key)
        if isinstance(finding, SketchRow):
            return self._near.decide(number, finding.row)
        return finding

    def _keep(self, record: dict[str, str | int], num_words: int, num_bytes: int) -> None:
        self._shards.write(record)
        self.kept.add(1, num_words, num_bytes)

    def finish(self) -> tuple[list[FileFacts], list[FileFacts]]:
        """The files of what is left, and of what was removed. Raises OSError."""
        if self._decontaminator is not None:
            for document in self._decontaminator.finish():
                self._decontaminated(document)
        return self._shards.finish(), [file.finish() for file in self._files.values()]

    def _decontaminated(self, document: Decontaminated) -> None:
        file, number = self._files["decontaminate"], document.number
        whole = measure(document.text)
        sizes = [measure(piece) for piece in document.pieces]
        if not document.pieces:
            [(text, why)] = document.cuts
            file.remove(number, text, why, *whole)
        elif document.cuts:
            num_words, num_bytes = (sum(column) for column in zip(*sizes, strict=True))
            file.change(number, document.cuts, whole[0] - num_words, whole[1] - num_bytes)
        for place, (piece, size) in enumerate(zip(document.pieces, sizes, strict=True)):
            record: dict[str, str | int] = {"id": number, "text": piece}
            if document.cuts:
                record = {"id": number, "piece": place, "text": piece}
            self._keep(record, *size)

    def close(self) -> None:
        """Let go of all files, whole or not."""
        with suppress(OSError):
            for file in self._files.values():
                file.close()
            self._shards.close()
            if self._decontaminator is not None:
                self._decontaminator.close()
