"""train.py's arguments for a restart: what begins a run, or goes back in it, must not do so a second time."""

from __future__ import annotations

from collections.abc import Sequence

from llmscale.checkpoint.history import find_checkpoints
from llmscale.config.run_config import RunConfig

#: Each takes one value.
_BEGINNINGS = ("--resume", "--init-from", "--skip-steps")


def restart_arguments(arguments: Sequence[str], config: RunConfig) -> list[str]:
    """`arguments`, which parse to `config`, for a start after they have begun a history that saved a checkpoint."""
    if not begins_somewhere(config):
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
    kept += ["--resume", "auto"]
    # A run file may give them.
    kept += [] if config.init_from is None else ["--init-from", "null"]
    return [*kept, "--skip-steps", "[]"] if config.skip_steps else kept


def saved_checkpoints(config: RunConfig) -> set[tuple[int, int]]:
    """(history, step) of what the run has saved: once there is more of it, it has begun. Not looked at where a restart
    needs no other arguments."""
    if not begins_somewhere(config):
        return set()
    return {(saved.history.number, saved.step) for saved in find_checkpoints(config.run).current}


def begins_somewhere(config: RunConfig) -> bool:
    """Return whether the run does more than continue where its folder ends."""
    return config.resume != "auto" or config.init_from is not None or bool(config.skip_steps)
