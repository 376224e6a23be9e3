"""Name a rank that holds up the others."""

from __future__ import annotations

import os

from llmscale.engine.collectives import gather
from llmscale.training.live_run import LiveRun
from llmscale.training.slow_ranks import SlowRanks


class WatchRanks:
    """Where a step was logged; a collective of its own only when there is somebody to name."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._slow = SlowRanks(live.world.world_size)

    def look(self, step: int) -> None:
        """`step` was logged. Collective."""
        live, times = self._live, self._live.recent.window.rank_times
        # Each rank measures a step a little differently, and all must come to the same: the first one's counts.
        found = self._slow.add("arithmetic", [time.arithmetic_s for time in times])
        found += self._slow.add("data wait", [time.data_wait_s for time in times], times[0].step_s)
        if not found:
            return
        hosts = gather(live.world.control, os.uname().nodename)
        for slow in found:
            live.report(
                f"WARNING: step {step}: rank {slow.rank} on host {hosts[slow.rank]} is slow, and the others wait "
                f"for it: {_DESCRIBED[slow.phase]} {slow.ratio:.2f} times as long"
            )
            if live.log:
                values = {"rank": slow.rank, "host": hosts[slow.rank], "ratio": slow.ratio, "phase": slow.phase}
                live.log.log_event("slow_rank", step=step, **values)


_DESCRIBED = {
    "arithmetic": "its arithmetic takes",
    "data wait": "for want of data on it a step takes",
}
