"""How a start of a run ended when an error ended it, for whoever lists runs. No torch.

A run folder has `failure.json` from the error of the first rank that fails in training until training begins again
there. A rank that was killed writes nothing; what its peers write is that they have lost it. Errors of the start-up are
not kept: they stand where the command was given.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from llmscale.errors import LlmscaleError
from llmscale.files.atomic_write import write_durably

FAILURE_NAME = "failure.json"
_MOST_CHARACTERS = 600


def record_failure(run_folder: Path, error: BaseException, *, step: int, rank: int) -> None:
    """Write it down, whole or not at all, unless another rank has: what came later came of that. Never raises."""
    path = run_folder / FAILURE_NAME
    record = {
        "error": _first_line(error),
        "step": step,
        "rank": rank,
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    with suppress(OSError):
        if not path.exists():
            write_durably(path, json.dumps(record, indent=1) + "\n")


def forget_failure(run_folder: Path) -> None:
    """Training begins: what ended an earlier start is over. Never raises."""
    with suppress(OSError):
        (run_folder / FAILURE_NAME).unlink()


def _first_line(error: BaseException) -> str:
    """What a user's mistake is answered with; of other errors the kind, too."""
    said = str(error).strip().partition("\n")[0].rstrip()
    kind = "" if isinstance(error, LlmscaleError) else type(error).__name__
    return ": ".join(filter(None, (kind, said)))[:_MOST_CHARACTERS]
