"""Where a set goes: what may be there already, and how it gets there whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from llmscale.data.prepare.atomic_folder import put_in_place, recover, sync_tree
from llmscale.data.prepare.work_folder import WorkFolder
from llmscale.data.shards.manifest import MANIFEST_NAME, Manifest, PrepareRequest, load_manifest
from llmscale.data.shards.verify_shards import check_files
from llmscale.errors import DataError

#: What sets are that were prepared before these were settings.
_BEFORE: PrepareRequest = {"tokens before a document": "", "--parse-special-tokens": False}


class Destination(ABC):
    """The place of one set."""

    beside: Path
    """A local path; what lies beside it is ours."""
    is_remote: bool = False

    @abstractmethod
    def find(self, request: PrepareRequest) -> Manifest | None:
        """The set, if it is there and answers the request; None when there is none. Raises DataError when anything else
        is there."""

    @abstractmethod
    def begin(self, work: WorkFolder, request: PrepareRequest) -> None:
        """Before any text is read, once nothing was found. Raises DataError."""

    @abstractmethod
    def keep_shard(self, path: Path) -> None:
        """A shard that is whole. Raises DataError."""

    @abstractmethod
    def finish(self, work: WorkFolder) -> None:
        """The set in the work folder is whole. Raises DataError, OSError."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything, in the middle too."""


class LocalFolder(Destination):
    """A folder that appears in one move."""

    def __init__(self, out: Path, *, overwrite: bool) -> None:
        self.beside = out
        self._overwrite = overwrite

    def find(self, request: PrepareRequest) -> Manifest | None:
        out = self.beside
        recover(out)
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return None
        if not (out / MANIFEST_NAME).is_file():
            raise DataError(
                f"{out} exists and is not a prepared set, so it will not be replaced. Choose another --out."
            )
        if self._overwrite:
            return None
        manifest = load_manifest(out)
        check_same(manifest, request, str(out), "Replace it with --overwrite")
        for split in manifest.splits:
            check_files(out, split, manifest)
        return manifest

    def begin(self, work: WorkFolder, request: PrepareRequest) -> None:
        """Nothing shows until all of it does."""

    def keep_shard(self, path: Path) -> None:
        """It lies where it should."""

    def close(self) -> None:
        """Nothing is open."""

    def finish(self, work: WorkFolder) -> None:
        sync_tree(work.set_folder)
        put_in_place(work.set_folder, self.beside, replace=self._overwrite)


def check_same(manifest: Manifest, request: PrepareRequest, where: str, remedy: str) -> None:
    """Whether a set answers the request. Raises DataError when it does not."""
    # A set of an older version lacks settings that did not exist: what they were then, else what is asked now.
    different = describe_differences({**request, **_BEFORE, **manifest.request}, request)
    if different:
        raise DataError(
            f"{where} already holds a set of {manifest.source} prepared differently: {different}. {remedy}, or choose "
            "another --out."
        )


def describe_differences(there: PrepareRequest, request: PrepareRequest) -> str:
    """By flag; where equal contents lie does not matter."""
    names = ("--input", "--tokenizer")
    return "; ".join(
        f"{key} {there.get(key)!r} there, {value!r} now"
        for key, value in request.items()
        if key not in names and there.get(key) != value
    )
