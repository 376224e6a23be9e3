"""A:B, as flags name steps: from A up to, not including, B, counted from 1 as they are printed."""

from __future__ import annotations

import re

from llmscale.errors import ConfigError

_STEPS = re.compile(r"([0-9]{1,12}):([0-9]{1,12})")


def parse_step_range(flag: str, text: str, meaning: str, most: int | None = None) -> tuple[int, int]:
    """(A, B), at `most` so many steps. `meaning` says in an error what becomes of the steps. Raises ConfigError."""
    matched = _STEPS.fullmatch(text.strip())
    first, behind = (int(matched[1]), int(matched[2])) if matched else (0, 0)
    if not 1 <= first < behind:
        raise ConfigError(
            f"{flag} {text[:80]!r} is no range of steps. Give A:B with 1 <= A < B: of steps A to B-1, as they are "
            f"printed, {meaning}, such as 1000:1010."
        )
    if most is not None and behind - first > most:
        raise ConfigError(f"{flag} {text[:80]}: {behind - first:,} steps are too many. Give at most {most}.")
    return first, behind
