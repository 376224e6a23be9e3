"""is_finished.py ARGUMENTS OF TRAIN.PY...: exit status 0 when the run that they name is finished, 1 when it is not."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

# Works from a clone that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmscale.config.parse import parse_run_config


def is_finished(run: Path) -> bool:
    """Whether the run's last end was that of its last step, and not a stop."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return False
    # A line without its end was cut short by a crash.
    records = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    ends = [record["event"] for record in records if record.get("event") in ("finished", "stopped")]
    return ends[-1:] == ["finished"]


def main(argv: Sequence[str]) -> int:
    """The exit status."""
    return 0 if is_finished(parse_run_config(argv).run) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
