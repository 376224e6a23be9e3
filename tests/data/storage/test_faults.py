"""What is tried again, and what is said of what is not."""

from __future__ import annotations

import errno
import json
import ssl
import threading
import time
from http.client import IncompleteRead

import azure.core.exceptions
import botocore.exceptions
import botocore.parsers
import google.cloud.storage.exceptions
import pytest
import requests
import s3transfer.exceptions
from botocore.exceptions import (
    ChecksumError,
    ClientError,
    EndpointConnectionError,
    FlexibleChecksumError,
    NoCredentialsError,
    ResponseStreamingError,
)

from llmscale.data.storage import faults
from llmscale.errors import DataError, UnreachableError
from tests.conftest import HANG_S

URL = "s3://bucket/name"


def _answered(status: int) -> ClientError:
    return ClientError({"Error": {"Code": "X"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")  # type: ignore[typeddict-item]


def _refused(status: int, code: str) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")  # type: ignore[typeddict-item]


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
        # Bytes that were damaged or lost on their way, by every client.
        (FlexibleChecksumError(error_msg="x"), True),
        (ChecksumError(checksum_type="crc32", expected_checksum="a", actual_checksum="b"), True),
        (ResponseStreamingError(error="x"), True),
        (botocore.exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2), True),
        (botocore.parsers.ResponseParserError("cut XML"), True),
        (s3transfer.exceptions.RetriesExceededError(IncompleteRead(b"")), True),
        (_refused(400, "BadDigest"), True),
        (_refused(400, "RequestTimeout"), True),
        (_refused(400, "InvalidRequest"), False),
        (google.cloud.storage.exceptions.DataCorruption(None, "x"), True),
        (requests.exceptions.ChunkedEncodingError("cut"), True),
        (requests.exceptions.ContentDecodingError("gzip"), True),
        (requests.exceptions.JSONDecodeError("cut", "{", 1), True),
        (requests.exceptions.ReadTimeout(), True),
        (azure.core.exceptions.IncompleteReadError(), True),
        (OSError("Consistency check failed: file should be of size 2 but has size 1"), True),
        (json.JSONDecodeError("a manifest", "{", 1), False),
        (ssl.SSLCertVerificationError("expired"), False),
        (NoCredentialsError(), False),
        (FileNotFoundError(), False),
        (ValueError("bug"), False),
    ],
    ids=repr,
)
def test_what_may_pass(error: Exception, passes: bool) -> None:
    assert faults.is_transient(error) == passes


def test_a_commit_of_the_hub_may_have_been_overtaken() -> None:
    for status in (409, 412):
        assert faults.is_transient(_answered(status), "hf://datasets/a/b")
        assert not faults.is_transient(_answered(status), URL)


def test_a_file_of_this_machine_needs_no_credentials() -> None:
    local = PermissionError(errno.EACCES, "Permission denied", "/shard")
    assert not faults.lacks_credentials(_wrapped(local))

    def act() -> None:
        raise local

    with pytest.raises(PermissionError):
        faults.with_retries(act, "Cannot act", url=URL)


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
        assert variable in str(faults.explain(error, "Cannot", url=url))


def _hang() -> None:
    threading.Event().wait(2.0 * HANG_S)


def test_a_request_that_hangs_says_so_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(faults, "RETRY_PAUSES_S", (0.0,))
    monkeypatch.setattr(faults, "STALL_S", 0.4)
    monkeypatch.setattr(faults, "_LINE_S", (0.1, 10.0))
    with pytest.raises(UnreachableError, match="Cannot list s3://a: TimeoutError: no answer within"):
        faults.with_retries(_hang, "Cannot list s3://a", url=URL)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["Waiting to list s3", "Cannot list s3", "Waiting to list s3"]


def test_a_slow_transfer_is_left_alone_while_bytes_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "STALL_S", 0.4)
    moved = [0]

    def act() -> int:
        for _ in range(10):
            time.sleep(0.1)
            moved[0] += 1
        return moved[0]

    assert faults.with_retries(act, "Cannot read", url=URL, progress=lambda: moved[0]) == 10
    monkeypatch.setattr(faults, "_BYTES_PER_S", 1)
    assert faults.with_retries(act, "Cannot read", url=URL, num_bytes=60) == 20


def test_a_request_that_hangs_ends_when_nobody_waits_any_more() -> None:
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()
    with pytest.raises(DataError):
        faults.with_retries(_hang, "Cannot act", url=URL, stop=stop)
