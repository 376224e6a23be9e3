"""Second and third stage: which documents share a key with another, and which of these are copies.

A document that shares neither its text's hash nor any band with another is no copy, and nothing is a copy of it. So the
third stage, one task that does what a local run does in the order of the input, sees all others only, and decides the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmscale.data.clean.cluster.looked import ComparedKeys, count_documents
from llmscale.data.clean.cluster.work_files import Verdicts, WorkFiles, load_array, save_array
from llmscale.data.clean.compare import Comparison
from llmscale.data.clean.findings import ExactKey, Removed, SketchRow
from llmscale.data.clean.pipeline import CleanOptions, check_number

_EXACT, _BAND = "exact", "band-"
#: Documents that are looked up at once.
_BATCH_DOCUMENTS = 1 << 12


def key_names(options: CleanOptions) -> list[str]:
    """What documents are compared by."""
    bands = [f"{_BAND}{band:04}" for band in range(options.near.bands)]
    return ([_EXACT] if "exact" in options.steps else []) + (bands if "near" in options.steps else [])


@dataclass(frozen=True)
class RepeatStage:
    """Tasks that share the keys among them."""

    files: WorkFiles
    options: CleanOptions
    num_looked: int
    """Tasks of the first stage."""

    @property
    def num_tasks(self) -> int:
        """As many as of the first stage: each takes a while to start, and has little to do where these have."""
        return min(len(key_names(self.options)), self.num_looked)

    def __call__(self, task: int) -> int:
        """How many documents have a key that another has, key by key. Raises OSError."""
        looked = [ComparedKeys(self.files.looked(number)) for number in range(self.num_looked)]
        num_repeated = 0
        for name in key_names(self.options)[task :: self.num_tasks]:
            repeated = find_repeated(np.concatenate([_keys_of(keys, name) for keys in looked]))
            save_array(self.files.repeated(name), np.packbits(repeated))
            num_repeated += int(repeated.sum())
        return num_repeated


def _keys_of(keys: ComparedKeys, name: str) -> NDArray[np.unsignedinteger]:
    return keys.exact_keys if name == _EXACT else keys.band_keys[int(name.removeprefix(_BAND))]


def find_repeated(keys: NDArray[np.unsignedinteger]) -> NDArray[np.bool_]:
    """Which of the keys stand more than once, [keys]."""
    order = np.argsort(keys, kind="stable")
    same = keys[order[1:]] == keys[order[:-1]]
    repeated = np.zeros(len(keys), np.bool_)
    repeated[order[1:][same]] = True
    repeated[order[:-1][same]] = True
    return repeated


@dataclass(frozen=True)
class DecideStage:
    """One task."""

    files: WorkFiles
    options: CleanOptions
    num_looked: int
    """Tasks of the first stage."""

    def __call__(self, task: int) -> int:
        """How many documents are copies. Raises DataError, OSError."""
        tasks = [ComparedKeys(self.files.looked(number)) for number in range(self.num_looked)]
        exact = self._repeated([_EXACT], [len(keys.exact_keys) for keys in tasks])
        bands = [name for name in key_names(self.options) if name != _EXACT]
        near = self._repeated(bands, [len(keys.minima) for keys in tasks])
        comparison = Comparison(self.options.near)
        counts: NDArray[np.uint32] | None = None
        if "decontaminate" in self.options.steps:
            counts = np.zeros(len(load_array(self.files.ngram_hashes)), np.uint32)
        first_number = num_removed = 0
        for number, keys in enumerate(tasks):
            removed = self._decide(comparison, keys, first_number, exact[number], near[number])
            Verdicts(first_number, removed).save(self.files.verdicts(number))
            if counts is not None:
                stays = ~np.isin(keys.overlaps[:, 0].astype(np.int64) + first_number, list(removed))
                np.add.at(counts, keys.overlaps[stays, 1], 1)
            num_removed += len(removed)
            first_number += count_documents(self.files.looked(number))
        check_number(first_number - 1)
        if counts is not None:
            save_array(self.files.ngram_counts, counts)
        return num_removed

    def _repeated(self, names: Sequence[str], lengths: Sequence[int]) -> list[NDArray[np.intp]]:
        """Of each task, the rows that have a key which another has."""
        found = np.zeros(sum(lengths), np.bool_)
        for name in names:
            if name in key_names(self.options):
                found |= np.unpackbits(load_array(self.files.repeated(name)), count=len(found)).astype(np.bool_)
        return [np.flatnonzero(part) for part in np.split(found, np.cumsum(lengths)[:-1])]

    def _decide(
        self,
        comparison: Comparison,
        keys: ComparedKeys,
        first_number: int,
        exact_rows: NDArray[np.intp],
        near_rows: NDArray[np.intp],
    ) -> dict[int, Removed]:
        """Which of a task's documents go, by their number in the input."""
        steps = self.options.steps
        near_is_first = "near" in steps and _EXACT in steps and steps.index("near") < steps.index("exact")
        documents = np.concatenate([keys.exact_documents[exact_rows], keys.near_documents[near_rows]])
        is_near = np.repeat([False, True], [len(exact_rows), len(near_rows)])
        rows = np.concatenate([exact_rows, near_rows])
        order = np.lexsort((is_near ^ near_is_first, documents))
        removed: dict[int, Removed] = {}
        for begin in range(0, len(order), _BATCH_DOCUMENTS):
            batch = order[begin : begin + _BATCH_DOCUMENTS]
            batch_is_near = is_near[batch]
            exact_keys = keys.exact_keys[rows[batch[~batch_is_near]]].tolist()
            comparison.begin_batch(exact_keys, keys.sketches(rows[batch[batch_is_near]]))
            places = np.where(batch_is_near, np.cumsum(batch_is_near), np.cumsum(~batch_is_near)) - 1
            for document, of_near, place in zip(
                documents[batch].tolist(), batch_is_near.tolist(), places.tolist(), strict=True
            ):
                number = first_number + document
                if number in removed:
                    continue
                finding = SketchRow(place) if of_near else ExactKey(exact_keys[place])
                decision = comparison.decide(number, finding)
                if decision is not None:
                    removed[number] = decision
        return removed
