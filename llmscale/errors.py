"""The errors a user can cause. Command-line entry points print them as one line and exit with status 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from llmscale.other_names import OTHER_NAMES


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


class MachineError(LlmscaleError):
    """Not the user's mistake: this machine failed the run, and the same command may succeed. Exit status 1, after which
    `llmscale launch` tries again."""

    is_on_every_rank = False
    """Whether all ranks have raised it together, so that one of a host speaks for all."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the legal name that `word` stands for, or an empty string when none is near.

    In this order: the same name in other letters (GPT2-124M, --n_layer), what other tools call it
    (llmscale/other_names.py), a name that the word begins or that begins the word (h100 is h100-80gb rather than h200),
    and one of nearly the same letters.
    """
    names = {_plain(name): name for name in reversed(list(known)) if _plain(name)}
    plain = _plain(word)
    if not plain:
        return ""
    meant = [name for name in OTHER_NAMES.get(plain, ()) if _plain(name) in names]
    if plain in names:
        found = [plain]
    elif meant:
        found = [_plain(name) for name in meant]
    else:
        found = _nearest(plain, list(reversed(names)))
    return f" Did you mean {' or '.join(repr(names[name]) for name in found)}?" if found else ""


def _plain(name: str) -> str:
    return name.lstrip("-").lower().replace("-", "_")


def _nearest(plain: str, names: list[str]) -> list[str]:
    begun = [name for name in names if len(plain) > 1 and name.startswith(plain)]
    begin = sorted((name for name in names if len(name) > 1 and plain.startswith(f"{name}_")), key=len, reverse=True)
    # 0.75: two letters of four changed places (fats, fast); "epochs" and "eps" have 0.67.
    return (begun or begin or difflib.get_close_matches(plain, names, n=1, cutoff=0.75))[:1]
