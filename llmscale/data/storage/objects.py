"""Objects of a store: list, describe, read in parts, write, replace by condition, delete, download, upload."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from llmscale.data.storage import faults
from llmscale.data.storage.faults import STALL_S, Missing, Overtaken
from llmscale.data.storage.schemes import SCHEMES, folder_of, has_pattern, path_of, root_of, scheme_of
from llmscale.errors import DataError
from llmscale.untrusted.documents import MAX_BYTES

_T = TypeVar("_T")
#: Parts of a pattern, and what each matches.
_WILDCARD = re.compile(r"\*\*/?|\*|\?|\[[^\]]+\]")
_MATCHES = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
_CHUNK_BYTES = 1 << 20
#: Longer files are uploaded to Azure in parts of this size, each with its checksum.
_AZURE_PART_BYTES = 8 << 20
_GOOGLE_S3_URL = "https://storage.googleapis.com"


@dataclass(frozen=True)
class StoredObject:
    """An object as listed."""

    url: str
    size_bytes: int
    version: str
    """Changes with the contents."""

    @property
    def path(self) -> str:
        """BUCKET/NAME."""
        return path_of(self.url)


class Store:
    """The objects of the bucket that a URL names, each by its URL. Thread-safe; a fork may use it.

    The store is opened when it is first used, and again when its credentials have expired. Every method retries
    transient errors and raises DataError: Missing, Overtaken, or UnreachableError if it says nothing about the data.
    """

    def __init__(
        self, url: str, *, for_reading: bool = False, remedy: str = "", stop: threading.Event | None = None
    ) -> None:
        """With `for_reading`, public objects need no credentials. `remedy` ends every message. `stop` ends retries."""
        self._root = root_of(url)
        self._for_reading = for_reading
        self._remedy = remedy
        self._stop = stop
        self._opened: tuple[int, Client] | None = None
        """Process id and client."""
        self._opening = threading.Lock()

    def head(self, url: str) -> StoredObject:
        """Return the current state of an object. Raises Missing."""
        return self._ask(lambda client: self._stored(client.head(self._name(url))), "find", url)

    def list_objects(self, url: str) -> list[StoredObject]:
        """Return the object of that name, those that match a pattern, or all below it, sorted by name."""
        name = self._name(url)
        pattern = None
        if has_pattern(url):
            pattern = _compile(name)
            name = self._name(f"{url.partition('://')[0]}://{folder_of(url)}")
        elif name:
            with suppress(Missing):
                return [self.head(url)]
        prefix = f"{name}/" if name else ""
        entries = self._ask(lambda client: list(client.list(prefix, "")), "list", url)
        objects = [entry for entry in entries if not entry.name.endswith("/")]
        return [self._stored(entry) for entry in sorted(objects) if pattern is None or pattern.fullmatch(entry.name)]

    def list_names(self, url: str) -> list[str]:
        """Return the names of the objects and folders one level below a URL."""
        prefix = f"{name}/" if (name := self._name(url)) else ""
        entries = self._ask(lambda client: list(client.list(prefix, "/")), "list", url)
        names = (entry.name.removeprefix(prefix).rstrip("/") for entry in entries)
        return sorted({name for name in names if name})

    def read(self, url: str, begin: int, end: int, *, version: str = "", stop: threading.Event | None = None) -> bytes:
        """Return bytes begin .. end - 1 of an object. Raises Overtaken unless it has `version`, if given."""

        def fetch(client: Client) -> bytes:
            data, current = client.read(self._name(url), begin, end)
            if version and _bare(current) != version:
                raise self._overtaken(url)
            if len(data) != end - begin:
                raise faults.DamagedInTransit(f"{len(data):,} bytes instead of {end - begin:,}")
            return data

        if end > begin:
            return self._ask(fetch, "read", url, num_bytes=end - begin, stop=stop)
        return b""

    def read_small(self, url: str, max_bytes: int = MAX_BYTES) -> bytes:
        """Return the contents of an object of llmscale. Raises DataError if it is longer than `max_bytes`."""
        return self._read_all(url, max_bytes)[0]

    def read_versioned(self, url: str) -> tuple[bytes, str] | None:
        """Return the contents and their version, for `write_if`; None for a missing object."""
        if scheme_of(url).kind == "gs" and has_hmac_key():
            raise DataError(
                f"Cannot open {url} with GCS_KEY and GCS_SECRET: requests with an HMAC key have no conditional writes. "
                "Unset both, and give GOOGLE_APPLICATION_CREDENTIALS (a key file) or `gcloud auth application-default "
                "login`."
            )
        try:
            return self._read_all(url, MAX_BYTES)
        except Missing:
            self.list_names(url)  # fails without the bucket
            return None

    def _read_all(self, url: str, max_bytes: int) -> tuple[bytes, str]:
        size_bytes = self.head(url).size_bytes
        if size_bytes > max_bytes:
            raise DataError(f"{url} has {size_bytes:,} bytes; llmscale writes at most {max_bytes:,} there.")
        return self._ask(lambda client: client.read(self._name(url), 0, None), "read", url, num_bytes=size_bytes)

    def write(self, url: str, contents: bytes) -> None:
        """Write an object, whatever was there, and compare its size."""

        def put(client: Client) -> None:
            client.put(self._name(url), contents, None)
            self._check_size(client, url, len(contents))

        self._ask(put, "upload", url, num_bytes=len(contents))

    def write_if(self, url: str, contents: bytes, version: str) -> str:
        """Write an object of at most MAX_BYTES in place of this version, "" for none, and return the new version.
        Raises Overtaken for another version.

        Callers make contents unique, so that an earlier attempt whose answer was lost is recognised. After
        UnreachableError the contents may have been written, or may still arrive.
        """
        if len(contents) > MAX_BYTES:
            raise DataError(f"{url} would have {len(contents):,} bytes. At most {MAX_BYTES:,} are written.")
        try:
            return self._ask(
                lambda client: client.put(self._name(url), contents, version), "write", url, num_bytes=len(contents)
            )
        except (Missing, Overtaken) as error:
            stored = self.read_versioned(url)  # fails without the bucket
            if stored is None or stored[0] != contents:
                raise self._overtaken(url) from error
            return stored[1]
        except DataError as error:
            if faults.is_unsupported(error):
                raise _unconditional(url) from error
            raise

    def delete(self, url: str) -> None:
        """Remove an object; a missing one is fine, as an attempt without an answer may have removed it."""
        with suppress(Missing):
            self._ask(lambda client: client.delete(self._name(url)), "remove", url)

    def download(self, url: str, path: Path) -> None:
        """Write an object to a local path atomically; its bytes on this disk show progress. OSError comes from the
        folder."""
        with tempfile.TemporaryDirectory(
            prefix=f".download-{path.name}-", dir=path.parent, ignore_cleanup_errors=True
        ) as folder:

            def fetch(client: Client) -> None:
                # An abandoned attempt may still write, so each has its own folder.
                target = Path(tempfile.mkdtemp(dir=folder), path.name)
                client.download(self._name(url), target)
                target.replace(path)

            self._ask(fetch, "fetch", url, progress=lambda: _count_bytes(Path(folder)))

    def upload(self, path: Path, url: str) -> None:
        """Write a file to an object, whatever was there, and compare its size."""
        size_bytes = path.stat().st_size

        def send(client: Client) -> None:
            client.upload(path, self._name(url))
            self._check_size(client, url, size_bytes)

        self._ask(send, "upload", url, num_bytes=size_bytes)

    def _check_size(self, client: Client, url: str, size_bytes: int) -> None:
        stored_bytes = client.head(self._name(url)).size_bytes
        if stored_bytes != size_bytes:
            raise faults.DamagedInTransit(f"{stored_bytes:,} bytes came there instead of {size_bytes:,}")

    def _ask(
        self,
        request: Callable[[Client], _T],
        verb: str,
        url: str,
        *,
        num_bytes: int = 0,
        progress: Callable[[], int] = lambda: 0,
        stop: threading.Event | None = None,
    ) -> _T:
        """Return the answer to a request, from a new client if the credentials of the open one have expired."""

        def attempt() -> _T:
            client = self._open(None)
            try:
                return request(client)
            except Exception as error:  # each client raises its own classes
                if not faults.lacks_credentials(error):
                    raise
            return request(self._open(client))

        return faults.with_retries(
            attempt,
            f"Cannot {verb} {url}",
            url=url,
            remedy=self._remedy,
            stop=stop or self._stop,
            num_bytes=num_bytes,
            progress=progress,
        )

    def _open(self, expired: Client | None) -> Client:
        """Return a client of this process, and another one than `expired`."""
        with self._opening:
            opened = self._opened
            if opened is None or opened[0] != os.getpid() or opened[1] is expired:
                opened = self._opened = os.getpid(), open_client(self._root, for_reading=self._for_reading)
            return opened[1]

    def _name(self, url: str) -> str:
        """Return an object's name within the bucket."""
        return url.removeprefix(self._root).strip("/")

    def _stored(self, entry: Entry) -> StoredObject:
        return StoredObject(f"{self._root}/{entry.name}", entry.size_bytes, _bare(entry.version))

    def _overtaken(self, url: str) -> Overtaken:
        return Overtaken(f"Another writer has changed {url} since it was read. Run the command again.")


