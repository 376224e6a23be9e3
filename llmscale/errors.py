"""The errors a user can cause. Command-line entry points print them as one line and exit with status 2."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

from llmscale.other_names import OTHER_NAMES


class LlmscaleError(Exception):
    """Base of every error whose text is meant for the user: it names the value, the legal ones and the fix."""


class ConfigError(LlmscaleError):
    """A flag, a run file, a ds_config or a combination of them cannot work."""


class DataError(LlmscaleError):
    """A data set is missing, empty, damaged, or does not belong to this model."""


class UnreachableError(DataError):
    """Data could not be fetched or kept here. This says nothing about the data themselves."""


class CheckpointError(LlmscaleError):
    """A checkpoint is missing, damaged, or does not belong to this run."""


class TrainingError(LlmscaleError):
    """Training cannot go on: the loss or the weights are no longer numbers."""


class MachineError(LlmscaleError):
    """Not the user's mistake: this machine failed the run, and the same command may succeed. Exit status 1, after which
    `llmscale launch` tries again."""

    is_on_every_rank = False
    """Whether all ranks have raised it together, so that one of a host speaks for all."""


def write_failure(error: OSError, out: Path) -> LlmscaleError:
    """Return the error for work that writes `out` and also opens files, pipes and semaphores elsewhere: it names what
    failed."""
    reason = error.strerror or str(error)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return MachineError(f"{reason} while {out} was written. Raise the limit with `ulimit -n`.")
    folder, named = os.path.dirname(os.path.abspath(out)), error.filename
    # Of a file that was opened before, the error names nothing: it is one of ours.
    path = folder if named is None or isinstance(named, int) else os.path.abspath(os.fsdecode(named))
    is_ours = os.path.commonpath((path, folder)) in (path, folder)
    return DataError(f"Cannot write {out}: {reason}." if is_ours else f"{path}: {reason}. It is needed to write {out}.")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the legal name that `word` stands for, or an empty string when none is near.

    In this order: the same name in other letters (GPT2-124M, --n_layer), what other tools call it
    (llmscale/other_names.py), one whose first parts the word is (h100 is h100-80gb rather than h200), one that is a
    single edit away, one that the word begins, one of nearly the same letters, and one that begins the word. It is
    never the word itself.
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
    # The word itself was no good where it stood.
    meant = [names[name] for name in found if names[name] != word]
    return f" Did you mean {' or '.join(map(repr, meant))}?" if meant else ""


def _plain(name: str) -> str:
    return name.lstrip("-").lower().replace("-", "_")


def _nearest(plain: str, names: list[str]) -> list[str]:
    long_enough = [name for name in names if min(len(plain), len(name)) > 1]
    # 0.75: two letters of four changed places (fats, fast); "epochs" and "eps" have 0.67.
    found = (
        [name for name in long_enough if name.startswith(f"{plain}_")]
        or [name for name in long_enough if _is_one_edit(plain, name)]
        or [name for name in long_enough if name.startswith(plain)]
        or difflib.get_close_matches(plain, names, n=1, cutoff=0.75)
        or sorted((name for name in long_enough if plain.startswith(f"{name}_")), key=len, reverse=True)
    )
    return found[:1]


def _is_one_edit(word: str, name: str) -> bool:
    """Whether one letter too many, too few or another, or two neighbours that changed places, part them."""
    differing = (at for at, (one, other) in enumerate(zip(word, name, strict=False)) if one != other)
    same = next(differing, min(len(word), len(name)))
    ours, theirs = word[same:], name[same:]
    swapped = ours[1::-1] + ours[2:]
    return swapped == theirs or ours[1:] == theirs[1:] or ours[1:] == theirs or ours == theirs[1:]
