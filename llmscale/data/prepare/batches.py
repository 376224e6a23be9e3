"""Documents gathered for the encoder, with what is known of the source at the end of each batch."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

from llmscale.data.prepare.sources.source import Place, Rejected, Source, TokenRules
from llmscale.data.tokenizers.tokenizer import TokenArray

#: Characters that a worker encodes at once.
BATCH_CHARACTERS = 1 << 20
#: Of a batch of records that hold next to nothing.
_MOST_RECORDS = 1 << 14


@dataclass(frozen=True)
class Mark:
    """How far a source was read, and what was found until then."""

    place: Place = ()
    read_bytes: int = 0
    num_empty: int = 0
    num_rejected: int = 0
    num_cut: int = 0
    num_skipped: int = 0
    is_end: bool = False


@dataclass
class Batch:
    """Neighbouring documents."""

    documents: list[str | TokenArray] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    mark: Mark = Mark()
    """Behind the last of them."""
    size: int = 0
    """Characters, tokens, and bytes of what was rejected."""

    @property
    def weight(self) -> int:
        """For how many usual batches it counts: one that is a document of many MB, for many."""
        return max(1, self.size // BATCH_CHARACTERS)


def gather(source: Source, rules: TokenRules | None, mark: Mark) -> Generator[Batch]:
    """The documents of a source behind `mark`, those without text left out and counted; without `rules` only text."""
    if mark.is_end:
        return
    batch, size, num_empty, num_rejected = Batch(), 0, mark.num_empty, mark.num_rejected
    source.num_cut, source.skipped = mark.num_cut, mark.num_skipped
    place = mark.place
    num_records = 0
    for record in source.records(mark.place, rules):
        place = record.place
        num_records += 1
        if isinstance(record, Rejected):
            batch.rejected.append(record)
            num_rejected += 1
            size += len(record.contents)
        elif len(record.content):
            batch.documents.append(record.content)
            size += len(record.content)
        else:
            num_empty += 1
        if size >= BATCH_CHARACTERS or num_records == _MOST_RECORDS:
            batch.mark = Mark(place, source.read_bytes, num_empty, num_rejected, source.num_cut, source.skipped)
            batch.size = size
            yield batch
            batch, size, num_records = Batch(), 0, 0
    batch.mark = Mark(place, source.read_bytes, num_empty, num_rejected, source.num_cut, source.skipped, is_end=True)
    batch.size = size
    yield batch
