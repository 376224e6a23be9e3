"""Open what `--data` names: one prepared set, or the sets of a mix in the proportions that its YAML gives."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd, lcm
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from llmscale.config.user_paths import check_path_or_url
from llmscale.data.prepare.output_folder import new_folder
from llmscale.data.shards.dataset_source import SetLocation, copy_description, open_set
from llmscale.data.shards.manifest import Manifest, get_split, load_manifest
from llmscale.data.shards.token_shards import TokenShards
from llmscale.errors import ConfigError, DataError
from llmscale.suggestions import did_you_mean
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, load_yaml
from llmscale.untrusted.paths import is_plain_name

SUFFIXES = (".yaml", ".yml")
#: A period of the pattern, in samples. Weights that need a longer one are rounded to parts of it.
MAX_PERIOD = 1 << 16
_MAX_SETS = 256
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_UNTIL = re.compile(r"\s*(\S+?)(?:\s+of\s+the\s+run)?\s*")


@dataclass(frozen=True)
class MixStage:
    """A part of the run with one proportion."""

    until: Fraction
    """Where it ends, as a part of the run's samples; the last one's is 1."""
    shares: tuple[int, ...]
    """Samples of each set in a period of the pattern, in the order of the sets."""


@dataclass(frozen=True)
class MixRecipe:
    """Which sets, and in which proportions."""

    path: Path
    """The file, for messages."""
    names: tuple[str, ...]
    data: tuple[str, ...]
    """Folder or URL of each set."""
    stages: tuple[MixStage, ...]

    @property
    def parts(self) -> tuple[Fraction, ...]:
        """Share of the whole run's samples that each set has; they add up to 1."""
        parts, begin = [Fraction(0)] * len(self.names), Fraction(0)
        for stage in self.stages:
            for place, share in enumerate(stage.shares):
                parts[place] += (stage.until - begin) * share / sum(stage.shares)
            begin = stage.until
        return tuple(parts)


def is_mix(data: str) -> bool:
    """Whether `--data` names a YAML and not a set."""
    return "://" not in data and data.lower().endswith(SUFFIXES) and not Path(data).is_dir()


def read_recipe(path: Path) -> MixRecipe:
    """Raises ConfigError, which names the file, the entry and what is legal."""
    where = f"--data {path}"
    try:
        values = load_yaml(path, Rules(ConfigError, max_bytes=CONFIG_MAX_BYTES), where)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{where}: {error.strerror}.") from None
    _check_keys(where, values, ("sets", "weights", "stages"))
    sets = _sets(where, values.get("sets"), path.parent)
    if ("weights" in values) == ("stages" in values):
        raise ConfigError(f"{where}: give either `weights`, for the whole run, or `stages`.")
    listed = values["stages"] if "stages" in values else [{"weights": values["weights"]}]
    stages = _stages(where, listed, tuple(sets))
    unused = [name for place, name in enumerate(sets) if not any(stage.shares[place] for stage in stages)]
    if unused:
        raise ConfigError(f"{where}: the set {unused[0]} has no weight in any stage. Give it one, or leave it out.")
    return MixRecipe(path, tuple(sets), tuple(sets.values()), stages)


def recorded_recipe(path: Path, recorded: object) -> MixRecipe | None:
    """Return the mix that a checkpoint recorded, in the proportions of its whole run; None when it recorded none.
    Raises ConfigError."""
    if not isinstance(recorded, Mapping) or "" in recorded:
        return None
    where = f"{path}, as the checkpoint recorded it"
    entries = {name: entry if isinstance(entry, Mapping) else {} for name, entry in recorded.items()}
    sets = _sets(where, {name: entry.get("data") for name, entry in entries.items()}, Path())
    samples = tuple(entry.get("samples") for entry in entries.values())
    if not all(type(count) is int and count >= 0 for count in samples) or not any(samples):
        raise ConfigError(f"{where}: the sets' samples are {str(samples)[:80]}, and must be numbers from 0 on.")
    return MixRecipe(
        path, tuple(sets), tuple(sets.values()), (MixStage(Fraction(1), cast("tuple[int, ...]", samples)),)
    )


def _check_keys(where: str, values: Mapping[str, object], legal: tuple[str, ...]) -> None:
    for key in values:
        if key not in legal:
            hint = did_you_mean(str(key), legal)
            raise ConfigError(f"{where}: unknown key {str(key)[:80]!r}.{hint} Legal: {', '.join(legal)}.")


