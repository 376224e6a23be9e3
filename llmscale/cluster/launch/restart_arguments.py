"""train.py's arguments for a restart: what begins a run, or goes back in it, must not do so a second time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmscale.config.run_config import RunConfig

#: Each takes one value.
_BEGINNINGS = ("--resume", "--init-from")


def restart_arguments(arguments: Sequence[str], config: RunConfig, newest: Path | None) -> list[str]:
    """`arguments`, which parse to `config`, for a start after the checkpoint `newest` was saved; None when none was.

    A run that was resumed from a named checkpoint goes on from `newest` by name: the newest of all in its folder may
    belong to the history that was abandoned.
    """
    if newest is None or (config.resume == "auto" and config.init_from is None):
        return list(arguments)
    kept, value_follows = [], False
    for word in arguments:
        name, equals, _ = word.partition("=")
        if value_follows:
            value_follows = False
        elif name.replace("_", "-") in _BEGINNINGS:
            value_follows = not equals
        else:
            kept.append(word)
    kept += ["--resume", "auto" if config.resume in ("auto", "none") else str(newest)]
    # Said by a run file, perhaps.
    return kept if config.init_from is None else [*kept, "--init-from", "null"]
