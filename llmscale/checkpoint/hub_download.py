"""Download and verify a model's files from the Hugging Face Hub, once per node, while the other ranks wait."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from llmscale.checkpoint.hf_read import INDEX_SUFFIX, choose_weights, find_weights_files, load_index
from llmscale.config.bundled_files import import_extra
from llmscale.data.tokenizers.hugging_face import VOCABULARY_NAMES
from llmscale.engine.collectives import gather, on_all_ranks
from llmscale.engine.process_group import World
from llmscale.errors import CheckpointError
from llmscale.untrusted.hub import (
    find_snapshot,
    hub_cache,
    hub_endpoint,
    is_offline,
    list_hub_files,
    note_absent,
    offline_variable,
    read_token,
)

#: Files that describe a model and its tokenizer, without code.
_DESCRIPTION = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
#: Interval at which ranks exchange whether the downloads have ended, so that no collective waits longer.
_FIRST_POLL_S, _POLL_S = 0.05, 2.0
#: Form of the Hub's X-Linked-ETag of a large file, which is the name of its file in the cache.
_SHA256 = re.compile(r"[0-9a-f]{64}")
_VERIFIED_NAME = ".llmscale-verified"
_CHUNK_BYTES = 1 << 22


class _Download(threading.Thread):
    """Downloads in a thread, so that it may take longer than the timeout of a collective."""

    def __init__(self, name: str, source: str, here: Path | None) -> None:
        """`here` is the complete folder in the cache, or None."""
        super().__init__(daemon=True)
        self._name, self._source = name, source
        self._cache = hub_cache(name.partition("@")[0])
        self._hashed_bytes = 0
        self.folder = here
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            self.folder = self.folder or _fetch(self._name, self._source)
            self._verify(find_weights_files(self.folder).files)
        except Exception as error:  # raised again in the main thread
            self.failure = error

    def done_bytes(self) -> int:
        """Return a number that grows with progress: bytes in the cache, partial files included, and bytes verified."""
        return self._hashed_bytes + sum(map(_size_bytes, self._cache.glob("blobs/*")))

    def _verify(self, files: Iterable[Path]) -> None:
        """Compare files with the Hub's sha256, once each. Raises CheckpointError."""
        for blob in (path.resolve() for path in files):
            # A cache that was copied without its links does not record the hashes.
            if not _SHA256.fullmatch(blob.name):
                continue
            status = blob.stat()
            note, seen = self._cache / _VERIFIED_NAME / blob.name, f"{status.st_size} {status.st_mtime_ns}"
            if note.is_file() and note.read_text(errors="replace") == seen:
                continue
            if (digest := self._hash(blob)) != blob.name:
                raise CheckpointError(
                    f"{self._source}: {blob} is damaged: its sha256 is {digest[:12]}..., "
                    f"the Hub's {blob.name[:12]}.... Remove it and run again, which downloads it again."
                )
            with contextlib.suppress(OSError):  # an unwritable cache only costs another verification
                note.parent.mkdir(exist_ok=True)
                note.write_text(seen)

    def _hash(self, path: Path) -> str:
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                self._hashed_bytes += len(chunk)
        return digest.hexdigest()


def provide_model(
    name: str | None, source: str, here: Path | None, world: World, progress: Callable[[], object]
) -> Path:
    """Return the folder with a model's verified weights and JSON files in this node's cache. Collective.

    `name` is NAME@COMMIT, or None for the user's own folder `here`. `here` is the folder if this node has the model;
    otherwise its first rank fetches it. `source` names it in messages. `progress` is called on every rank while any
    download advances. Raises DataError on every rank.
    """
    download = None if name is None or world.local_rank else _Download(name, source, here)
    if download is not None:
        download.start()
    before, wait_s = list[int](), _FIRST_POLL_S
    while True:
        is_done = download is None or not download.is_alive()
        ranks = gather(world.control, (is_done, download.done_bytes() if download else 0))
        done_bytes = [number for _, number in ranks]
        if done_bytes != before:
            progress()
        if all(is_done for is_done, _ in ranks):
            break
        before = done_bytes
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _POLL_S)

    def outcome() -> Path | None:
        if download is None:
            return here
        if download.failure is not None:
            raise download.failure
        return download.folder

    folders = gather(world.control, on_all_ranks(world.control, outcome))
    folder = folders[world.rank - world.local_rank]
    assert folder is not None
    return folder


def _fetch(name: str, source: str) -> Path:
    """Fetch the description of NAME@COMMIT and its weights in one format, safetensors if available."""
    model, _, commit = name.partition("@")
    snapshot_download = import_extra("huggingface_hub", source, "remote").snapshot_download

    def fetch(names: Iterable[str]) -> Path:
        # snapshot_download takes patterns; a file name may contain their characters.
        patterns, cache = [glob.escape(name) for name in names], hub_cache(model).parent
        endpoint, token = hub_endpoint(), read_token() or False
        return Path(
            snapshot_download(
                model, revision=commit, allow_patterns=patterns, cache_dir=cache, endpoint=endpoint, token=token
            )
        )

    try:
        if is_offline():
            raise OSError(f"{offline_variable()} is set")
        listed = list_hub_files(name, CheckpointError)
        main = choose_weights(listed, f"{source} on the Hub")
        described = [part for part in listed if part in _DESCRIPTION]
        for absent in {*VOCABULARY_NAMES} - {*listed}:
            note_absent(model, commit, absent)
        folder = fetch([*described, main])
        # Without an answer of the Hub, snapshot_download returns the rest of an earlier download.
        if not (folder / main).exists():
            raise OSError(f"{main} was not downloaded")
        if main.endswith(INDEX_SUFFIX):
            folder = fetch({*load_index(folder / main).values()})
        return folder
    except CheckpointError:
        raise
    except Exception as error:  # huggingface_hub's errors, its transport's, and OSError
        if (cached := _cached_weights(model, commit)) is not None:
            return cached
        # Drop the query of a URL: the Hub puts credentials there.
        words = re.sub(r"(https?://[^\s?]+)\?\S+", r"\1?...", str(getattr(error, "reason", None) or error))
        reason = " ".join(words.split())[:300]
        raise CheckpointError(
            f"{source} cannot be fetched from the Hugging Face Hub ({type(error).__name__}: {reason}). Download its "
            "weights and JSON files and pass their folder, or log in with HF_TOKEN or `hf auth login` if it "
            "needs permission."
        ) from None


def _cached_weights(model: str, commit: str) -> Path | None:
    """Return the cached folder if it has all weights, even without every description file."""
    folder = find_snapshot(model, commit, "config.json")
    try:
        return folder and find_weights_files(folder).folder
    except CheckpointError:
        return None


def _size_bytes(path: Path) -> int:
    """Return the size of a file, 0 if it was just renamed."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
