"""Whether ranks get on: a rank whose heartbeats stay the same for too long hangs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from llmscale.cluster.launch.messages import RankSigns


@dataclass
class Progress:
    """Follows the ranks of one attempt. Times are on the caller's monotonic clock."""

    began_s: float
    ranks: Iterable[int]
    start_timeout_s: float
    """To a rank's first finished step, from its beginning or the last sign that its start gets on."""
    hang_timeout_s: float
    """Between two heartbeats of a rank that trains."""
    first_step: int | None = None
    last_step: int | None = None
    training_since_s: float | None = None
    """When the first step was finished."""
    _seen: dict[int, tuple[RankSigns, float]] = field(default_factory=dict)

    def note(self, signs: Iterable[RankSigns], now_s: float) -> None:
        """Take in the newest heartbeats."""
        for sign in signs:
            before = self._seen.get(sign.rank)
            if before is None or before[0].count != sign.count:
                self._seen[sign.rank] = (sign, now_s)
            if sign.first_step is not None and sign.step is not None:
                self.first_step = sign.first_step
                self.last_step = max(self.last_step or 0, sign.step)
                self.training_since_s = now_s if self.training_since_s is None else self.training_since_s

    def hanging(self, now_s: float) -> list[int]:
        """Ranks that have been silent for too long."""
        silent = []
        for rank in self.ranks:
            sign, since_s = self._seen.get(rank, (None, self.began_s))
            if sign is not None and sign.exit_code is not None:
                continue
            starting = sign is None or sign.phase == "starting"
            # A start has few signs of its own: of downloads, and of weights that are read.
            if now_s - since_s > (self.start_timeout_s if starting else self.hang_timeout_s):
                silent.append(rank)
        return silent
