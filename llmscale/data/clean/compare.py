"""The steps that compare documents: what each is compared by goes in, in the order of the input, and a decision comes
out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmscale.data.clean.exact import ExactIndex
from llmscale.data.clean.findings import ExactKey, Removed, SketchRow
from llmscale.data.clean.near import NearIndex
from llmscale.data.clean.sketches import NearSettings, Sketches

#: Whether a document goes, by its number in the input and what it is compared by.
Decide = Callable[[int, ExactKey | SketchRow], Removed | None]


class Comparison:
    """With every document that came before and was kept."""

    def __init__(self, near: NearSettings) -> None:
        self._exact = ExactIndex()
        self._near = NearIndex(near)

    def begin_batch(self, exact_keys: Sequence[int], sketches: Sketches) -> None:
        """Look up what will be asked about next."""
        self._exact.begin_batch(exact_keys)
        self._near.begin_batch(sketches)

    def decide(self, number: int, finding: ExactKey | SketchRow) -> Removed | None:
        """Whether document `number` goes; else it is remembered."""
        if isinstance(finding, ExactKey):
            return self._exact.decide(number, finding.key)
        return self._near.decide(number, finding.row)
