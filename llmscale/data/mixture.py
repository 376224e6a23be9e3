"""Open `--data`, a prepared dataset or a mixture of several given by a YAML, and order the samples of a mixture.

Every position of a mixture belongs to a dataset and is the next sample in that dataset's own order: a pure function of
(seed, position), the same for any number of ranks. A resume needs only the position. Each dataset's samples occur once
per epoch of that dataset, in all stages of the run together. NumPy only.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import gcd, lcm
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, PlainValidator, ValidationError, WithJsonSchema

from llmscale.config.user_paths import check_path_or_url
from llmscale.data.order.sample_order import Ranges, StreamOrder, stream_positions
from llmscale.data.prepare.output_folder import new_folder
from llmscale.data.shards.cache import SetLocation, copy_description, open_set
from llmscale.data.shards.manifest import Manifest, get_split, load_manifest
from llmscale.data.shards.token_shards import Marked, TokenShards
from llmscale.errors import ConfigError, DataError
from llmscale.suggestions import describe_invalid, did_you_mean
from llmscale.terminal.human_numbers import parse_number
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, load_settings
from llmscale.untrusted.paths import is_plain_name
from llmscale.untrusted.terminal import make_visible_line

SUFFIXES = (".yaml", ".yml")
#: Longest period of the pattern, in samples. Weights that need a longer one are rounded to parts of it.
MAX_PERIOD = 1 << 16
_MAX_SETS = 256
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_WEIGHT_SCHEMA = {
    "type": ["number", "string"],
    "minimum": 0,
    "pattern": r"^[0-9][0-9_,.]*([eE][+-]?[0-9]+)?[kKmMbBgGtT]?$",
}
_UNTIL = re.compile(r"\s*(\S+?)(?:\s+of\s+the\s+run)?\s*")
_FILE = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, defer_build=True)
#: Key of a run's identity under which a checkpoint records data, fingerprint and samples of each dataset.
RECORDED_SETS = "sets"
#: Folder of a run with the descriptions of its datasets, by the first letters of their fingerprint.
KEPT_NAME = "dataset"
_KEPT_LETTERS = 16
#: Properties that all datasets of a mixture must share.
_ALIKE = {
    "tokenizer_sha256": "another tokenizer",
    "vocab_size": "another vocabulary",
    "eot_token": "another end of documents",
    "seq_len": "windows of another length",
}


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("must be letters, digits, _ . -, at most 64, and begin with a letter or digit")
    return name


def _parse_weight(value: object) -> Fraction:
    if isinstance(value, bool):
        weight = None
    else:
        weight = _number(str(value))
    if weight is None:
        raise ValueError("must be a number from 0 on")
    return weight


def _parse_until(value: object) -> Fraction:
    if isinstance(value, bool):
        matched = None
    else:
        matched = _UNTIL.fullmatch(str(value))
    if matched:
        until = _number(matched[1])
    else:
        until = None
    if until is None or not 0 < until <= 1:
        raise ValueError("must be the part of the run where the stage ends, such as 0.9")
    return until


_Name = Annotated[str, AfterValidator(_check_name), WithJsonSchema({"type": "string", "pattern": f"^{_NAME.pattern}$"})]
_Weight = Annotated[Fraction, PlainValidator(_parse_weight), WithJsonSchema(_WEIGHT_SCHEMA)]
_Until = Annotated[
    Fraction,
    PlainValidator(_parse_until),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
                {"type": "string", "pattern": r"^\s*[0-9.eE+-]+(\s+of\s+the\s+run)?\s*$"},
            ]
        }
    ),
]


class MixFileStage(BaseModel):
    """Part of the run with constant proportions, as written."""

    model_config = _FILE

    until: _Until | None = None
    """Part of the run where the stage ends, such as 0.9; the last stage has none."""
    weights: dict[_Name, _Weight]
    """Weight of each dataset in the stage; without an entry: 0."""


class MixFile(BaseModel):
    """Datasets of a mixture and their proportions, as written in the YAML for `--data`."""

    model_config = ConfigDict(
        **_FILE, json_schema_extra={"oneOf": [{"required": ["weights"]}, {"required": ["stages"]}]}
    )

    sets: dict[_Name, Annotated[str, AfterValidator(check_path_or_url)]]
    """Folder or URL of each dataset, by a name of your choice. A folder is relative to the file."""
    weights: dict[_Name, _Weight] | None = None
    """Weight of each dataset in the whole run."""
    stages: list[MixFileStage] | None = None
    """Parts of the run with weights of their own, in place of `weights`."""


@dataclass(frozen=True)
class MixStage:
    """A part of the run with constant proportions."""

    until: Fraction
    """End, as a fraction of the run's samples; 1 for the last stage."""
    shares: tuple[int, ...]
    """Samples of each dataset in a period of the pattern."""


