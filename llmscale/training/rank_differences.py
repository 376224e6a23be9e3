"""Which of many ranks differ in what, in one line. Plain Python: a thousand ranks need no network to be tested."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmscale.errors import ConfigError, DataError, LlmscaleError

#: Key by key what one rank was started with. Values are shown in errors.
Section = Mapping[str, str]

#: The section whose differences are the data's; its values are long hashes, as those of the sources are.
DATA_SECTION = "data set"
SOURCES_SECTION = "sources"
#: How much of a difference an error shows.
_MOST_ITEMS = 4
_MOST_VALUES = 3
_MOST_RANGES = 4
_MOST_HOSTS = 2
_LONGEST_VALUE = 60
_HASH_DIGITS = 12


@dataclass(frozen=True)
class Contribution:
    """What one rank sends first: a few hundred bytes."""

    host: str
    digests: Mapping[str, bytes]
    """By section."""


def contribute(sections: Mapping[str, Section]) -> Contribution:
    """This rank's."""
    digests = {
        name: hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest() for name, values in sections.items()
    }
    return Contribution(platform.node(), digests)


def find_speakers(contributions: Sequence[Contribution]) -> dict[str, set[int]]:
    """By section that differs, the first rank of each group of ranks that agree with each other."""
    names = {name: None for contribution in contributions for name in contribution.digests}
    speakers: dict[str, set[int]] = {}
    for name in names:
        groups = _ranks_by([contribution.digests.get(name) for contribution in contributions])
        if len(groups) > 1:
            speakers[name] = {ranks[0] for ranks in groups.values()}
    return speakers


def explain(contributions: Sequence[Contribution], details: Sequence[Mapping[str, Section]]) -> LlmscaleError:
    """One line, however many ranks: what differs, its values, and who has them. `details` is filled for speakers."""
    hosts = [contribution.host for contribution in contributions]
    lines: list[str] = []
    differing = find_speakers(contributions)
    for name in differing:
        groups = _ranks_by([contribution.digests.get(name) for contribution in contributions])
        sections = {rank: details[ranks[0]].get(name, {}) for ranks in groups.values() for rank in ranks}
        keys = {key: None for section in {id(s): s for s in sections.values()}.values() for key in section}
        items = []
        for key in keys:
            by_value = _ranks_by([sections[rank].get(key, "absent") for rank in range(len(hosts))])
            if len(by_value) > 1:
                is_hash = name in (SOURCES_SECTION, DATA_SECTION)
                items.append(f"{key} is {_describe_values(by_value, hosts, is_hash=is_hash)}")
        more = f"; {len(items) - _MOST_ITEMS} more of its keys differ" if len(items) > _MOST_ITEMS else ""
        lines.append(f"{name}: {'; '.join(items[:_MOST_ITEMS])}{more}")
    kind = DataError if list(differing) == [DATA_SECTION] else ConfigError
    return kind(
        f"the ranks were not started alike, so they cannot train together. {'. '.join(lines)}. Start every rank with "
        "the same flags, files, data and software."
    )


def _ranks_by(values: Sequence[object]) -> dict[object, list[int]]:
    """Ranks by the value that they hold, the most frequent first."""
    groups: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return dict(sorted(groups.items(), key=lambda group: (-len(group[1]), group[1][0])))


def _describe_values(by_value: Mapping[object, list[int]], hosts: Sequence[str], *, is_hash: bool) -> str:
    shown: list[str] = []
    for value, ranks in list(by_value.items())[:_MOST_VALUES]:
        text = str(value)
        text = text[:_HASH_DIGITS] if is_hash and len(text) > _LONGEST_VALUE else text
        text = text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
        where = _describe_hosts(ranks, hosts) if len(set(hosts)) > 1 and shown else ""
        shown.append(f"{text} on {describe_ranks(ranks)}{where}")
    more = f" and {len(by_value) - _MOST_VALUES} other values elsewhere" if len(by_value) > _MOST_VALUES else ""
    return ", ".join(shown) + more


def _describe_hosts(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    more = f" and {len(names) - _MOST_HOSTS} more" if len(names) > _MOST_HOSTS else ""
    return f" (host {', '.join(names[:_MOST_HOSTS])}{more})"


def describe_ranks(ranks: Sequence[int]) -> str:
    """Ascending ranks in a few words: `ranks 0-3 and 7`."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:_MOST_RANGES]]
    left = sum(last - first + 1 for first, last in ranges[_MOST_RANGES:])
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}{f' and {left} more' if left else ''}"
