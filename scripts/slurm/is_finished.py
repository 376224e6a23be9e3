"""is_finished.py ARGUMENTS OF TRAIN.PY...: exit with status 0 if their run is finished, else 1."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

# So that a clone works without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmscale.checkpoint.remote_run import fetch_run
from llmscale.config.run_arguments import parse_run_config


def is_finished(run: Path) -> bool:
    """Return whether the run ended after its last step, not by a stop, and was not started since."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    events = []
    for line in lines:
        # Ignore lines that a crash cut short or damaged.
        with suppress(ValueError, AttributeError, RecursionError):
            events.append(json.loads(line).get("event"))
    return [event for event in events if event in ("start", "finished", "stopped")][-1:] == ["finished"]


def main(argv: Sequence[str]) -> int:
    return 0 if is_finished(fetch_run(parse_run_config(argv).run)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
