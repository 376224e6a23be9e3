"""Write documents that are kept, the text that each step removed, and a report of each step."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zstandard

from llmscale.data.clean.annotate import CleanOptions, DocumentAnnotations, Measure, Size, StepName
from llmscale.data.clean.decontaminate import Decontaminator
from llmscale.data.clean.filters import Changed, Overlaps, Removed, Why
from llmscale.data.prepare.sources.clean_folder import REMOVED_FOLDER, shard_name
from llmscale.data.shards.compressed import most_unpacked_bytes
from llmscale.untrusted.terminal import make_visible_line

_LEVEL = 3


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
        self.num_records = self.num_text_bytes = self._num_bytes = 0

    def has_room_for(self, line: bytes) -> bool:
        """Return whether `data prepare` would unpack the file with this line; it refuses extreme compression."""
        # The bytes written so far are a lower bound of the file's size.
        return self.num_text_bytes + len(line) <= most_unpacked_bytes(self._num_bytes)

    def write(self, line: bytes) -> None:
        """Append a line. Raises OSError."""
        self.num_records += 1
        self.num_text_bytes += len(line)
        self._put(self._compressor.compress(line))

    def finish(self) -> FileFacts:
        """Complete the file. Raises OSError."""
        self._put(self._compressor.flush())
        self._file.close()
        return FileFacts(self._path.name, self.num_records, self._num_bytes, self._digest.hexdigest())

    def close(self) -> None:
        """Close the file, complete or not."""
        self._file.close()

    def _put(self, contents: bytes) -> None:
        self._file.write(contents)
        self._digest.update(contents)
        self._num_bytes += len(contents)


class DocumentShards:
    """Documents in files of about `shard_bytes` of uncompressed text, less where the text compresses extremely."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self.files: list[FileFacts] = []
        """Complete files."""
        self._current: JsonlFile | None = None

    def write(self, record: Mapping[str, object]) -> None:
        """Append a record. Raises OSError."""
        line = _line(record)
        if self._current is not None and not self._current.has_room_for(line):
            self.finish_file()
        if self._current is None:
            self._current = JsonlFile(self._folder / shard_name(len(self.files)))
        self._current.write(line)
        if self._current.num_text_bytes >= self._shard_bytes:
            self.finish_file()

    def finish_file(self) -> None:
        """Complete the current file, if any. Raises OSError."""
        if self._current is not None:
            self.files.append(self._current.finish())
            self._current = None

    def close(self) -> None:
        """Close the current file, complete or not."""
        if self._current is not None:
            self._current.close()


def _line(record: Mapping[str, object]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


@dataclass
class DocumentCounts:
    """Number of documents, and their total size."""

    documents: int = 0
    words: int = 0
    bytes: int = 0
    tokens: int = 0

    def add(self, documents: int, size: Size) -> None:
        """Add documents with a total size."""
        self.documents += documents
        self.words += size.words
        self.bytes += size.bytes
        self.tokens += size.tokens

    def add_all(self, other: DocumentCounts) -> None:
        """Add other counts."""
        self.add(other.documents, Size(other.words, other.bytes, other.tokens))


#: Removed texts of which a report shows the beginning.
_MOST_EXAMPLES = 3
_EXAMPLE_CHARACTERS = 100


@dataclass
class StepReport:
    """Counts and examples of what one step removed."""

    step: StepName
    taken_in: DocumentCounts = field(default_factory=DocumentCounts)
    removed: DocumentCounts = field(default_factory=DocumentCounts)
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
        self.taken_in.add_all(later.taken_in)
        self.removed.add_all(later.removed)
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


class RemovedFile:
    """File of the text that a step removed, and the step's report."""

    def __init__(self, folder: Path, place: int, step: StepName) -> None:
        """Create the file. Raises OSError."""
        self.report = StepReport(step)
        self._file = JsonlFile(folder / f"{place:02}-{step}.jsonl.zst")

    def remove(self, number: int, text: str, why: Why, size: Size) -> None:
        """Record the removal of a document. Raises OSError."""
        self.report.removed.add(1, size)
        self._write(number, text, why, "document")

    def change(self, number: int, parts: list[tuple[str, Why]], size: Size) -> None:
        """Record that a document loses `parts`, of the total size `size`. Raises OSError."""
        self.report.removed.add(0, size)
        self.report.num_changed += 1
        for text, why in parts:
            self._write(number, text, why, "part")

    def _write(self, number: int, text: str, why: Why, what: str) -> None:
        self._file.write(_line({"id": number, "removed": what, **why, "text": text}))
        self.report.note(number, text, why)

    def finish(self) -> FileFacts:
        """Complete the file. Raises OSError."""
        return self._file.finish()

    def close(self) -> None:
        """Close the file, complete or not."""
        self._file.close()


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
        self.taken_in, self.kept = DocumentCounts(), DocumentCounts()
        self._number = first_number
        self._shards = DocumentShards(folder, shard_bytes)
        (folder / REMOVED_FOLDER).mkdir()
        self._files: dict[StepName, RemovedFile] = {
            step: RemovedFile(folder / REMOVED_FOLDER, place, step) for place, step in enumerate(options.steps, start=1)
        }
        self._decontaminator = decontaminator
        if decontaminator is not None:
            self._measure = Measure(options.tokenizer)

    @property
    def reports(self) -> list[StepReport]:
        return [file.report for file in self._files.values()]

    def add(self, contents: Sequence[str], documents: Sequence[DocumentAnnotations], duplicates: Duplicates) -> None:
        """Add consecutive documents with their annotations. Raises DataError, OSError."""
        for content, document in zip(contents, documents, strict=True):
            self._add(content, document, duplicates)
            self._number += 1

    def _add(self, content: str, document: DocumentAnnotations, duplicates: Duplicates) -> None:
        number, sizes = self._number, iter(document.sizes)
        size = next(sizes)
        self.taken_in.add(1, size)
        for step, file in self._files.items():
            file.report.taken_in.add(1, size)
            finding = duplicates.get((number, step)) or document.findings.get(step)
            if isinstance(finding, Removed):
                file.remove(number, content, finding.why, size)
                return
            if isinstance(finding, Changed):
                left = next(sizes)
                file.change(number, finding.parts, size.less(left))
                content, size = finding.text, left
            elif isinstance(finding, Overlaps):
                self._decontaminate(number, content, finding)
                return
        self._keep({"id": number, "text": content}, size)

    def _decontaminate(self, number: int, content: str, overlaps: Overlaps) -> None:
        assert self._decontaminator is not None
        file, document = self._files["decontaminate"], self._decontaminator(content, overlaps)
        size, *sizes = self._measure([content, *document.pieces])
        if not document.pieces:
            [(text, why)] = document.cuts
            file.remove(number, text, why, size)
        elif document.cuts:
            file.change(number, document.cuts, functools.reduce(Size.less, sizes, size))
        for index, (piece, piece_size) in enumerate(zip(document.pieces, sizes, strict=True)):
            record: dict[str, str | int] = {"id": number, "text": piece}
            if document.cuts:
                record = {"id": number, "piece": index, "text": piece}
            self._keep(record, piece_size)

    def _keep(self, record: dict[str, str | int], size: Size) -> None:
        self._shards.write(record)
        self.kept.add(1, size)

    def finish(self) -> tuple[list[FileFacts], list[FileFacts]]:
        """Return the files of documents that were kept, and of removed text. Raises OSError."""
        self._shards.finish_file()
        return self._shards.files, [file.finish() for file in self._files.values()]

    def close(self) -> None:
        """Close all files, complete or not."""
        for file in self._files.values():
            file.close()
        self._shards.close()
