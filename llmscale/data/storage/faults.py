"""Limit each request to a store, retry transient errors with pauses, and word the message for the user.

Each client has its own exception classes and wraps those of others. They are recognised by class name and HTTP status
along the chain of causes.
"""

from __future__ import annotations

import errno
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from llmscale.config.bundled_files import install_command
from llmscale.data.storage.schemes import SCHEMES
from llmscale.errors import DataError, TransientError, UnreachableError, causes_of, http_status
from llmscale.untrusted.terminal import print_visible

_T = TypeVar("_T")
#: Pauses between attempts.
RETRY_PAUSES_S = (1.0, 4.0, 16.0, 60.0)
#: An attempt ends after this time without a byte; also the clients' timeout.
STALL_S = 30.0
#: Where progress is not visible, an attempt gets one more second per this many bytes.
_BYTES_PER_S = 128 << 10
#: A waiting attempt prints a line after this time, then at this interval.
_LINE_S = 5.0, 10.0
#: Classes of connection errors and timeouts, and of bytes that were lost or changed in transit.
_TRANSIENT = re.compile(
    "ConnectionError|TimeoutError|Timeout|TransportError|HTTPClientError|ServiceRequestError|ServiceResponseError|"
    "RetriesExceededError|RetryError|IncompleteRead|IncompleteReadError|ProtocolError|ChecksumError|DataCorruption|"
    "FlexibleChecksumError|DamagedInTransit|ChunkedEncodingError|ContentDecodingError|DecodeError|ResponseParserError|"
    "InvalidJSONError"
)
#: Codes or texts of a store's answer 400 to bytes that arrived damaged or late, S3's answer 409 to two conditional
#: writes at once, and the Hub client's text for a short download, for which it has no class.
_TRANSIENT_WORDS = re.compile(
    "BadDigest|IncompleteBody|RequestTimeout|XAmzContentSHA256Mismatch|XAmzContentChecksumMismatch|Md5Mismatch|"
    "Crc64Mismatch|ConditionalRequestConflict|doesn't match calculated|Consistency check failed"
)
#: Classes of missing or refused credentials.
_CREDENTIALS = re.compile(
    "NoCredentialsError|PartialCredentialsError|CredentialRetrievalError|ProfileNotFound|TokenRetrievalError|"
    "SSOTokenLoadError|UnauthorizedSSOTokenError|DefaultCredentialsError|RefreshError|ClientAuthenticationError|"
    "CredentialUnavailableError|LocalTokenNotFoundError"
)
_OFFLINE = re.compile("SSLCertVerificationError|OfflineModeIsEnabled")
#: S3's answer 400 to temporary credentials that have expired; an answer to HEAD has no body with a code.
_EXPIRED_WORDS = re.compile(r"\((ExpiredToken|TokenRefreshRequired)\)|\(400\) when calling the HeadObject")
#: Faults of this machine's disk.
_DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


class DamagedInTransit(Exception):
    """A store returned or stored other bytes than it should have."""


class Missing(DataError):
    """No object has that name."""


class Overtaken(DataError):
    """Another writer has changed the object since it was read."""


class Denied(UnreachableError):
    """Credentials are missing, have expired or lack permission."""


def with_retries(
    action: Callable[[], _T],
    what: str,
    *,
    url: str,
    remedy: str = "",
    stop: threading.Event | None = None,
    num_bytes: int = 0,
    progress: Callable[[], int] = lambda: 0,
) -> _T:
    """Return the result of `action`, retried after a pause with one printed line per transient error, until `stop` is
    set.

    Each attempt may take STALL_S without a change of `progress`, or STALL_S plus the time for `num_bytes`. `what`
    begins with "Cannot" and opens every message. Raises what `explain` returns, and OSError of this machine's disk.
    """
    stop = stop or threading.Event()
    limit_s = STALL_S + num_bytes / _BYTES_PER_S
    for number, pause_s in enumerate((*RETRY_PAUSES_S, None), start=1):
        # Never raised here before it is classified: its context would be what this thread is handling.
        answer = _within_limit(action, what, limit_s, stop, progress)
        error = answer.exception()
        if error is None:
            return answer.result()
        is_of_disk = isinstance(error, OSError) and error.errno in _DISK_FAULTS
        if is_of_disk or isinstance(error, DataError) or not isinstance(error, Exception):
            raise error
        explained = explain(error, what, url=url, remedy=remedy)
        if pause_s is None or stop.is_set() or not isinstance(explained, TransientError):
            raise explained from error
        print_visible(
            f"{what}: {_summarise(error)[:200]}. Trying again in {pause_s:g} s ({number} of {len(RETRY_PAUSES_S)}).",
            file=sys.stderr,
            flush=True,
        )
        if stop.wait(pause_s):
            raise explained from error
    raise AssertionError("the last attempt returns or raises")


