"""Ending processes by their numbers."""

from __future__ import annotations

import subprocess
import time

from llmscale.cluster.launch.ranks import descendants, kill_descendants, process_state


def test_a_tree_is_ended_by_its_numbers() -> None:
    script = "sleep 100 & sleep 100 & setsid sleep 100 & wait"
    with subprocess.Popen(["bash", "-c", script]) as shell:
        while len(descendants(shell.pid)) < 3:
            time.sleep(0.01)
        children = descendants(shell.pid)
        assert kill_descendants(shell.pid) == 3
        assert [state for state in map(process_state, children) if state not in ("", "Z")] == []
    assert process_state(shell.pid) == ""
