"""URLs that a set can be written to, and what is none."""

from __future__ import annotations

import pytest

from llmscale.data.storage.schemes import check_not_forgotten, check_out_url, path_of
from llmscale.errors import DataError


def test_places_for_a_set() -> None:
    assert check_out_url("s3://bucket/a/set/") == "s3://bucket/a/set"
    assert check_out_url("hf://datasets/org/name") == "hf://datasets/org/name"
    assert path_of("gs://bucket/a/") == "bucket/a"


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket",
        "s3://bucket//set",
        "s3://bucket/../set",
        "s3://bucket/set?x=1",
        "s3://bucket/*",
        "S3://b/set",
        "ftp://host/set",
        "hf://datasets/org",
        "hf://datasets/org/name/folder",
        "hf://models/org/name",
        "s3://b/\x1b[0m",
    ],
)
def test_no_place_for_a_set(url: str) -> None:
    with pytest.raises(DataError):
        check_out_url(url)


def test_a_scheme_without_its_slashes_is_no_folder() -> None:
    with pytest.raises(DataError, match="s3://BUCKET"):
        check_not_forgotten("s3:/bucket/set", "--out")
    check_not_forgotten("hf:org/name", "--input")
