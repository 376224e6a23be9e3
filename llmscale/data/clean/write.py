"""Write documents that are kept, the text that each step removed, and a report of each step."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zstandard

from llmscale.data.clean.annotate import CleanOptions, Counts, DocumentAnnotations, Measure, StepName
from llmscale.data.clean.decontaminate import Decontaminator
from llmscale.data.clean.filters import Changed, Overlaps, Removed, Why
from llmscale.data.prepare.sources.clean_folder import REMOVED_FOLDER, shard_name
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


#: Removed texts of which a report shows the beginning.
_MOST_EXAMPLES = 3
_EXAMPLE_CHARACTERS = 100


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
        self.taken_in, self.kept = Counts(), Counts()
        self.reports = {step: StepReport(step) for step in options.steps}
        self._folder, self._shard_bytes, self._number = folder, shard_bytes, first_number
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
                content, size = finding.text, left
            elif isinstance(finding, Overlaps):
                self._decontaminate(content, finding)
                return
        self._keep({"id": self._number, "text": content}, size)

    def _remove(self, step: StepName, parts: list[tuple[str, Why]], size: Counts) -> None:
        """Record removed text of the total `size`: one document, or without a document in `size` parts of one."""
        report, what = self.reports[step], "document" if size.documents else "part"
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
