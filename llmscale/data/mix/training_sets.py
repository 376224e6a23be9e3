"""What `--data` names: one prepared set, or the sets of a mix."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmscale.data.mix.recipe import MixRecipe, is_mix, read_recipe, recorded_recipe
from llmscale.data.prepare.atomic_folder import new_folder
from llmscale.data.shards.dataset_source import SetLocation, copy_description, open_set
from llmscale.data.shards.manifest import Manifest, get_split, load_manifest
from llmscale.data.shards.token_shards import TokenShards
from llmscale.errors import DataError
from llmscale.untrusted.paths import is_plain_name

#: The key of a run's identity under which a checkpoint records its sets: data, fingerprint and samples of each.
RECORDED_SETS = "sets"
#: Folder of a run with the descriptions of its sets, by the beginning of their fingerprint.
KEPT_NAME, _KEPT_LETTERS = "dataset", 16
#: What the sets of a mix must have in common: a sample of each must mean the same to a model.
_ALIKE = {
    "tokenizer_sha256": "another tokenizer",
    "vocab_size": "another vocabulary",
    "eot_token": "another end of documents",
    "seq_len": "windows of another length",
}


@dataclass(frozen=True)
class TrainingSets:
    """Sets that can be opened and that belong together."""

    name: str
    """As the user wrote it, for messages."""
    locations: tuple[SetLocation, ...]
    recipe: MixRecipe | None = None
    """None for a single set."""

    @property
    def first(self) -> SetLocation:
        """The set whose tokenizer is everyone's."""
        return self.locations[0]

    @property
    def manifest(self) -> Manifest:
        """Of the first set: what all have in common may be read there."""
        return self.first.manifest

    @property
    def names(self) -> tuple[str, ...]:
        """Of the sets; of a single one, what the user wrote."""
        return self.recipe.names if self.recipe else (self.name,)

    @property
    def num_train_samples(self) -> int:
        """Samples of all training splits."""
        return sum(location.manifest.splits["train"].num_samples for location in self.locations)

    @property
    def fingerprint(self) -> str:
        """What decides which windows sample ids mean. Weights are not in it: they may change in the course of a run."""
        if self.recipe is None:
            return self.manifest.fingerprint
        parts = (f"{name} {at.manifest.fingerprint}\n" for name, at in zip(self.names, self.locations, strict=True))
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def as_recorded(self, identity: Mapping[str, object]) -> TrainingSets:
        """Return the same sets in the proportions of the whole run, where a checkpoint's `identity` records them."""
        recorded = recorded_recipe(self.recipe.path, identity.get(RECORDED_SETS)) if self.recipe else None
        return replace(self, recipe=recorded) if recorded and recorded.names == self.names else self

    def with_split(self, split: str) -> tuple[SetLocation, ...]:
        """Those sets that have one."""
        return tuple(at for at in self.locations if split in at.manifest.splits)


def open_training_sets(
    data: str, cache: Path | None = None, identity: Mapping[str, object] | None = None
) -> TrainingSets:
    """Open what `--data` names. The mix in a checkpoint's `identity` stands in for a YAML that was deleted. Raises
    ConfigError for a malformed YAML, DataError for sets that are missing or do not belong together."""
    if not is_mix(data):
        return TrainingSets(data, (_open(data, data, cache),))
    identity = identity or {}
    recipe = _find_recipe(data, identity)
    located = tuple(
        _open(folder, f"{data}: {name}", cache) for name, folder in zip(recipe.names, recipe.data, strict=True)
    )
    for name, location in zip(recipe.names[1:], located[1:], strict=True):
        for key, words in _ALIKE.items():
            mine, first = getattr(location.manifest, key), getattr(located[0].manifest, key)
            if mine != first:
                raise DataError(
                    f"{data}: the set {name} has {words} than {recipe.names[0]}: {key} {mine} and {first}. Prepare "
                    "both with the same --tokenizer and --seq-len."
                )
    return TrainingSets(data, located, recipe).as_recorded(identity)


