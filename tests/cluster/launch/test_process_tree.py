"""Ending processes by their numbers."""

from __future__ import annotations

import subprocess
import time

from llmscale.cluster.launch.process_tree import descendants, kill_descendants, process_state


def test_a_tree_is_ended_by_its_numbers_and_the_spared_stay() -> None:
    script = "sleep 100 & sleep 100 & setsid sleep 100 & wait"
    with subprocess.Popen(["bash", "-c", script]) as shell:
        while len(descendants(shell.pid)) < 3:
            time.sleep(0.01)
        children = descendants(shell.pid)
        assert kill_descendants(shell.pid, spare=children[:1]) == 2
        assert process_state(children[0]) == "S"
        assert [state for state in map(process_state, children[1:]) if state not in ("", "Z")] == []
        assert kill_descendants(shell.pid) == 1
    assert process_state(shell.pid) == ""
