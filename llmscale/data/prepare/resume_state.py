"""How far `prepare` is: what the work folder keeps so that a killed run goes on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from llmscale.data.prepare.batches import Mark
from llmscale.data.prepare.split_writer import SplitState
from llmscale.data.prepare.tokenised_document import TokenisedDocument
from llmscale.data.prepare.train_val_split import Held
from llmscale.data.prepare.work_folder import WorkFolder


class _Facts(TypedDict):
    mark: dict[str, object]
    quarantine: list[int]
    note: str
    is_read: bool
    splits: dict[str, tuple[int, int, list[int]]]
    held: tuple[int, float, bool] | None
    held_document: tuple[int, str] | None


@dataclass(frozen=True)
class ResumeState:
    """What was done by a moment at which the documents until then were in their splits."""

    mark: Mark
    """Place in the source."""
    quarantine: tuple[int, int]
    """Bytes and records of the file of rejected records."""
    splits: dict[str, SplitState]
    held: Held[TokenisedDocument] | None
    """None where the score alone decides about a document."""
    note: str = ""
    """How the validation split was made."""
    is_read: bool = False
    """Whether every document is in the splits, so that shards are all that may be missing."""

    @property
    def num_documents(self) -> int:
        return sum(split.num_documents for split in self.splits.values())


def save_resume_state(work: WorkFolder, state: ResumeState) -> None:
    """Raises OSError."""
    held = state.held
    document = held.document if held is not None else None
    facts: _Facts = {
        "mark": asdict(state.mark),
        "quarantine": list(state.quarantine),
        "note": state.note,
        "is_read": state.is_read,
        "splits": {
            name: (split.num_documents, split.num_text_bytes, split.run_begins) for name, split in state.splits.items()
        },
        "held": None if held is None else (held.num_copies, held.score, held.has_others),
        "held_document": None if document is None else (document.num_text_bytes, document.text_hash.hex()),
    }
    arrays: dict[str, NDArray[np.generic]] = {} if document is None else {"held": document.tokens}
    for name, split in state.splits.items():
        arrays |= {f"{name}_rest": split.rest, f"{name}_counts": split.counts}
    work.save_state(facts, arrays)


def load_resume_state(work: WorkFolder) -> ResumeState | None:
    """None when nothing was saved. Raises OSError."""
    saved = work.load_state()
    if saved is None:
        return None
    facts, arrays = cast(_Facts, saved[0]), saved[1]
    document = None
    if facts["held_document"] is not None:
        num_bytes, digest = facts["held_document"]
        document = TokenisedDocument(
            cast(NDArray[np.unsignedinteger], arrays["held"]), num_bytes, bytes.fromhex(digest)
        )
    mark = facts["mark"]
    place = tuple(cast(list[int], mark.pop("place")))
    [size_bytes, num_rejected] = facts["quarantine"]
    return ResumeState(
        mark=Mark(place=place, **cast(dict[str, int], mark)),  # type: ignore[arg-type]  # is_end is a bool
        quarantine=(size_bytes, num_rejected),
        splits={
            name: SplitState(
                cast(NDArray[np.unsignedinteger], arrays[f"{name}_rest"]),
                cast(NDArray[np.int64], arrays[f"{name}_counts"]),
                *numbers,
            )
            for name, numbers in facts["splits"].items()
        },
        held=None if facts["held"] is None else Held(document, *facts["held"]),
        note=facts["note"],
        is_read=facts["is_read"],
    )
