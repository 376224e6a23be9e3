"""Compare a run with the checkpoint that it resumes: some values may not change. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from llmscale.config.run_config import CHANGES_THAT_BREAK
from llmscale.errors import CheckpointError


def check_identity(saved: Mapping[str, object], now: Mapping[str, object], allowed: list[str]) -> list[str]:
    """Compare the values that define the sample sequence with the checkpoint's.

    Returns one warning per allowed change. Raises CheckpointError with every other change: both values, the
    consequence, and the flag that accepts it.
    """
    refused: list[str] = []
    warnings: list[str] = []
    for key, breaks in CHANGES_THAT_BREAK.items():
        before = saved.get(key)
        after = now.get(key)
        # A mixture's order follows from its datasets.
        is_mix = any(isinstance(order, Mapping) and "sets" in order for order in (before, after))
        if before == after or (key == "order" and is_mix and saved.get("data") != now.get("data")):
            continue
        was = repr(_difference(before, after))
        is_now = repr(_difference(after, before))
        if key == "data" and isinstance(saved.get("sets"), Mapping):
            was = _show_sets(saved, now)
            is_now = _show_sets(now, saved)
            is_now += ", prepared again since" if was == is_now else ""
        change = f"{key} was {was} and is {is_now}"
        (warnings if key in allowed else refused).append(f"{change} ({breaks})")
        if key not in allowed:
            refused[-1] += f"; accept it with --allow-changed {key}"
    if refused:
        raise CheckpointError(f"this is not the run that was saved: {'. '.join(refused)}. Or start a new --run folder.")
    return warnings


def _show_sets(identity: Mapping[str, object], other: Mapping[str, object]) -> str:
    """Return the datasets of one identity, by name and path, whose content differs in the other one."""
    tables = (cast("Mapping[str, object]", one["sets"]) for one in (identity, other))
    own, others = ({name: entry if isinstance(entry, Mapping) else {} for name, entry in of.items()} for of in tables)
    differ = [name for name in own if own[name].get("fingerprint") != others.get(name, {}).get("fingerprint")]
    if differ:
        return ", ".join(f"{f'{name} in ' if name else ''}{own[name].get('data')}" for name in differ)
    left_out = [name for name in others if name not in own]
    if left_out:
        return f"without {', '.join(left_out)}"
    return f"in the order {', '.join(own)}"


def _difference(value: object, other: object) -> object:
    """Return a value for a message, reduced to the differing entries (at any depth) if both are mappings."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return {key: _difference(value[key], other.get(key)) for key in value if value[key] != other.get(key)}
    return value