@dataclass(frozen=True)
class MixRecipe:
    """Datasets of a mixture and their proportions."""

    path: Path
    """File name for messages."""
    names: tuple[str, ...]
    data: tuple[str, ...]
    """Folder or URL of each dataset."""
    stages: tuple[MixStage, ...]

    @property
    def parts(self) -> tuple[Fraction, ...]:
        """Fraction of the run's samples from each dataset; they add up to 1."""
        parts = [Fraction(0)] * len(self.names)
        begin = Fraction(0)
        for stage in self.stages:
            for place, share in enumerate(stage.shares):
                parts[place] += (stage.until - begin) * share / sum(stage.shares)
            begin = stage.until
        return tuple(parts)


def is_mix(data: str) -> bool:
    """Return whether `--data` names a mixture's YAML."""
    return "://" not in data and data.lower().endswith(SUFFIXES) and not Path(data).is_dir()


def read_recipe(path: Path) -> MixRecipe:
    """Read a mixture's YAML. Raises ConfigError with the file, the entry and the legal values."""
    where = f"--data {path}"
    values = load_settings(path, Rules(ConfigError, max_bytes=CONFIG_MAX_BYTES), where)
    written = _check_file(where, values)
    sets = _locate(where, written, path.parent)
    if (written.weights is None) == (written.stages is None):
        raise ConfigError(f"{where}: give either `weights`, for the whole run, or `stages`.")
    if written.weights is not None:
        listed = [MixFileStage.model_construct(weights=written.weights)]
    else:
        listed = written.stages or []
    stages = _stages(where, listed, tuple(sets))
    unused = [name for place, name in enumerate(sets) if not any(stage.shares[place] for stage in stages)]
    if unused:
        raise ConfigError(f"{where}: the dataset {unused[0]} has no weight in any stage. Give it one, or remove it.")
    return MixRecipe(path, tuple(sets), tuple(sets.values()), stages)


def recorded_recipe(path: Path, recorded: object) -> MixRecipe | None:
    """Return the mixture recorded in a checkpoint, in the proportions of its whole run, or None. Raises ConfigError."""
    if not isinstance(recorded, Mapping) or "" in recorded:
        return None
    where = f"{path}, as the checkpoint recorded it"
    entries = {name: entry if isinstance(entry, Mapping) else {} for name, entry in recorded.items()}
    sets = _locate(
        where, _check_file(where, {"sets": {name: entry.get("data") for name, entry in entries.items()}}), Path()
    )
    samples = tuple(entry.get("samples") for entry in entries.values())
    if not all(type(count) is int and count >= 0 for count in samples) or not any(samples):
        raise ConfigError(f"{where}: the datasets' samples are {str(samples)[:80]}, and must be numbers from 0 on.")
    return MixRecipe(
        path, tuple(sets), tuple(sets.values()), (MixStage(Fraction(1), cast("tuple[int, ...]", samples)),)
    )


def _check_file(where: str, values: Mapping[str, object]) -> MixFile:
    """Return the entries of a mixture's YAML. Raises ConfigError naming the first wrong one, its value and the rule."""
    try:
        return MixFile.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"] if part != "[key]"]
        if len(place) > 1 and place[0] == "stages":
            place[1] = str(int(place[1]) + 1)
        name = make_visible_line(".".join(place)[:80])
        if first["type"] == "extra_forbidden":
            legal = (MixFileStage if len(place) > 1 else MixFile).model_fields
            hint = did_you_mean(place[-1], legal)
            raise ConfigError(f"{where}: unknown key '{name}'.{hint} Legal: {', '.join(legal)}.") from None
        if first["type"] == "missing":
            raise ConfigError(f"{where}: '{name}' is missing.") from None
        raise ConfigError(f"{where}: {describe_invalid(name, first)}") from None


