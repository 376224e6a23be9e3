"""Errors with a text for the user. Commands print them as one line and exit with status 2, or 1."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path


class LlmscaleError(Exception):
    """Base of every error whose text is for the user: it names the value, the legal values and the fix."""

    is_on_every_rank = False
    """True if every rank raises the error, so that one rank per host reports it."""
    is_transient = False
    """True if the same command may succeed later: a rank ends with status 1, and `llmscale launch` tries again."""


class ConfigError(LlmscaleError):
    """A flag, a run file, a ds_config or a combination of them cannot work."""


class DataError(LlmscaleError):
    """A dataset is missing, empty, damaged, or does not belong to this model."""


class UnreachableError(DataError):
    """Data could not be fetched or stored; the data themselves may be intact."""


class TransientError(UnreachableError):
    """A store, a hub or the network failed, and the same command may succeed later."""

    is_transient = True


class CheckpointError(LlmscaleError):
    """A checkpoint is missing, damaged, or does not belong to this run."""


class TrainingError(LlmscaleError):
    """Training cannot continue: the loss or the weights are not finite."""


class MachineError(LlmscaleError):
    """This machine failed the run, and the same command may succeed later."""

    is_transient = True


def write_failure(error: OSError, out: Path) -> LlmscaleError:
    """Return the error for a failed write of `out`, which may have needed other files, pipes or semaphores."""
    reason = error.strerror or str(error)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return MachineError(f"{reason} while {out} was written. Raise the limit with `ulimit -n`.")
    folder = os.path.dirname(os.path.abspath(out))
    named = error.filename
    # An error without a file name comes from a file that was already open, which is one of ours.
    if named is None or isinstance(named, int):
        path = folder
    else:
        path = os.path.abspath(os.fsdecode(named))
    is_ours = os.path.commonpath((path, folder)) in (path, folder)
    return DataError(f"Cannot write {out}: {reason}." if is_ours else f"{path}: {reason}. It is needed to write {out}.")


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, its cause or context, and so on."""
    for _ in range(10):
        if error is None:
            return
        yield error
        # boto3 keeps the error of its last attempt there.
        error = error.__cause__ or getattr(error, "last_exception", None) or error.__context__


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status of the answer that an exception of any client reports."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) or None
    codes = (getattr(response, "status_code", None), getattr(error, "status_code", None), getattr(error, "code", None))
    return next((int(code) for code in codes if isinstance(code, int) and 300 <= code < 600), None)
