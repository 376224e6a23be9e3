"""The peaks of a recorded run, with every storage in the category it ended up in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from llmscale.dry_run.tracker import Category, Event
from llmscale.memory.breakdown import Breakdown


def peaks_by_phase(
    start: Breakdown,
    events: Iterable[Event],
    category_of: Mapping[int, Category],
    *,
    without: Collection[Category] = (),
) -> dict[str, Breakdown]:
    """Phase -> the moment within it with the most live bytes, the categories in `without` left out.

    `start`: what was alive before the first event.
    """
    live = Counter({category: getattr(start, f"{category.value}_bytes") for category in Category})
    for category in without:
        live[category] = 0
    total, phase = sum(live.values()), ""
    totals: dict[str, int] = {}
    peaks: dict[str, Breakdown] = {}
    for event in events:
        if event.phase != phase:
            phase = event.phase
            if total > totals.get(phase, -1):
                totals[phase], peaks[phase] = total, _breakdown(live)
        category = category_of[event.storage]
        if category in without:
            continue
        live[category] += event.num_bytes
        total += event.num_bytes
        if total > totals.get(phase, -1):
            totals[phase], peaks[phase] = total, _breakdown(live)
    return peaks


def _breakdown(live: Counter[Category]) -> Breakdown:
    return Breakdown(**{f"{category.value}_bytes": live[category] for category in Category})
