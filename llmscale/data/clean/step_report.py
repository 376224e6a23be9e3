"""What a step took: counted, kept in a file, and shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from llmscale.data.clean.findings import Why
from llmscale.data.clean.jsonl_files import FileFacts, JsonlFile
from llmscale.data.clean.steps import StepName
from llmscale.data.clean.text import Text
from llmscale.untrusted.terminal import make_visible_line

#: Documents of which a report shows the beginning.
_MOST_EXAMPLES = 3
_EXAMPLE_CHARACTERS = 100


@dataclass
class Amount:
    """Of text."""

    documents: int = 0
    words: int = 0
    """Between whitespace."""
    bytes: int = 0
    """Of UTF-8."""

    def add(self, documents: int, words: int, size_bytes: int) -> None:
        self.documents += documents
        self.words += words
        self.bytes += size_bytes


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

    def remove(self, number: int, text: str, why: Why, num_words: int, num_bytes: int) -> None:
        """A whole document goes. Raises OSError."""
        self.report.removed.add(1, num_words, num_bytes)
        self._write(number, text, why, "document")

    def change(self, number: int, parts: list[tuple[str, Why]], num_words: int, num_bytes: int) -> None:
        """A document stays without these parts, which were so many words and bytes of it. Raises OSError."""
        self.report.removed.add(0, num_words, num_bytes)
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


def measure(text: str) -> tuple[int, int]:
    """Words and bytes."""
    return Text(text).num_words, len(text.encode())