def _locate(where: str, written: MixFile, folder: Path) -> dict[str, str]:
    """Return the folder or URL of each dataset by name. Raises ConfigError."""
    if not 0 < len(written.sets) <= _MAX_SETS:
        raise ConfigError(
            f"{where}: {len(written.sets)} datasets are listed. Give 1 to {_MAX_SETS}, such as `web: data/web`."
        )
    sets: dict[str, str] = {}
    for name, data in written.sets.items():
        try:
            sets[name] = data if "://" in data else check_path_or_url(str(folder / data))
        except ValueError as error:
            raise ConfigError(f"{where}: sets.{name} = {data[:80]!r}: {error}.") from None
    return sets


def _stages(where: str, listed: Sequence[MixFileStage], names: tuple[str, ...]) -> tuple[MixStage, ...]:
    if not listed:
        raise ConfigError(f"{where}: `stages` must be a list, each with `weights` and all but the last with `until`.")
    stages: list[MixStage] = []
    for number, stage in enumerate(listed, 1):
        spot = f"{where}: stage {number}" if len(listed) > 1 else where
        if stages:
            begin = stages[-1].until
        else:
            begin = Fraction(0)
        is_last = number == len(listed)
        until = Fraction(1) if is_last and stage.until is None else stage.until
        if is_last and until != 1:
            raise ConfigError(f"{spot}: the last stage lasts to the end of the run. Drop its `until`.")
        if until is None or until <= begin or (until == 1 and not is_last):
            if until is None:
                given = "missing"
            else:
                given = f"{float(until):g}"
            raise ConfigError(
                f"{spot}: `until` is {given}, and must be the part of the run where the stage ends, more than "
                f"{float(begin):g} and less than 1."
            )
        stages.append(MixStage(until, _shares(spot, stage.weights, names)))
    return tuple(stages)


def _shares(where: str, given: Mapping[str, Fraction], names: tuple[str, ...]) -> tuple[int, ...]:
    """Return weights as the smallest integers in their proportion, or as nearby parts of MAX_PERIOD. Raises
    ConfigError."""
    for name in given:
        if name not in names:
            hint = did_you_mean(name, names)
            legal = ", ".join(names)
            raise ConfigError(f"{where}: weights names {name!r}, which is not in sets.{hint} Legal: {legal}.")
    weights = tuple(given.get(name, Fraction(0)) for name in names)
    if not sum(weights):
        raise ConfigError(f"{where}: all weights are 0. Give at least one dataset a weight.")
    return whole_shares(weights)


def _number(text: str) -> Fraction | None:
    """Parse a number from 0 to 10^120 exactly; return None for anything else."""
    value = Decimal(-1)
    with suppress(ValueError):
        value = parse_number(text)
    # A number of many digits in a mixture would take hours.
    if value == 0 or (value > 0 and abs(value.adjusted()) <= 120):
        return Fraction(value)
    return None


def whole_shares(weights: tuple[Fraction, ...]) -> tuple[int, ...]:
    """Return integers in the proportion of the weights: exact if their sum is at most MAX_PERIOD, else the nearest with
    that sum (largest remainders), at least 1 for a positive weight."""
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


@dataclass(frozen=True)
class TrainingSets:
    """A dataset or a mixture, opened."""

    name: str
    """Name as the user wrote it, for messages."""
    locations: tuple[SetLocation, ...]
    recipe: MixRecipe | None = None
    """None for a single dataset."""

    @property
    def first(self) -> SetLocation:
        """The first dataset, whose tokenizer is that of all."""
        return self.locations[0]

    @property
    def chat_template(self) -> str | None:
        """Template of the first dataset of conversations; None without any."""
        chats = (location.manifest.chat for location in self.locations)
        return next((chat.template for chat in chats if chat is not None), None)

    def masks_documents(self, wanted: bool) -> bool:
        """Return whether attention ends at documents: in rows of several conversations it does, in padded rows of one,
        which may hold end-of-text tokens, it does not, and with text alone as `wanted`.

        Raises ConfigError for a mixture of both kinds of rows.
        """
        chats = [(at.name, at.manifest.chat) for at in self.locations if at.manifest.chat is not None]
        packed = [name for name, chat in chats if chat.masks_documents]
        padded = [name for name, chat in chats if not chat.masks_documents]
        if packed and padded:
            raise ConfigError(
                f"{padded[0]} has one conversation a row, which may hold end-of-text tokens, and {packed[0]} several, "
                "which need a document mask. In a mixture prepare all conversations with --packing pad, or none."
            )
        return bool(packed) or (wanted and not padded)

    @property
    def manifest(self) -> Manifest:
        """The first dataset's manifest, for properties that all share."""
        return self.first.manifest

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the datasets; for a single one, what the user wrote."""
        return self.recipe.names if self.recipe else (self.name,)

    @property
    def num_train_samples(self) -> int:
        """Number of samples in all training splits."""
        return sum(location.manifest.splits["train"].num_samples for location in self.locations)

    @property
    def fingerprint(self) -> str:
        """Hash of the windows that sample ids refer to. Weights are left out, because they may change during a run."""
        if self.recipe is None:
            return self.manifest.fingerprint
        parts = (f"{name} {at.manifest.fingerprint}\n" for name, at in zip(self.names, self.locations, strict=True))
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def as_recorded(self, identity: Mapping[str, object]) -> TrainingSets:
        """Return the datasets in the proportions of the whole run, if a checkpoint's `identity` records them."""
        if self.recipe:
            recorded = recorded_recipe(self.recipe.path, identity.get(RECORDED_SETS))
        else:
            recorded = None
        if recorded and recorded.names == self.names:
            return replace(self, recipe=recorded)
        return self

    def with_split(self, split: str) -> tuple[SetLocation, ...]:
        """Return the datasets that have this split."""
        return tuple(at for at in self.locations if split in at.manifest.splits)