def open_recorded_sets(
    data: str, cache: Path | None, given: str | None, identity: Mapping[str, object]
) -> TrainingSets:
    """Open the sets that a checkpoint names, with the `identity` that it records.

    Whoever wrote it chose the address, so nothing is asked of one unless the user names it, too: `given`, his --data.
    Raises DataError, as `open_training_sets`.
    """
    for address in _find_recipe(data, identity).data if is_mix(data) else [data]:
        if "://" in address.removeprefix("file://") and given not in (data, address):
            raise DataError(
                f"the checkpoint says that it was trained on {data if address == data else f'{address}, of {data}'}: "
                f"nothing is asked of an address that you did not give. If you trust it, add --data {data}"
            )
    return open_training_sets(data, cache, identity)


def _find_recipe(data: str, identity: Mapping[str, object]) -> MixRecipe:
    """Return the recipe in a YAML, or the one in a checkpoint's `identity` when that file was deleted."""
    recorded = None if os.path.exists(data) else recorded_recipe(Path(data), identity.get(RECORDED_SETS))
    return recorded or read_recipe(Path(data))


def keep_sets(sets: TrainingSets, run: Path) -> None:
    """Copy to a run folder what its checkpoints need when the sets are gone: every manifest, and the tokenizer. Raises
    DataError, OSError."""
    out = run / KEPT_NAME / sets.fingerprint[:_KEPT_LETTERS]
    if out.exists():
        return
    with new_folder(out, replace=False) as folder:
        for number, (name, location) in enumerate(zip(sets.names, sets.locations, strict=True)):
            place = folder / (f"{number:03}-{name}" if sets.recipe else f"{number:03}")
            copy_description(location, place, with_tokenizer=number == 0)


def open_kept_sets(run: Path, fingerprint: str, data: str) -> TrainingSets | None:
    """Return what `keep_sets` copied of the sets with a fingerprint, without their shards; None when a part of it is
    missing or damaged. `data`: their name in messages."""
    if not is_plain_name(fingerprint):
        return None
    try:
        places = sorted((run / KEPT_NAME / fingerprint[:_KEPT_LETTERS]).iterdir())
        locations = tuple(SetLocation(str(place), load_manifest(place), place, None) for place in places)
    except (OSError, DataError):
        return None
    names = tuple(place.name.partition("-")[2] for place in places)
    recipe = MixRecipe(run, names, tuple(map(str, places)), ()) if any(names) else None
    sets = TrainingSets(data, locations, recipe) if locations else None
    return sets if sets is not None and sets.fingerprint == fingerprint else None


def _open(data: str, where: str, cache: Path | None) -> SetLocation:
    location = open_set(data, cache)
    if "train" not in location.manifest.splits or not location.manifest.splits["train"].num_samples:
        raise DataError(f"{where} has no training samples. Prepare more text, or a smaller --val-fraction.")
    return location


class MixedShards:
    """The windows of one split of several sets, by ids that count through all of them."""

    def __init__(self, locations: tuple[SetLocation, ...], split: str, cache_limit_bytes: int | None = None) -> None:
        """Raises DataError, as TokenShards."""
        for location in locations:
            get_split(location.manifest, split, location.name)
        self._parts = [
            TokenShards(location, split, cache_limit_bytes=cache_limit_bytes, num_sets=len(locations))
            for location in locations
        ]
        self._dtype = np.result_type(*(part.manifest.dtype for part in self._parts))
        self._ends = np.cumsum([len(part) for part in self._parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, sample_ids: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
        """Windows of samples [b], [b, T + 1], as TokenShards.read. Raises DataError."""
        windows = np.empty((len(sample_ids), self._parts[0].manifest.seq_len + 1), self._dtype)
        owners = np.searchsorted(self._ends, sample_ids, side="right")
        for owner in np.unique(owners):
            part, chosen = self._parts[owner], np.flatnonzero(owners == owner)
            windows[chosen] = part.read(sample_ids[chosen] - (self._ends[owner] - len(part)))
        return windows
