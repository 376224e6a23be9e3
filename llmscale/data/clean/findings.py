"""What a step says of a document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: Why something was removed, as it stands in the file of removed documents: `rule`, then what makes the case.
Why = Mapping[str, str | int | float]


def beyond(rule: str, value: float, limit: float) -> Why:
    """A rule whose limit a document is beyond."""
    return {"rule": rule, "value": round(value, 4), "limit": limit}


@dataclass(frozen=True, slots=True)
class Removed:
    """The whole document goes."""

    why: Why


@dataclass(frozen=True, slots=True)
class Changed:
    """The document stays with another text."""

    text: str
    parts: list[tuple[str, Why]]
    """What was taken out of it."""


@dataclass(frozen=True, slots=True)
class ExactKey:
    """Equal for equal texts."""

    key: int


@dataclass(frozen=True, slots=True)
class SketchRow:
    """The document's row in its batch's matrix of sketches."""

    row: int


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Where a document has n-grams of evaluation text: (n-gram, first character, character behind it) each."""

    matches: list[tuple[int, int, int]]

    @property
    def ngrams(self) -> list[int]:
        """Each once."""
        return sorted({ngram for ngram, _, _ in self.matches})


#: Of one document at one step; no finding means that the step has nothing against it.
Finding = Removed | Changed | ExactKey | SketchRow | Overlaps