def probe_conditions(url: str) -> None:
    """Check with a probe object below `url` that the store honours the conditions of writes. Raises DataError."""
    probe_url = f"{url.rstrip('/')}/.conditional-{secrets.token_hex(8)}"
    store = Store(url)
    first = store.write_if(probe_url, secrets.token_bytes(16), "")
    try:
        store.write_if(probe_url, secrets.token_bytes(16), first)
        with suppress(Overtaken):
            store.write_if(probe_url, secrets.token_bytes(16), "")
            raise _unconditional(probe_url)
        with suppress(Overtaken):
            store.write_if(probe_url, secrets.token_bytes(16), first)
            raise _unconditional(probe_url)
    finally:
        store.delete(probe_url)


def _unconditional(url: str) -> DataError:
    return DataError(
        f"The store of {url} ignores or refuses conditional writes (If-Match, If-None-Match), so two runs could "
        "overwrite each other. Update the server, or use another store."
    )


def _bare(version: str) -> str:
    """Return a version without quotes, which Azure's listings leave out."""
    return version.strip('"')


def _compile(pattern: str) -> re.Pattern[str]:
    """Return the expression of a pattern: * within a name, ** across /."""
    parts = []
    place = 0
    for wildcard in _WILDCARD.finditer(pattern):
        parts.append(re.escape(pattern[place : wildcard.start()]))
        parts.append(_MATCHES.get(wildcard[0], wildcard[0].replace("[!", "[^", 1)))
        place = wildcard.end()
    return re.compile("".join(parts) + re.escape(pattern[place:]))


