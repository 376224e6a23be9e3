"""What the tasks of a stage leave for the next, in the work folder that all machines share.

    looked/00003/       what task 3 found of its documents, and by what they are compared
    repeated/exact.npy  which documents share a key with another; one file for each key
    verdicts/00003.npz  which of task 3's documents are copies
    ngram_counts.npy    how many documents have each n-gram of evaluation text
    parts/00003/        what task 3 keeps and removes, and its report
    errors/             why a task failed

Each is there whole or not at all.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmscale.data.clean.decontaminate import EvaluationNgrams
from llmscale.data.clean.findings import ExactKey, Removed, SketchRow
from llmscale.data.prepare.output_folder import sync_tree
from llmscale.files.atomic_write import write_durably

_ITEMS_NAME, _LABELS_NAME = "evaluation_items.npy", "evaluation_labels.json"


@dataclass(frozen=True)
class WorkFiles:
    """Their places."""

    folder: Path
    """Absolute."""

    def looked(self, task: int) -> Path:
        return self.folder / "looked" / f"{task:05}"

    def repeated(self, key: str) -> Path:
        return self.folder / "repeated" / f"{key}.npy"

    def verdicts(self, task: int) -> Path:
        return self.folder / "verdicts" / f"{task:05}.npz"

    def part(self, task: int) -> Path:
        return self.folder / "parts" / f"{task:05}"

    @property
    def ngram_counts(self) -> Path:
        return self.folder / "ngram_counts.npy"

    @property
    def errors(self) -> Path:
        return self.folder / "errors"

    def error(self, stage: str, task: int) -> Path:
        return self.errors / f"{stage}-{task:05}.json"

    @property
    def logs(self) -> Path:
        """datatrove's, and what it knows of finished tasks."""
        return self.folder / "logs"

    @property
    def ngram_hashes(self) -> Path:
        return self.folder / "evaluation.npy"

    def forget_failed(self) -> None:
        """Why tasks failed, and what they left unfinished: for when none runs."""
        shutil.rmtree(self.errors, ignore_errors=True)
        for folders in (self.looked(0).parent, self.part(0).parent):
            for partial in folders.glob(".*"):
                shutil.rmtree(partial, ignore_errors=True)

    def save_ngrams(self, ngrams: EvaluationNgrams) -> None:
        """Once: tasks of an earlier command may have the files mapped into memory. Raises OSError."""
        if (self.folder / _LABELS_NAME).exists():  # the last of them
            return
        save_array(self.ngram_hashes, ngrams.hashes)
        save_array(self.folder / _ITEMS_NAME, ngrams.items)
        write_durably(self.folder / _LABELS_NAME, json.dumps([list(ngrams.labels), ngrams.num_short]))

    def load_ngrams(self) -> EvaluationNgrams:
        """Raises OSError."""
        labels, num_short = json.loads((self.folder / _LABELS_NAME).read_bytes())
        return EvaluationNgrams(load_array(self.ngram_hashes), load_array(self.folder / _ITEMS_NAME), labels, num_short)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to write into that becomes `path`; what an earlier try left there goes. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        yield partial
        sync_tree(partial)
        shutil.rmtree(path, ignore_errors=True)
        os.rename(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save_array(path: Path, array: NDArray[np.generic]) -> None:
    """Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    buffer = io.BytesIO()
    np.save(buffer, array)
    write_durably(path, buffer.getvalue())


def load_array(path: Path) -> NDArray:
    """Mapped into memory. Raises OSError."""
    # Of nothing there is nothing to map.
    return np.load(path, mmap_mode="r") if path.stat().st_size > 128 else np.load(path)


class Verdicts:
    """Which documents of a task are copies, and of which; what the steps say that compare documents."""

    def __init__(self, first_number: int, removed: Mapping[int, Removed]) -> None:
        """`removed` by number in the whole input, of which the task's first document has `first_number`."""
        self.first_number = first_number
        self._removed = removed

    def decide(self, number: int, finding: ExactKey | SketchRow) -> Removed | None:
        """Whether the document goes by this finding."""
        removed = self._removed.get(number)
        if removed is None or isinstance(finding, SketchRow) != ("similarity" in removed.why):
            return None
        return removed

    def save(self, path: Path) -> None:
        """Raises OSError."""
        path.parent.mkdir(exist_ok=True)
        whys = [removed.why for removed in self._removed.values()]
        buffer = io.BytesIO()
        np.savez(
            buffer,
            first_number=np.array(self.first_number, np.int64),
            numbers=np.fromiter(self._removed, np.int64, len(whys)),
            duplicate_of=np.array([why["duplicate_of"] for why in whys], np.int64),
            # Of exact copies none.
            similarity=np.array([why.get("similarity", np.nan) for why in whys], np.float64),
        )
        write_durably(path, buffer.getvalue())

    @classmethod
    def load(cls, path: Path) -> Verdicts:
        """Raises OSError."""
        with np.load(path, allow_pickle=False) as stored:
            columns = (stored["numbers"].tolist(), stored["duplicate_of"].tolist(), stored["similarity"].tolist())
            first_number = int(stored["first_number"])
        removed = {
            number: Removed({"rule": "exact_duplicate", "duplicate_of": first})
            if similarity != similarity
            else Removed({"rule": "near_duplicate", "duplicate_of": first, "similarity": similarity})
            for number, first, similarity in zip(*columns, strict=True)
        }
        return cls(first_number, removed)
