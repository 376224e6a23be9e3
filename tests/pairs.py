"""Settings drawn evenly: every two values of two keys meet, whatever the habits of a generator."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Settings = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]

#: Settings that are tried for a pair before it counts as impossible.
_MOST_DRAWS = 400
#: Legal settings of a pair, of which the one with the most missing pairs is taken.
_CANDIDATES = 12


def draw_pairs(
    choices: Mapping[str, Sequence[Any]], is_legal: Callable[[Settings], bool], times: int = 1, seed: int = 0
) -> list[Settings]:
    """Return legal settings among which every possible pair of values of two keys is found `times` times or more."""
    draw = random.Random(seed)
    missing = dict.fromkeys(_all_pairs(choices), times)
    drawn: list[Settings] = []
    for pair in _all_pairs(choices):
        while missing[pair] > 0:
            candidates = _draw_with(pair, choices, is_legal, draw)
            if not candidates:
                break
            chosen = max(candidates, key=lambda settings: sum(missing[p] > 0 for p in _pairs_of(settings)))
            drawn.append(chosen)
            for met in _pairs_of(chosen):
                missing[met] -= 1
    return drawn


def _draw_with(
    pair: Pair, choices: Mapping[str, Sequence[Any]], is_legal: Callable[[Settings], bool], draw: random.Random
) -> list[Settings]:
    """Return some legal settings that have a pair of values."""
    legal: list[Settings] = []
    for _ in range(_MOST_DRAWS):
        settings = {key: draw.choice(values) for key, values in choices.items()} | dict(pair)
        if is_legal(settings):
            legal.append(settings)
        if len(legal) == _CANDIDATES:
            break
    return legal


def _all_pairs(choices: Mapping[str, Sequence[Any]]) -> list[Pair]:
    single = [[(key, value) for value in values] for key, values in choices.items()]
    return [pair for one, other in itertools.combinations(single, 2) for pair in itertools.product(one, other)]


def _pairs_of(settings: Settings) -> list[Pair]:
    return list(itertools.combinations(settings.items(), 2))