def _sets(where: str, value: object, folder: Path) -> dict[str, str]:
    """Name -> folder or URL."""
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(f"{where}: `sets` must be a mapping of names to prepared sets, such as `web: data/web`.")
    if len(value) > _MAX_SETS:
        raise ConfigError(f"{where}: {len(value)} sets are listed; at most {_MAX_SETS} can be mixed.")
    found: dict[str, str] = {}
    for name, data in value.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"{where}: {str(name)[:80]!r} is no name of a set. Legal: letters, digits, _ . -")
        try:
            data = check_path_or_url(data if isinstance(data, str) else "")
            found[name] = data if "://" in data else check_path_or_url(str(folder / data))
        except ValueError as error:
            raise ConfigError(
                f"{where}: sets.{name} is {str(data)[:80]!r}, and must be the folder or URL of a set: it {error}."
            ) from None
    return found


def _stages(where: str, value: object, names: tuple[str, ...]) -> tuple[MixStage, ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: `stages` must be a list, each with `weights` and all but the last with `until`.")
    found: list[MixStage] = []
    for number, entry in enumerate(value, 1):
        spot = f"{where}: stage {number}" if len(value) > 1 else where
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{spot} is {str(entry)[:80]!r}, and must have `weights`.")
        _check_keys(spot, entry, ("until", "weights"))
        begin = found[-1].until if found else Fraction(0)
        until = _until(spot, entry.get("until"), begin, is_last=number == len(value))
        found.append(MixStage(until, _shares(spot, entry.get("weights"), names)))
    return tuple(found)


def _until(where: str, value: object, begin: Fraction, *, is_last: bool) -> Fraction:
    if is_last and value is None:
        return Fraction(1)
    matched = None if value is None or isinstance(value, bool) else _UNTIL.fullmatch(str(value))
    until = _number(matched[1]) if matched else None
    if is_last and until != 1:
        raise ConfigError(f"{where}: the last stage lasts to the end of the run and has no `until`, not {value!r}.")
    if until is None or not begin < until <= 1 or (until == 1 and not is_last):
        raise ConfigError(
            f"{where}: until is {str(value)[:80]!r}, and must be the part of the run where the stage ends, more than "
            f"{float(begin):g} and less than 1."
        )
    return until


def _shares(where: str, value: object, names: tuple[str, ...]) -> tuple[int, ...]:
    """Weights as the smallest whole numbers in their proportion, or parts of MAX_PERIOD near it."""
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(f"{where}: `weights` must be a mapping of sets to numbers, such as `web: 70`.")
    weights = dict.fromkeys(names, Fraction(0))
    for name, given in value.items():
        if name not in weights:
            raise ConfigError(f"{where}: weights name {str(name)[:80]!r}.{did_you_mean(str(name), names)} "
                              f"Sets: {', '.join(names)}.")  # fmt: skip
        weight = None if isinstance(given, bool) else _number(str(given))
        if weight is None or weight < 0:
            raise ConfigError(f"{where}: the weight of {name} is {str(given)[:80]!r}, and must be a number from 0 on.")
        weights[name] = weight
    if not sum(weights.values()):
        raise ConfigError(f"{where}: all weights are 0. Give at least one set more.")
    return whole_shares(tuple(weights.values()))


def _number(text: str) -> Fraction | None:
    """Decimals exactly as written; None for anything else."""
    if not re.fullmatch(r"[0-9]{1,18}(\.[0-9]{0,18})?(e[+-]?[0-9]{1,2})?", text, re.IGNORECASE):
        return None
    return Fraction(text)


def whole_shares(weights: tuple[Fraction, ...]) -> tuple[int, ...]:
    """Whole numbers in the proportion of the weights: exactly where their sum is at most MAX_PERIOD, else the nearest
    with that sum (largest remainders), and none of a positive weight 0."""
    unit = lcm(*(weight.denominator for weight in weights))
    exact = [int(weight * unit) for weight in weights]
    divisor = gcd(*exact)
    exact = [number // divisor for number in exact]
    total = sum(exact)
    if total <= MAX_PERIOD:
        return tuple(exact)
    shares = [max(1, number * MAX_PERIOD // total) if number else 0 for number in exact]
    remainders = sorted(range(len(exact)), key=lambda place: -(exact[place] * MAX_PERIOD % total))
    for place in remainders[: max(0, MAX_PERIOD - sum(shares))]:
        shares[place] += 1
    return tuple(shares)


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
