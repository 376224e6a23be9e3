"""What is tried again, and what is said of what is not."""

from __future__ import annotations

import errno
import threading

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError

from llmscale.data.storage import faults
from llmscale.errors import DataError
from tests.conftest import HANG_S

URL = "s3://bucket/name"


def _answered(status: int) -> ClientError:
    return ClientError({"Error": {"Code": "X"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")  # type: ignore[typeddict-item]


def _wrapped(cause: Exception) -> Exception:
    try:
        try:
            raise cause
        except Exception:
            raise ValueError("upload failed")  # noqa: B904  # as boto3 does
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (_answered(503), True),
        (_wrapped(_answered(500)), True),
        (_answered(429), True),
        (_answered(404), False),
        (_answered(403), False),
        (EndpointConnectionError(endpoint_url="http://x"), True),
        (ConnectionResetError(), True),
        (NoCredentialsError(), False),
        (FileNotFoundError(), False),
        (ValueError("bug"), False),
    ],
    ids=repr,
)
def test_what_may_pass(error: Exception, passes: bool) -> None:
    assert faults.may_pass(error) == passes


def test_a_commit_of_the_hub_may_have_been_overtaken() -> None:
    for status in (409, 412):
        assert faults.may_pass(_answered(status), "hf://datasets/a/b")
        assert not faults.may_pass(_answered(status), URL)


def test_a_file_of_this_machine_needs_no_credentials() -> None:
    local = PermissionError(errno.EACCES, "Permission denied", "/shard")
    assert not faults.lacks_credentials(_wrapped(local))
    assert faults.lacks_credentials(PermissionError("Access Denied"))


def test_it_is_tried_again_with_a_line_each_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(faults, "RETRY_PAUSES_S", (0.0, 0.0))
    left = [ConnectionResetError("reset"), _answered(503)]

    def act() -> str:
        if left:
            raise left.pop()
        return "done"

    assert faults.with_retries(act, "Cannot act", url=URL) == "done"
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_pause_ends_when_nobody_waits_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "RETRY_PAUSES_S", (2.0 * HANG_S, 2.0 * HANG_S))
    stop = threading.Event()
    calls = []

    def act() -> None:
        calls.append(1)
        threading.Timer(0.05, stop.set).start()
        raise TimeoutError("too slow")

    with pytest.raises(DataError, match="too slow"):
        faults.with_retries(act, "Cannot act", url=URL, stop=stop)
    assert len(calls) == 1


def test_the_last_fault_names_the_reason_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "RETRY_PAUSES_S", (0.0,))
    calls = []

    def act() -> None:
        calls.append(1)
        raise TimeoutError("too slow")

    with pytest.raises(DataError, match=r"Cannot act: TimeoutError: too slow. Wait."):
        faults.with_retries(act, "Cannot act", url=URL, remedy="Wait.")
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("url", "variable"),
    [
        ("s3://a/b", "AWS_ACCESS_KEY_ID"),
        ("gs://a/b", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az://a/b", "AZURE_ACCOUNT_NAME"),
        ("hf://datasets/a/b", "HF_TOKEN"),
    ],
)
def test_missing_credentials_say_which(url: str, variable: str) -> None:
    for error in (NoCredentialsError(), _answered(403)):
        assert variable in str(faults.fault(error, "Cannot", url=url))
