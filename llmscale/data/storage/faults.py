"""Limit each request to a store, retry transient errors with pauses, and word the message for the user.

Each client has its own exception classes and wraps those of others. They are recognised by class name and HTTP status
along the chain of causes.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from llmscale.config.bundled_files import install_command
from llmscale.data.storage.schemes import SCHEMES
from llmscale.errors import DataError, TransientError, UnreachableError
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
_TRANSIENT = {
    # Connection errors and timeouts.
    *("ConnectionError", "TimeoutError", "Timeout", "TimeoutException", "TransportError", "HTTPClientError"),
    *("ClientConnectionError", "ServerDisconnectedError", "ServiceRequestError", "ServiceResponseError"),
    *("RetriesExceededError", "RetryError"),
    # Bytes lost or changed in transit, in a body or an answer.
    *("IncompleteRead", "IncompleteReadError", "ProtocolError", "ResponseStreamingError", "ClientPayloadError"),
    *("PayloadEncodingError", "ChecksumError", "FlexibleChecksumError", "DataCorruption", "DamagedInTransit"),
    *("ChunkedEncodingError", "ContentDecodingError", "DecodeError", "ResponseParserError", "InvalidJSONError"),
}
#: Codes or texts of a store's answer 400 to bytes that arrived damaged or late, S3's answer 409 to two conditional
#: writes at once, and the Hub client's text for a short download, for which it has no class.
_TRANSIENT_WORDS = re.compile(
    "BadDigest|IncompleteBody|RequestTimeout|XAmzContentSHA256Mismatch|XAmzContentChecksumMismatch|Md5Mismatch|"
    "Crc64Mismatch|ConditionalRequestConflict|doesn't match calculated|Consistency check failed"
)
#: Codes of S3's answer 400 to temporary credentials that have expired.
_EXPIRED_WORDS = re.compile(r"\((ExpiredToken|TokenRefreshRequired)\)")
_CREDENTIALS = {
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"),
    *("TokenRetrievalError", "UnauthorizedSSOTokenError", "DefaultCredentialsError", "RefreshError"),
    *("ClientAuthenticationError", "CredentialUnavailableError", "LocalTokenNotFoundError", "PermissionError"),
    "Unauthenticated",
}


class DamagedInTransit(Exception):
    """A store returned or stored other bytes than it should have."""


def with_retries(
    action: Callable[[], _T],
    what: str,
    *,
    url: str,
    remedy: str = "",
    stop: threading.Event | None = None,
    to_error: Callable[[Exception], Exception] | None = None,
    num_bytes: int = 0,
    progress: Callable[[], int] | None = None,
) -> _T:
    """Return the result of `action`, retried after a pause with one printed line per transient error, until `stop` is
    set.

    Each attempt may take STALL_S without a change of `progress`, or STALL_S plus the time for `num_bytes`. `what`
    begins with "Cannot" and opens every message. Raises DataError with the cause and either `remedy` or how to give
    credentials; `to_error` can replace that error.
    """
    stop = stop or threading.Event()
    to_error = to_error or partial(explain, what=what, url=url, remedy=remedy)
    limit_s = STALL_S + num_bytes / _BYTES_PER_S
    for number, pause_s in enumerate((*RETRY_PAUSES_S, None), start=1):
        try:
            return _within_limit(action, what, limit_s, stop, progress or (lambda: 0))
        except DataError:
            raise
        except Exception as error:  # each client raises its own classes
            if pause_s is not None and is_transient(error, url) and not stop.is_set():
                print_visible(
                    f"{what}: {summarise(error)[:200]}. Trying again in {pause_s:g} s ({number} of "
                    f"{len(RETRY_PAUSES_S)}).",
                    file=sys.stderr,
                    flush=True,
                )
                if not stop.wait(pause_s):
                    continue
            explained = to_error(error)
            if explained is error:
                raise
            raise explained from error
    raise AssertionError("the last attempt returns or raises")


def _within_limit(
    action: Callable[[], _T], what: str, limit_s: float, stop: threading.Event, progress: Callable[[], int]
) -> _T:
    """Return the result of `action`, run in a thread because some clients' requests have no timeout; an abandoned
    thread ends with the process. Raises TimeoutError, and whatever the action raises."""
    answer: Future[_T] = Future()

    def run() -> None:
        try:
            answer.set_result(action())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="store", daemon=True).start()
    seen, since_s, line_s = progress(), time.monotonic(), _LINE_S[0]
    while not wait([answer], timeout=min(1.0, limit_s / 4)).done:
        if (now := progress()) != seen:
            seen, since_s, line_s = now, time.monotonic(), _LINE_S[0]
        waited_s = time.monotonic() - since_s
        if waited_s >= limit_s or stop.is_set():
            raise TimeoutError(f"no answer within {waited_s:.0f} s")
        if waited_s >= line_s:
            line_s += _LINE_S[1]
            print_visible(
                f"Waiting to {what.removeprefix('Cannot ')}: no answer for {waited_s:.0f} s, of at most "
                f"{limit_s:.0f} s.",
                file=sys.stderr,
                flush=True,
            )
    return answer.result()


def explain(error: Exception, what: str, *, url: str, remedy: str = "") -> DataError:
    """Return the error for the user: UnreachableError when it says nothing about the data itself."""
    scheme = SCHEMES.get(url.partition("://")[0])
    said = f"{what}: {summarise(error)[:300]}."
    if scheme is not None and lacks_credentials(error):
        return UnreachableError(f"{said} Credentials are missing or lack permission. Give {scheme.credentials}.")
    if isinstance(error, ImportError):
        needed = f"Install what {url.partition('://')[0]}:// needs: `{install_command('remote')}`."
        return UnreachableError(f"{said} {needed}")
    kind = TransientError if is_transient(error, url) else DataError
    return kind(f"{said} {remedy}".rstrip())


def is_transient(error: BaseException, url: str = "") -> bool:
    """Return whether an error is transient: of the connection, of bytes in transit, or a temporary one of the store."""
    if _names(_chain(error)) & {*_CREDENTIALS, "SSLCertVerificationError", "OfflineModeIsEnabled"}:
        return False
    for cause in _chain(error):
        # glibc's text for NXDOMAIN: a misspelt name, or no network.
        if "Name or service not known" in str(cause):
            return False
        # Checked before the status, because aiohttp gives a broken connection a status.
        if _names([cause]) & _TRANSIENT or _TRANSIENT_WORDS.search(str(cause)):
            return True
        if (status := _status(cause)) is not None:
            # The Hub refuses a commit while another one is being made.
            is_overtaken = status in (409, 412) and url.startswith("hf://")
            return status in (408, 429) or status >= 500 or is_overtaken
    return False


def lacks_credentials(error: BaseException) -> bool:
    """Return whether credentials are missing or refused."""
    # A PermissionError with a file name is a local one, not the store's.
    names = _names(cause for cause in _chain(error) if getattr(cause, "filename", None) is None)
    statuses = (status for cause in _chain(error) if (status := _status(cause)) is not None)
    is_expired = any(_EXPIRED_WORDS.search(str(cause)) for cause in _chain(error))
    return is_expired or next(statuses, None) in (401, 403) or bool(names & _CREDENTIALS)


def summarise(error: BaseException) -> str:
    """Return the class and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, its cause or context, and so on."""
    for _ in range(10):
        if error is None:
            return
        yield error
        # boto3 keeps the error of its last attempt there.
        error = error.__cause__ or getattr(error, "last_exception", None) or error.__context__


def _names(errors: Iterable[BaseException]) -> set[str]:
    return {kind.__name__ for error in errors for kind in type(error).__mro__}


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of the answer that an exception reports."""
    response = getattr(error, "response", None)
    found = (
        response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(response, dict)
        else getattr(response, "status_code", None)
    )
    for status in (found, *(getattr(error, name, None) for name in ("status_code", "status", "code"))):
        if isinstance(status, int) and 300 <= status < 600:
            return int(status)
    return None