def open_training_sets(
    data: str, cache: Path | None = None, identity: Mapping[str, object] | None = None
) -> TrainingSets:
    """Open `--data`. The mixture in a checkpoint's `identity` replaces a deleted YAML. Raises ConfigError for a
    malformed YAML, DataError for datasets that are missing or do not match."""
    if not is_mix(data):
        return TrainingSets(data, (_open(data, data, cache),))
    identity = identity or {}
    recipe = _find_recipe(data, identity)
    located = tuple(
        _open(folder, f"{data}: {name}", cache) for name, folder in zip(recipe.names, recipe.data, strict=True)
    )
    for name, location in zip(recipe.names[1:], located[1:], strict=True):
        for key, words in _ALIKE.items():
            mine = getattr(location.manifest, key)
            first = getattr(located[0].manifest, key)
            if mine != first:
                raise DataError(
                    f"{data}: the dataset {name} has {words} than {recipe.names[0]}: {key} {mine} and {first}. Prepare "
                    "both with the same --tokenizer and --seq-len."
                )
    return TrainingSets(data, located, recipe).as_recorded(identity)


def open_recorded_sets(
    data: str, cache: Path | None, given: str | None, identity: Mapping[str, object]
) -> TrainingSets:
    """Open the datasets that a checkpoint names, with the `identity` that it records.

    The checkpoint is untrusted: an address in it is contacted only if the user names it, too (`given`, the --data).
    Raises as `open_training_sets`.
    """
    for address in _find_recipe(data, identity).data if is_mix(data) else [data]:
        if "://" in address.removeprefix("file://") and given not in (data, address):
            raise DataError(
                f"the checkpoint says that it was trained on {data if address == data else f'{address}, of {data}'}: "
                f"llmscale does not contact an address that you did not give. If you trust it, add --data {data}"
            )
    return open_training_sets(data, cache, identity)


def _find_recipe(data: str, identity: Mapping[str, object]) -> MixRecipe:
    """Return the recipe in a YAML, or the one in a checkpoint's `identity` when that file was deleted."""
    if os.path.exists(data):
        recorded = None
    else:
        recorded = recorded_recipe(Path(data), identity.get(RECORDED_SETS))
    return recorded or read_recipe(Path(data))


def keep_sets(sets: TrainingSets, run: Path) -> None:
    """Copy every manifest and the tokenizer to the run folder, for checkpoints that outlive the datasets. Raises
    DataError, OSError."""
    out = run / KEPT_NAME / sets.fingerprint[:_KEPT_LETTERS]
    if out.exists():
        return
    with new_folder(out, replace=False) as folder:
        for number, (name, location) in enumerate(zip(sets.names, sets.locations, strict=True)):
            place = folder / (f"{number:03}-{name}" if sets.recipe else f"{number:03}")
            copy_description(location, place, with_tokenizer=number == 0)


