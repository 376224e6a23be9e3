"""is_finished.py ARGUMENTS OF TRAIN.PY...: exit status 0 when the run that they name is finished, 1 when it is not."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

# Works from a clone that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmscale.config.run_config import parse_run_config


def is_finished(run: Path) -> bool:
    """Whether the run's last end was that of its last step, and not a stop, and nothing was begun since."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    events = []
    for line in lines:
        # A line that a crash cut short, or that was damaged since, says nothing.
        with suppress(ValueError, AttributeError, RecursionError):
            events.append(json.loads(line).get("event"))
    return [event for event in events if event in ("start", "finished", "stopped")][-1:] == ["finished"]


def main(argv: Sequence[str]) -> int:
    """The exit status."""
    return 0 if is_finished(parse_run_config(argv).run) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
