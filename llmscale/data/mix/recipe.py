"""What a YAML of `--data` says: prepared sets, and how much of each in which part of the run. No torch.

    sets:
      web: ../data/fineweb-edu        # relative to this file, or a URL
      code: s3://bucket/code
    stages:
      - until: 0.9                    # of the run
        weights: {web: 70, code: 30}
      - weights: {web: 40, code: 60}

`weights` beside `sets` instead of `stages` is one stage. Weights are shares of the samples, in any unit; they need not
be in proportion to the sets' sizes, and a set may be seen several times while another is not seen to its end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from pathlib import Path
from typing import cast

from llmscale.config.user_paths import check_path_or_url
from llmscale.errors import ConfigError, did_you_mean
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, load_yaml

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