def _count_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder, or -1 if one is removed meanwhile."""
    with suppress(OSError):
        return sum(path.stat().st_size for path in folder.rglob("*"))
    return -1


if TYPE_CHECKING:
    from azure.storage.blob import BlobServiceClient


class Entry(NamedTuple):
    """An object as listed or described, or a folder, whose name ends with a slash."""

    name: str
    size_bytes: int
    version: str
    """Changes with the contents: an ETag, Google's generation, or the Hub's blob id."""


class Client(Protocol):
    """The objects of one bucket. Thread-safe. Raises whatever the store's library raises, and FileNotFoundError."""

    def head(self, name: str) -> Entry: ...

    def list(self, prefix: str, delimiter: str) -> Iterable[Entry]:
        """Yield what begins with a prefix; with the delimiter "/", one level and its folders."""

    def read(self, name: str, begin: int, end: int | None) -> tuple[bytes, str]:
        """Return bytes begin .. end - 1, or all of them, and the object's version."""

    def put(self, name: str, contents: bytes, condition: str | None) -> str:
        """Write an object and return its version: without a condition (None), only a new one (""), or only in place
        of that version."""

    def delete(self, name: str) -> None: ...

    def download(self, name: str, path: Path) -> None: ...

    def upload(self, path: Path, name: str) -> None: ...