def open_kept_sets(run: Path, fingerprint: str, data: str) -> TrainingSets | None:
    """Return the datasets that `keep_sets` copied, without shards; None if a part is missing or damaged. `data` names
    them in messages."""
    if not is_plain_name(fingerprint):
        return None
    try:
        places = sorted((run / KEPT_NAME / fingerprint[:_KEPT_LETTERS]).iterdir())
        locations = tuple(SetLocation(str(place), load_manifest(place), place, None) for place in places)
    except (OSError, DataError):
        return None
    names = tuple(place.name.partition("-")[2] for place in places)
    if any(names):
        recipe = MixRecipe(run, names, tuple(map(str, places)), ())
    else:
        recipe = None
    if locations:
        sets = TrainingSets(data, locations, recipe)
    else:
        sets = None
    return sets if sets is not None and sets.fingerprint == fingerprint else None


def _open(data: str, where: str, cache: Path | None) -> SetLocation:
    location = open_set(data, cache)
    if "train" not in location.manifest.splits or not location.manifest.splits["train"].num_samples:
        raise DataError(f"{where} has no training samples. Prepare more text, or a smaller --val-fraction.")
    return location


_Read = Callable[[TokenShards, NDArray[np.int64]], NDArray[np.unsignedinteger]]


class MixedShards:
    """Windows of one split of several datasets, with consecutive ids."""

    def __init__(self, locations: tuple[SetLocation, ...], split: str, cache_limit_bytes: int | None = None) -> None:
        """Open the shards of every dataset. Raises DataError."""
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

    @property
    def has_mask(self) -> bool:
        """True if tokens of a dataset may not be targets."""
        return any(part.has_mask for part in self._parts)

    def read(self, sample_ids: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
        """Return the windows of samples [b], [b, T + 1]. Raises DataError."""
        return self._gather(sample_ids, TokenShards.read, self._dtype)

    def read_marked(self, sample_ids: NDArray[np.int64]) -> Marked:
        """Return the windows of samples [b] with marks of their targets, [b, T + 1]. Raises DataError."""
        return self._gather(sample_ids, TokenShards.read_marked, np.dtype(np.uint32))

    def _gather(self, sample_ids: NDArray[np.int64], read: _Read, dtype: np.dtype[Any]) -> NDArray[Any]:
        windows = np.empty((len(sample_ids), self._parts[0].manifest.seq_len + 1), dtype)
        owners = np.searchsorted(self._ends, sample_ids, side="right")
        for owner in np.unique(owners):
            part = self._parts[owner]
            chosen = np.flatnonzero(owners == owner)
            windows[chosen] = read(part, sample_ids[chosen] - (self._ends[owner] - len(part)))
        return windows


IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Pattern:
    """One period of the repeating pattern of datasets."""

    shares: IntArray
    """Samples of each dataset in a period, [datasets]."""
    owners: IntArray
    """Dataset of each place, [period]."""
    ranks: IntArray
    """Number of earlier places of the same dataset, [period]."""

    def owners_at(self, offsets: IntArray) -> tuple[IntArray, IntArray]:
        """Return the dataset of each offset [n] from the pattern's begin, and the number of its samples before."""
        rounds, places = np.divmod(offsets, len(self.owners))
        owners = self.owners[places]
        return owners, rounds * self.shares[owners] + self.ranks[places]

    def counts_before(self, offset: int) -> IntArray:
        """Return the samples of each dataset, [datasets], among the first `offset`."""
        rounds, places = divmod(offset, len(self.owners))
        return rounds * self.shares + np.bincount(self.owners[:places], minlength=len(self.shares))


@lru_cache(maxsize=16)
def build_pattern(shares: tuple[int, ...]) -> Pattern:
    """Return the pattern of a period of sum(shares) samples, as even as possible.

    Sample j of a dataset with share n of a period K is placed in [floor(j K / n), ceil((j + 1) K / n)), earliest end
    first. This is fair scheduling on one processor (Baruah et al., "Proportionate progress", Algorithmica 1996, theorem
    1): it always succeeds and keeps every dataset within one sample of its share at every position. The pattern is not
    random; samples come in the random order of their dataset.
    """
    period = sum(shares)
    ranks = np.empty(period, np.int64)
    owners = np.empty(period, np.int64)
    waiting = [(0, owner) for owner, share in enumerate(shares) if share]
    heapq.heapify(waiting)
    ready: list[tuple[int, int]] = []
    placed = [0] * len(shares)
    for place in range(period):
        while waiting and waiting[0][0] <= place:
            _, owner = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(placed[owner] + 1) * period // shares[owner]), owner))
        _, owner = heapq.heappop(ready)
        owners[place] = owner
        ranks[place] = placed[owner]
        placed[owner] += 1
        heapq.heappush(waiting, (placed[owner] * period // shares[owner], owner))
    return Pattern(np.array(shares, np.int64), owners, ranks)


@dataclass(frozen=True)
class PlacedStage:
    """A stage with its position in the stream."""

    begin: int
    """First stream position."""
    shares: tuple[int, ...]
    """Samples of each dataset in a period of the pattern."""


def place_stages(
    recipe: MixRecipe,
    total_samples: int,
    global_batch_size: int,
    *,
    saved: Sequence[PlacedStage] = (),
    seen: int = 0,
    skipped: Ranges = (),
) -> tuple[PlacedStage, ...]:
    """Return the stages of a run of `total_samples`, cut between steps. The first `seen` samples keep the `saved`
    stages; later ones follow the recipe. `skipped` are ranges of the stream that the run skips. Neighbours with equal
    shares are joined."""

    def place(samples: int) -> int:
        return int(stream_positions(np.array([samples]), skipped)[0])

    if seen:
        here = place(seen)
    else:
        here = 0
    stages = [stage for stage in saved if stage.begin < here]
    begin = 0
    for number, stage in enumerate(recipe.stages, 1):
        end = place(round(stage.until * total_samples / global_batch_size) * global_batch_size)
        is_last = number == len(recipe.stages)
        goes_on = bool(stages) and stages[-1].shares == stage.shares
        if (end > max(begin, here) or is_last) and not goes_on:
            # A run without a mixture so far continues as if it had had one from its beginning.
            stages.append(PlacedStage(max(begin, here) if stages else 0, stage.shares))
        begin = max(begin, end)
    return tuple(stages)


class MixedOrder:
    """The order of a mixture. Ids count through the datasets: a sample's id in its dataset plus all samples of the
    datasets before."""

    def __init__(self, orders: Sequence[StreamOrder], stages: Sequence[PlacedStage]) -> None:
        """`stages` ascend; the first begins at 0."""
        sizes = [order.num_samples for order in orders]
        self.first_ids = np.concatenate(([0], np.cumsum(sizes)))[:-1]
        """First sample id of each dataset, [datasets]."""
        self.num_samples = sum(sizes)
        self.orders = tuple(orders)
        self.stages = tuple(stages)
        self._begins = np.array([stage.begin for stage in stages], np.int64)
        self._drawn_before = [np.zeros(len(orders), np.int64)]
        for stage, following in pairwise(stages):
            drawn = build_pattern(stage.shares).counts_before(following.begin - stage.begin)
            self._drawn_before.append(self._drawn_before[-1] + drawn)

    def rows(self, positions: IntArray) -> IntArray:
        """Implement StreamOrder with each dataset's own rows."""
        rows = np.empty(len(positions), np.int64)
        for owner, chosen, places in self._by_set(positions):
            rows[chosen] = self.orders[owner].rows(places)
        return rows

    def sample_ids(self, positions: IntArray) -> IntArray:
        """Implement StreamOrder."""
        ids = np.empty(len(positions), np.int64)
        for owner, chosen, places in self._by_set(positions):
            ids[chosen] = self.first_ids[owner] + self.orders[owner].sample_ids(places)
        return ids

    def drawn_before(self, position: int) -> IntArray:
        """Return the samples of each dataset before a stream position, [datasets]."""
        stage = int(np.searchsorted(self._begins, position, side="right")) - 1
        offset = position - self.stages[stage].begin
        return self._drawn_before[stage] + build_pattern(self.stages[stage].shares).counts_before(offset)

    def set_of(self, sample_ids: IntArray) -> IntArray:
        """Return the dataset of each sample, [n]."""
        return np.searchsorted(self.first_ids, sample_ids, side="right") - 1

    def _by_set(self, positions: IntArray) -> list[tuple[int, IntArray, IntArray]]:
        """Return each dataset that occurs, the indices of its positions, and their positions in its own order."""
        owners = np.empty_like(positions)
        places = np.empty_like(positions)
        stages = np.searchsorted(self._begins, positions, side="right") - 1
        for number in np.unique(stages):
            stage = self.stages[number]
            chosen = np.flatnonzero(stages == number)
            owners_here, before = build_pattern(stage.shares).owners_at(positions[chosen] - stage.begin)
            owners[chosen] = owners_here
            places[chosen] = self._drawn_before[number][owners_here] + before
        by_set = ((int(owner), np.flatnonzero(owners == owner)) for owner in np.unique(owners))
        return [(owner, chosen, places[chosen]) for owner, chosen in by_set]
