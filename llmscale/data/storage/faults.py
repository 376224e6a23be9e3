"""What went wrong at a store: whether it may pass, tries with pauses between them, and what to tell the user.

Each store's client has its own kinds of exceptions and wraps those of others, so they are known by their names and by
the status of HTTP that they carry, along the chain of what caused what.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from llmscale.config.shipped import install_command
from llmscale.data.storage.schemes import SCHEMES
from llmscale.errors import DataError
from llmscale.untrusted.terminal import print_visible

_T = TypeVar("_T")
#: Pauses between tries.
RETRY_PAUSES_S = (1.0, 4.0, 16.0, 60.0)
_PASSING = {
    *("ConnectionError", "TimeoutError", "IncompleteRead", "ProtocolError", "TransportError", "HTTPClientError"),
    *("ClientConnectionError", "ClientPayloadError", "ServerDisconnectedError", "ServiceRequestError"),
    *("ServiceResponseError", "ResponseStreamingError", "ShortAnswer"),
}
_CREDENTIALS = {
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"),
    *("TokenRetrievalError", "UnauthorizedSSOTokenError", "DefaultCredentialsError", "RefreshError"),
    *("ClientAuthenticationError", "CredentialUnavailableError", "LocalTokenNotFoundError", "PermissionError"),
    "Unauthenticated",
}


class ShortAnswer(Exception):
    """A store gave other bytes than it said it has, or has other bytes than it was given."""


def with_retries(
    action: Callable[[], _T],
    what: str,
    *,
    url: str,
    remedy: str = "",
    stop: threading.Event | None = None,
    explain: Callable[[Exception], Exception] | None = None,
) -> _T:
    """The result of `action`; a fault that may pass is said in one line and tried again after a pause, unless `stop`
    is set.

    `what` begins the sentence of a fault. Raises DataError: credentials and how to give them, or what is wrong and
    `remedy`; or what `explain` makes of a fault.
    """
    stop = stop or threading.Event()
    explain = explain or partial(fault, what=what, url=url, remedy=remedy)
    for number, pause_s in enumerate(RETRY_PAUSES_S, start=1):
        try:
            return action()
        except DataError:
            raise
        except Exception as error:  # each client raises its own kinds
            if not may_pass(error, url) or stop.is_set():
                raise explain(error) from error
            print_visible(
                f"{what}: {summarise(error)[:200]}. Trying again in {pause_s:g} s ({number} of {len(RETRY_PAUSES_S)}).",
                file=sys.stderr,
                flush=True,
            )
            if stop.wait(pause_s):
                raise explain(error) from error
    try:
        return action()
    except DataError:
        raise
    except Exception as error:
        raise explain(error) from error


def fault(error: Exception, what: str, *, url: str, remedy: str = "") -> DataError:
    """What to tell the user."""
    scheme = SCHEMES.get(url.partition("://")[0])
    said = f"{what}: {summarise(error)[:300]}."
    if scheme is not None and lacks_credentials(error):
        return DataError(f"{said} Credentials are missing, or may not do that. Give {scheme.credentials}.")
    if isinstance(error, ImportError):
        return DataError(f"{said} Install what {url.partition('://')[0]}:// needs: `{install_command('remote')}`.")
    return DataError(f"{said} {remedy}".rstrip())


def may_pass(error: BaseException, url: str = "") -> bool:
    """Whether it is a fault of the connection, or of the store for the moment."""
    status = _status(error)
    if status is not None:
        # The Hub refuses a commit while another one is under way.
        is_overtaken = status in (409, 412) and url.startswith("hf://")
        return status in (408, 429) or status >= 500 or is_overtaken
    names = {kind.__name__ for cause in _chain(error) for kind in type(cause).__mro__}
    return bool(names & _PASSING) and not names & _CREDENTIALS


def lacks_credentials(error: BaseException) -> bool:
    # A client's own PermissionError names no file: one that does is of this machine.
    causes = [cause for cause in _chain(error) if getattr(cause, "filename", None) is None]
    names = {kind.__name__ for cause in causes for kind in type(cause).__mro__}
    return _status(error) in (401, 403) or bool(names & _CREDENTIALS)


def summarise(error: BaseException) -> str:
    """Its first line, behind its kind where that says more."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, what caused it or what it came up in, and so on."""
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """The status of HTTP that an answer had, if there was one."""
    for cause in _chain(error):
        response = getattr(cause, "response", None)
        found = (
            response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(response, dict)
            else getattr(response, "status_code", None)
        )
        for status in (found, *(getattr(cause, name, None) for name in ("status_code", "status", "code"))):
            if isinstance(status, int) and 300 <= status < 600:
                return int(status)
    return None