def open_client(root: str, *, for_reading: bool) -> Client:
    """Return a client for the bucket at the URL `root`. With `for_reading`, public objects need no credentials."""
    kind = scheme_of(root).kind
    bucket = path_of(root)
    if kind == "azure":
        return _Azure(bucket, root)
    if kind == "hf":
        return _Hub(bucket)
    if kind == "s3":
        return _Amazon(bucket, for_reading=for_reading, endpoint_url=os.environ.get("S3_ENDPOINT_URL"))
    if has_hmac_key():
        return _open_google_s3(bucket)
    return _Google(bucket, for_reading=for_reading)


def has_hmac_key() -> bool:
    """Return whether the environment names an HMAC key for Google's store, which takes it by Amazon's protocol."""
    return bool(os.environ.get("GCS_KEY") and os.environ.get("GCS_SECRET"))


class _Amazon:
    """A bucket of S3, or of a store with its protocol."""

    def __init__(
        self, bucket: str, *, for_reading: bool = False, settings: dict[str, Any] | None = None, **login: Any
    ) -> None:
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore import UNSIGNED
        from botocore.config import Config

        session = boto3.session.Session()
        limits = {"connect_timeout": STALL_S, "read_timeout": STALL_S, "retries": {"total_max_attempts": 1}}
        if for_reading and session.get_credentials() is None:
            limits["signature_version"] = UNSIGNED
        self._client = session.client("s3", config=Config(**limits, **(settings or {})), **login)
        self._bucket = bucket
        # No threads: a process would wait at its end for a pool's threads, even if a store stalls them.
        self._transfer = TransferConfig(use_threads=False)
        if "S3_CANNED_ACL" in os.environ:
            self._rights = {"ACL": os.environ["S3_CANNED_ACL"]}
        else:
            self._rights = {}

    def head(self, name: str) -> Entry:
        answer = self._client.head_object(Bucket=self._bucket, Key=name)
        return Entry(name, answer["ContentLength"], answer.get("ETag", ""))

    def list(self, prefix: str, delimiter: str) -> Iterable[Entry]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=prefix, Delimiter=delimiter
        )
        for page in pages:
            yield from (Entry(item["Key"], item["Size"], item["ETag"]) for item in page.get("Contents", ()))
            yield from (Entry(item["Prefix"], 0, "") for item in page.get("CommonPrefixes", ()))

    def read(self, name: str, begin: int, end: int | None) -> tuple[bytes, str]:
        part = {} if end is None else {"Range": f"bytes={begin}-{end - 1}"}
        answer = self._client.get_object(Bucket=self._bucket, Key=name, **part)
        return answer["Body"].read(), answer.get("ETag", "")

    def put(self, name: str, contents: bytes, condition: str | None) -> str:
        if condition is None:
            conditions = {}
        elif condition:
            conditions = {"IfMatch": condition}
        else:
            conditions = {"IfNoneMatch": "*"}
        answer = self._client.put_object(Bucket=self._bucket, Key=name, Body=contents, **conditions, **self._rights)
        return str(answer["ETag"])

    def delete(self, name: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=name)

    def download(self, name: str, path: Path) -> None:
        answer = self._client.get_object(Bucket=self._bucket, Key=name)
        with path.open("wb") as file:
            for chunk in answer["Body"].iter_chunks(_CHUNK_BYTES):
                file.write(chunk)

    def upload(self, path: Path, name: str) -> None:
        self._client.upload_file(str(path), self._bucket, name, ExtraArgs=self._rights, Config=self._transfer)


def _open_google_s3(bucket: str) -> _Amazon:
    """Return Google's store by Amazon's protocol, without the checksums of Amazon's that it does not know."""
    return _Amazon(
        bucket,
        settings={"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"},
        endpoint_url=_GOOGLE_S3_URL,
        region_name="auto",
        aws_access_key_id=os.environ["GCS_KEY"],
        aws_secret_access_key=os.environ["GCS_SECRET"],
    )


