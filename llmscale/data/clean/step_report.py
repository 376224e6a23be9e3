"""What a step took: counted, kept in a file, and shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmscale.data.clean.findings import Why
from llmscale.data.clean.jsonl_files import FileFacts, JsonlFile
from llmscale.data.clean.measure import Amount, Size
from llmscale.data.clean.steps import StepName
from llmscale.untrusted.terminal import make_visible_line

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
