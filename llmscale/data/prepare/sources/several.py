"""Several inputs as one."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence

from llmscale.data.prepare.sources.source import Place, Record, Source, TokenRules


class SeveralSources(Source):
    """One input after the other. Places are (input, ...)."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self.name = ", ".join(source.name for source in sources)
        self.left_out = " ".join(source.left_out for source in sources if source.left_out) or None
        sizes = [source.total_bytes for source in sources]
        known = [size for size in sizes if size is not None]
        self.total_bytes = sum(known) if len(known) == len(sizes) else None

    @property
    def passed_over(self) -> Counter[str]:  # type: ignore[override]  # known when all is read
        return sum((source.passed_over for source in self._sources), Counter())

    def records(self, start: Place, rules: TokenRules | None) -> Iterator[Record]:
        first, inner = (start[0], start[1:]) if start else (0, ())
        before = sum(source.total_bytes or 0 for source in self._sources[:first])
        for number, source in enumerate(self._sources[first:], start=first):
            source.skipped = source.num_cut = 0
            skipped, num_cut = self.skipped, self.num_cut
            for record in source.records(inner, rules):
                self.read_bytes = before + source.read_bytes
                self.skipped, self.num_cut = skipped + source.skipped, num_cut + source.num_cut
                record.place = (number, *record.place)
                yield record
            self.skipped, self.num_cut = skipped + source.skipped, num_cut + source.num_cut
            before, inner = before + source.read_bytes, ()

    def parts(self) -> list[Source]:
        """Of every input, in order."""
        return [part for source in self._sources for part in source.parts()]

    def fingerprint(self) -> str:
        """Of every input's, in order."""
        return hashlib.sha256(" ".join(source.fingerprint() for source in self._sources).encode()).hexdigest()