class _Google:
    """A bucket of Google's store."""

    def __init__(self, bucket: str, *, for_reading: bool) -> None:
        from google.auth import default
        from google.auth.exceptions import DefaultCredentialsError
        from google.cloud.storage import Client

        try:
            # Requests name buckets, never a project.
            self._client = Client(project="none", credentials=default()[0])
        except DefaultCredentialsError:
            if not for_reading:
                raise
            self._client = Client.create_anonymous_client()
        self._bucket = self._client.bucket(bucket)
        self._limits: dict[str, Any] = {"retry": None, "timeout": STALL_S}

    def head(self, name: str) -> Entry:
        blob = self._bucket.get_blob(name, **self._limits)
        if blob is None:
            raise FileNotFoundError(name)
        return Entry(name, blob.size, str(blob.generation))

    def list(self, prefix: str, delimiter: str) -> Iterable[Entry]:
        blobs = self._client.list_blobs(self._bucket, prefix=prefix, delimiter=delimiter or None, **self._limits)
        yield from (Entry(blob.name, blob.size, str(blob.generation)) for blob in blobs)
        yield from (Entry(name, 0, "") for name in blobs.prefixes)

    def read(self, name: str, begin: int, end: int | None) -> tuple[bytes, str]:
        blob = self._bucket.blob(name)
        last = None if end is None else end - 1
        contents = blob.download_as_bytes(start=begin or None, end=last, raw_download=True, **self._limits)
        return contents, str(blob.generation)

    def put(self, name: str, contents: bytes, condition: str | None) -> str:
        blob = self._bucket.blob(name)
        conditions = {}
        if condition is not None:
            conditions["if_generation_match"] = int(condition or 0)
            # Google caches public objects for an hour otherwise.
            blob.cache_control = "no-store"
        kind = "application/octet-stream"
        blob.upload_from_string(contents, kind, checksum="crc32c", **conditions, **self._limits)
        return str(blob.generation)

    def delete(self, name: str) -> None:
        self._bucket.blob(name).delete(**self._limits)

    def download(self, name: str, path: Path) -> None:
        with path.open("wb") as file:
            self._bucket.blob(name).download_to_file(file, raw_download=True, **self._limits)

    def upload(self, path: Path, name: str) -> None:
        self._bucket.blob(name).upload_from_filename(str(path), checksum="crc32c", **self._limits)


class _Azure:
    """A container of the account in the environment; of another endpoint by a connection string."""

    def __init__(self, container: str, url: str) -> None:
        """Raises DataError when no account is named."""
        self._container = _open_azure_account(url).get_container_client(container)

    def head(self, name: str) -> Entry:
        return self._describe(self._container.get_blob_client(name).get_blob_properties())

    def _describe(self, blob: Any) -> Entry:
        # A folder of an account with a hierarchical namespace.
        is_folder = (getattr(blob, "metadata", None) or {}).get("hdi_isfolder") == "true"
        return Entry(f"{blob.name}/" if is_folder else blob.name, blob.get("size") or 0, str(blob.get("etag")))

    def list(self, prefix: str, delimiter: str) -> Iterable[Entry]:
        walk = self._container.walk_blobs if delimiter else self._container.list_blobs
        yield from map(self._describe, walk(name_starts_with=prefix, include=["metadata"]))

    def read(self, name: str, begin: int, end: int | None) -> tuple[bytes, str]:
        answer = self._container.download_blob(name, begin, None if end is None else end - begin)
        return answer.readall(), str(answer.properties.etag)

    def put(self, name: str, contents: bytes, condition: str | None) -> str:
        from azure.core import MatchConditions

        options: dict[str, Any] = {"overwrite": condition != ""}
        if condition:
            options |= {"etag": condition, "match_condition": MatchConditions.IfNotModified}
        blob = self._container.get_blob_client(name)
        return str(blob.upload_blob(contents, validate_content=True, **options)["etag"])

    def delete(self, name: str) -> None:
        self._container.delete_blob(name)

    def download(self, name: str, path: Path) -> None:
        with path.open("wb") as file:
            self._container.download_blob(name).readinto(file)

    def upload(self, path: Path, name: str) -> None:
        with path.open("rb") as file:
            self._container.upload_blob(name, file, overwrite=True, validate_content=True)


