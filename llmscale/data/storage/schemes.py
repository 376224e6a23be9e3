"""Check URLs of object stores, and say how each store takes its credentials.

Imports no store's library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmscale.config.user_paths import check_text
from llmscale.errors import DataError
from llmscale.suggestions import did_you_mean

_SEPARATOR = "://"
_FORGOTTEN = re.compile(r"(s3|gs|az|azure):(?!//)")


@dataclass(frozen=True)
class Scheme:
    """A kind of store."""

    example: str
    kind: str
    """Name of the store; two schemes of one store share it."""
    credentials: str
    """Sources of credentials, as the end of a sentence that begins with "Give"."""


_AZURE = Scheme(
    "az://CONTAINER/PATH",
    "azure",
    "AZURE_ACCOUNT_NAME with AZURE_ACCOUNT_ACCESS_KEY, AZURE_ACCOUNT_NAME after `az login`, or "
    "AZURE_STORAGE_CONNECTION_STRING, which may name another endpoint",
)
SCHEMES = {
    "s3": Scheme(
        "s3://BUCKET/PATH",
        "s3",
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN with temporary ones), AWS_PROFILE, or a role "
        "of this machine; for a store that is not Amazon's also S3_ENDPOINT_URL",
    ),
    "gs": Scheme(
        "gs://BUCKET/PATH",
        "gs",
        "GOOGLE_APPLICATION_CREDENTIALS (a key file), `gcloud auth application-default login`, or GCS_KEY and "
        "GCS_SECRET (an HMAC key)",
    ),
    "az": _AZURE,
    "azure": _AZURE,
    "hf": Scheme("hf://datasets/ORGANISATION/NAME", "hf", "HF_TOKEN, or `hf auth login`"),
}


def is_url(text: str) -> bool:
    return _SEPARATOR in text


def scheme_of(url: str) -> Scheme:
    """Return the scheme of a URL. Raises DataError for an unknown one."""
    name = url.partition(_SEPARATOR)[0]
    if name not in SCHEMES:
        legal = ", ".join(dict.fromkeys(scheme.example for scheme in SCHEMES.values()))
        raise DataError(f"{url} begins with {name}://, which is unknown.{did_you_mean(name, SCHEMES)} Legal: {legal}.")
    return SCHEMES[name]


def path_of(url: str) -> str:
    """Return BUCKET/NAME."""
    return url.partition(_SEPARATOR)[2].strip("/")


def root_of(url: str) -> str:
    """Return the URL of the bucket, container or repository of the Hub. Raises DataError for an unknown scheme."""
    parts = path_of(url).split("/")
    depth = 1
    if scheme_of(url).kind == "hf":  # models have no type before their name
        depth = 3 if parts[0] in ("datasets", "spaces") else 2
        # A revision may be refs/convert/parquet.
        depth += 2 if "@refs" in "/".join(parts[:depth]) else 0
    return f"{url.partition(_SEPARATOR)[0]}{_SEPARATOR}{'/'.join(parts[:depth])}"


def has_pattern(spec: str) -> bool:
    """Return whether a name is a pattern."""
    return any(letter in spec for letter in "*?[")


def folder_of(spec: str) -> str:
    """Return the path above the first part with a pattern, or all of it."""
    parts = path_of(spec).split("/")
    fixed = next((number for number, part in enumerate(parts) if has_pattern(part)), len(parts))
    return "/".join(parts[:fixed])


def check_out_url(url: str) -> str:
    """Return the URL of an `--out` without a trailing slash. Raises DataError when no dataset can be written there."""
    try:
        check_text(url)
    except ValueError as error:
        raise DataError(f"--out {url!r} {error}.") from None
    scheme = scheme_of(url)
    parts = path_of(url).split("/")
    is_hub = scheme.kind == "hf"
    if is_hub and (len(parts) != 3 or parts[0] != "datasets" or not all(parts)):
        raise DataError(
            f"--out {url}: a prepared dataset takes the root of a dataset on the Hub. Legal: {scheme.example}."
        )
    if len(parts) < 2 or any(part in ("", ".", "..") for part in parts) or set("?#*[]") & set(url):
        raise DataError(
            f"--out {url} cannot hold a dataset. Legal: {scheme.example}, without ? # * [ ] and empty names."
        )
    return f"{url.partition(_SEPARATOR)[0]}{_SEPARATOR}{'/'.join(parts)}"


def check_not_forgotten(text: str, flag: str) -> None:
    """Refuse s3:bucket and s3:/bucket, which would name a local folder. Raises DataError."""
    forgotten = _FORGOTTEN.match(text)
    if forgotten:
        raise DataError(f"{flag} {text} is neither a path nor a URL. Legal: {SCHEMES[forgotten[1]].example}.")
