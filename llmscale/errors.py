"""The errors a user can cause. Command-line entry points print them as one line and exit with status 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LlmscaleError(Exception):
    """Base of every error whose text is meant for the user: it names the value, the legal ones and the fix."""


class ConfigError(LlmscaleError):
    """A flag, a run file, a ds_config or a combination of them cannot work."""


class DataError(LlmscaleError):
    """A data set is missing, empty, damaged, or does not belong to this model."""


class CheckpointError(LlmscaleError):
    """A checkpoint is missing, damaged, or does not belong to this run."""


class TrainingError(LlmscaleError):
    """Training cannot go on: the loss or the weights are no longer numbers."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the closest of `known`, or an empty string when none is close.

    A name that the word begins, or that begins the word, is closer than one of the same letters: h100 is h100-80gb
    rather than h200.
    """
    names = list(known)
    begun = [name for name in names if len(word) > 1 and name.startswith(word)]
    begin = sorted((name for name in names if len(name) > 1 and word.startswith(name)), key=len, reverse=True)
    close = begun or begin or difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