def _open_azure_account(url: str) -> BlobServiceClient:
    """Return a client of the account in the environment. Raises DataError when none is named."""
    from azure.storage.blob import BlobServiceClient

    limits: dict[str, Any] = {
        "retry_total": 0,
        "connection_timeout": STALL_S,
        "read_timeout": STALL_S,
        "max_single_put_size": _AZURE_PART_BYTES,
        "max_block_size": _AZURE_PART_BYTES,
    }
    if connection := os.environ.get("AZURE_STORAGE_CONNECTION_STRING"):
        return BlobServiceClient.from_connection_string(connection, **limits)
    account = os.environ.get("AZURE_ACCOUNT_NAME") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    if not account:
        raise DataError(f"Cannot open {url}: AZURE_ACCOUNT_NAME is not set. Give {SCHEMES['az'].credentials}.")
    credential: Any = os.environ.get("AZURE_ACCOUNT_ACCESS_KEY") or os.environ.get("AZURE_STORAGE_ACCOUNT_KEY")
    if not credential:
        from azure.identity import AzureCliCredential, ChainedTokenCredential, DefaultAzureCredential

        credential = ChainedTokenCredential(AzureCliCredential(), DefaultAzureCredential())
    return BlobServiceClient(f"https://{account}.blob.core.windows.net", credential=credential, **limits)


class _Hub:
    """A repository of the Hub. Every write is a commit, one at a time."""

    def __init__(self, path: str) -> None:
        """`path` is datasets/ORGANISATION/NAME or that of a model, perhaps with @REVISION."""
        from huggingface_hub import HfApi

        _quieten_hub()
        name, _, revision = path.partition("@")
        kind, separator, below = name.partition("/")
        is_typed = kind in ("datasets", "spaces") and separator
        self._repository: dict[str, Any] = {
            "repo_id": below if is_typed else name,
            "repo_type": kind.removesuffix("s") if is_typed else "model",
            "revision": revision or None,
        }
        self._api = HfApi()
        self._is_committing = threading.Lock()

    def head(self, name: str) -> Entry:
        described = list(map(_describe_on_hub, self._api.get_paths_info(paths=[name], **self._repository)))
        if not described or described[0].name != name:
            raise FileNotFoundError(name)
        return described[0]

    def list(self, prefix: str, delimiter: str) -> Iterable[Entry]:
        from huggingface_hub.errors import EntryNotFoundError

        folder = prefix.strip("/") or None
        try:
            items = list(self._api.list_repo_tree(path_in_repo=folder, recursive=not delimiter, **self._repository))
        except EntryNotFoundError:
            return ()
        return map(_describe_on_hub, items)

    def read(self, name: str, begin: int, end: int | None) -> tuple[bytes, str]:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        headers = build_hf_headers()
        if end is not None:
            headers["Range"] = f"bytes={begin}-{end - 1}"
        url = hf_hub_url(filename=name, endpoint=self._api.endpoint, **self._repository)
        answer = get_session().get(url, headers=headers, timeout=STALL_S)
        hf_raise_for_status(answer)
        # The answer's ETag may be that of another server.
        return answer.content, self.head(name).version

    def put(self, name: str, contents: bytes, condition: str | None) -> str:
        assert condition is None
        self._commit(name, contents)
        return ""

    def delete(self, name: str) -> None:
        self.head(name)
        with self._is_committing:
            self._api.delete_file(name, commit_message=f"Remove {name}", **self._repository)

    def download(self, name: str, path: Path) -> None:
        from huggingface_hub import hf_hub_download

        fetched = hf_hub_download(filename=name, local_dir=path.parent, **self._repository)
        Path(fetched).replace(path)

    def upload(self, path: Path, name: str) -> None:
        self._commit(name, path)

    def _commit(self, name: str, contents: bytes | Path) -> None:
        from huggingface_hub import CommitOperationAdd

        added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=contents)]
        # Large files are uploaded concurrently, before the commit that names them.
        self._api.preupload_lfs_files(additions=added, **self._repository)
        with self._is_committing:
            self._api.create_commit(operations=added, commit_message=f"Add {name}", **self._repository)


def _describe_on_hub(item: Any) -> Entry:
    """Return a file or a folder of the Hub, which has no size."""
    if hasattr(item, "size"):
        return Entry(item.path, item.size, item.blob_id)
    return Entry(f"{item.path}/", 0, "")


def _quieten_hub() -> None:
    """Turn off the Hub client's progress bars and warnings of retries, unless the environment asks for them."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars, logging

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        disable_progress_bars()
    if "HF_HUB_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