def _within_limit(
    action: Callable[[], _T], what: str, limit_s: float, stop: threading.Event, progress: Callable[[], int]
) -> Future[_T]:
    """Return the outcome of `action`, run in a thread because some clients' requests have no timeout; an abandoned
    thread ends with the process, and the outcome is then a TimeoutError."""
    answer: Future[_T] = Future()

    def run() -> None:
        try:
            answer.set_result(action())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="store", daemon=True).start()
    seen = progress()
    since_s = time.monotonic()
    line_s = _LINE_S[0]
    while not wait([answer], timeout=min(1.0, limit_s / 4)).done:
        if (now := progress()) != seen:
            seen = now
            since_s = time.monotonic()
            line_s = _LINE_S[0]
        waited_s = time.monotonic() - since_s
        if waited_s >= limit_s or stop.is_set():
            timed_out: Future[_T] = Future()
            timed_out.set_exception(TimeoutError(f"no answer within {waited_s:.0f} s"))
            return timed_out
        if waited_s >= line_s:
            line_s += _LINE_S[1]
            print_visible(
                f"Waiting to {what.removeprefix('Cannot ')}: no answer for {waited_s:.0f} s, of at most "
                f"{limit_s:.0f} s.",
                file=sys.stderr,
                flush=True,
            )
    return answer


def explain(error: BaseException, what: str, *, url: str, remedy: str = "") -> DataError:
    """Return the error for the user: UnreachableError or a subclass if it says nothing about the data itself."""
    kind = Denied if lacks_credentials(error) else _classify(error, url)
    text, scheme = f"{what}: {_summarise(error)[:300]}.", url.partition("://")[0]
    if kind is Denied and scheme in SCHEMES:
        return Denied(f"{text} Credentials are missing or lack permission. Give {SCHEMES[scheme].credentials}.")
    if kind is Overtaken:
        return Overtaken(f"Another writer has changed {url} since it was read. Run the command again.")
    if isinstance(error, ImportError):
        return UnreachableError(f"{text} Install what {scheme}:// needs: `{install_command('remote')}`.")
    return kind(f"{text} {remedy}".rstrip())


def is_transient(error: BaseException, url: str = "") -> bool:
    """Return whether an error is transient: of the connection, of bytes in transit, or a temporary one of the store."""
    return not lacks_credentials(error) and _classify(error, url) is TransientError


def lacks_credentials(error: BaseException) -> bool:
    """Return whether credentials are missing or refused."""
    statuses = (status for cause in causes_of(error) if (status := http_status(cause)) is not None)
    is_named = any(_is(cause, _CREDENTIALS) or _EXPIRED_WORDS.search(str(cause)) for cause in causes_of(error))
    return is_named or next(statuses, None) in (401, 403)


def is_unsupported(error: BaseException) -> bool:
    """Return whether a store does not know what was asked of it (501)."""
    return any(http_status(cause) == 501 for cause in causes_of(error))


def _classify(error: BaseException, url: str) -> type[DataError]:
    """Return the class of an error that is not about credentials."""
    if any(_is(cause, _OFFLINE) for cause in causes_of(error)):
        return UnreachableError
    for cause in causes_of(error):
        # glibc's text for NXDOMAIN: a misspelt name, or no network.
        if "Name or service not known" in str(cause):
            return UnreachableError
        # Checked before the status: an answer that was cut has a good one.
        if _is(cause, _TRANSIENT) or _TRANSIENT_WORDS.search(str(cause)):
            return TransientError
        if (status := http_status(cause)) is not None:
            return _class_of(status, cause, url)
    is_missing = isinstance(error, FileNotFoundError) and error.filename is None
    return Missing if is_missing else DataError


def _class_of(status: int, error: BaseException, url: str) -> type[DataError]:
    """Return the class of an answer with an HTTP status."""
    # The Hub refuses a commit while another one is being made.
    if status in (408, 429) or (status >= 500 and status != 501) or (status in (409, 412) and url.startswith("hf:")):
        return TransientError
    if status == 404:
        return Missing
    # 416: it has become shorter than the range that was asked for.
    if status in (412, 416) or getattr(error, "error_code", None) == "BlobAlreadyExists":
        return Overtaken
    return DataError


def _summarise(error: BaseException) -> str:
    """Return the class and first line of an error."""
    lines = str(error).strip().splitlines()
    if lines:
        return f"{type(error).__name__}: {lines[0].rstrip('.')}"
    return type(error).__name__


def _is(error: BaseException, names: re.Pattern[str]) -> bool:
    """Return whether the class of an error, or one that it is derived from, has one of these names."""
    return any(names.fullmatch(kind.__name__) for kind in type(error).__mro__)
